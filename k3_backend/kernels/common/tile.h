// What the two forms of a small matrix product share: tile and panel sizes, the split of work over a team of workers,
// the matrix unit's configuration, and the rows of W that one step multiplies. No arithmetic.
#pragma once

#include "common/simd.h"
#include "k3_cpu.h"

namespace k3::gemm {

constexpr int kTile = 16;        // rows of W, and tokens, of one tile
constexpr int kMaxTokens = 64;   // tokens that one pass over the weights serves: kernels take so many at a time
constexpr int kMaxInFlight = 4;  // tiles of W, and tiles of W times panels, accumulated together

// One finished tile. Rows: v[token][row of W]. Panels: v[row of W][token].
struct alignas(64) Tile {
  float v[kTile * kTile];
};

constexpr int panels_of(int tokens) { return (tokens + kTile - 1) / kTile; }
// Tokens of panel p when there are `tokens` in all.
constexpr int in_panel(int tokens, int p) { return tokens - p * kTile < kTile ? tokens - p * kTile : kTile; }
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

// Makes AMX usable in a scope of one worker, for form Panels; nothing on other levels. Releasing at the end leaves no
// tile state behind for other code on the thread and keeps context switches cheap; both together cost about 0.13 us.
template <class Form>
class MatrixUnit {
 public:
#if defined(__AMX_BF16__)
  MatrixUnit() {
    if (!Form::kPacked) return;
    struct alignas(64) {
      uint8_t palette = 1, start_row = 0, reserved[14] = {};
      uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
    } config;
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    _tile_loadconfig(&config);
  }
  ~MatrixUnit() {
    if (Form::kPacked) _tile_release();
  }
#else
  MatrixUnit() {}
  ~MatrixUnit() {}
#endif
  MatrixUnit(const MatrixUnit&) = delete;
  MatrixUnit& operator=(const MatrixUnit&) = delete;
};

// Tiles of W that are multiplied together, and those to request from memory meanwhile (null: none). Weights come from
// the last-level cache or DRAM once per step, in pieces too short for the hardware's stream detection.
struct Group {
  const bf16* rows[kMaxInFlight];
  const bf16* next[kMaxInFlight];
  int count;
  int64_t ld;

  // Requests the lines with elements [i, i + 32) of all 16 rows of the next tiles.
  K3_INLINE void prefetch(int i) const {
    if (!next[0]) return;
    for (int r = 0; r < count; ++r)
      for (int row = 0; row < kTile; ++row) __builtin_prefetch(next[r] + row * ld + i);
  }
};

}  // namespace k3::gemm
