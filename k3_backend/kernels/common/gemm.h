// Small matrix products C = X W^T of bf16 with fp32 accumulation, for W row-major as stored and a few tokens X: the shared
// core of every kernel that multiplies activations by weights. Works in tiles of 16 rows of W by 16 tokens and hands each
// finished fp32 tile to the caller's `emit`, which rounds, fuses and stores. Owns no memory and no threads.
//
// Two forms, chosen by a schedule, because the best one depends on the number of tokens:
//   Rows    token rows as they are; every output is one dot product, W is read once per four tokens.
//   Panels  16 tokens side by side, in pairs along K: [K/2][16][2]. The pairs feed AMX tiles where the level has them
//           (x86-64-v4-amx), else vector lanes. A token's result does not depend on which tokens share its panel.
// K is a multiple of 32. Every output is summed in an order fixed by form and level alone, never by workers or blocking.
#pragma once

#include "common/simd.h"
#include "k3_cpu.h"

namespace k3::gemm {

constexpr int kTile = 16;        // rows of W, and tokens, of one tile
constexpr int kMaxTokens = 64;   // tokens that one pass over the weights serves; kernels loop over blocks of so many
constexpr int kMaxInFlight = 4;  // tiles accumulated together

// One finished tile. Rows: v[token][row of W]. Panels: v[row of W][token].
struct alignas(64) Tile {
  float v[kTile * kTile];
};

constexpr int panels_of(int tokens) { return (tokens + kTile - 1) / kTile; }
// Elements that the activations of some tokens take in either form.
constexpr int64_t acts_elems(int tokens, int64_t k) { return int64_t(panels_of(tokens)) * kTile * k; }

struct Range {
  int64_t begin, end;
};
// The part of `count` items that a worker takes, in multiples of `unit`.
K3_INLINE Range share(int64_t count, int64_t unit, int32_t worker, int32_t workers) {
  const int64_t units = (count + unit - 1) / unit;
  const int64_t end = units * (worker + 1) / workers * unit;
  return {units * worker / workers * unit, end < count ? end : count};
}

// One worker of a parallel region.
struct Team {
  const K3Context* ctx;
  int32_t worker, workers;

  K3_INLINE void barrier() const {
    if (workers > 1) ctx->barrier(ctx);  // a region of one worker runs on the caller alone, without the pool
  }
  K3_INLINE Range share(int64_t count, int64_t unit = 1) const { return gemm::share(count, unit, worker, workers); }
};

// Makes AMX usable in a scope of one worker; nothing on other levels. Releasing at the end leaves no tile state behind for
// other code on the thread and keeps context switches cheap.
class MatrixUnit {
 public:
#if defined(__AMX_BF16__)
  MatrixUnit() {
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    _tile_loadconfig(&config);
  }
  ~MatrixUnit() { _tile_release(); }
#else
  MatrixUnit() {}
  ~MatrixUnit() {}
#endif
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// Tiles of W that are multiplied together, and those to request from memory meanwhile (null: none). Weights come from the
// last-level cache or DRAM once per step, in pieces too short for the hardware's stream detection.
template <int R>
struct Group {
  const bf16* rows[R];
  const bf16* next[R];
  int64_t ld;

  // Requests the lines with elements [i, i + 32) of all 16 rows of the next tiles.
  K3_INLINE void prefetch(int i) const {
    if (!next[0]) return;
    for (int r = 0; r < R; ++r)
      for (int row = 0; row < kTile; ++row) __builtin_prefetch(next[r] + row * ld + i);
  }
};

// --- Form Rows ---------------------------------------------------------------------------------------------------------
struct Rows {
  static constexpr bool kPacked = false;

  static K3_INLINE const bf16* panel(const bf16* acts, int p, int64_t k) { return acts + p * kTile * k; }

  // Activations of `tokens` contiguous rows of k elements: read in place.
  static K3_INLINE const bf16* stage(const Team&, const bf16* x, int, int64_t, bf16*) { return x; }

  // Tile r of the group by panel p < P of `tokens` tokens at `acts` becomes c[p * R + r].
  template <int R, int P>
  static K3_INLINE void multiply(const Group<R>& w, int k, const bf16* acts, int tokens, Tile* c) {
    for (int p = 0; p < P; ++p) {
      const bf16* x = panel(acts, p, k);
      const int n = tokens - p * kTile < kTile ? tokens - p * kTile : kTile;
      for (int i = 0; i < k && p == 0; i += 32) w.prefetch(i);
      for (int r = 0; r < R; ++r)
        for (int row = 0; row < kTile; row += 4) {
          const bf16* rows = w.rows[r] + row * w.ld;
          float* out = c[p * R + r].v + row;
          int m = 0;
          for (; m + 4 <= n; m += 4) dots<4>(rows, w.ld, k, x + m * int64_t(k), out + m * kTile);
          if (m + 2 <= n) dots<2>(rows, w.ld, k, x + m * int64_t(k), out + m * kTile), m += 2;
          if (m < n) dots<1>(rows, w.ld, k, x + m * int64_t(k), out + m * kTile);
        }
    }
  }

  // fn(row vector a) -> row vector over the valid part of tiles: c = fn(a, b).
  template <typename F>
  static K3_INLINE void combine(Tile& c, const Tile& a, const Tile& b, int tokens, F&& fn) {
    for (int i = 0; i < tokens * kTile; i += kLanes) store(c.v + i, fn(load(a.v + i), load(b.v + i)));
  }

  // out[token][0..16) = bf16(tile)
  static K3_INLINE void store_bf16(const Tile& c, bf16* out, int64_t ld, int tokens) {
    for (int m = 0; m < tokens; ++m)
      for (int j = 0; j < kTile; j += kLanes) store(out + m * ld + j, load(c.v + m * kTile + j));
  }
  // row_of(token)[0..16) = tile
  template <typename F>
  static K3_INLINE void store_f32(const Tile& c, int tokens, F&& row_of) {
    for (int m = 0; m < tokens; ++m)
      for (int j = 0; j < kTile; j += kLanes) store(row_of(m) + j, load(c.v + m * kTile + j));
  }
  // The tile becomes elements [n0, n0 + 16) of the activations of a following product over K = k.
  static K3_INLINE void store_acts(const Tile& c, bf16* panel_acts, int64_t k, int64_t n0, int tokens) {
    store_bf16(c, panel_acts + n0, k, tokens);
  }

 private:
  template <int M>
  static K3_INLINE void dots(const bf16* w, int64_t ldw, int k, const bf16* x, float* out) {
    vf acc[M][4];
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < 4; ++r) acc[m][r] = zero();
    for (int i = 0; i < k; i += kPairs) {
      const vb w0 = load_pairs(w + i), w1 = load_pairs(w + ldw + i), w2 = load_pairs(w + 2 * ldw + i), w3 = load_pairs(w + 3 * ldw + i);
      for (int m = 0; m < M; ++m) {
        const vb xv = load_pairs(x + m * int64_t(k) + i);
        acc[m][0] = dot_pairs(acc[m][0], w0, xv);
        acc[m][1] = dot_pairs(acc[m][1], w1, xv);
        acc[m][2] = dot_pairs(acc[m][2], w2, xv);
        acc[m][3] = dot_pairs(acc[m][3], w3, xv);
      }
    }
    for (int m = 0; m < M; ++m) _mm_storeu_ps(out + m * kTile, sums(acc[m]));
  }

  static K3_INLINE __m128 sums(const vf (&a)[4]) {
    __m256 h[4];
    for (int i = 0; i < 4; ++i) {
#if defined(__AVX512F__)
      h[i] = _mm256_add_ps(_mm512_castps512_ps256(a[i]), _mm512_extractf32x8_ps(a[i], 1));
#else
      h[i] = a[i];
#endif
    }
    const __m256 s = _mm256_hadd_ps(_mm256_hadd_ps(h[0], h[1]), _mm256_hadd_ps(h[2], h[3]));
    return _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
  }
};

// --- Form Panels -------------------------------------------------------------------------------------------------------
struct Panels {
  static constexpr bool kPacked = true;

  static K3_INLINE const bf16* panel(const bf16* acts, int p, int64_t k) { return acts + p * kTile * k; }

  // Packs elements [k0, k0 + 32) of up to 16 tokens, row_of(token) each, into their place in a panel; absent tokens are 0.
  template <typename F>
  static K3_INLINE void pack(bf16* panel, int64_t k0, int tokens, F&& row_of) {
#if defined(__AVX512F__)
    __m512i r[kTile];
    for (int m = 0; m < kTile; ++m) r[m] = m < tokens ? _mm512_loadu_si512(row_of(m) + k0) : _mm512_setzero_si512();
    transpose(r);
    for (int i = 0; i < kTile; ++i) _mm512_storeu_si512(panel + k0 * kTile + i * 2 * kTile, r[i]);
#else
    for (int m = 0; m < kTile; ++m)
      for (int i = 0; i < 32; i += 2) {
        bf16* to = panel + (k0 + i) * kTile + 2 * m;
        to[0] = m < tokens ? row_of(m)[k0 + i] : 0;
        to[1] = m < tokens ? row_of(m)[k0 + i + 1] : 0;
      }
#endif
  }

  // Activations of `tokens` contiguous rows of k elements: packed into `acts` by the whole team.
  static K3_INLINE const bf16* stage(const Team& team, const bf16* x, int tokens, int64_t k, bf16* acts) {
    const int64_t steps = k / 32;
    const Range mine = team.share(panels_of(tokens) * steps);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int p = int(i / steps);
      const bf16* rows = x + p * kTile * k;
      pack(acts + p * kTile * k, i % steps * 32, tokens - p * kTile, [&](int m) { return rows + m * k; });
    }
    team.barrier();
    return acts;
  }

  template <int R, int P>
  static K3_INLINE void multiply(const Group<R>& w, int k, const bf16* acts, int tokens, Tile* c);

  // Few tokens fill only the front of each row, so several rows share a vector: fn may be expensive.
  template <typename F>
  static K3_INLINE void combine(Tile& c, const Tile& a, const Tile& b, int tokens, F&& fn) {
    if (tokens <= 4) return combine_rows<4>(c, a, b, fn);
    if (tokens <= 8) return combine_rows<8>(c, a, b, fn);
    combine_rows<16>(c, a, b, fn);
  }

  static K3_INLINE void store_bf16(const Tile& c, bf16* out, int64_t ld, int tokens) {
#if defined(__AVX512F__)
    // Pairs of neighbouring rows of W first: half the transposition is done by the rounding.
    __m512i x[4], y[4];  // per token t = 4 * lane + i: rows 0..7 in x[i], rows 8..15 in y[i], by 128-bit lanes
    for (int half = 0; half < 2; ++half) {
      __m512i u[4];
      for (int i = 0; i < 4; ++i) {
        const float* row = c.v + (half * 8 + 2 * i) * kTile;
        u[i] = pair(load(row), load(row + kTile));
      }
      transpose4(half ? y : x, u);
    }
    for (int i = 0; i < 4; ++i) {
      const __m512i low = _mm512_permutex2var_epi64(x[i], _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), y[i]);
      const __m512i high = _mm512_permutex2var_epi64(x[i], _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), y[i]);
      const __m256i t[4] = {_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1), _mm512_castsi512_si256(high),
                            _mm512_extracti64x4_epi64(high, 1)};
      for (int lane = 0; lane < 4; ++lane)
        if (4 * lane + i < tokens) _mm256_storeu_si256((__m256i*)(out + (4 * lane + i) * ld), t[lane]);
    }
#else
    store_f32_rows(c, tokens, [&](int m, vf v, int j) { store(out + m * ld + j, v); });
#endif
  }

  template <typename F>
  static K3_INLINE void store_f32(const Tile& c, int tokens, F&& row_of) {
#if defined(__AVX512F__)
    __m512i r[kTile];
    for (int i = 0; i < kTile; ++i) r[i] = _mm512_castps_si512(load(c.v + i * kTile));
    transpose(r);
    for (int m = 0; m < kTile; ++m)
      if (m < tokens) store(row_of(m), _mm512_castsi512_ps(r[m]));
#else
    store_f32_rows(c, tokens, [&](int m, vf v, int j) { store(row_of(m) + j, v); });
#endif
  }

  static K3_INLINE void store_acts(const Tile& c, bf16* panel_acts, int64_t, int64_t n0, int) {
    for (int i = 0; i < kTile; i += 2)
      for (int j = 0; j < kTile; j += kLanes) {
        const vb v = pair(load(c.v + i * kTile + j), load(c.v + (i + 1) * kTile + j));
        memcpy(panel_acts + (n0 + i) * kTile + 2 * j, &v, sizeof v);
      }
  }

 private:
#if defined(__AVX512F__)
  // Within each 128-bit lane: out[i] = element i of in[0], in[1], in[2], in[3].
  static K3_INLINE void transpose4(__m512i* out, const __m512i* in) {
    const __m512i a = _mm512_unpacklo_epi32(in[0], in[1]), b = _mm512_unpackhi_epi32(in[0], in[1]);
    const __m512i c = _mm512_unpacklo_epi32(in[2], in[3]), d = _mm512_unpackhi_epi32(in[2], in[3]);
    out[0] = _mm512_unpacklo_epi64(a, c);
    out[1] = _mm512_unpackhi_epi64(a, c);
    out[2] = _mm512_unpacklo_epi64(b, d);
    out[3] = _mm512_unpackhi_epi64(b, d);
  }
  // 16 x 16 elements of 32 bits.
  static K3_INLINE void transpose(__m512i (&r)[kTile]) {
    __m512i t[kTile];
    for (int i = 0; i < kTile; i += 4) transpose4(t + i, r + i);
    for (int i = 0; i < 4; ++i) {
      const __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88), b = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
      const __m512i c = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88), d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
      r[i] = _mm512_shuffle_i32x4(a, c, 0x88);
      r[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
      r[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
      r[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
  }
#else
  template <typename F>
  static K3_INLINE void store_f32_rows(const Tile& c, int tokens, F&& put) {
    for (int m = 0; m < tokens; ++m) {
      alignas(64) float row[kTile];
      for (int i = 0; i < kTile; ++i) row[i] = c.v[i * kTile + m];
      for (int j = 0; j < kTile; j += kLanes) put(m, load(row + j), j);
    }
  }
#endif

  template <int W, typename F>
  static K3_INLINE void combine_rows(Tile& c, const Tile& a, const Tile& b, F&& fn) {
    constexpr int kRows = W < kLanes ? kLanes / W : 1;
    for (int i = 0; i < kTile; i += kRows)
      for (int j = 0; j < W; j += kLanes) {
        const int at = i * kTile + j;
        store_rows<kRows>(c.v + at, fn(load_rows<kRows>(a.v + at), load_rows<kRows>(b.v + at)));
      }
  }

  // The first kLanes / N elements of N rows of a tile as one vector.
  template <int N>
  static K3_INLINE vf load_rows(const float* p) {
    if constexpr (N == 1) return load(p);
    float row[kLanes];
    for (int i = 0; i < N; ++i) memcpy(row + i * (kLanes / N), p + i * kTile, sizeof(float) * kLanes / N);
    return load(row);
  }
  template <int N>
  static K3_INLINE void store_rows(float* p, vf x) {
    if constexpr (N == 1) return store(p, x);
    float row[kLanes];
    store(row, x);
    for (int i = 0; i < N; ++i) memcpy(p + i * kTile, row + i * (kLanes / N), sizeof(float) * kLanes / N);
  }

  template <int N, int P>
  static K3_INLINE void lanes(const bf16* w, int64_t ldw, int k, const bf16* acts, Tile* c, int row, int stride);
};

#if defined(__AMX_BF16__)

// C tiles are registers 0..3 (panel-major), W tiles 4 and 5, panels 6 and 7; W and panels alternate between two registers
// so that a load can run while the previous product still reads the other. The intrinsics name registers by literals.
template <int R, int P>
K3_INLINE void Panels::multiply(const Group<R>& w, int k, const bf16* acts, int, Tile* c) {
  static_assert(R * P <= 4 && (R <= 2 || P == 1), "four accumulators");
  constexpr long kPanelRow = 2 * kTile * sizeof(bf16);
  const long w_stride = long(w.ld) * long(sizeof(bf16));
  __atomic_signal_fence(__ATOMIC_SEQ_CST);  // the tile intrinsics do not tell the compiler that they read memory
  _tile_zero(0);
  if constexpr (R * P > 1) _tile_zero(1);
  if constexpr (R * P > 2) _tile_zero(2);
  if constexpr (R * P > 3) _tile_zero(3);
  for (int i = 0; i < k; i += 32) {
    w.prefetch(i);
    const bf16* x = acts + int64_t(i) * kTile;
    _tile_loadd(4, w.rows[0] + i, w_stride);
    _tile_loadd(6, x, kPanelRow);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (R >= 2) {
      _tile_loadd(5, w.rows[1] + i, w_stride);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (R == 4) {
      _tile_loadd(4, w.rows[2] + i, w_stride);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(5, w.rows[3] + i, w_stride);
      _tile_dpbf16ps(3, 5, 6);
    }
    if constexpr (P >= 2) {
      _tile_loadd(7, x + kTile * int64_t(k), kPanelRow);
      if constexpr (R == 1) {
        _tile_dpbf16ps(1, 4, 7);
      } else {
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
      }
    }
    if constexpr (P == 4) {
      _tile_loadd(6, x + 2 * kTile * int64_t(k), kPanelRow);
      _tile_dpbf16ps(2, 4, 6);
      _tile_loadd(7, x + 3 * kTile * int64_t(k), kPanelRow);
      _tile_dpbf16ps(3, 4, 7);
    }
  }
  _tile_stored(0, c[0].v, 64);
  if constexpr (R * P > 1) _tile_stored(1, c[1].v, 64);
  if constexpr (R * P > 2) _tile_stored(2, c[2].v, 64);
  if constexpr (R * P > 3) _tile_stored(3, c[3].v, 64);
}

#else

// N rows of W by P panels in vector lanes; one pair of W is broadcast against the pairs of all tokens.
template <int N, int P>
K3_INLINE void Panels::lanes(const bf16* w, int64_t ldw, int k, const bf16* acts, Tile* c, int row, int stride) {
  constexpr int kParts = kTile / kLanes;
  vf acc[N][P][kParts];
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p)
      for (int h = 0; h < kParts; ++h) acc[n][p][h] = zero();
  for (int i = 0; i < k; i += 2) {
    vb x[P][kParts];
    for (int p = 0; p < P; ++p)
      for (int h = 0; h < kParts; ++h) x[p][h] = load_pairs(panel(acts, p, k) + int64_t(i) * kTile + h * kPairs);
    for (int n = 0; n < N; ++n) {
      const vb wv = broadcast_pair(w + n * ldw + i);
      for (int p = 0; p < P; ++p)
        for (int h = 0; h < kParts; ++h) acc[n][p][h] = dot_pairs(acc[n][p][h], wv, x[p][h]);
    }
  }
  for (int n = 0; n < N; ++n)
    for (int p = 0; p < P; ++p)
      for (int h = 0; h < kParts; ++h) store(c[p * stride].v + (row + n) * kTile + h * kLanes, acc[n][p][h]);
}

template <int R, int P>
K3_INLINE void Panels::multiply(const Group<R>& w, int k, const bf16* acts, int, Tile* c) {
  constexpr int kAccumulators = kLanes == 16 ? 16 : 8;  // of 32 and 16 vector registers
  constexpr int kRows = kAccumulators / (P * (kTile / kLanes));
  for (int i = 0; i < k; i += 32) w.prefetch(i);
  for (int r = 0; r < R; ++r)
    for (int row = 0; row < kTile; row += kRows) lanes<kRows, P>(w.rows[r] + row * w.ld, w.ld, k, acts, c + r, row, R);
}

#endif

// --- Driver ------------------------------------------------------------------------------------------------------------

// Row-major weights as stored: tile t is rows [16 t, 16 t + 16).
struct Weights {
  const bf16* data;
  int64_t ld;
  K3_INLINE const bf16* tile(int64_t t, int) const { return data + t * kTile * ld; }
  K3_INLINE const bf16* ahead(int64_t t) const { return tile(t, 0); }
};

// Gate rows first, then up rows: tile 2 j is gate rows [16 j, 16 j + 16), tile 2 j + 1 the up rows that go with them.
struct GateUp {
  const bf16* data;
  int64_t ld, width;
  K3_INLINE const bf16* tile(int64_t t, int) const { return data + (t / 2 * kTile + t % 2 * width) * ld; }
  K3_INLINE const bf16* ahead(int64_t t) const { return tile(t, 0); }
};

// How a kernel walks its tiles; from the schedule.
struct Walk {
  int in_flight;  // tiles of W accumulated together: 1, 2 or 4
  bool prefetch;  // request the next tiles of W while multiplying these
};

template <int R, class Form, class W, class Emit>
K3_INLINE void tile_group(const W& weights, int64_t t, bool ahead, int k, const bf16* acts, int tokens, Emit&& emit) {
  Tile c[kMaxInFlight];
  Group<R> group;
  group.ld = weights.ld;
  for (int r = 0; r < R; ++r) {
    group.rows[r] = weights.tile(t + r, r);
    group.next[r] = ahead ? weights.ahead(t + R + r) : nullptr;
  }
  const int panels = panels_of(tokens);
  auto block = [&]<int P>(int p) {
    Form::template multiply<R, P>(group, k, Form::panel(acts, p, k), tokens - p * kTile, c);
    group.next[0] = nullptr;
    for (int i = 0; i < P; ++i) {
      const int left = tokens - (p + i) * kTile;
      emit(t, p + i, &c[i * R], left < kTile ? left : kTile);
    }
  };
  int p = 0;
  if constexpr (R == 1)
    for (; p + 4 <= panels; p += 4) block.template operator()<4>(p);
  if constexpr (R <= 2)
    for (; p + 2 <= panels; p += 2) block.template operator()<2>(p);
  for (; p < panels; ++p) block.template operator()<1>(p);
}

// Multiplies tiles [begin, end) of W with all tokens. `emit(t, p, c, valid)` gets, per panel p with `valid` <= 16 tokens,
// the finished tiles c[0..kUnit) of t, t + 1, ...; the range is a multiple of kUnit (2: a tile and its partner).
template <int kUnit, class Form, class W, class Emit>
K3_INLINE void for_tiles(const W& weights, Range tiles, Walk walk, int k, const bf16* acts, int tokens, Emit&& emit) {
  int64_t t = tiles.begin;
  auto run = [&]<int R>() {
    for (; t + R <= tiles.end; t += R)
      tile_group<R, Form>(weights, t, walk.prefetch && t + 2 * R <= tiles.end, k, acts, tokens,
                          [&](int64_t first, int p, const Tile* c, int valid) {
                            for (int r = 0; r < R; r += kUnit) emit(first + r, p, c + r, valid);
                          });
  };
  if (walk.in_flight >= 4) run.template operator()<4>();
  if (walk.in_flight >= 2 || kUnit == 2) run.template operator()<2>();
  if constexpr (kUnit == 1) run.template operator()<1>();
}

// Elements [n0, n0 + 16) of the activations `panel_acts` (over k) = bf16(f(bf16(gate), bf16(up))).
template <class Form>
K3_INLINE void store_situ(const Tile& gate, const Tile& up, const Situ& f, bf16* panel_acts, int64_t k, int64_t n0, int valid) {
  Tile h{};
  Form::combine(h, gate, up, valid, [&](vf g, vf u) { return f(round_bf16(g), round_bf16(u)); });
  Form::store_acts(h, panel_acts, k, n0, valid);
}

}  // namespace k3::gemm
