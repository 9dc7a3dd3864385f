// Vectors of fp32 lanes and their bf16 loads and stores, for every CPU kernel. One source, two levels: AVX-512 (16
// lanes, with the bf16 instructions where the level has them) and AVX2 with FMA (8 lanes), chosen by predefined macros.
//
// Holds elementwise arithmetic and reductions only: no loops over memory, no threads, no geometry. `vf` is a native
// vector type, so + - * / work on it. Lane order of a `sum` is fixed, so results repeat bit for bit at one level.
//
// Rounding to bf16 is to nearest even, NaN stays NaN (quiet). The AVX-512 bf16 instructions read and write denormals as
// zero; the emulation keeps them. Largest error against exact maths where the result is a normal number, in units in
// the last place of fp32, at both levels: exp 1.5, sigmoid 3, tanh 3 (tests/k3_backend/test_kernels_common.py
// measures them).
#pragma once

#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#define K3_INLINE inline __attribute__((always_inline))
#define K3_NOINLINE __attribute__((noinline))

namespace k3 {

using bf16 = uint16_t;

K3_INLINE float to_f32(bf16 x) {
  const uint32_t bits = uint32_t(x) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

// --- The two levels --------------------------------------------------------------------------------------------------
// vf: fp32 lanes. vb: bf16 pairs, twice as many elements as vf has lanes, as stored in memory.
#if defined(__AVX512F__)

using vf = __m512;
using vb = __m512i;
constexpr int kLanes = 16;

K3_INLINE __mmask16 first_lanes(int n) { return __mmask16((1u << n) - 1); }

K3_INLINE vf zero() { return _mm512_setzero_ps(); }
K3_INLINE vf set1(float x) { return _mm512_set1_ps(x); }
K3_INLINE vf load(const float* p) { return _mm512_loadu_ps(p); }
K3_INLINE vf load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
K3_INLINE void store(float* p, vf x) { _mm512_storeu_ps(p, x); }
K3_INLINE void store_n(float* p, vf x, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), x); }
K3_INLINE vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
K3_INLINE vf min(vf a, vf b) { return _mm512_min_ps(a, b); }  // b if either is NaN
K3_INLINE vf max(vf a, vf b) { return _mm512_max_ps(a, b); }  // b if either is NaN
K3_INLINE vf abs(vf x) { return _mm512_abs_ps(x); }
K3_INLINE vf sqrt(vf x) { return _mm512_sqrt_ps(x); }
K3_INLINE vf copy_sign(vf magnitude, vf sign) {
  const __m512i s = _mm512_and_si512(_mm512_castps_si512(sign), _mm512_set1_epi32(int(0x80000000u)));
  return _mm512_castsi512_ps(_mm512_or_si512(_mm512_castps_si512(magnitude), s));
}
K3_INLINE vf round_int(vf x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
K3_INLINE vf scale_by_pow2(vf x, vf n) { return _mm512_scalef_ps(x, n); }  // x * 2^n for integral n
K3_INLINE float first(vf x) { return _mm512_cvtss_f32(x); }
K3_INLINE float sum(vf x) { return _mm512_reduce_add_ps(x); }
K3_INLINE float max(vf x) { return _mm512_reduce_max_ps(x); }

K3_INLINE vf widen(__m256i h) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16)); }
K3_INLINE __m256i narrow(vf x) {
#if defined(__AVX512BF16__)
  const __m256bh h = _mm512_cvtneps_pbh(x);
  __m256i bits;
  memcpy(&bits, &h, sizeof bits);
  return bits;
#else
  const __m512i u = _mm512_castps_si512(x);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_add_epi32(u, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  r = _mm512_mask_or_epi32(r, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), u, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(r, 16));
#endif
}
K3_INLINE vf load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
K3_INLINE vf load_n(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
K3_INLINE void store(bf16* p, vf x) { _mm256_storeu_si256((__m256i*)p, narrow(x)); }
K3_INLINE void store_n(bf16* p, vf x, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(x)); }

K3_INLINE vb load_pairs(const bf16* p) { return _mm512_loadu_si512(p); }
K3_INLINE vb load_pairs_n(const bf16* p, int n) { return _mm512_maskz_loadu_epi16(__mmask32((1ull << n) - 1), p); }
K3_INLINE vb broadcast_pair(const bf16* p) {
  int pair;
  memcpy(&pair, p, 4);
  return _mm512_set1_epi32(pair);
}
K3_INLINE vf even(vb x) { return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16)); }
K3_INLINE vf odd(vb x) { return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32(int(0xffff0000u)))); }
// bf16(a) in the low and bf16(b) in the high half of each lane.
K3_INLINE vb pair(vf a, vf b) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(narrow(a)), _mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow(b)), 16));
}

#elif defined(__AVX2__) && defined(__FMA__)

using vf = __m256;
using vb = __m256i;
constexpr int kLanes = 8;

K3_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

K3_INLINE vf zero() { return _mm256_setzero_ps(); }
K3_INLINE vf set1(float x) { return _mm256_set1_ps(x); }
K3_INLINE vf load(const float* p) { return _mm256_loadu_ps(p); }
K3_INLINE vf load_n(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
K3_INLINE void store(float* p, vf x) { _mm256_storeu_ps(p, x); }
K3_INLINE void store_n(float* p, vf x, int n) { _mm256_maskstore_ps(p, first_lanes(n), x); }
K3_INLINE vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
K3_INLINE vf min(vf a, vf b) { return _mm256_min_ps(a, b); }  // b if either is NaN
K3_INLINE vf max(vf a, vf b) { return _mm256_max_ps(a, b); }  // b if either is NaN
K3_INLINE vf abs(vf x) { return _mm256_andnot_ps(set1(-0.0f), x); }
K3_INLINE vf sqrt(vf x) { return _mm256_sqrt_ps(x); }
K3_INLINE vf copy_sign(vf magnitude, vf sign) { return _mm256_or_ps(magnitude, _mm256_and_ps(set1(-0.0f), sign)); }
K3_INLINE vf round_int(vf x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
K3_INLINE vf pow2(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
// x * 2^n for integral n in [-252, 254]; two factors, because one alone can leave fp32's exponent range.
K3_INLINE vf scale_by_pow2(vf x, vf n) {
  const __m256i i = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(i, 1);
  return x * pow2(half) * pow2(_mm256_sub_epi32(i, half));
}
K3_INLINE float first(vf x) { return _mm256_cvtss_f32(x); }
K3_INLINE float sum(vf x) {
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_movehdup_ps(q)));
}
K3_INLINE float max(vf x) {
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_movehdup_ps(q)));
}

K3_INLINE vf widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
K3_INLINE __m128i narrow(vf x) {
  const __m256i u = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_add_epi32(u, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(u, _mm256_set1_epi32(0x400000));
  r = _mm256_blendv_epi8(r, quiet, _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  r = _mm256_srli_epi32(r, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
K3_INLINE vf load(const bf16* p) { return widen(_mm_loadu_si128((const __m128i*)p)); }
K3_INLINE vf load_n(const bf16* p, int n) {
  __m128i h = _mm_setzero_si128();
  memcpy(&h, p, size_t(n) * 2);
  return widen(h);
}
K3_INLINE void store(bf16* p, vf x) { _mm_storeu_si128((__m128i*)p, narrow(x)); }
K3_INLINE void store_n(bf16* p, vf x, int n) {
  const __m128i h = narrow(x);
  memcpy(p, &h, size_t(n) * 2);
}

K3_INLINE vb load_pairs(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
K3_INLINE vb load_pairs_n(const bf16* p, int n) {
  __m256i h = _mm256_setzero_si256();
  memcpy(&h, p, size_t(n) * 2);
  return h;
}
K3_INLINE vb broadcast_pair(const bf16* p) {
  int pair;
  memcpy(&pair, p, 4);
  return _mm256_set1_epi32(pair);
}
K3_INLINE vf even(vb x) { return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16)); }
K3_INLINE vf odd(vb x) { return _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(int(0xffff0000u)))); }
// bf16(a) in the low and bf16(b) in the high half of each lane.
K3_INLINE vb pair(vf a, vf b) {
  return _mm256_or_si256(_mm256_cvtepu16_epi32(narrow(a)), _mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow(b)), 16));
}

#else
#error "CPU kernels need AVX2 and FMA (x86-64-v3) or AVX-512"
#endif

constexpr int kPairs = 2 * kLanes;  // bf16 elements of a vb

// --- Written once for both levels ------------------------------------------------------------------------------------

K3_INLINE vf round_bf16(vf x) { return widen(narrow(x)); }
K3_INLINE bf16 to_bf16(float x) {
  bf16 out;
  store_n(&out, set1(x), 1);
  return out;
}

// acc + a * b, each lane taking one pair of neighbouring elements; fp32 accumulation.
K3_INLINE vf dot_pairs(vf acc, vb a, vb b) {
#if defined(__AVX512BF16__)
  __m512bh x, y;
  memcpy(&x, &a, sizeof x);
  memcpy(&y, &b, sizeof y);
  return _mm512_dpbf16_ps(acc, x, y);
#else
  return fma(odd(a), odd(b), fma(even(a), even(b), acc));
#endif
}

// Range reduction x = n ln2 + r with |r| <= ln2 / 2 and e^r - 1 = r (1 + r / 2 + ...). The coefficients minimise the
// largest relative error of that polynomial on the range (1.1e-8, computed by iteratively reweighted least squares).
struct ExpParts {
  vf n;
  vf expm1_r;
};

K3_INLINE ExpParts exp_parts(vf x) {
  const vf n = round_int(x * set1(1.442695041f));
  vf r = fma(n, set1(-0.693359375f), x);  // ln2 in two parts, the first exact in few bits
  r = fma(n, set1(2.12194440e-4f), r);
  vf p = fma(set1(1.3888872245e-3f), r, set1(8.3691043645e-3f));
  p = fma(p, r, set1(4.1667137160e-2f));
  p = fma(p, r, set1(1.6666505899e-1f));
  p = fma(p, r, set1(4.9999998119e-1f));
  return {n, fma(r * r, p, r)};
}

// e^x: 0 below -104, infinity above 88.73, NaN for NaN.
K3_INLINE vf exp(vf x) {
  const ExpParts e = exp_parts(min(set1(90.0f), max(set1(-110.0f), x)));
  return scale_by_pow2(e.expm1_r + set1(1.0f), e.n);
}

// e^x - 1 without cancellation near 0, for x <= 88; NaN for NaN.
K3_INLINE vf expm1_upto88(vf x) {
  const ExpParts e = exp_parts(max(set1(-110.0f), x));
  const vf scale = scale_by_pow2(set1(1.0f), e.n);
  return fma(e.expm1_r, scale, scale - set1(1.0f));
}

// 1 / (1 + e^-x): 0 below about -88.7, NaN for NaN.
K3_INLINE vf sigmoid(vf x) { return set1(1.0f) / (set1(1.0f) + exp(zero() - x)); }
K3_INLINE vf silu(vf x) { return x / (set1(1.0f) + exp(zero() - x)); }

// (e^2|x| - 1) / (e^2|x| + 1), relative accuracy also near 0; 1 to the last bit from |x| = 10 on.
K3_INLINE vf tanh(vf x) {
  const vf t = expm1_upto88(min(set1(20.0f), abs(x + x)));
  return copy_sign(t / (t + set1(2.0f)), x);
}

// SiTU: f(g, u) = beta tanh(g / beta) sigmoid(g) lin tanh(u / lin), or without the last bound if linear_beta <= 0. The
// two tanh share one division.
struct Situ {
  float beta, linear_beta;

  K3_INLINE vf operator()(vf g, vf u) const {
    const vf t = expm1_upto88(min(set1(20.0f), abs(g) * set1(2.0f / beta)));
    const vf gated = sigmoid(g) * copy_sign(t * set1(beta), g);
    if (linear_beta <= 0.0f) return gated * u / (t + set1(2.0f));
    const vf v = expm1_upto88(min(set1(20.0f), abs(u) * set1(2.0f / linear_beta)));
    return gated * copy_sign(v * set1(linear_beta), u) / ((t + set1(2.0f)) * (v + set1(2.0f)));
  }
};

}  // namespace k3
