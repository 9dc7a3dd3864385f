// MXFP4 weights as bf16 tiles: E2M1 codes, two per byte with the even element in the low nibble, one UE8M0 scale byte
// per 32 elements along K (OCP Microscaling Formats v1.0). Within fp32's range every product of a code and a scale is a
// bf16 number, so nothing is rounded here; a scale of 255 makes its 32 elements NaN.
#pragma once

#include "common/gemm.h"

namespace k3::gemm {

constexpr int kScaleBlock = 32;

// 2^(scale - 127)
K3_INLINE float ue8m0(uint8_t scale) {
  const uint32_t bits = scale == 255 ? 0x7fc00000u : scale == 0 ? 0x00400000u : uint32_t(scale) << 23;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

// Expands kLanes bytes of codes, times scale, to kPairs bf16 elements.
K3_INLINE void expand_codes(const uint8_t* codes, vf scale, bf16* out) {
#if defined(__AVX512F__)
  const vf table = _mm512_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f,  //
                                  -0.f, -.5f, -1.f, -1.5f, -2.f, -3.f, -4.f, -6.f);
  const __m512i byte = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes));
  const vf even = _mm512_permutexvar_ps(byte, table) * scale;  // reads the low four bits of each index
  const vf odd = _mm512_permutexvar_ps(_mm512_srli_epi32(byte, 4), table) * scale;
  const __m512i high = _mm512_and_si512(_mm512_castps_si512(odd), _mm512_set1_epi32(int(0xffff0000u)));
  _mm512_storeu_si512(out, _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), high));
#else
  const vf table = _mm256_setr_ps(0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f);
  const __m256i byte = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes));
  const auto value = [&](__m256i code) {  // the permutation reads the low three bits; the fourth is the sign
    const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(code, 3), 31);
    return _mm256_xor_ps(_mm256_permutevar8x32_ps(table, code), _mm256_castsi256_ps(sign)) * scale;
  };
  const vf even = value(byte), odd = value(_mm256_srli_epi32(byte, 4));
  const __m256i high = _mm256_and_si256(_mm256_castps_si256(odd), _mm256_set1_epi32(int(0xffff0000u)));
  _mm256_storeu_si256((__m256i*)out, _mm256_or_si256(_mm256_srli_epi32(_mm256_castps_si256(even), 16), high));
#endif
}

// Expands 16 rows of k elements from `row` on.
K3_INLINE void expand_tile(const uint8_t* packed, const uint8_t* scales, int64_t row, int64_t k, bf16* tile) {
  for (int i = 0; i < kTile; ++i) {
    const uint8_t* codes = packed + (row + i) * (k / 2);
    const uint8_t* scale = scales + (row + i) * (k / kScaleBlock);
    for (int64_t j = 0; j < k; j += kPairs)
      expand_codes(codes + j / 2, set1(ue8m0(scale[j / kScaleBlock])), tile + i * k + j);
  }
}

// Row-major MXFP4 weights; with `width` != 0 gate rows first, then `width` further down the up rows, as in `GateUp`.
// Tiles are expanded into `tiles`, room for kMaxInFlight of them, which the worker owns.
struct Mxfp4 {
  const uint8_t* packed;
  const uint8_t* scales;
  int64_t ld, width;
  bf16* tiles;

  K3_INLINE const bf16* tile(int64_t t, int slot) const {
    const int64_t row = width ? t / 2 * kTile + t % 2 * width : t * kTile;
    bf16* to = tiles + slot * kTile * ld;
    expand_tile(packed, scales, row, ld, to);
    return to;
  }
  K3_INLINE const bf16* ahead(int64_t) const { return nullptr; }  // the next tile is not in memory as bf16
};

}  // namespace k3::gemm
