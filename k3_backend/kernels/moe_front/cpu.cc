// MoE front in one fork-join: router scores with top-k selection, and the latent down projection.
//
// logits = W_gate x, fp32, never rounded; s = sigmoid(logits); chosen = the k largest of s + bias, ties to the lower
// id, NaN last; w_e = scale s_e / (sum of chosen s + 1e-20); latent = bf16(W_down x).
// Shapes: x bf16 [M, D] activation; w_gate bf16 [E, D], bias f32 [E], w_down bf16 [L, D] constants; outputs
// topk_ids i32 [M, k], topk_weights f32 [M, k], latent bf16 [M, L]; D = hidden, E = experts, L = latent.
// Policy: router and down projection are one list of row tiles, router first, split over the workers. With one router
// tile the worker that made it selects at once, with one token per vector lane, while the others go on with the
// projection; a router of several tiles needs a barrier first, and then all workers select.
#include "common/bind.h"
#include "common/gemm.h"

namespace {

using namespace k3::gemm;
using k3::bf16;
using k3::vf;

constexpr int kHidden = K3_HIDDEN;
constexpr int kExperts = K3_EXPERTS;
constexpr int kTopK = K3_TOP_K;
constexpr int kLatent = K3_LATENT;
constexpr int kRouterTiles = kExperts / kTile;
static_assert(kHidden % 32 == 0 && kExperts % kTile == 0 && kLatent % kTile == 0 && kTopK <= kExperts, "whole tiles");

typedef int32_t vi __attribute__((vector_size(k3::kLanes * 4)));

struct Call {
  const bf16* x;
  const bf16* w_gate;
  const float* bias;
  const bf16* w_down;
  int32_t* topk_ids;
  float* topk_weights;
  bf16* latent;
  int64_t m;
  float scale;
  Walk walk;
};

struct Scratch {
  alignas(64) bf16 x[acts_elems(kMaxTokens, kHidden)];
  alignas(64) float logits[panels_of(kMaxTokens)][kExperts][kTile];
};
static_assert(sizeof(Scratch) <= K3_SCRATCH_BYTES, "one block of tokens fits");

// Integers in the order of the floats, NaN below all of them; leaves INT32_MIN free for experts already taken.
vi sortable(vf x) {
  const vi bits = vi(x);
  const vi ordered = bits ^ ((bits >> 31) & 0x7fffffff);
  return vi(x == x) ? ordered : ordered - ordered + (INT32_MIN + 1);
}

// Top-k of the tokens in lanes [j, j + kLanes) of one panel of logits; `valid` of them exist, the first is row `row`.
void select(const Call& call, const float (*logits)[kTile], int j, int valid, int64_t row) {
  vf score[kExperts];
  vi key[kExperts];
  for (int e = 0; e < kExperts; ++e) {
    score[e] = k3::sigmoid(k3::load(logits[e] + j));
    key[e] = sortable(score[e] + k3::set1(call.bias[e]));
  }
  vf sum = k3::zero();
  vf chosen[kTopK];
  for (int slot = 0; slot < kTopK; ++slot) {
    vi best = key[0], id = {};
    vf value = score[0];
    for (int e = 1; e < kExperts; ++e) {
      const vi better = key[e] > best;
      best = better ? key[e] : best;
      id = better ? vi{} + e : id;
      value = better ? score[e] : value;
    }
    for (int e = 0; e < kExperts; ++e) key[e] = id == e ? vi{} + INT32_MIN : key[e];
    chosen[slot] = value;
    sum = sum + value;
    for (int lane = 0; lane < valid; ++lane) call.topk_ids[(row + lane) * kTopK + slot] = id[lane];
  }
  const vf norm = sum + k3::set1(1e-20f);
  for (int slot = 0; slot < kTopK; ++slot) {
    const vf weight = chosen[slot] * k3::set1(call.scale) / norm;
    for (int lane = 0; lane < valid; ++lane) call.topk_weights[(row + lane) * kTopK + slot] = weight[lane];
  }
}

void select_panel(const Call& call, const Scratch& scratch, int p, int valid, int64_t row) {
  for (int j = 0; j < valid; j += k3::kLanes)
    select(call, scratch.logits[p], j, valid - j < k3::kLanes ? valid - j : k3::kLanes, row + j);
}

// Keeps a tile of logits with one expert per row, the layout of form Panels.
template <class Form>
void store_logits(const Tile& c, float (*logits)[kTile], int valid) {
  if constexpr (Form::kPacked) {
    memcpy(logits, c.v, sizeof c.v);
  } else {
    for (int e = 0; e < kTile; ++e)
      for (int m = 0; m < valid; ++m) logits[e][m] = c.v[m * kTile + e];
  }
}

template <class Form>
void front(const Call& call, const Team& team, Scratch& scratch) {
  const MatrixUnit<Form> unit;
  const Range mine = team.share(kRouterTiles + kLatent / kTile);
  const Range router{mine.begin, mine.end < kRouterTiles ? mine.end : kRouterTiles};
  const Range down{mine.begin < kRouterTiles ? 0 : mine.begin - kRouterTiles, mine.end - kRouterTiles};
  for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
    const int tokens = int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens);
    if (m0 > 0) team.barrier();  // the block before may still be reading packed tokens or logits
    const bf16* acts = Form::stage(team, call.x + m0 * kHidden, tokens, kHidden, scratch.x);
    if (Form::kPacked) team.barrier();
    for_tiles<1, Form>(Weights{call.w_gate, kHidden}, router, call.walk, kHidden, acts, tokens,
                       [&](int64_t t, int p, const Tile* c, int valid) {
                         store_logits<Form>(*c, scratch.logits[p] + t * kTile, valid);
                         if (kRouterTiles == 1) select_panel(call, scratch, p, valid, m0 + p * kTile);
                       });
    for_tiles<1, Form>(Weights{call.w_down, kHidden}, down, call.walk, kHidden, acts, tokens,
                       [&](int64_t t, int p, const Tile* c, int valid) {
                         Form::store_bf16(*c, call.latent + (m0 + p * kTile) * kLatent + t * kTile, kLatent, valid);
                       });
    if (kRouterTiles == 1) continue;
    team.barrier();
    for (int p = team.worker; p < panels_of(tokens); p += team.workers)
      select_panel(call, scratch, p, in_panel(tokens, p), m0 + p * kTile);
  }
}

}  // namespace

K3_EXPORT(moe_front) {
  k3::Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call call{};
  call.x = k3::bind<const bf16>(in, {k3::kAny, kHidden}, "x must be [M, hidden]", &call.m);
  call.w_gate = k3::bind<const bf16>(in, {kExperts, kHidden}, "w_gate must be [experts, hidden]");
  call.bias = k3::bind<const float>(in, {kExperts}, "bias must be [experts]");
  call.w_down = k3::bind<const bf16>(in, {kLatent, kHidden}, "w_down must be [latent, hidden]");
  call.topk_ids = k3::bind<int32_t>(in, {call.m, kTopK}, "topk_ids must be [M, top_k]");
  call.topk_weights = k3::bind<float>(in, {call.m, kTopK}, "topk_weights must be [M, top_k]");
  call.latent = k3::bind<bf16>(in, {call.m, kLatent}, "latent must be [M, latent]");
  call.scale = in.real();
  if (in.integer() != kTopK) in.fail("attribute top_k must be the geometry's");
  const Tunables tunables(in);
  call.walk = tunables.walk;
  if (in.finish()) return -1;
  Scratch& scratch = *static_cast<Scratch*>(ctx->scratch);
  k3::parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const Team team{ctx, worker, workers};
    tunables.packed ? front<Panels>(call, team, scratch) : front<Rows>(call, team, scratch);
  });
  return 0;
}
