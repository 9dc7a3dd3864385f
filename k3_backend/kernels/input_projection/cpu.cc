// Attention input projection: out[M, N] = bf16(x[M, D] w[N, D]^T), fp32 accumulation, one rounding.
//
// Shapes: x bf16 [M, D] activation, w bf16 [N, D] constant, out bf16 [M, N] output; D = hidden, N a multiple of 16 (the
// packed rows are padded). Policy: the rows of W are split over the workers, so that each core reads half of the
// weights; blocks of 64 tokens share one pass over them. The schedule chooses form, tiles in flight and prefetching.
#include "common/bind.h"
#include "common/gemm.h"

namespace {

using namespace k3::gemm;
using k3::bf16;

constexpr int kHidden = K3_HIDDEN;
static_assert(kHidden % 32 == 0, "products run over K in steps of 32");
static_assert(acts_elems(kMaxTokens, kHidden) * int64_t(sizeof(bf16)) <= K3_SCRATCH_BYTES, "one block of tokens fits");

struct Call {
  const bf16* x;
  const bf16* w;
  bf16* out;
  int64_t m, n;
  Walk walk;
};

template <class Form>
void project(const Call& call, const Team& team, bf16* packed) {
  const MatrixUnit<Form> unit;
  const Range tiles = team.share(call.n / kTile);
  for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
    const int tokens = int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens);
    if (m0 > 0) team.barrier();  // the block before may still be reading the packed tokens
    const bf16* acts = Form::stage(team, call.x + m0 * kHidden, tokens, kHidden, packed);
    if (Form::kPacked) team.barrier();
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
  Call call{};
  call.x = k3::bind<const bf16>(in, {k3::kAny, kHidden}, "x must be [M, hidden]", &call.m);
  call.w = k3::bind<const bf16>(in, {k3::kAny, kHidden}, "w must be [N, hidden]", &call.n);
  call.out = k3::bind<bf16>(in, {call.m, call.n}, "out must be [M, N]");
  if (call.n % kTile) in.fail("the number of packed rows must be a multiple of 16");
  const Tunables tunables(in);
  call.walk = tunables.walk;
  if (in.finish()) return -1;
  bf16* packed = static_cast<bf16*>(ctx->scratch);
  k3::parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const Team team{ctx, worker, workers};
    tunables.packed ? project<Panels>(call, team, packed) : project<Rows>(call, team, packed);
  });
  return 0;
}
