// MLA decode core on AMX tiles: 16 queries cost what one costs. Scores are cache rows, read in place, times packed queries.
// Values are weights times pairs of rows: two neighbouring rows are interleaved per even and per odd column, which keeps the
// accumulators in the order of the vector form. Weights go in as bf16 high and low parts, so that they keep 16 bits.
#pragma once

#include "common/gemm.h"
#include "mla_decode/tile.h"

#if defined(__AMX_BF16__)

namespace k3::mla {

struct MatrixForm {
  static constexpr bool kFits = ROW % 64 == 0 && KL % 64 == 0;
  static constexpr int64_t kWorthwhile = 8;  // queries; measured, fewer are faster in vector lanes
  static constexpr int kTile = gemm::kTile;
  static constexpr long kTileRow = 64;  // bytes

  // Queries of one tile; a request with more has several tiles, and its accumulators are padded to whole ones.
  static int64_t padded_queries(int64_t queries) { return queries <= kTile ? queries : (queries + kTile - 1) / kTile * kTile; }
  static int64_t blocks(int64_t queries) { return (queries + kTile - 1) / kTile; }

  struct Workspace {
    bf16* queries;         // [block][ROW / 2][16][2]
    bf16* high;            // [queries, padded][kMaxTile]
    bf16* low;
    bf16* rows;            // two groups of 16 rows that do not lie together in the cache
    gemm::Tile* products;  // four
    bf16* pairs;           // [step][4][16][32]: interleaved rows of 64 columns
    Workspace(Arena& arena, int64_t count)
        : queries(arena.take<bf16>(blocks(count) * kTile * ROW)),
          high(arena.take<bf16>(padded_queries(count) * kMaxTile)),
          low(arena.take<bf16>(padded_queries(count) * kMaxTile)),
          rows(arena.take<bf16>(2 * kTile * ROW)),
          products(arena.take<gemm::Tile>(4)),
          pairs(arena.take<bf16>(kMaxTile / kRowsOfStep * 4 * kTile * 32)) {}
  };

  static void pack_queries(Workspace& w, const bf16* queries, int64_t count) {
    for (int64_t b = 0; b < blocks(count); ++b) {
      const int valid = int(count - b * kTile < kTile ? count - b * kTile : kTile);
      gemm::Panels::gather(w.queries + b * kTile * ROW, ROW, valid, [&](int q) { return queries + (b * kTile + q) * ROW; });
    }
  }

  // s[q][r] = <query q, row r>. Registers: 0..3 products (two groups of rows, each in two halves of K that do not wait for
  // each other), 4 and 5 rows, 6 and 7 queries.
  static void scores(Workspace& w, const RowTile& tile, int64_t queries, float* s) {
    const Configuration configuration(kTile);
    constexpr long kRowBytes = ROW * sizeof(bf16);
    for (int64_t r = 0; r < tile.count; r += 2 * kTile) {
      const bf16* group[2] = {together(tile.rows + r, w.rows), together(tile.rows + r + kTile, w.rows + kTile * ROW)};
      __atomic_signal_fence(__ATOMIC_SEQ_CST);  // the tile intrinsics do not tell the compiler which memory they use
      for (int64_t b = 0; b < blocks(queries); ++b) {
        const bf16* panel = w.queries + b * kTile * ROW;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int k = 0; k < ROW; k += 64) {
          if (tile.prefetch && b == 0 && k < kLatePrefetch) {
            for (int i = 0; i < 2 * kTile; ++i) {
              __builtin_prefetch(tile.ahead[r + i] + k, 0, 2);
              __builtin_prefetch(tile.ahead[r + i] + k + 32, 0, 2);
            }
          }
          _tile_loadd(6, panel + k * kTile, kTileRow);
          _tile_loadd(4, group[0] + k, kRowBytes);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(5, group[1] + k, kRowBytes);
          _tile_dpbf16ps(1, 5, 6);
          _tile_loadd(7, panel + (k + 32) * kTile, kTileRow);
          _tile_loadd(4, group[0] + k + 32, kRowBytes);
          _tile_dpbf16ps(2, 4, 7);
          _tile_loadd(5, group[1] + k + 32, kRowBytes);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, w.products[0].v, kTileRow);
        _tile_stored(1, w.products[1].v, kTileRow);
        _tile_stored(2, w.products[2].v, kTileRow);
        _tile_stored(3, w.products[3].v, kTileRow);
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        const int valid = int(queries - b * kTile < kTile ? queries - b * kTile : kTile);
        for (int g = 0; g < 2; ++g) {
          gemm::Tile& sum = w.products[g];
          for (int i = 0; i < kTile * kTile; i += kLanes) store(sum.v + i, load(sum.v + i) + load(w.products[2 + g].v + i));
          gemm::Panels::store_f32(sum, valid, [&](int q) { return s + (b * kTile + q) * kMaxTile + r + g * kTile; });
        }
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
      }
    }
  }

  // values[q] = keep[q] * values[q] + sum over rows of p[q][r] * row. Registers: 0..3 values of 64 columns, 4 and 5 high and
  // low weights, 6 and 7 pairs of rows.
  static void add_values(Workspace& w, const RowTile& tile, int64_t queries, const float* p, const float* keep, float* values) {
    split_weights(w, tile.count, queries, p);
    for (int64_t q = 0; q < queries; ++q) {
      if (keep[q] == 1.0f) continue;
      for (int d = 0; d < KL; d += kLanes) store(values + q * KL + d, load(values + q * KL + d) * set1(keep[q]));
    }
    const Configuration configuration(int(queries < kTile ? queries : kTile));
    const int64_t steps = (tile.count + kRowsOfStep - 1) / kRowsOfStep;
    constexpr long kValuesRow = KL * sizeof(float), kWeightsRow = kMaxTile * sizeof(bf16);
    for (int d = 0; d < KL; d += 64) {
      for (int64_t step = 0; step < steps; ++step) interleave(w, tile, step, d);
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      for (int64_t b = 0; b < blocks(queries); ++b) {
        float* out = values + b * kTile * KL + d;
        _tile_loadd(0, out, kValuesRow);
        _tile_loadd(1, out + 16, kValuesRow);
        _tile_loadd(2, out + 32, kValuesRow);
        _tile_loadd(3, out + 48, kValuesRow);
        for (int64_t step = 0; step < steps; ++step) {
          const int64_t weights = b * kTile * kMaxTile + step * kRowsOfStep;
          const bf16* pairs = w.pairs + step * 4 * kTile * 32;
          _tile_loadd(4, w.high + weights, kWeightsRow);
          _tile_loadd(5, w.low + weights, kWeightsRow);
          _tile_loadd(6, pairs, kTileRow);
          _tile_dpbf16ps(0, 4, 6);
          _tile_loadd(7, pairs + kTile * 32, kTileRow);
          _tile_dpbf16ps(1, 4, 7);
          _tile_dpbf16ps(0, 5, 6);
          _tile_loadd(6, pairs + 2 * kTile * 32, kTileRow);
          _tile_dpbf16ps(2, 4, 6);
          _tile_dpbf16ps(1, 5, 7);
          _tile_loadd(7, pairs + 3 * kTile * 32, kTileRow);
          _tile_dpbf16ps(3, 4, 7);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, out, kValuesRow);
        _tile_stored(1, out + 16, kValuesRow);
        _tile_stored(2, out + 32, kValuesRow);
        _tile_stored(3, out + 48, kValuesRow);
      }
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
    }
  }

 private:
  // Tile shapes for a scope: registers 0..5 have `rows` rows, 6 and 7 have 16, all of 64 bytes.
  class Configuration {
   public:
    explicit Configuration(int rows) {
      struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
        uint8_t rows[16] = {};
      } config;
      for (int i = 0; i < 8; ++i) config.rows[i] = uint8_t(i < 6 ? rows : kTile);
      __atomic_signal_fence(__ATOMIC_SEQ_CST);
      _tile_loadconfig(&config);
    }
    ~Configuration() { _tile_release(); }
    Configuration(const Configuration&) = delete;
    Configuration& operator=(const Configuration&) = delete;
  };

  // 16 rows one after the other: where they lie, or copied.
  static const bf16* together(const bf16* const* rows, bf16* copy) {
    bool contiguous = true;
    for (int i = 1; i < kTile; ++i) contiguous = contiguous && rows[i] == rows[0] + i * ROW;
    if (contiguous) return rows[0];
    for (int i = 0; i < kTile; ++i) memcpy(copy + i * ROW, rows[i], ROW * sizeof(bf16));
    return copy;
  }

  static void split_weights(Workspace& w, int64_t count, int64_t queries, const float* p) {
    const int64_t rows = (count + kRowsOfStep - 1) / kRowsOfStep * kRowsOfStep;
    for (int64_t q = 0; q < padded_queries(queries); ++q) {
      for (int64_t r = 0; r < rows; r += kLanes) {
        const vf weight = q < queries && r < count ? load(p + q * kMaxTile + r) : zero();  // beyond `count` p is 0 already
        const vf high = round_bf16(weight);
        store(w.high + q * kMaxTile + r, high);
        store(w.low + q * kMaxTile + r, weight - high);
      }
    }
  }

  // Columns [d, d + 64) of 32 rows as four second operands: even and odd columns of [d, d + 32), then of the next 32.
  static void interleave(Workspace& w, const RowTile& tile, int64_t step, int d) {
    bf16* to = w.pairs + step * 4 * kTile * 32;
    for (int i = 0; i < kTile; ++i) {
      const int64_t r = step * kRowsOfStep + 2 * i;
      if (tile.prefetch) {
        __builtin_prefetch(tile.ahead[r] + kLatePrefetch + d / 2, 0, 2);
        __builtin_prefetch(tile.ahead[r + 1] + kLatePrefetch + d / 2, 0, 2);
      }
      for (int half = 0; half < 2; ++half) {
        const RowPairs x = k3::interleave(load_pairs(tile.rows[r] + d + half * 32), load_pairs(tile.rows[r + 1] + d + half * 32));
        _mm512_storeu_si512(to + (half * 2) * kTile * 32 + i * 32, x.even);
        _mm512_storeu_si512(to + (half * 2 + 1) * kTile * 32 + i * 32, x.odd);
      }
    }
  }
};

}  // namespace k3::mla

#endif
