// Exposes the common headers' functions over arrays, so that tests can measure their errors. Built like a kernel.
#include "common/mxfp4.h"
#include "common/simd.h"

#define PROBE extern "C" __attribute__((visibility("default"))) void

#define PROBE_ELEMENTWISE(name)                                                     \
  PROBE probe_##name(const float* x, float* y, int64_t n) {                         \
    for (int64_t i = 0; i + k3::kLanes <= n; i += k3::kLanes)                       \
      k3::store(y + i, k3::name(k3::load(x + i)));                                  \
  }

PROBE_ELEMENTWISE(exp)
PROBE_ELEMENTWISE(sigmoid)
PROBE_ELEMENTWISE(tanh)
PROBE_ELEMENTWISE(round_bf16)

PROBE probe_situ(const float* g, const float* u, float* y, int64_t n, float beta, float linear_beta) {
  const k3::Situ f{beta, linear_beta};
  for (int64_t i = 0; i + k3::kLanes <= n; i += k3::kLanes) k3::store(y + i, f(k3::load(g + i), k3::load(u + i)));
}

// Tails: loads and stores of the first n elements, of both types.
PROBE probe_tail(const float* x, float* y, k3::bf16* rounded, float* back, int64_t n) {
  const k3::vf v = k3::load_n(x, int(n));
  k3::store_n(y, v, int(n));
  k3::store_n(rounded, v, int(n));
  k3::store_n(back, k3::load_n(rounded, int(n)), int(n));
}

// 16 rows of k elements.
PROBE probe_mxfp4(const uint8_t* packed, const uint8_t* scales, k3::bf16* out, int64_t k) {
  k3::gemm::expand_tile(packed, scales, 0, k, out);
}
