// KDA decode on CPU: conv + SiLU + l2norm + forget gate + delta-rule recurrence + gated RMSNorm in one kernel.
//
// An item is one (request, head); its fp32 state is a [V, K] matrix, K contiguous. Each state row is read once and written
// once per token: with a' = a*k and a" = a*q, one sweep over row S gives S.a' and S.a"; then
//   u = beta (v - S.a'),   S <- S*a + u k,   o = S.a" + u (k.q)
// which equals the interface's decay, delta and read in exact arithmetic. Rows of one state are independent, so they may
// also be shared out over workers. Results do not depend on the number of workers, the partition, or the other tunables.
#include <algorithm>

#include "common/attention.h"
#include "common/bind.h"

namespace {

using namespace k3;

constexpr int H = K3_HEADS, K = K3_KDA_HEAD_DIM, W = H * K, W3 = 3 * W, R = K3_KDA_GATE_RANK, P = K3_KDA_PROJ_ROWS;
constexpr int kTaps = 4;  // conv width
static_assert(K3_CONV_WIDTH == kTaps && K % gemm::kTile == 0 && R % 32 == 0, "the loops below have no tails");
constexpr int kGate = 3 * W, kForget = 4 * W, kBeta = 4 * W + R;  // columns of the packed projection row

enum Partition { kByRequest = 0, kByHead = 1, kByRow = 2 };

struct Call {
  const bf16* proj;
  const float* conv_w;
  const bf16* f_b;
  const float* a_log;
  const float* dt_bias;
  const bf16* o_norm;
  const int32_t* slots;
  const int32_t* accepted;
  bf16* conv_state;
  float* state;
  bf16* out;
  float gate_lower_bound, eps, l2_eps;
  int64_t B, T, taps;
  int64_t partition, prefetch;
  bool gates_together;
};

// What the sweep over the state needs of one token of one item, and its result.
struct alignas(64) Token {
  float a[K], k[K], ak[K], aq[K], v[K], o[K];
  float beta, kq;
};

struct Item {
  int64_t b, h;
};

Item item_at(const Call& c, int64_t i) { return c.partition == kByHead ? Item{i % c.B, i / c.B} : Item{i / H, i % H}; }

// Requests [b0, b1) by heads [h0, h1) that contain the items [begin, end).
struct Block {
  int64_t begin, end, b0, b1, h0, h1;
};

// The longest run of items from `begin` on whose tokens fit one matrix product.
Block block_at(const Call& c, int64_t begin, int64_t limit) {
  const int64_t requests = gemm::kMaxTokens / c.T;
  int64_t end = c.partition == kByHead ? std::min(begin + requests, (begin / c.B + 1) * c.B) : (begin / H + requests) * H;
  end = std::min(end, limit);
  const Item first = item_at(c, begin), last = item_at(c, end - 1);
  const bool whole = first.b != last.b && c.partition != kByHead;  // several requests: all heads between the ends
  return {begin, end, first.b, last.b + 1, whole ? 0 : first.h, whole ? H : last.h + 1};
}

// The state an item starts from, or null if its request is null.
float* source(const Call& c, Item item) {
  const int32_t* slots = c.slots + item.b * c.T;
  if (slots[0] <= 0) return nullptr;  // before `accepted` is used: padding may hold anything there
  const int32_t slot = slots[c.accepted[item.b] - 1];
  return slot > 0 ? c.state + (slot * int64_t(H) + item.h) * K * K : nullptr;
}

// y = silu(conv(x)) over the item's K channels starting at `channel`, for the token whose four taps are `rows`; returns sum y^2.
float conv_silu(const Call& c, const bf16* const (&rows)[kTaps], int64_t channel, float* y) {
  vf squares = zero();
  for (int64_t i = channel; i < channel + K; i += kLanes) {
    vf w[kTaps];
    load_columns4(c.conv_w + i * kTaps, w);
    vf x = w[0] * load(rows[0] + i);
    for (int j = 1; j < kTaps; ++j) x = fma(w[j], load(rows[j] + i), x);
    const vf s = silu(x);
    squares = fma(s, s, squares);
    store(y + i - channel, s);
  }
  return sum(squares);
}

// g = bf16(F_b f_a) of one head, one dot product per channel.
void project_gate(const Call& c, const bf16* f_a, int64_t h, bf16* g) {
  vb x[R / kPairs];
  for (int r = 0; r < R / kPairs; ++r) x[r] = load_pairs(f_a + r * kPairs);
  for (int d = 0; d < K; d += kLanes) {
    vf acc[kLanes];
    for (int l = 0; l < kLanes; ++l) {
      const bf16* row = c.f_b + (h * K + d + l) * R;
      acc[l] = zero();
      for (int r = 0; r < R / kPairs; ++r) acc[l] = dot_pairs(acc[l], load_pairs(row + r * kPairs), x[r]);
    }
    store(g + d, sum_each(acc));
  }
}

// Memory of one worker for the gates of a block of items: requests [b0, b1) by heads [h0, h1).
struct alignas(64) Gates {
  bf16 acts[gemm::kMaxTokens * R];
  bf16 g[gemm::kMaxTokens * W];  // [token][channel]
};

// The same for all tokens of a block as one matrix product.
void project_gates(const Call& c, Block block, Gates& gates) {
  const int tokens = int((block.b1 - block.b0) * c.T);
  const bf16* f_a = c.proj + block.b0 * c.T * P + kForget;
  for (int p = 0; p < gemm::panels_of(tokens); ++p)
    gemm::Panels::gather(gates.acts + p * gemm::kTile * R, R, gemm::in_panel(tokens, p),
                         [&](int m) { return f_a + (p * gemm::kTile + m) * P; });
  const gemm::MatrixUnit<gemm::Panels> unit;
  gemm::for_tiles<1, gemm::Panels>(
      gemm::Weights{c.f_b, R}, {block.h0 * K / gemm::kTile, block.h1 * K / gemm::kTile}, {2, false}, R, gates.acts, tokens,
      [&](int64_t t, int p, const gemm::Tile* tile, int valid) {
        gemm::Panels::store_bf16(*tile, gates.g + p * gemm::kTile * W + t * gemm::kTile, W, valid);
      });
}

// a = exp(bound * sigmoid(exp(A_log) * (g + dt_bias)))
void decay(const Call& c, int64_t h, const bf16* g, float* a) {
  const vf rate = exp(set1(c.a_log[h])), bound = set1(c.gate_lower_bound);
  for (int d = 0; d < K; d += kLanes) store(a + d, exp(bound * sigmoid(rate * (load(g + d) + load(c.dt_bias + h * K + d)))));
}

// Everything before the state, for all tokens of an item; then shifts the item's channels of the conv state. `gate` is the
// item's first row of ready gates, or null.
void prepare(const Call& c, Item item, const bf16* gate, Token* tokens) {
  const int64_t acc = c.accepted[item.b], base = item.h * K;
  bf16* conv = c.conv_state + c.slots[item.b * c.T] * c.taps * W3;
  const bf16* x = c.proj + item.b * c.T * P;
  for (int64_t t = 0; t < c.T; ++t) {
    Token& token = tokens[t];
    const bf16* row = x + t * P;
    const bf16* rows[kTaps];
    for (int j = 0; j < kTaps; ++j) rows[j] = t + j < 3 ? conv + (acc - 1 + t + j) * W3 : row + (j - 3) * P;
    float q[K];
    bf16 g[K];
    const float q_scale = 1.0f / __builtin_sqrtf((conv_silu(c, rows, base, q) + c.l2_eps) * K);
    const float k_scale = 1.0f / __builtin_sqrtf(conv_silu(c, rows, W + base, token.k) + c.l2_eps);
    conv_silu(c, rows, 2 * W + base, token.v);
    if (!gate) project_gate(c, row + kForget, item.h, g);
    decay(c, item.h, gate ? gate + t * W : g, token.a);
    vf kq = zero();
    for (int d = 0; d < K; d += kLanes) {
      const vf qd = load(q + d) * set1(q_scale), kd = load(token.k + d) * set1(k_scale), ad = load(token.a + d);
      store(token.k + d, kd);
      store(token.ak + d, ad * kd);
      store(token.aq + d, ad * qd);
      kq = fma(kd, qd, kq);
    }
    token.kq = sum(kq);
    token.beta = first(sigmoid(set1(to_f32(row[kBeta + item.h]))));
  }
  // Rows move towards the front (accepted >= 1), so ascending order reads each row before it is overwritten.
  for (int64_t r = 0; r < c.T + 2; ++r) {
    const bf16* from = r < 2 ? conv + (acc + r) * W3 : x + (r - 2) * P;
    for (int s = 0; s < 3; ++s) memcpy(conv + r * W3 + s * W + base, from + s * W + base, K * sizeof(bf16));
  }
}

// One token's update of V rows [v, v + N): reads `from`, writes `to` (which may be the same), both [N, K].
template <int N>
K3_INLINE void update_rows(const float* from, float* to, Token& token, int64_t v) {
  vf sk[N], sq[N];
  for (int r = 0; r < N; ++r) sk[r] = sq[r] = zero();
#pragma GCC unroll 4
  for (int d = 0; d < K; d += kLanes) {
    const vf ak = load(token.ak + d), aq = load(token.aq + d);
    for (int r = 0; r < N; ++r) {
      const vf s = load(from + r * K + d);
      sk[r] = fma(s, ak, sk[r]);
      sq[r] = fma(s, aq, sq[r]);
    }
  }
  const vf u = set1(token.beta) * (load_n(token.v + v, N) - sum_each(sk));
  store_n(token.o + v, fma(u, set1(token.kq), sum_each(sq)), N);
  alignas(64) float us[kLanes];
  store(us, u);
#pragma GCC unroll 4
  for (int d = 0; d < K; d += kLanes) {
    const vf a = load(token.a + d), k = load(token.k + d);
    for (int r = 0; r < N; ++r) store(to + r * K + d, fma(set1(us[r]), k, load(from + r * K + d) * a));
  }
}

// All tokens of an item over its V rows [v, end). `next` is the state this worker sweeps afterwards, or null.
template <int N>
void sweep(const Call& c, Item item, Token* tokens, const float* src, const float* next, int64_t v, int64_t end) {
  alignas(64) float unsaved[N * K];  // takes the state after a token whose slot is null
  for (; v < end; v += N) {
    if (c.prefetch) {
      const int64_t ahead = v + c.prefetch;
      if (ahead < end) prefetch_lines(src + ahead * K, N * K * sizeof(float));
      else if (next) prefetch_lines(next + (ahead - end) * K, N * K * sizeof(float));
    }
    const float* from = src + v * K;
    for (int64_t t = 0; t < c.T; ++t) {
      const int32_t slot = c.slots[item.b * c.T + t];
      float* to = slot > 0 ? c.state + ((slot * int64_t(H) + item.h) * K + v) * K : unsaved;
      update_rows<N>(from, to, tokens[t], v);
      from = to;
    }
  }
}

using Sweep = void (*)(const Call&, Item, Token*, const float*, const float*, int64_t, int64_t);

Sweep sweep_for(int64_t v_block) {
  switch (v_block) {
    case 1: return sweep<1>;
    case 2: return sweep<2>;
    case 4: return sweep<4>;
    case 8: return sweep<8>;
    default: return nullptr;
  }
}

// out = bf16(o * rsqrt(mean o^2 + eps) * o_norm * sigmoid(g)), or zeros for a request without state.
void finish(const Call& c, Item item, const Token* tokens, bool live) {
  for (int64_t t = 0; t < c.T; ++t) {
    const int64_t row = item.b * c.T + t;
    bf16* out = c.out + row * W + item.h * K;
    if (!live) {
      memset(out, 0, K * sizeof(bf16));
      continue;
    }
    const float* o = tokens[t].o;
    const bf16* g = c.proj + row * P + kGate + item.h * K;
    vf squares = zero();
    for (int d = 0; d < K; d += kLanes) squares = fma(load(o + d), load(o + d), squares);
    const vf scale = set1(1.0f / __builtin_sqrtf(sum(squares) / K + c.eps));
    for (int d = 0; d < K; d += kLanes) store(out + d, load(o + d) * scale * load(c.o_norm + d) * sigmoid(load(g + d)));
  }
}

// Calls fn(item, gate) for the items of a range in order; gates are made block by block, or left to `prepare`.
template <typename F>
void for_items(const Call& c, Range range, Gates& gates, F&& fn) {
  for (int64_t i = range.begin; i < range.end;) {
    const Block block = block_at(c, i, range.end);
    if (c.gates_together) project_gates(c, block, gates);
    for (; i < block.end; ++i) {
      const Item item = item_at(c, i);
      fn(i, item, c.gates_together ? gates.g + (item.b - block.b0) * c.T * W + item.h * K : nullptr);
    }
  }
}

// Items are independent: each worker takes a run of them from start to end.
void by_item(const K3Context* ctx, const Call& c, Sweep sweep, int32_t threads) {
  Gates* gates = static_cast<Gates*>(ctx->scratch);
  Token* scratch = reinterpret_cast<Token*>(gates + ctx->max_workers);
  parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    Token* tokens = scratch + worker * c.T;
    const Range mine = share(c.B * H, worker, workers);
    for_items(c, mine, gates[worker], [&](int64_t i, Item item, const bf16* gate) {
      const float* src = source(c, item);
      if (src) {
        prepare(c, item, gate, tokens);
        sweep(c, item, tokens, src, i + 1 < mine.end ? source(c, item_at(c, i + 1)) : nullptr, 0, K);
      }
      finish(c, item, tokens, src != nullptr);
    });
  });
}

// Every worker takes a share of each state's V rows. Items go in waves that fit the scratch; the barriers order the three
// phases: tokens are prepared by one worker and read by all, `o` is written by all and read by one.
void by_row(const K3Context* ctx, const Call& c, Sweep sweep, int32_t threads, int64_t v_block) {
  Gates* gates = static_cast<Gates*>(ctx->scratch);
  Token* scratch = reinterpret_cast<Token*>(gates + ctx->max_workers);
  const int64_t left_bytes = ctx->scratch_bytes - ctx->max_workers * int64_t(sizeof(Gates));
  const int64_t items = c.B * H, wave = left_bytes / int64_t(sizeof(Token)) / c.T;
  parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    const Range rows = share(K / v_block, worker, workers);
    const int64_t v0 = rows.begin * v_block, v1 = rows.end * v_block;
    for (int64_t first = 0; first < items; first += wave) {
      const int64_t end = std::min(first + wave, items);
      Range mine = share(end - first, worker, workers);
      mine = {first + mine.begin, first + mine.end};
      for_items(c, mine, gates[worker], [&](int64_t i, Item item, const bf16* gate) {
        if (source(c, item)) prepare(c, item, gate, scratch + (i - first) * c.T);
      });
      if (workers > 1) ctx->barrier(ctx);
      for (int64_t i = first; i < end; ++i) {
        const float* src = source(c, item_at(c, i));
        const float* next = i + 1 < end ? source(c, item_at(c, i + 1)) : nullptr;
        if (src) sweep(c, item_at(c, i), scratch + (i - first) * c.T, src, next ? next + v0 * K : nullptr, v0, v1);
      }
      if (workers > 1) ctx->barrier(ctx);
      for (int64_t i = mine.begin; i < mine.end; ++i)
        finish(c, item_at(c, i), scratch + (i - first) * c.T, source(c, item_at(c, i)) != nullptr);
      if (workers > 1) ctx->barrier(ctx);
    }
  });
}

// Nothing may be read or written through an id that the pool does not have.
const char* check(const Call& c, int64_t S) {
  for (int64_t i = 0; i < c.B * c.T; ++i)
    if (c.slots[i] >= S) return "slots: id beyond the state pool";
  for (int64_t b = 0; b < c.B; ++b)
    if (c.slots[b * c.T] > 0 && (c.accepted[b] < 1 || c.accepted[b] > c.T)) return "accepted: must lie in [1, T]";
  return nullptr;
}

}  // namespace

K3_EXPORT(kda_decode) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call c{};
  int64_t M = 0, slots[2] = {}, pool[3] = {};
  c.proj = bind<const bf16>(in, {kAny, P}, "proj must be [M, P]", &M);
  c.conv_w = bind<const float>(in, {W3, kTaps}, "conv_w must be [3 W, C]");
  c.f_b = bind<const bf16>(in, {W, R}, "f_b must be [W, R]");
  c.a_log = bind<const float>(in, {H}, "a_log must be [H]");
  c.dt_bias = bind<const float>(in, {H, K}, "dt_bias must be [H, K]");
  c.o_norm = bind<const bf16>(in, {K}, "o_norm must be [K]");
  c.slots = in.tensor<const int32_t>(2, slots);
  c.accepted = bind<const int32_t>(in, {slots[0]}, "accepted must be [B]");
  c.conv_state = in.tensor<bf16>(3, pool);
  c.state = bind<float>(in, {pool[0], H, K, K}, "state must be [S, H, K, K]");
  c.out = bind<bf16>(in, {M, W}, "out must be [M, W]");
  c.gate_lower_bound = in.real();
  c.eps = in.real();
  c.l2_eps = in.real();
  const int32_t threads = int32_t(in.integer());
  c.partition = in.integer();
  c.gates_together = in.integer() != 0;
  const int64_t v_block = in.integer();
  c.prefetch = in.integer();
  c.B = slots[0];
  c.T = slots[1];
  c.taps = pool[1];
  const Sweep sweep = sweep_for(v_block);
  if (M != c.B * c.T || c.taps < c.T + 2 || pool[2] != W3) in.fail("conv_state must be [S, at least T + 2, 3 W] and M = B * T");
  if (!sweep || c.partition < kByRequest || c.partition > kByRow || c.prefetch < 0 || c.prefetch > K)
    in.fail("tunables: value not declared in cpu.toml");
  if (in.finish()) return -1;
  if (c.T > gemm::kMaxTokens || ctx->max_workers * int64_t(sizeof(Gates) + c.T * sizeof(Token)) > ctx->scratch_bytes)
    in.fail("scratch too small for a worker's gates and T tokens");
  else if (const char* why = check(c, pool[0])) in.fail(why);
  if (in.finish()) return -1;
  if (c.partition == kByRow) by_row(ctx, c, sweep, threads, v_block);
  else by_item(ctx, c, sweep, threads);
  return 0;
}
