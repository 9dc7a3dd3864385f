// Routed latent experts, latent norm, up projection and shared expert in one fork-join.
//
// E_e(z) = W2_e bf16(f(bf16(W1_e z), bf16(W3_e z))), f = SiTU; r = bf16(sum over slots of w E, fp32, in slot order)
// shared = W_sd bf16(f(bf16(W_sg x), bf16(W_su x))); out = bf16(bf16(W_up rms(r; latent_norm)) + bf16(shared))
// Shapes: interface.py; D = hidden, L = latent, I = expert width, S = shared width. Experts are bf16, or MXFP4 expanded
// tile by tile into cache. A chosen id outside [0, E) adds nothing and reads nothing.
//
// Policy: (token, slot) pairs are grouped by expert, so an expert's weights are read once per 64 tokens. Whole experts
// are dealt to workers by cost. Each pair's E goes to its own row of scratch, and a token sums its rows in slot order:
// who ran which expert when never changes a bit.
//   phase 1  pack x; experts                               [pairs x L]
//   phase 2  shared gate/up and SiTU; per token sum, norm  [tokens x S], [tokens x L]
//   phase 3  up projection + shared down projection        [tokens x D]
#include "common/bind.h"
#include "common/gemm.h"
#include "common/mxfp4.h"

namespace {

using namespace k3::gemm;
using k3::bf16;
using k3::vf;

constexpr int kHidden = K3_HIDDEN;
constexpr int kLatent = K3_LATENT;
constexpr int kExperts = K3_EXPERTS;
constexpr int kTopK = K3_TOP_K;
constexpr int kWidth = K3_EXPERT_WIDTH;
constexpr int kShared = K3_SHARED_WIDTH;
constexpr int kMaxWorkers = 2;
constexpr int kMaxPairs = kMaxTokens * kTopK;
constexpr int kMaxK = kLatent > kWidth ? kLatent : kWidth;
static_assert(kHidden % 32 == 0 && kLatent % 32 == 0 && kWidth % 32 == 0 && kShared % 32 == 0, "K in steps of 32");

struct Call {
  const bf16 *x, *latent;
  const int32_t* topk_ids;
  const float* topk_weights;
  const bf16 *w13, *w2;
  const uint8_t *w13_packed, *w13_scale, *w2_packed, *w2_scale;
  const bf16 *latent_norm, *w_up, *shared_gate_up, *shared_down;
  bf16* out;
  int64_t m;
  float eps;
  k3::Situ situ;
  Walk walk;
};

struct Scratch {
  alignas(64) bf16 x[acts_elems(kMaxTokens, kHidden)];
  alignas(64) bf16 shared[acts_elems(kMaxTokens, kShared)];
  alignas(64) bf16 normed[acts_elems(kMaxTokens, kLatent)];
  alignas(64) float pairs[kMaxPairs][kLatent];
  Tile up[kHidden / kTile][panels_of(kMaxTokens)];
  struct alignas(64) Own {
    bf16 z[acts_elems(kMaxTokens, kLatent)];
    bf16 h[acts_elems(kMaxTokens, kWidth)];
    bf16 tiles[kMaxInFlight * kTile * kMaxK];
  } own[kMaxWorkers];
};
static_assert(sizeof(Scratch) <= K3_SCRATCH_BYTES, "one block of tokens fits");

K3_INLINE bool valid_expert(int32_t id) { return id >= 0 && id < kExperts; }

// Pairs (token * k + slot) of a block of tokens by expert, in ascending order, and the worker of each expert.
struct Routing {
  int begin[kExperts + 1];
  int16_t pair[kMaxPairs];
  int8_t worker[kExperts];

  Routing(const int32_t* ids, int tokens, int workers) {
    int count[kExperts] = {};
    for (int i = 0; i < tokens * kTopK; ++i)
      if (valid_expert(ids[i])) ++count[ids[i]];
    int64_t load[kMaxWorkers] = {};
    begin[0] = 0;
    for (int e = 0; e < kExperts; ++e) {
      begin[e + 1] = begin[e] + count[e];
      int least = 0;
      for (int w = 1; w < workers; ++w)
        if (load[w] < load[least]) least = w;
      worker[e] = int8_t(least);
      // Reading an expert's weights costs about as much as multiplying them with two panels of tokens.
      if (count[e]) load[least] += 2 + panels_of(count[e]);
      count[e] = begin[e];
    }
    for (int i = 0; i < tokens * kTopK; ++i)
      if (valid_expert(ids[i])) pair[count[ids[i]]++] = int16_t(i);
  }
};

struct Bf16Experts {
  static K3_INLINE GateUp gate_up(const Call& call, int e, bf16*) {
    return {call.w13 + int64_t(e) * 2 * kWidth * kLatent, kLatent, kWidth};
  }
  static K3_INLINE Weights down(const Call& call, int e, bf16*) {
    return {call.w2 + int64_t(e) * kLatent * kWidth, kWidth};
  }
};

struct Mxfp4Experts {
  static K3_INLINE Mxfp4 gate_up(const Call& call, int e, bf16* tiles) {
    const int64_t rows = int64_t(e) * 2 * kWidth;
    const uint8_t* scale = call.w13_scale + rows * (kLatent / kScaleBlock);
    return {call.w13_packed + rows * (kLatent / 2), scale, kLatent, kWidth, tiles};
  }
  static K3_INLINE Mxfp4 down(const Call& call, int e, bf16* tiles) {
    const int64_t rows = int64_t(e) * kLatent;
    const uint8_t* scale = call.w2_scale + rows * (kWidth / kScaleBlock);
    return {call.w2_packed + rows * (kWidth / 2), scale, kWidth, 0, tiles};
  }
};

// E_e of up to 64 pairs, each into its row of `pairs`.
template <class Form, class Experts>
void expert(const Call& call, int e, const int16_t* pair, int count, const bf16* latent, float (*pairs)[kLatent],
            Scratch::Own& own) {
  for (int p = 0; p < panels_of(count); ++p)
    Form::gather(own.z + p * kTile * kLatent, kLatent, in_panel(count, p),
                 [&](int i) { return latent + int64_t(pair[p * kTile + i] / kTopK) * kLatent; });
  for_tiles<2, Form>(Experts::gate_up(call, e, own.tiles), {0, 2 * kWidth / kTile}, call.walk, kLatent, own.z, count,
                     [&](int64_t t, int p, const Tile* c, int valid) {
                       bf16* h = own.h + p * kTile * kWidth;
                       store_situ<Form>(c[0], c[1], call.situ, h, kWidth, t / 2 * kTile, valid);
                     });
  for_tiles<1, Form>(Experts::down(call, e, own.tiles), {0, kLatent / kTile}, call.walk, kWidth, own.h, count,
                     [&](int64_t t, int p, const Tile* c, int valid) {
                       Form::store_f32(*c, valid, [&](int i) { return pairs[pair[p * kTile + i]] + t * kTile; });
                     });
}

// rms(bf16(sum over slots of w E)) of one token.
void combine(const Call& call, const int32_t* ids, const float* weights, const float (*pairs)[kLatent], bf16* normed) {
  vf r[kLatent / k3::kLanes];
  vf squares = k3::zero();
  for (int i = 0; i < kLatent; i += k3::kLanes) {
    vf sum = k3::zero();
    for (int slot = 0; slot < kTopK; ++slot)
      if (valid_expert(ids[slot])) sum = k3::fma(k3::set1(weights[slot]), k3::load(pairs[slot] + i), sum);
    r[i / k3::kLanes] = k3::round_bf16(sum);
    squares = k3::fma(r[i / k3::kLanes], r[i / k3::kLanes], squares);
  }
  const vf norm = k3::set1(1.0f) / k3::sqrt(k3::set1(k3::sum(squares) / kLatent + call.eps));
  for (int i = 0; i < kLatent; i += k3::kLanes)
    k3::store(normed + i, r[i / k3::kLanes] * norm * k3::load(call.latent_norm + i));
}

template <class Form>
void combine_panel(const Call& call, int64_t row, int valid, const float (*pairs)[kLatent], bf16* panel) {
  alignas(64) bf16 rows[kTile][kLatent];
  for (int i = 0; i < valid; ++i)
    combine(call, call.topk_ids + (row + i) * kTopK, call.topk_weights + (row + i) * kTopK, pairs + i * kTopK, rows[i]);
  Form::gather(panel, kLatent, valid, [&](int i) { return rows[i]; });
}

// Phase 1: this worker's experts.
template <class Form, class Experts>
K3_NOINLINE void routed(const Call& call, int64_t m0, int tokens, const Team& team, Scratch& s) {
  const Routing routing(call.topk_ids + m0 * kTopK, tokens, team.workers);
  for (int e = 0; e < kExperts; ++e) {
    if (routing.worker[e] != team.worker) continue;
    for (int i = routing.begin[e]; i < routing.begin[e + 1]; i += kMaxTokens) {
      const int left = routing.begin[e + 1] - i;
      const int count = left < kMaxTokens ? left : kMaxTokens;
      expert<Form, Experts>(call, e, routing.pair + i, count, call.latent + m0 * kLatent, s.pairs, s.own[team.worker]);
    }
  }
}

// Phase 2: hidden activations of the shared expert; normed sums of the routed ones.
template <class Form>
K3_NOINLINE void hidden(const Call& call, int64_t m0, int tokens, const bf16* x, const Team& team, Scratch& s) {
  const GateUp gate_up{call.shared_gate_up, kHidden, kShared};
  for_tiles<2, Form>(gate_up, team.share(2 * kShared / kTile, 2), call.walk, kHidden, x, tokens,
                     [&](int64_t t, int p, const Tile* c, int valid) {
                       bf16* h = s.shared + p * kTile * kShared;
                       store_situ<Form>(c[0], c[1], call.situ, h, kShared, t / 2 * kTile, valid);
                     });
  for (int p = team.worker; p < panels_of(tokens); p += team.workers)
    combine_panel<Form>(call, m0 + p * kTile, in_panel(tokens, p), s.pairs + p * kTile * kTopK,
                        s.normed + p * kTile * kLatent);
}

// Phase 3: both products back to the hidden size, rounded each, and their sum.
template <class Form>
K3_NOINLINE void output(const Call& call, int64_t m0, int tokens, const Team& team, Scratch& s) {
  const Range mine = team.share(kHidden / kTile);
  for_tiles<1, Form>(Weights{call.w_up, kLatent}, mine, call.walk, kLatent, s.normed, tokens,
                     [&](int64_t t, int p, const Tile* c, int) { s.up[t][p] = *c; });
  for_tiles<1, Form>(Weights{call.shared_down, kShared}, mine, call.walk, kShared, s.shared, tokens,
                     [&](int64_t t, int p, const Tile* c, int valid) {
                       Tile y{};
                       Form::combine(y, s.up[t][p], *c, valid,
                                     [](vf up, vf shared) { return k3::round_bf16(up) + k3::round_bf16(shared); });
                       Form::store_bf16(y, call.out + (m0 + p * kTile) * kHidden + t * kTile, kHidden, valid);
                     });
}

template <class Form, class Experts>
void block(const Call& call, int64_t m0, int tokens, const Team& team, Scratch& s) {
  const bf16* x = Form::stage(team, call.x + m0 * kHidden, tokens, kHidden, s.x);
  routed<Form, Experts>(call, m0, tokens, team, s);
  team.barrier();
  hidden<Form>(call, m0, tokens, x, team, s);
  team.barrier();
  output<Form>(call, m0, tokens, team, s);
}

template <class Form, class Experts>
K3_NOINLINE void run(const Call& call, const K3Context* ctx, int32_t threads) {
  Scratch& scratch = *static_cast<Scratch*>(ctx->scratch);
  k3::parallel(ctx, threads < kMaxWorkers ? threads : kMaxWorkers, [&](int32_t worker, int32_t workers) {
    const MatrixUnit<Form> unit;
    const Team team{ctx, worker, workers};
    for (int64_t m0 = 0; m0 < call.m; m0 += kMaxTokens) {
      if (m0 > 0) team.barrier();  // the block before may still be reading what phases 1 and 2 write
      block<Form, Experts>(call, m0, int(call.m - m0 < kMaxTokens ? call.m - m0 : kMaxTokens), team, scratch);
    }
  });
}

template <class Experts>
void run_as(const Call& call, const K3Context* ctx, const Tunables& tunables) {
  if (tunables.packed) return run<Panels, Experts>(call, ctx, tunables.threads);
  run<Rows, Experts>(call, ctx, tunables.threads);
}

}  // namespace

K3_EXPORT(moe_experts) {
  k3::Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call call{};
  call.x = k3::bind<const bf16>(in, {k3::kAny, kHidden}, "x must be [M, hidden]", &call.m);
  call.latent = k3::bind<const bf16>(in, {call.m, kLatent}, "latent must be [M, latent]");
  call.topk_ids = k3::bind<const int32_t>(in, {call.m, kTopK}, "topk_ids must be [M, top_k]");
  call.topk_weights = k3::bind<const float>(in, {call.m, kTopK}, "topk_weights must be [M, top_k]");
  const char* kExpertShape = "an expert weight has another shape than the interface's for this geometry";
  call.w13 = k3::bind<const bf16>(in, {kExperts, 2 * kWidth, kLatent}, kExpertShape);
  call.w2 = k3::bind<const bf16>(in, {kExperts, kLatent, kWidth}, kExpertShape);
  call.w13_packed = k3::bind<const uint8_t>(in, {kExperts, 2 * kWidth, kLatent / 2}, kExpertShape);
  call.w13_scale = k3::bind<const uint8_t>(in, {kExperts, 2 * kWidth, kLatent / kScaleBlock}, kExpertShape);
  call.w2_packed = k3::bind<const uint8_t>(in, {kExperts, kLatent, kWidth / 2}, kExpertShape);
  call.w2_scale = k3::bind<const uint8_t>(in, {kExperts, kLatent, kWidth / kScaleBlock}, kExpertShape);
  call.latent_norm = k3::bind<const bf16>(in, {kLatent}, "latent_norm must be [latent]");
  call.w_up = k3::bind<const bf16>(in, {kHidden, kLatent}, "w_up must be [hidden, latent]");
  call.shared_gate_up = k3::bind<const bf16>(in, {2 * kShared, kHidden}, "shared_gate_up must be [2 shared, hidden]");
  call.shared_down = k3::bind<const bf16>(in, {kHidden, kShared}, "shared_down must be [hidden, shared_width]");
  call.out = k3::bind<bf16>(in, {call.m, kHidden}, "out must be [M, hidden]");
  const bool mxfp4 = in.integer() != 0;
  call.eps = in.real();
  call.situ.beta = in.real();
  call.situ.linear_beta = in.real();
  const Tunables tunables(in);
  call.walk = tunables.walk;
  const bool bf16_there = call.w13 && call.w2;
  const bool mxfp4_there = call.w13_packed && call.w13_scale && call.w2_packed && call.w2_scale;
  if (mxfp4 ? !mxfp4_there : !bf16_there) in.fail("the expert weights of this expert_format are absent");
  if (in.finish()) return -1;
  mxfp4 ? run_as<Mxfp4Experts>(call, ctx, tunables) : run_as<Bf16Experts>(call, ctx, tunables);
  return 0;
}
