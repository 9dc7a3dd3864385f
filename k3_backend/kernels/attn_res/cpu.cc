// Attention residual site on CPU: prefix update, block write, softmax mix over saved rows, RMSNorm of the mix.
//
// One token at a time, all of whose rows stay in L1; workers share the tokens. Scores, softmax and mix are fp32.
#include "common/attention.h"
#include "common/bind.h"

namespace {

using namespace k3;

constexpr int D = K3_HIDDEN, NB = K3_ATTN_RES_BLOCKS;
static_assert(D % kLanes == 0, "vector loops below have no tails");

struct Call {
  bf16* prefix;
  const bf16* delta;
  bf16* blocks;
  const bf16* res_norm;
  const bf16* res_proj;
  const bf16* out_norm;
  bf16* out;
  int64_t write_block, sources;
  bool add_delta, round_mix;
  float eps;
};

float rms_scale(vf squares, float eps) { return 1.0f / __builtin_sqrtf(sum(squares) / D + eps); }

// sum(v * key) * rsqrt(mean(v^2) + eps)
float score(const bf16* v, const float* key, float eps) {
  vf dot[2] = {zero(), zero()}, squares[2] = {zero(), zero()};  // two chains hide the latency of an fma
  for (int d = 0, i = 0; d < D; d += kLanes, i ^= 1) {
    const vf x = load(v + d);
    dot[i] = fma(x, load(key + d), dot[i]);
    squares[i] = fma(x, x, squares[i]);
  }
  return sum(dot[0] + dot[1]) * rms_scale(squares[0] + squares[1], eps);
}

void update_prefix(const Call& c, int64_t m) {
  bf16* prefix = c.prefix + m * D;
  if (c.add_delta) {
    const bf16* delta = c.delta + m * D;
    for (int d = 0; d < D; d += kLanes) store(prefix + d, load(prefix + d) + load(delta + d));
  }
  if (c.write_block >= 0) memcpy(c.blocks + (m * NB + c.write_block) * D, prefix, D * sizeof(bf16));
}

// `mix` is D floats of temporary memory.
void mix_row(const Call& c, int64_t m, const float* key, float* mix) {
  const bf16* row[NB + 1];
  float weight[NB + 1];
  const int64_t n = c.sources;
  for (int64_t s = 0; s < n; ++s) row[s] = c.blocks + (m * NB + s) * D;
  row[n] = c.prefix + m * D;

  float top = weight[n] = n ? score(row[n], key, c.eps) : 0.0f, total = 0.0f;
  for (int64_t s = 0; s < n; ++s) {
    weight[s] = score(row[s], key, c.eps);
    top = weight[s] > top ? weight[s] : top;
  }
  for (int64_t s = 0; s <= n; ++s) total += weight[s] = first(exp(set1(weight[s] - top)));

  vf squares = zero();
  for (int d = 0; d < D; d += kLanes) {
    vf x = set1(weight[n] / total) * load(row[n] + d);
    for (int64_t s = 0; s < n; ++s) x = fma(set1(weight[s] / total), load(row[s] + d), x);
    if (c.round_mix) x = round_bf16(x);
    squares = fma(x, x, squares);
    store(mix + d, x);
  }
  const vf scale = set1(rms_scale(squares, c.eps));
  for (int d = 0; d < D; d += kLanes) store(c.out + m * D + d, load(mix + d) * scale * load(c.out_norm + d));
}

}  // namespace

K3_EXPORT(attn_res) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call c{};
  int64_t M = 0;
  c.prefix = bind<bf16>(in, {kAny, D}, "prefix must be [M, hidden]", &M);
  c.delta = bind<const bf16>(in, {M, D}, "delta must be [M, hidden]");
  c.blocks = bind<bf16>(in, {M, NB, D}, "blocks must be [M, saved rows, hidden]");
  c.res_norm = bind<const bf16>(in, {D}, "res_norm must be [hidden]");
  c.res_proj = bind<const bf16>(in, {D}, "res_proj must be [hidden]");
  c.out_norm = bind<const bf16>(in, {D}, "out_norm must be [hidden]");
  c.out = bind<bf16>(in, {M, D}, "out must be [M, hidden]");
  c.add_delta = in.integer() != 0;
  c.write_block = in.integer();
  c.sources = in.integer();
  c.round_mix = in.integer() != 0;
  c.eps = in.real();
  const int32_t threads = int32_t(in.integer());
  if (c.add_delta != (c.delta != nullptr)) in.fail("delta: must be given exactly if add_delta is 1");
  if (c.write_block < -1 || c.write_block >= NB || c.sources < 0 || c.sources > NB)
    in.fail("write_block, sources: beyond the saved rows");
  if (in.finish()) return -1;
  if (ctx->max_workers * 2 * D * int64_t(sizeof(float)) > ctx->scratch_bytes) in.fail("scratch too small for two rows per worker");
  if (in.finish()) return -1;
  parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    float* key = static_cast<float*>(ctx->scratch) + worker * 2 * D;
    for (int d = 0; d < D; d += kLanes) store(key + d, load(c.res_norm + d) * load(c.res_proj + d));
    const Range mine = share(M, worker, workers);
    for (int64_t m = mine.begin; m < mine.end; ++m) {
      update_prefix(c, m);
      mix_row(c, m, key, key + D);
    }
  });
  return 0;
}
