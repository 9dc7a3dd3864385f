// Small matrix products C = X W^T of bf16 with fp32 accumulation, for W row-major as stored and a few tokens X: the
// shared core of every kernel that multiplies activations by weights. Works in tiles of 16 rows of W by 16 tokens and
// hands each finished fp32 tile to the caller's `emit`, which rounds, fuses and stores. Owns no memory and no threads.
//
// Two forms, chosen by a schedule because the best one depends on the number of tokens: Rows (form_rows.h) and Panels
// (form_panels.h). K is a multiple of 32. Every output is summed in an order fixed by form and level alone, never by
// workers or blocking, so results repeat bit for bit over any number of workers.
#pragma once

#include "common/form_panels.h"
#include "common/form_rows.h"

namespace k3::gemm {

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

// Multiplies tiles [begin, end) of W with all tokens. `emit(t, p, c, valid)` gets, per panel p with `valid` <= 16
// tokens, the finished tiles c[0..kUnit) of t, t + 1, ...; the range is a multiple of kUnit (2: a tile and its
// partner).
template <int kUnit, class Form, class W, class Emit>
K3_INLINE void for_tiles(const W& weights, Range tiles, Walk walk, int k, const bf16* acts, int tokens, Emit&& emit) {
  const int panels = panels_of(tokens);
  Tile c[kMaxInFlight];
  Group group;
  group.ld = weights.ld;
  for (int64_t t = tiles.begin; t < tiles.end; t += group.count) {
    group.count = walk.in_flight > kUnit ? walk.in_flight : kUnit;
    while (group.count > tiles.end - t) group.count /= 2;
    const bool ahead = walk.prefetch && t + 2 * group.count <= tiles.end;
    for (int r = 0; r < group.count; ++r) {
      group.rows[r] = weights.tile(t + r, r);
      group.next[r] = ahead ? weights.ahead(t + group.count + r) : nullptr;
    }
    for (int p = 0, step; p < panels; p += step) {
      step = kMaxInFlight / group.count;
      while (step > panels - p) step /= 2;
      Form::multiply(group, step, k, Form::panel(acts, p, k), tokens - p * kTile, c);
      group.next[0] = nullptr;
      for (int i = 0; i < step; ++i)
        for (int r = 0; r < group.count; r += kUnit)
          emit(t + r, p + i, &c[i * group.count + r], in_panel(tokens, p + i));
    }
  }
}

// Elements [n0, n0 + 16) of the activations `panel_acts` (over k) = bf16(f(bf16(gate), bf16(up))).
template <class Form>
K3_INLINE void store_situ(const Tile& gate, const Tile& up, const Situ& f, bf16* panel_acts, int64_t k, int64_t n0,
                          int valid) {
  Tile h{};
  Form::combine(h, gate, up, valid, [&](vf g, vf u) { return f(round_bf16(g), round_bf16(u)); });
  Form::store_acts(h, panel_acts, k, n0, valid);
}

}  // namespace k3::gemm
