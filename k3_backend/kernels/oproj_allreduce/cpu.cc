// Attention output projection with the rank sum and the prefix update behind it, one pass, nothing stored in between.
//
// partial_r = bf16(x_r w_r^T); y = bf16(sum over r of partial_r, fp32, in rank order); prefix = y, or bf16(prefix + y).
// Shapes: x bf16 [ranks, M, KL] activation, w bf16 [ranks, D, KL] constant, prefix bf16 [M, D] state; D = hidden, KL a
// multiple of 32 (whole heads). Policy: the D columns of the prefix are split over the workers; a column block is
// finished by the worker that owns it, so the update needs no reduction and no order between workers.
#include "common/bind.h"
#include "common/gemm.h"

namespace {

using namespace k3::gemm;
using k3::bf16;
using k3::vf;

constexpr int kHidden = K3_HIDDEN;
constexpr int kTiles = kHidden / kTile;
static_assert(kHidden % kTile == 0, "a tile updates 16 columns of the prefix exactly once");

// Scratch: the sums over ranks of one block of tokens, then its packed activations.
constexpr int64_t kSumBytes = int64_t(sizeof(Tile)) * kTiles * panels_of(kMaxTokens);

struct Call {
  const bf16* x;
  const bf16* w;
  bf16* prefix;
  int64_t ranks, m, kl;
  bool restart;
  Walk walk;
};

// prefix[token][n0..n0 + 16) takes the finished sum y.
template <class Form>
void update(const Call& call, const Tile& y, bf16* prefix, int valid) {
  Tile rows;
  Form::store_f32(y, valid, [&](int m) { return rows.v + m * kTile; });
  for (int m = 0; m < valid; ++m)
    for (int j = 0; j < kTile; j += k3::kLanes) {
      bf16* at = prefix + m * kHidden + j;
      const vf v = k3::round_bf16(k3::load(rows.v + m * kTile + j));
      k3::store(at, call.restart ? v : k3::load(at) + v);
    }
}

template <class Form>
void project(const Call& call, const Team& team, bf16* packed, Tile* sums) {
  const MatrixUnit<Form> unit;
  const Range tiles = team.share(kTiles);
  for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
    const int tokens = int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens);
    for (int64_t r = 0; r < call.ranks; ++r) {
      if (m0 + r > 0) team.barrier();  // the product before may still be reading the packed tokens
      const bf16* acts = Form::stage(team, call.x + (r * call.m + m0) * call.kl, tokens, call.kl, packed);
      if (Form::kPacked) team.barrier();
      for_tiles<1, Form>(Weights{call.w + r * kHidden * call.kl, call.kl}, tiles, call.walk, int(call.kl), acts, tokens,
                         [&](int64_t t, int p, const Tile* c, int valid) {
                           bf16* prefix = call.prefix + (m0 + p * kTile) * kHidden + t * kTile;
                           if (call.ranks == 1) return update<Form>(call, *c, prefix, valid);
                           Tile& sum = sums[t * panels_of(kMaxTokens) + p];
                           if (r == 0) sum = Tile{};
                           Form::combine(sum, sum, *c, valid, [](vf s, vf v) { return s + k3::round_bf16(v); });
                           if (r + 1 == call.ranks) update<Form>(call, sum, prefix, valid);
                         });
    }
  }
}

}  // namespace

K3_EXPORT(oproj_allreduce) {
  k3::Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call call{};
  int64_t x_shape[3] = {};
  call.x = in.tensor<const bf16>(3, x_shape);
  call.ranks = x_shape[0];
  call.m = x_shape[1];
  call.kl = x_shape[2];
  call.w = k3::bind<const bf16>(in, {call.ranks, kHidden, call.kl}, "w must be [ranks, hidden, KL] as x is");
  call.prefix = k3::bind<bf16>(in, {call.m, kHidden}, "prefix must be [M, hidden]");
  call.restart = in.integer() != 0;
  const Tunables tunables(in);
  call.walk = tunables.walk;
  if (call.kl % 32) in.fail("KL must be a multiple of 32");
  const int64_t packed_bytes = acts_elems(kMaxTokens, call.kl) * int64_t(sizeof(bf16));
  if (kSumBytes + packed_bytes > K3_SCRATCH_BYTES) in.fail("KL exceeds the scratch memory");
  if (in.finish()) return -1;
  Tile* sums = static_cast<Tile*>(ctx->scratch);
  bf16* packed = reinterpret_cast<bf16*>(static_cast<char*>(ctx->scratch) + kSumBytes);
  k3::parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const Team team{ctx, worker, workers};
    tunables.packed ? project<Panels>(call, team, packed, sums) : project<Rows>(call, team, packed, sums);
  });
  return 0;
}
