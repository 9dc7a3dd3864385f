// MLA query path on CPU: q_a norm, q_b, absorption of W_UK; kv_a norm and insert into the latent cache.
//
// Two phases over blocks of up to 64 tokens, with a barrier between them. First the workers share the 16-row tiles of W_qb
// (each norms the few q_a rows for itself) and the cache rows. Then they share the columns of W_UK, which is stored with
// its output columns contiguous: in vector lanes, a row is split into even and odd fp32 lanes and added, weighted by one
// element of q_nope, to the accumulators of several tokens; on AMX tiles, pairs of rows are interleaved once for all tokens.
#include "common/attention.h"
#include "common/bind.h"

namespace {

using namespace k3;

constexpr int H = K3_HEADS, QL = K3_Q_LORA, KL = K3_KV_LORA, NOPE = K3_NOPE, PE = K3_PE, ROW = K3_MLA_ROW, P = K3_MLA_PROJ_ROWS;
constexpr int kTile = gemm::kTile, kHeadRows = NOPE + PE;
constexpr int kParts = 4;                                  // vectors of pairs along KL that one unit of work covers
constexpr int kUnitColumns = kParts * kPairs, kUnits = KL / kUnitColumns;
constexpr int kAccumulators = kLanes == 16 ? 16 : 8;       // of 32 and 16 vector registers
static_assert(NOPE % kTile == 0 && PE % kTile == 0 && QL % 32 == 0, "a tile of W_qb belongs to one part of one head");
static_assert(QL % kLanes == 0 && KL % kUnitColumns == 0, "vector loops below have no tails");

struct Call {
  const bf16* proj;
  const bf16* q_norm;
  const bf16* kv_norm;
  const bf16* w_qb;
  const bf16* w_uk_t;
  const int64_t* slot_mapping;
  bf16* query;
  bf16* cache;
  int64_t M;
  float eps;
  gemm::Walk walk;
};

// Tokens from which on AMX tiles absorb faster than vector lanes, where the level has them.
#if defined(__AMX_BF16__)
constexpr int kMatrixTokens = NOPE % 32 == 0 ? 4 : gemm::kMaxTokens + 1;
#else
constexpr int kMatrixTokens = gemm::kMaxTokens + 1;
#endif

// Temporary memory: one part shared by the workers, one each.
struct alignas(64) Shared {
  // [H][token][NOPE], in fp32 for vector lanes, else in bf16; the values are bf16 in both.
  float lanes[H * gemm::kMaxTokens * NOPE];
  bf16 tiles[H * gemm::kMaxTokens * NOPE];
};
struct alignas(64) Workspace {
  bf16 c[gemm::kMaxTokens * QL];
  bf16 acts[gemm::kMaxTokens * QL];
  bf16 pairs[kMatrixTokens <= gemm::kMaxTokens ? NOPE * 64 : 1];  // W_UK rows of 64 columns: [step][4][16][32]
  gemm::Tile products[4];
  float tile[kTile * kTile];
};

// out = bf16(x * rsqrt(mean x^2 + eps) * w)
template <int N>
void rms_norm(const bf16* x, const bf16* w, float eps, bf16* out) {
  vf squares = zero();
  for (int d = 0; d < N; d += kLanes) squares = fma(load(x + d), load(x + d), squares);
  const vf scale = set1(1.0f / __builtin_sqrtf(sum(squares) / N + eps));
  for (int d = 0; d < N; d += kLanes) store(out + d, load(x + d) * scale * load(w + d));
}

void insert_rows(const Call& c, Range rows) {
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    if (c.slot_mapping[m] < 0) continue;
    const bf16* kv_a = c.proj + m * P + QL;
    bf16* row = c.cache + c.slot_mapping[m] * ROW;
    rms_norm<KL>(kv_a, c.kv_norm, c.eps, row);
    memcpy(row + KL, kv_a + KL, PE * sizeof(bf16));
  }
}

// q = bf16(W_qb rms(q_a)): the pe part goes straight into the query rows, the nope part into `shared`.
template <class Form>
void up_project(const Call& c, const gemm::Team& team, int64_t m0, int tokens, Shared& shared, Workspace& w) {
  const gemm::MatrixUnit<Form> unit;
  for (int m = 0; m < tokens; ++m) rms_norm<QL>(c.proj + (m0 + m) * P, c.q_norm, c.eps, w.c + m * QL);
  const gemm::Team alone{nullptr, 0, 1};
  const bf16* acts = Form::stage(alone, w.c, tokens, QL, w.acts);
  const auto place = [&](int64_t t, int p, const gemm::Tile* tile, int valid) {
    const int64_t h = t * kTile / kHeadRows, n = t * kTile % kHeadRows, at = (h * gemm::kMaxTokens + p * kTile) * NOPE + n;
    if (n >= NOPE) {
      Form::store_bf16(*tile, c.query + ((m0 + p * kTile) * H + h) * ROW + KL + n - NOPE, H * ROW, valid);
    } else if (tokens >= kMatrixTokens) {
      Form::store_bf16(*tile, shared.tiles + at, NOPE, valid);
    } else {
      Form::store_f32(*tile, valid, [&](int m) { return w.tile + m * kTile; });
      for (int m = 0; m < valid; ++m)
        for (int j = 0; j < kTile; j += kLanes) store(shared.lanes + at + m * NOPE + j, round_bf16(load(w.tile + m * kTile + j)));
    }
  };
  gemm::for_tiles<1, Form>(gemm::Weights{c.w_qb, QL}, team.share(H * kHeadRows / kTile), c.walk, QL, acts, tokens, place);
}

// Columns [0, kUnitColumns) of q_nope W_UK for N tokens; w and out point at the first column.
template <int N>
void absorb(const float* q_nope, const bf16* w, bf16* out) {
  constexpr int kPart = kAccumulators / (2 * N) < kParts ? kAccumulators / (2 * N) : kParts;
  for (int first = 0; first < kUnitColumns; first += kPart * kPairs) {
    vf acc[N][2 * kPart];
    for (int m = 0; m < N; ++m)
      for (int i = 0; i < 2 * kPart; ++i) acc[m][i] = zero();
    for (int n = 0; n < NOPE; ++n) {
      for (int i = 0; i < kPart; ++i) {
        const vb x = load_pairs(w + n * KL + first + i * kPairs);
        const vf x_even = even(x), x_odd = odd(x);
        for (int m = 0; m < N; ++m) {
          const vf q = set1(q_nope[m * NOPE + n]);
          acc[m][2 * i] = fma(q, x_even, acc[m][2 * i]);
          acc[m][2 * i + 1] = fma(q, x_odd, acc[m][2 * i + 1]);
        }
      }
    }
    for (int m = 0; m < N; ++m)
      for (int i = 0; i < kPart; ++i) {
        const vb x = pair(acc[m][2 * i], acc[m][2 * i + 1]);
        memcpy(out + m * H * ROW + first + i * kPairs, &x, sizeof x);
      }
  }
}

#if defined(__AMX_BF16__)
// Columns [0, kUnitColumns) of q_nope W_UK for all tokens. Registers: 0..3 products (even and odd columns of two times 32), 4
// tokens, 6 and 7 pairs of rows. Rows of absent tokens are computed from whatever lies there and not stored.
void absorb_tiles(const bf16* q_nope, const bf16* weights, bf16* out, int tokens, Workspace& w) {
  const gemm::MatrixUnit<gemm::Panels> unit;
  constexpr int kOperand = kTile * 32;
  for (int first = 0; first < kUnitColumns; first += 64) {
    for (int n = 0; n < NOPE; n += 2)
      for (int half = 0; half < 2; ++half) {
        const bf16* row = weights + n * KL + first + half * 32;
        const RowPairs x = interleave(load_pairs(row), load_pairs(row + KL));
        bf16* to = w.pairs + (n / 32 * 4 + half * 2) * kOperand + n % 32 * kTile;
        _mm512_storeu_si512(to, x.even);
        _mm512_storeu_si512(to + kOperand, x.odd);
      }
    for (int m = 0; m < tokens; m += kTile) {
      __atomic_signal_fence(__ATOMIC_SEQ_CST);  // the tile intrinsics do not tell the compiler which memory they use
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      for (int n = 0; n < NOPE; n += 32) {
        const bf16* pairs = w.pairs + n / 32 * 4 * kOperand;
        _tile_loadd(4, q_nope + m * NOPE + n, NOPE * long(sizeof(bf16)));
        _tile_loadd(6, pairs, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, pairs + kOperand, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, pairs + 2 * kOperand, 64);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, pairs + 3 * kOperand, 64);
        _tile_dpbf16ps(3, 4, 7);
      }
      _tile_stored(0, w.products[0].v, 64);
      _tile_stored(1, w.products[1].v, 64);
      _tile_stored(2, w.products[2].v, 64);
      _tile_stored(3, w.products[3].v, 64);
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      for (int i = 0; i < kTile && m + i < tokens; ++i)
        for (int half = 0; half < 2; ++half) {
          const float *even = w.products[2 * half].v + i * kTile, *odd = w.products[2 * half + 1].v + i * kTile;
          _mm512_storeu_si512(out + (m + i) * H * ROW + first + half * 32, pair(load(even), load(odd)));
        }
    }
  }
}
#endif

void absorb_units(const Call& c, Range units, int64_t m0, int tokens, const Shared& shared, Workspace& w) {
  for (int64_t unit = units.begin; unit < units.end; ++unit) {
    const int64_t h = unit / kUnits, column = unit % kUnits * kUnitColumns, tokens_of_head = h * gemm::kMaxTokens * NOPE;
    const bf16* weights = c.w_uk_t + h * NOPE * KL + column;
    bf16* out = c.query + (m0 * H + h) * ROW + column;
#if defined(__AMX_BF16__)
    if (tokens >= kMatrixTokens) {
      absorb_tiles(shared.tiles + tokens_of_head, weights, out, tokens, w);
      continue;
    }
#endif
    const float* q_nope = shared.lanes + tokens_of_head;
    int m = 0;
    for (; m + 4 <= tokens; m += 4) absorb<4>(q_nope + m * NOPE, weights, out + m * H * ROW);
    if (m + 2 <= tokens) absorb<2>(q_nope + m * NOPE, weights, out + m * H * ROW), m += 2;
    if (m < tokens) absorb<1>(q_nope + m * NOPE, weights, out + m * H * ROW);
  }
}

template <class Form>
void run(const Call& c, const gemm::Team& team, Shared& shared, Workspace& w) {
  insert_rows(c, share(c.M, team.worker, team.workers));
  for (int64_t m0 = 0; m0 < c.M; m0 += gemm::kMaxTokens) {
    const int tokens = int(c.M - m0 < gemm::kMaxTokens ? c.M - m0 : gemm::kMaxTokens);
    if (m0 > 0) team.barrier();  // the block before may still be reading q_nope
    up_project<Form>(c, team, m0, tokens, shared, w);
    team.barrier();
    absorb_units(c, share(H * kUnits, team.worker, team.workers), m0, tokens, shared, w);
  }
}

// Nothing may be written to a row that the cache does not have.
const char* check(const Call& c, int64_t cache_rows) {
  for (int64_t m = 0; m < c.M; ++m)
    if (c.slot_mapping[m] >= cache_rows) return "slot_mapping: row beyond the cache";
  return nullptr;
}

}  // namespace

K3_EXPORT(mla_query) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call c{};
  int64_t cache[3] = {};
  c.proj = bind<const bf16>(in, {kAny, P}, "proj must be [M, P]", &c.M);
  c.q_norm = bind<const bf16>(in, {QL}, "q_norm must be [QL]");
  c.kv_norm = bind<const bf16>(in, {KL}, "kv_norm must be [KL]");
  c.w_qb = bind<const bf16>(in, {H * kHeadRows, QL}, "w_qb must be [H * (NOPE + PE), QL]");
  c.w_uk_t = bind<const bf16>(in, {H, NOPE, KL}, "w_uk_t must be [H, NOPE, KL]");
  c.slot_mapping = bind<const int64_t>(in, {c.M}, "slot_mapping must be [M]");
  c.query = bind<bf16>(in, {c.M, H, ROW}, "query must be [M, H, ROW]");
  c.cache = in.tensor<bf16>(3, cache);
  in.tensor<uint8_t>(3);  // kv_cache_e4m3: no such call is supported
  c.eps = in.real();
  const int64_t cache_format = in.integer();
  in.real();  // k_scale is 1 with bf16 rows
  const gemm::Tunables tunables(in);
  c.walk = tunables.walk;
  if (cache_format != 0 || !c.cache) in.fail("cache_format must be 0, with kv_cache");
  if (cache[2] != ROW) in.fail("kv_cache must be [pages, page, ROW]");
  if (in.finish()) return -1;
  if (const char* why = check(c, cache[0] * cache[1])) in.fail(why);
  else if (int64_t(sizeof(Shared)) + ctx->max_workers * int64_t(sizeof(Workspace)) > ctx->scratch_bytes)
    in.fail("scratch too small for the workers");
  if (in.finish()) return -1;
  parallel(ctx, tunables.threads, [&](int32_t worker, int32_t workers) {
    const gemm::Team team{ctx, worker, workers};
    Shared& shared = *static_cast<Shared*>(ctx->scratch);
    Workspace& w = reinterpret_cast<Workspace*>(&shared + 1)[worker];
    tunables.packed ? run<gemm::Panels>(c, team, shared, w) : run<gemm::Rows>(c, team, shared, w);
  });
  return 0;
}
