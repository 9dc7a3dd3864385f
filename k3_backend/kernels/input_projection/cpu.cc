// Attention input projection: out[M, N] = bf16(x[M, D] w[N, D]^T), fp32 accumulation, one rounding.
//
// Shapes: x bf16 [M, D] activation, w bf16 [N, D] constant, out bf16 [M, N] output; D = hidden, N a multiple of 16 (the packed
// rows are padded). Policy: the rows of W are split over the workers, so that each core reads half of the weights; blocks of
// 64 tokens share one pass over them. The schedule chooses form, tiles in flight and prefetching.
#include "common/gemm.h"

namespace {

using namespace k3::gemm;
using k3::bf16;

constexpr int kHidden = K3_HIDDEN;
static_assert(kHidden % 32 == 0, "products run over K in steps of 32");

struct Call {
  const bf16* x;
  const bf16* w;
  bf16* out;
  int64_t m, n;
  Walk walk;
};

template <class Form>
void project(const Call& call, const Team& team, bf16* scratch) {
  const MatrixUnit unit;
  const Range tiles = team.share(call.n / kTile);
  for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
    const int tokens = int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens);
    if (m0 > 0) team.barrier();  // the block before may still be reading the packed tokens
    const bf16* acts = Form::stage(team, call.x + m0 * kHidden, tokens, kHidden, scratch);
    for_tiles<1, Form>(Weights{call.w, kHidden}, tiles, call.walk, kHidden, acts, tokens,
                       [&](int64_t t, int p, const Tile* c, int valid) {
                         Form::store_bf16(*c, call.out + (m0 + p * kTile) * call.n + t * kTile, call.n, valid);
                       });
  }
}

}  // namespace

K3_EXPORT(input_projection) {
  k3::Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  int64_t x_shape[2] = {}, w_shape[2] = {}, out_shape[2] = {};
  Call call{};
  call.x = in.tensor<const bf16>(2, x_shape);
  call.w = in.tensor<const bf16>(2, w_shape);
  call.out = in.tensor<bf16>(2, out_shape);
  const int32_t threads = int32_t(in.integer());
  const int64_t form = in.integer();
  call.walk.in_flight = int(in.integer());
  call.walk.prefetch = in.integer() != 0;
  call.m = x_shape[0];
  call.n = w_shape[0];
  if (x_shape[1] != kHidden || w_shape[1] != kHidden) in.fail("x and w must have `hidden` columns");
  if (out_shape[0] != call.m || out_shape[1] != call.n) in.fail("out must have one row per row of x and one column per row of w");
  if (call.n % kTile) in.fail("the number of packed rows must be a multiple of 16");
  if (in.finish()) return -1;
  bf16* scratch = static_cast<bf16*>(ctx->scratch);
  k3::parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    const Team team{ctx, worker, workers};
    form == 0 ? project<Rows>(call, team, scratch) : project<Panels>(call, team, scratch);
  });
  return 0;
}
