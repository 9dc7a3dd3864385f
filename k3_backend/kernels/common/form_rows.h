// Form Rows of a small matrix product: token rows as they are, every output one dot product in vector lanes, W read
// once per four tokens. Best for one or two tokens, and for more where a level has no matrix unit.
#pragma once

#include "common/tile.h"

namespace k3::gemm {

struct Rows {
  static constexpr bool kPacked = false;

  static K3_INLINE const bf16* panel(const bf16* acts, int p, int64_t k) { return acts + p * kTile * k; }

  // Activations of `tokens` contiguous rows of k elements; here they are read in place.
  static K3_INLINE const bf16* stage(const Team&, const bf16* x, int, int64_t, bf16*) { return x; }

  // Elements [0, k) of up to 16 tokens, row_of(token) each, become a panel of activations.
  template <typename F>
  static K3_INLINE void gather(bf16* panel, int64_t k, int tokens, F&& row_of) {
    for (int m = 0; m < tokens; ++m) memcpy(panel + m * k, row_of(m), size_t(k) * sizeof(bf16));
  }

  // Tile r of the group by panel p < `panels` of `tokens` tokens at `acts` becomes c[p * group.count + r].
  static void multiply(const Group& w, int panels, int k, const bf16* acts, int tokens, Tile* c) {
    for (int i = 0; i < k; i += 32) w.prefetch(i);
    for (int p = 0; p < panels; ++p)
      for (int r = 0; r < w.count; ++r)
        tile(w.rows[r], w.ld, k, panel(acts, p, k), in_panel(tokens, p), c[p * w.count + r].v);
  }

  // c = fn(a, b) elementwise, for the valid tokens.
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
  static K3_NOINLINE void tile(const bf16* w, int64_t ldw, int k, const bf16* x, int tokens, float* out) {
    for (int row = 0; row < kTile; row += 4, w += 4 * ldw, out += 4) {
      int m = 0;
      for (; m + 4 <= tokens; m += 4) dots<4>(w, ldw, k, x + m * int64_t(k), out + m * kTile);
      if (m + 2 <= tokens) dots<2>(w, ldw, k, x + m * int64_t(k), out + m * kTile), m += 2;
      if (m < tokens) dots<1>(w, ldw, k, x + m * int64_t(k), out + m * kTile);
    }
  }

  template <int M>
  static K3_INLINE void dots(const bf16* w, int64_t ldw, int k, const bf16* x, float* out) {
    vf acc[M][4];
    for (int m = 0; m < M; ++m)
      for (int r = 0; r < 4; ++r) acc[m][r] = zero();
    for (int i = 0; i < k; i += kPairs) {
      const vb w0 = load_pairs(w + i), w1 = load_pairs(w + ldw + i);
      const vb w2 = load_pairs(w + 2 * ldw + i), w3 = load_pairs(w + 3 * ldw + i);
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

}  // namespace k3::gemm
