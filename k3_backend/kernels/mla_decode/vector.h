// MLA decode core in vector lanes: scores and values of a tile for a few queries. The bf16 elements of a row are split into
// even and odd fp32 lanes and never reordered; queries are split the same way once.
#pragma once

#include "mla_decode/tile.h"

namespace k3::mla {

struct VectorForm {
  static constexpr int kQueryRow = (ROW + kPairs - 1) / kPairs * kPairs;  // a split query, padded with zeros
  static constexpr int kRowsInFlight = 4;
  static constexpr int kAccumulators = kLanes == 16 ? 16 : 8;  // of 32 and 16 vector registers

  static int64_t padded_queries(int64_t queries) { return queries; }

  struct Workspace {
    float* queries;  // [queries][kQueryRow]
    Workspace(Arena& arena, int64_t count) : queries(arena.take<float>(count * kQueryRow)) {}
  };

  static void pack_queries(Workspace& w, const bf16* queries, int64_t count) {
    for (int64_t q = 0; q < count; ++q) {
      for (int d = 0; d < ROW; d += kPairs) {
        const vb x = load_pairs_n(queries + q * ROW + d, ROW - d < kPairs ? ROW - d : kPairs);
        store(w.queries + q * kQueryRow + d, even(x));
        store(w.queries + q * kQueryRow + d + kLanes, odd(x));
      }
    }
  }

  // s[q][r] = <query q, row r>
  static void scores(Workspace& w, const RowTile& tile, int64_t queries, float* s) {
    in_blocks(queries, [&]<int N>(int64_t q) {
      (q == 0 && tile.prefetch ? scores_of<N, true> : scores_of<N, false>)(w.queries + q * kQueryRow, tile, s + q * kMaxTile);
    });
  }

  // values[q] = keep[q] * values[q] + sum over rows of p[q][r] * row
  static void add_values(Workspace&, const RowTile& tile, int64_t queries, const float* p, const float* keep, float* values) {
    in_blocks(queries, [&]<int N>(int64_t q) {
      const auto add = q == 0 && tile.prefetch ? values_of<N, true> : values_of<N, false>;
      add(tile, tile.count, p + q * kMaxTile, keep + q, values + q * KL);
    });
  }

  // The same for one query and the first `count` rows only.
  static void add_values_of(const RowTile& tile, int64_t count, const float* p, float keep, float* values) {
    values_of<1, false>(tile, count, p, &keep, values);
  }

 private:
  // Calls fn<N>(q) for blocks of N = 4, 2, 1 queries that cover [0, count).
  template <typename F>
  static K3_INLINE void in_blocks(int64_t count, F&& fn) {
    int64_t q = 0;
    for (; q + 4 <= count; q += 4) fn.template operator()<4>(q);
    if (q + 2 <= count) fn.template operator()<2>(q), q += 2;
    if (q < count) fn.template operator()<1>(q);
  }

  template <int N, bool kAhead>
  static void scores_of(const float* queries, const RowTile& tile, float* s) {
    for (int64_t r = 0; r < tile.count; r += kRowsInFlight) {
      vf acc[N][kRowsInFlight];
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < kRowsInFlight; ++i) acc[n][i] = zero();
      const auto step = [&](int d, auto&& load_row) {
        vf q_even[N], q_odd[N];
        for (int n = 0; n < N; ++n) {
          q_even[n] = load(queries + n * kQueryRow + d);
          q_odd[n] = load(queries + n * kQueryRow + d + kLanes);
        }
        for (int i = 0; i < kRowsInFlight; ++i) {
          const vb x = load_row(tile.rows[r + i] + d);
          if (kAhead && d < kLatePrefetch && d % kLine == 0) __builtin_prefetch(tile.ahead[r + i] + d, 0, 2);
          const vf x_even = even(x), x_odd = odd(x);
          for (int n = 0; n < N; ++n) acc[n][i] = fma(q_odd[n], x_odd, fma(q_even[n], x_even, acc[n][i]));
        }
      };
      for (int d = 0; d + kPairs <= ROW; d += kPairs) step(d, [](const bf16* p) { return load_pairs(p); });
      if constexpr (ROW % kPairs) step(ROW / kPairs * kPairs, [](const bf16* p) { return load_pairs_n(p, ROW % kPairs); });
      for (int n = 0; n < N; ++n) store_n(s + n * kMaxTile + r, sum_each(acc[n]), kRowsInFlight);
    }
  }

  template <int N, bool kAhead>
  static void values_of(const RowTile& tile, int64_t count, const float* p, const float* keep, float* values) {
    constexpr int kPart = kAccumulators / (2 * N) < KL / kPairs ? kAccumulators / (2 * N) : KL / kPairs;
    static_assert(KL / kPairs % kPart == 0, "columns go in equal parts");
    for (int d = 0; d < KL; d += kPart * kPairs) {
      vf acc[N][2 * kPart];
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 2 * kPart; ++i) acc[n][i] = set1(keep[n]) * load(values + n * KL + d + i * kLanes);
      for (int64_t r = 0; r < count; ++r) {
        for (int i = 0; i < kPart; ++i) {
          const int column = d + i * kPairs;
          if (kAhead && column % (2 * kLine) == 0) __builtin_prefetch(tile.ahead[r] + kLatePrefetch + column / 2, 0, 2);
          const vb x = load_pairs(tile.rows[r] + column);
          const vf x_even = even(x), x_odd = odd(x);
          for (int n = 0; n < N; ++n) {
            const vf weight = set1(p[n * kMaxTile + r]);
            acc[n][2 * i] = fma(weight, x_even, acc[n][2 * i]);
            acc[n][2 * i + 1] = fma(weight, x_odd, acc[n][2 * i + 1]);
          }
        }
      }
      for (int n = 0; n < N; ++n)
        for (int i = 0; i < 2 * kPart; ++i) store(values + n * KL + d + i * kLanes, acc[n][i]);
    }
  }
};

}  // namespace k3::mla
