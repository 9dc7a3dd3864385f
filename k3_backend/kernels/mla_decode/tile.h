// What both forms of the MLA decode core work on: a tile of cache rows, and the memory of one worker.
#pragma once

#include "common/attention.h"
#include "k3_cpu.h"

namespace k3::mla {

constexpr int H = K3_HEADS, ROW = K3_MLA_ROW, KL = K3_KV_LORA;
constexpr int kMaxTile = 64;
constexpr int kRowsOfStep = 32;                  // row lists are readable up to a multiple of this
constexpr int kLine = kCacheLine / sizeof(bf16);
// A row's elements from here on are prefetched while values are added, those before it while scores are computed, so that
// the memory is asked evenly while both compute.
constexpr int kLatePrefetch = ROW - KL / 2;
static_assert(KL % kPairs == 0, "the loops over values have no tails");

alignas(64) inline constexpr bf16 kZeroRow[ROW] = {};

// `count` cache rows in order, and the rows to request from memory meanwhile. Both lists go on with zero rows.
struct RowTile {
  const bf16* rows[kMaxTile];
  const bf16* ahead[kMaxTile];
  int64_t count;
  bool prefetch;

  void pad() {
    for (int64_t r = count; r % kRowsOfStep; ++r) rows[r] = ahead[r] = kZeroRow;
  }
};

// Sums of one request's queries over some rows: unnormalised values, running maximum and sum of the weights.
struct Accumulator {
  float* values;  // [queries][KL], each kPairs columns as kLanes even and kLanes odd ones
  float* max;     // [queries]
  float* sum;     // [queries]
};

// Hands out consecutive 64-byte aligned pieces of a buffer; with a null buffer it only counts.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename T>
  T* take(int64_t count) {
    const int64_t at = bytes_;
    bytes_ += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    return base_ ? reinterpret_cast<T*>(base_ + at) : nullptr;
  }
  Accumulator accumulator(int64_t queries) { return {take<float>(queries * KL), take<float>(queries), take<float>(queries)}; }
  int64_t bytes() const { return bytes_; }

 private:
  char* base_;
  int64_t bytes_ = 0;
};

}  // namespace k3::mla
