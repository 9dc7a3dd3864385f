// MLA value on CPU: merge of DCP shards by log-sum-exp, value up-projection W_UV, sigmoid gate.
//
// Workers share the 16-row tiles of W_UV over all heads and meet nowhere: each merges, for the heads of its own tiles, the
// latent rows it needs into its own scratch. That repeats a little work when two workers share a head and saves a barrier.
// Blocks of up to 64 tokens share one pass over the weights.
#include "common/attention.h"
#include "common/bind.h"

namespace {

using namespace k3;

constexpr int H = K3_HEADS, KL = K3_KV_LORA, V = K3_V_DIM, W = H * V, P = K3_MLA_PROJ_ROWS;
constexpr int kTile = gemm::kTile, kTiles = V / kTile;
static_assert(V % kTile == 0 && KL % 32 == 0, "heads are whole tiles of W_UV, products run over K in steps of 32");

struct Call {
  const bf16* partial;
  const float* lse;
  const bf16* proj;
  const bf16* w_uv;
  bf16* out;
  int64_t shards, M, gate_offset;
  gemm::Walk walk;
};

// Temporary memory of one worker.
struct alignas(64) Workspace {
  bf16 latent[gemm::kMaxTokens * KL];
  bf16 acts[gemm::kMaxTokens * KL];
  float tile[kTile * kTile];
  bool live[gemm::kMaxTokens];
};

// latent = bf16(sum of 2^(lse - max) * partial / sum of 2^(lse - max)) over sources with finite lse; false if there is none.
bool merge(const Call& c, int64_t m, int64_t h, bf16* latent) {
  const auto index = [&](int64_t shard) { return (shard * c.M + m) * H + h; };
  const auto finite = [](float x) { return x - x == 0.0f; };
  float top = 0.0f, total = 0.0f;
  int64_t sources = 0, only = 0;
  for (int64_t s = 0; s < c.shards; ++s) {
    const float lse = c.lse[index(s)];
    if (!finite(lse)) continue;
    if (!sources++ || lse > top) top = lse;
    only = s;
  }
  if (!sources) {
    memset(latent, 0, KL * sizeof(bf16));
    return false;
  }
  if (sources == 1) {
    memcpy(latent, c.partial + index(only) * KL, KL * sizeof(bf16));
    return true;
  }
  alignas(64) float sum[KL] = {};
  for (int64_t s = 0; s < c.shards; ++s) {
    const float lse = c.lse[index(s)];
    if (!finite(lse)) continue;
    const float weight = first(exp2(set1(lse - top)));
    total += weight;
    const bf16* row = c.partial + index(s) * KL;
    for (int d = 0; d < KL; d += kLanes) store(sum + d, fma(set1(weight), load(row + d), load(sum + d)));
  }
  for (int d = 0; d < KL; d += kLanes) store(latent + d, load(sum + d) * set1(1.0f / total));
  return true;
}

template <class Form>
void head_tiles(const Call& c, int64_t h, gemm::Range tiles, int64_t m0, int tokens, Workspace& w) {
  for (int m = 0; m < tokens; ++m) w.live[m] = merge(c, m0 + m, h, w.latent + m * KL);
  const gemm::Team alone{nullptr, 0, 1};
  const bf16* acts = Form::stage(alone, w.latent, tokens, KL, w.acts);
  const auto gate_and_store = [&](int64_t t, int p, const gemm::Tile* c16, int valid) {
    Form::store_f32(*c16, valid, [&](int m) { return w.tile + m * kTile; });
    const int64_t column = h * V + t * kTile;
    for (int m = 0; m < valid; ++m) {
      const int64_t row = m0 + p * kTile + m;
      const bf16* gate = c.proj + row * P + c.gate_offset + column;
      bf16* out = c.out + row * W + column;
      const bool live = w.live[p * kTile + m];
      for (int j = 0; j < kTile; j += kLanes) {
        const vf v = round_bf16(load(w.tile + m * kTile + j)) * sigmoid(load(gate + j));
        store(out + j, live ? v : zero());  // a row without sources is 0 even if its gate is NaN
      }
    }
  };
  gemm::for_tiles<1, Form>(gemm::Weights{c.w_uv + h * V * KL, KL}, tiles, c.walk, KL, acts, tokens, gate_and_store);
}

template <class Form>
void run(const Call& c, const gemm::Team& team, Workspace& w) {
  const gemm::MatrixUnit<Form> unit;
  const gemm::Range mine = team.share(H * kTiles);
  for (int64_t m0 = 0; m0 < c.M; m0 += gemm::kMaxTokens) {
    const int tokens = int(c.M - m0 < gemm::kMaxTokens ? c.M - m0 : gemm::kMaxTokens);
    for (int64_t t = mine.begin; t < mine.end;) {
      const int64_t h = t / kTiles, first = t % kTiles, end = (h + 1) * kTiles < mine.end ? (h + 1) * kTiles : mine.end;
      head_tiles<Form>(c, h, {first, first + end - t}, m0, tokens, w);
      t = end;
    }
  }
}

}  // namespace

K3_EXPORT(mla_value) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call c{};
  int64_t partial[4] = {};
  c.partial = in.tensor<const bf16>(4, partial);
  c.shards = partial[0];
  c.M = partial[1];
  c.lse = bind<const float>(in, {c.shards, c.M, H}, "lse must be [shards, M, H]");
  c.proj = bind<const bf16>(in, {c.M, P}, "proj must be [M, P]");
  c.w_uv = bind<const bf16>(in, {H, V, KL}, "w_uv must be [H, V, KL]");
  c.out = bind<bf16>(in, {c.M, W}, "out must be [M, W]");
  c.gate_offset = in.integer();
  const gemm::Tunables tunables(in);
  c.walk = tunables.walk;
  if (partial[2] != H || partial[3] != KL) in.fail("partial must be [shards, M, H, KL]");
  if (c.gate_offset < 0 || c.gate_offset + W > P) in.fail("gate_offset: gate lies outside the projection row");
  if (in.finish()) return -1;
  if (ctx->max_workers * int64_t(sizeof(Workspace)) > ctx->scratch_bytes) in.fail("scratch too small for the workers");
  if (in.finish()) return -1;
  parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const gemm::Team team{ctx, worker, workers};
    Workspace& w = static_cast<Workspace*>(ctx->scratch)[worker];
    tunables.packed ? run<gemm::Panels>(c, team, w) : run<gemm::Rows>(c, team, w);
  });
  return 0;
}
