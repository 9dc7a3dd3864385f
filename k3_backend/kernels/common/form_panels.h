// Form Panels of a small matrix product: 16 tokens side by side in pairs along K, [K/2][16][2], which is the layout
// that AMX takes as its second operand and that vector lanes can use as well. A tile holds one row of W per row and one
// token per column, so a token's result does not depend on its neighbours, and a following product reads bf16 pairs of
// two tile rows without a transposition.
#pragma once

#include "common/tile.h"

namespace k3::gemm {

struct Panels {
  static constexpr bool kPacked = true;

  static K3_INLINE const bf16* panel(const bf16* acts, int p, int64_t k) { return acts + p * kTile * k; }

  // Packs elements [k0, k0 + 32) of up to 16 tokens, row_of(token) each, into their place in a panel; the rest is 0.
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

  // Activations of `tokens` contiguous rows of k elements, packed into `acts` by the whole team; the caller's next
  // barrier completes them.
  static K3_INLINE const bf16* stage(const Team& team, const bf16* x, int tokens, int64_t k, bf16* acts) {
    const int64_t steps = k / 32;
    const Range mine = team.share(panels_of(tokens) * steps);
    for (int64_t i = mine.begin; i < mine.end; ++i) {
      const int p = int(i / steps);
      const bf16* rows = x + p * kTile * k;
      pack(acts + p * kTile * k, i % steps * 32, in_panel(tokens, p), [&](int m) { return rows + m * k; });
    }
    return acts;
  }

  template <typename F>
  static K3_INLINE void gather(bf16* panel, int64_t k, int tokens, F&& row_of) {
    for (int64_t i = 0; i < k; i += 32) pack(panel, i, tokens, row_of);
  }

  // Tile r of the group by panel p < `panels` at `acts` becomes c[p * group.count + r]; both counts are powers of two,
  // four tiles in all at most.
  static K3_NOINLINE void multiply(const Group& w, int panels, int k, const bf16* acts, int, Tile* c) {
    switch (w.count * kMaxInFlight + panels) {
      case 1 * kMaxInFlight + 1: return products<1, 1>(w, k, acts, c);
      case 1 * kMaxInFlight + 2: return products<1, 2>(w, k, acts, c);
      case 1 * kMaxInFlight + 4: return products<1, 4>(w, k, acts, c);
      case 2 * kMaxInFlight + 1: return products<2, 1>(w, k, acts, c);
      case 2 * kMaxInFlight + 2: return products<2, 2>(w, k, acts, c);
      case 4 * kMaxInFlight + 1: return products<4, 1>(w, k, acts, c);
    }
  }

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
      const __m256i t[4] = {_mm512_castsi512_si256(low), _mm512_extracti64x4_epi64(low, 1),
                            _mm512_castsi512_si256(high), _mm512_extracti64x4_epi64(high, 1)};
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
      const __m512i a = _mm512_shuffle_i32x4(t[i], t[4 + i], 0x88);
      const __m512i b = _mm512_shuffle_i32x4(t[i], t[4 + i], 0xdd);
      const __m512i c = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0x88);
      const __m512i d = _mm512_shuffle_i32x4(t[8 + i], t[12 + i], 0xdd);
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

  template <int R, int P>
  static K3_INLINE void products(const Group& w, int k, const bf16* acts, Tile* c);

  template <int N, int P>
  static K3_INLINE void lanes(const bf16* w, int64_t ldw, int k, const bf16* acts, Tile* c, int row, int stride);
};

#if defined(__AMX_BF16__)

// C tiles are registers 0..3 (panel-major), W tiles 4 and 5, panels 6 and 7; W and panels alternate between two
// registers so that a load can run while the previous product still reads the other. The intrinsics name registers by
// literals.
template <int R, int P>
K3_INLINE void Panels::products(const Group& w, int k, const bf16* acts, Tile* c) {
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
K3_INLINE void Panels::products(const Group& w, int k, const bf16* acts, Tile* c) {
  constexpr int kAccumulators = kLanes == 16 ? 16 : 8;  // of 32 and 16 vector registers
  constexpr int kRows = kAccumulators / (P * (kTile / kLanes));
  for (int i = 0; i < k; i += 32) w.prefetch(i);
  for (int r = 0; r < R; ++r)
    for (int row = 0; row < kTile; row += kRows) lanes<kRows, P>(w.rows[r] + row * w.ld, w.ld, k, acts, c + r, row, R);
}

#endif

}  // namespace k3::gemm
