// Helpers shared by the attention-side kernels (KDA, MLA, AttnRes): reductions of several vectors at once, the transposed
// load of the short convolution's weights, and the split of work over workers. No geometry, no state.
#pragma once

#include "common/simd.h"

namespace k3 {

constexpr int64_t kCacheLine = 64;

// Work items [begin, end) of one worker when `count` items are split evenly.
struct Range {
  int64_t begin, end;
};

K3_INLINE Range share(int64_t count, int32_t worker, int32_t workers) {
  return {count * worker / workers, count * (worker + 1) / workers};
}

// Sums over groups of four neighbouring lanes: lane i of each group holds the group's sum of the i-th argument.
K3_INLINE vf sum4(vf a, vf b, vf c, vf d) {
#if defined(__AVX512F__)
  const vf ab = _mm512_unpacklo_ps(a, b) + _mm512_unpackhi_ps(a, b);
  const vf cd = _mm512_unpacklo_ps(c, d) + _mm512_unpackhi_ps(c, d);
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return _mm512_castpd_ps(_mm512_unpacklo_pd(x, y)) + _mm512_castpd_ps(_mm512_unpackhi_pd(x, y));
#else
  const vf ab = _mm256_unpacklo_ps(a, b) + _mm256_unpackhi_ps(a, b);
  const vf cd = _mm256_unpacklo_ps(c, d) + _mm256_unpackhi_ps(c, d);
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return _mm256_castpd_ps(_mm256_unpacklo_pd(x, y)) + _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
#endif
}

// Lane i holds the sum over all lanes of acc[i]; N is a power of two up to kLanes, lanes from N on repeat. The order of
// additions within one sum does not depend on N, so blocking does not change bits.
template <int N>
K3_INLINE vf sum_each(const vf (&acc)[N]) {
  static_assert(N <= kLanes && (N & (N - 1)) == 0, "one lane per sum");
  vf quads[kLanes / 4];
  for (int q = 0; q < kLanes / 4; ++q) {
    const int i = 4 * q % N;
    quads[q] = sum4(acc[i], acc[(i + 1) % N], acc[(i + 2) % N], acc[(i + 3) % N]);
  }
#if defined(__AVX512F__)
  const vf x = _mm512_shuffle_f32x4(quads[0], quads[1], 0x88) + _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd);
  const vf y = _mm512_shuffle_f32x4(quads[2], quads[3], 0x88) + _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd);
  return _mm512_shuffle_f32x4(x, y, 0x88) + _mm512_shuffle_f32x4(x, y, 0xdd);
#else
  return _mm256_permute2f128_ps(quads[0], quads[1], 0x20) + _mm256_permute2f128_ps(quads[0], quads[1], 0x31);
#endif
}

// Loads kLanes rows of four values, as four vectors of one column each.
K3_INLINE void load_columns4(const float* p, vf (&column)[4]) {
  const vf r0 = load(p), r1 = load(p + kLanes), r2 = load(p + 2 * kLanes), r3 = load(p + 3 * kLanes);
#if defined(__AVX512F__)
  const __m512i even = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(2));
  const vf a = _mm512_permutex2var_ps(r0, even, r1), b = _mm512_permutex2var_ps(r2, even, r3);
  const vf c = _mm512_permutex2var_ps(r0, odd, r1), d = _mm512_permutex2var_ps(r2, odd, r3);
  column[0] = _mm512_shuffle_f32x4(a, b, 0x44);
  column[1] = _mm512_shuffle_f32x4(a, b, 0xee);
  column[2] = _mm512_shuffle_f32x4(c, d, 0x44);
  column[3] = _mm512_shuffle_f32x4(c, d, 0xee);
#else
  const vf a = _mm256_permute2f128_ps(r0, r2, 0x20), b = _mm256_permute2f128_ps(r0, r2, 0x31);
  const vf c = _mm256_permute2f128_ps(r1, r3, 0x20), d = _mm256_permute2f128_ps(r1, r3, 0x31);
  const vf ab_lo = _mm256_unpacklo_ps(a, b), ab_hi = _mm256_unpackhi_ps(a, b);
  const vf cd_lo = _mm256_unpacklo_ps(c, d), cd_hi = _mm256_unpackhi_ps(c, d);
  column[0] = _mm256_shuffle_ps(ab_lo, cd_lo, 0x44);
  column[1] = _mm256_shuffle_ps(ab_lo, cd_lo, 0xee);
  column[2] = _mm256_shuffle_ps(ab_hi, cd_hi, 0x44);
  column[3] = _mm256_shuffle_ps(ab_hi, cd_hi, 0xee);
#endif
}

#if defined(__AVX512BW__)
// Two neighbouring rows of bf16 as pairs (first, second) of their even and of their odd columns: what the second operand of
// an AMX product takes, in an order that `pair` undoes.
struct RowPairs {
  vb even, odd;
};
K3_INLINE RowPairs interleave(vb first, vb second) {
  constexpr __mmask32 kUpper = 0xaaaaaaaa;
  return {_mm512_mask_mov_epi16(first, kUpper, _mm512_slli_epi32(second, 16)),
          _mm512_mask_mov_epi16(_mm512_srli_epi32(first, 16), kUpper, second)};
}
#endif

K3_INLINE vf exp2(vf x) { return exp(x * set1(0.693147181f)); }

K3_INLINE void prefetch_lines(const void* p, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += kCacheLine) __builtin_prefetch((const char*)p + i, 0, 3);
}

}  // namespace k3
