// Shape checks of a kernel's tensor arguments, and the walk every matrix kernel takes from its schedule.
#pragma once

#include "common/gemm.h"

namespace k3 {

// Any size in a dimension: the first tensor with rows tells M to the others.
constexpr int64_t kAny = -1;

// The next tensor argument, which must have exactly this shape; `rows` receives its first dimension. Null if absent.
template <typename T, size_t N>
T* bind(Args& in, const int64_t (&shape)[N], const char* mismatch, int64_t* rows = nullptr) {
  int64_t found[N] = {};
  T* data = in.tensor<T>(int32_t(N), found);
  for (size_t i = 0; data && i < N; ++i)
    if (shape[i] != kAny && found[i] != shape[i]) in.fail(mismatch);
  if (rows) *rows = found[0];
  return data;
}

namespace gemm {

// The tunables that all matrix kernels share, in the order of their cpu.toml.
struct Tunables {
  int32_t threads;
  bool packed;  // form Panels instead of Rows
  Walk walk;

  explicit Tunables(Args& in) {
    threads = int32_t(in.integer());
    packed = in.integer() != 0;
    walk.in_flight = int(in.integer());
    walk.prefetch = in.integer() != 0;
  }
};

}  // namespace gemm
}  // namespace k3
