// MLA decode core on CPU: softmax(<query, row> * scale) over paged latent rows, value = row[:kv_lora], base-2 LSE.
//
// All T*H queries of a request share one pass over its cache rows, read in place through the block table. Rows come in
// tiles that stay in L1: scores of the tile, online softmax, then the values. The bf16 elements of a row are split into
// even and odd fp32 lanes and never reordered; queries are split the same way once, and `pair` joins the two at the end.
// A request may be cut into chunks of `split` rows that different workers take; their partial results are merged in
// ascending order. Bits depend on the tunables, not on the number of workers or on other requests.
#include "k3_cpu.h"

#include <math.h>

#include "common/attention.h"

namespace {

using namespace k3;

constexpr int H = K3_HEADS, ROW = K3_MLA_ROW, KL = K3_KV_LORA;
constexpr int kMaxTile = 64;
constexpr int kRowsInFlight = 4;
constexpr int kLine = kCacheLine / sizeof(bf16);
constexpr int kAccumulators = kLanes == 16 ? 16 : 8;  // of 32 and 16 vector registers
constexpr int kQueryRow = (ROW + kPairs - 1) / kPairs * kPairs;  // a split query, padded with zeros
static_assert(KL % kPairs == 0, "the loops over values have no tails");

struct Call {
  const bf16* query;
  const bf16* cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  bf16* out;
  float* lse;
  float scale;
  int64_t B, T, Q;  // Q = T * H queries per request
  int64_t page, max_pages;
  int64_t dcp_rank, dcp_size, interleave;
  int64_t tile, prefetch;
};

// Positions below `end` that live on this shard; they are its local positions 0 .. count - 1.
int64_t local_count(const Call& c, int64_t end) {
  if (end <= 0) return 0;
  const int64_t stride = c.interleave * c.dcp_size, rest = end % stride - c.dcp_rank * c.interleave;
  return end / stride * c.interleave + (rest < 0 ? 0 : rest > c.interleave ? c.interleave : rest);
}
int64_t visible(const Call& c, int64_t b, int64_t t) { return local_count(c, c.seq_lens[b] - c.T + t + 1); }
int64_t length(const Call& c, int64_t b) { return visible(c, b, c.T - 1); }

// Walks a request's cache rows in order through its block table.
class Cursor {
 public:
  Cursor(const Call& c, int64_t b, int64_t at)
      : c_(c), pages_(c.block_table + b * c.max_pages + at / c.page), in_page_(at % c.page) {}
  const bf16* next() {
    if (in_page_ == c_.page) ++pages_, in_page_ = 0;
    return c_.cache + (*pages_ * c_.page + in_page_++) * ROW;
  }

 private:
  const Call& c_;
  const int32_t* pages_;
  int64_t in_page_;
};

// A run of rows of one request, and where its result goes: unnormalised values, running maximum and sum of each query.
struct Chunk {
  int64_t b, begin, end;
};

struct Accumulator {
  float* values;  // [Q][KL], each kPairs columns as kLanes even and kLanes odd ones
  float* max;     // [Q]
  float* sum;     // [Q]
};

int64_t accumulator_floats(int64_t Q) { return (Q * (KL + 2) + 15) / 16 * 16; }
Accumulator accumulator(float* at, int64_t Q) { return {at, at + Q * KL, at + Q * (KL + 1)}; }

// Scores of N queries against `count` rows; both row lists are readable up to the next multiple of kRowsInFlight. Requests
// the front of the rows `ahead`, `add_values` their rest, so that the memory is asked evenly while both compute.
template <int N, bool kAhead>
void scores(const float* queries, const bf16* const* rows, const bf16* const* ahead, int64_t count, float* s) {
  for (int64_t r = 0; r < count; r += kRowsInFlight) {
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
        const vb x = load_row(rows[r + i] + d);
        if (kAhead && d < ROW - KL / 2 && d % kLine == 0) __builtin_prefetch(ahead[r + i] + d, 0, 2);
        const vf x_even = even(x), x_odd = odd(x);
        for (int n = 0; n < N; ++n) acc[n][i] = fma(q_odd[n], x_odd, fma(q_even[n], x_even, acc[n][i]));
      }
    };
    for (int d = 0; d + kPairs <= ROW; d += kPairs) step(d, [](const bf16* p) { return load_pairs(p); });
    if constexpr (ROW % kPairs) step(ROW / kPairs * kPairs, [](const bf16* p) { return load_pairs_n(p, ROW % kPairs); });
    for (int n = 0; n < N; ++n) store_n(s + n * kMaxTile + r, sum_each(acc[n]), kRowsInFlight);
  }
}

// Turns one query's scores of a tile into weights e^(s - max); returns the factor for everything accumulated before.
float weights(float* s, int64_t count, float* running_max, float* running_sum) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  for (int64_t i = count; i < padded; ++i) s[i] = -INFINITY;
  vf top = set1(*running_max);
  for (int64_t i = 0; i < padded; i += kLanes) top = k3::max(top, load(s + i));
  const float new_max = k3::max(top);
  vf total = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vf p = k3::exp(load(s + i) - set1(new_max));
    total = total + p;
    store(s + i, p);
  }
  const float keep = first(k3::exp(set1(*running_max - new_max)));
  *running_max = new_max;
  *running_sum = *running_sum * keep + k3::sum(total);
  return keep;
}

// values[n] = keep[n] * values[n] + sum over `count` rows of p[n][r] * row
template <int N, bool kAhead>
void add_values(const bf16* const* rows, const bf16* const* ahead, int64_t count, const float* p, const float* keep, float* values) {
  constexpr int kPart = kAccumulators / (2 * N) < KL / kPairs ? kAccumulators / (2 * N) : KL / kPairs;
  static_assert(KL / kPairs % kPart == 0, "columns go in equal parts");
  for (int d = 0; d < KL; d += kPart * kPairs) {
    vf acc[N][2 * kPart];
    for (int n = 0; n < N; ++n)
      for (int i = 0; i < 2 * kPart; ++i) acc[n][i] = set1(keep[n]) * load(values + n * KL + d + i * kLanes);
    for (int64_t r = 0; r < count; ++r) {
      for (int i = 0; i < kPart; ++i) {
        if (kAhead && (d + i * kPairs) % (2 * kLine) == 0) __builtin_prefetch(ahead[r] + ROW - KL / 2 + (d + i * kPairs) / 2, 0, 2);
        const vb x = load_pairs(rows[r] + d + i * kPairs);
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

// Calls fn<N>(q) for blocks of N = 4, 2, 1 queries that cover [0, count).
template <typename F>
K3_INLINE void blocks_of_queries(int64_t count, F&& fn) {
  int64_t q = 0;
  for (; q + 4 <= count; q += 4) fn.template operator()<4>(q);
  if (q + 2 <= count) fn.template operator()<2>(q), q += 2;
  if (q < count) fn.template operator()<1>(q);
}

// Splits a request's queries into even and odd fp32 lanes, scaled.
void split_queries(const Call& c, int64_t b, float* queries) {
  for (int64_t q = 0; q < c.Q; ++q) {
    const bf16* from = c.query + (b * c.Q + q) * ROW;
    for (int d = 0; d < ROW; d += kPairs) {
      const vb x = load_pairs_n(from + d, ROW - d < kPairs ? ROW - d : kPairs);
      store(queries + q * kQueryRow + d, even(x) * set1(c.scale));
      store(queries + q * kQueryRow + d + kLanes, odd(x) * set1(c.scale));
    }
  }
}

// `s` holds [Q][kMaxTile] floats.
void attend(const Call& c, Chunk chunk, const float* queries, float* s, Accumulator acc) {
  memset(acc.values, 0, c.Q * KL * sizeof(float));
  for (int64_t q = 0; q < c.Q; ++q) acc.max[q] = -INFINITY, acc.sum[q] = 0.0f;
  Cursor cursor(c, chunk.b, chunk.begin), cursor_ahead(c, chunk.b, chunk.begin);
  for (int64_t r = 0; r < c.prefetch * c.tile && chunk.begin + r < chunk.end; ++r) cursor_ahead.next();
  const int64_t everyone = visible(c, chunk.b, 0);  // the first token sees least
  const bf16* rows[kMaxTile];
  const bf16* ahead[kMaxTile];
  float keep[kMaxTile];
  for (int64_t at = chunk.begin; at < chunk.end; at += c.tile) {
    const int64_t count = chunk.end - at < c.tile ? chunk.end - at : c.tile;
    for (int64_t r = 0; r < count; ++r) {
      rows[r] = cursor.next();
      ahead[r] = at + c.prefetch * c.tile + r < chunk.end ? cursor_ahead.next() : rows[r];
    }
    for (int64_t r = count; r % kRowsInFlight; ++r) rows[r] = ahead[r] = rows[count - 1];
    blocks_of_queries(c.Q, [&]<int N>(int64_t q) {
      (q == 0 && c.prefetch ? scores<N, true> : scores<N, false>)(queries + q * kQueryRow, rows, ahead, count, s + q * kMaxTile);
    });
    if (at + count <= everyone) {
      blocks_of_queries(c.Q, [&]<int N>(int64_t q) {
        for (int n = 0; n < N; ++n) keep[n] = weights(s + (q + n) * kMaxTile, count, acc.max + q + n, acc.sum + q + n);
        (q == 0 && c.prefetch ? add_values<N, true> : add_values<N, false>)(rows, ahead, count, s + q * kMaxTile, keep, acc.values + q * KL);
      });
      continue;
    }
    // Tokens of this step are causal among themselves. A later token's row is left out, not weighted by zero.
    for (int64_t q = 0; q < c.Q; ++q) {
      const int64_t seen = visible(c, chunk.b, q / H) - at;
      if (seen <= 0) continue;
      const int64_t mine = seen < count ? seen : count;
      keep[0] = weights(s + q * kMaxTile, mine, acc.max + q, acc.sum + q);
      add_values<1, false>(rows, ahead, mine, s + q * kMaxTile, keep, acc.values + q * KL);
    }
  }
}

// Normalises and stores one query's result; nothing seen gives 0 and -inf.
void emit(const Call& c, int64_t row, const float* values, float max, float sum) {
  bf16* out = c.out + row * KL;
  const vf scale = set1(sum == 0.0f ? 0.0f : 1.0f / sum);
  for (int d = 0; d < KL; d += kPairs) {
    const vb x = pair(load(values + d) * scale, load(values + d + kLanes) * scale);
    memcpy(out + d, &x, sizeof x);
  }
  c.lse[row] = sum == 0.0f ? -INFINITY : max * 1.4426950408889634f + log2f(sum);
}

// Merges `count` partial results of one query, `stride` floats apart, into the first one.
void merge(Accumulator first_part, int64_t count, int64_t stride, int64_t q) {
  float top = -INFINITY;
  for (int64_t i = 0; i < count; ++i) top = first_part.max[i * stride + q] > top ? first_part.max[i * stride + q] : top;
  float* values = first_part.values + q * KL;
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    if (first_part.sum[i * stride + q] == 0.0f) continue;  // saw nothing; its maximum is -inf
    const float weight = first(k3::exp(set1(first_part.max[i * stride + q] - top)));
    sum += weight * first_part.sum[i * stride + q];
    for (int d = 0; d < KL; d += kLanes)
      store(values + d, fma(set1(weight), load(values + i * stride + d), i ? load(values + d) : zero()));
  }
  first_part.max[q] = top;
  first_part.sum[q] = sum;
}

// How a call is cut and where its temporary data lie.
struct Plan {
  int64_t split;      // rows of a chunk
  int64_t rows;       // cache rows of all requests together
  float* workspaces;  // one per worker
  float* parts;       // one accumulator per chunk of requests with several chunks
};

int64_t chunks(int64_t rows, int64_t split) { return rows > split ? (rows + split - 1) / split : 1; }
int64_t workspace_floats(int64_t Q) { return Q * (kQueryRow + kMaxTile) + accumulator_floats(Q); }

// Chunks grow until their partial results fit the scratch; independent of the number of workers. False if nothing fits.
bool plan_call(const K3Context* ctx, const Call& c, int64_t split, Plan& plan) {
  const int64_t workspaces = ctx->max_workers * workspace_floats(c.Q), capacity = ctx->scratch_bytes / int64_t(sizeof(float));
  plan = {split ? split : INT64_MAX, 0, static_cast<float*>(ctx->scratch), static_cast<float*>(ctx->scratch) + workspaces};
  for (int64_t b = 0; b < c.B; ++b) plan.rows += length(c, b);
  for (;; plan.split *= 2) {
    int64_t parts = 0;
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t n = chunks(length(c, b), plan.split);
      parts += n > 1 ? n : 0;
    }
    if (workspaces + parts * accumulator_floats(c.Q) <= capacity) return true;
    if (!parts) return false;
  }
}

void run(const K3Context* ctx, const Call& c, const Plan& plan, int32_t threads) {
  parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    float* queries = plan.workspaces + worker * workspace_floats(c.Q);
    float* s = queries + c.Q * kQueryRow;
    const Accumulator own = accumulator(s + c.Q * kMaxTile, c.Q);
    const int64_t stride = accumulator_floats(c.Q);
    // A worker takes the chunks that start in its share of all rows.
    const Range mine = share(plan.rows, worker, workers);
    int64_t start = 0, part = 0;
    bool merges = false;
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t rows = length(c, b), count = chunks(rows, plan.split);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = i * plan.split, end = i + 1 < count ? begin + plan.split : rows;
        const bool taken = start >= mine.begin && (start < mine.end || worker == workers - 1);
        start += end - begin;
        if (!taken) continue;
        const Accumulator acc = count > 1 ? accumulator(plan.parts + (part + i) * stride, c.Q) : own;
        split_queries(c, b, queries);
        attend(c, {b, begin, end}, queries, s, acc);
        if (count == 1)
          for (int64_t q = 0; q < c.Q; ++q) emit(c, b * c.Q + q, acc.values + q * KL, acc.max[q], acc.sum[q]);
      }
      if (count > 1) part += count, merges = true;
    }
    if (!merges) return;
    if (workers > 1) ctx->barrier(ctx);  // every part is written
    part = 0;
    for (int64_t b = 0, item = 0; b < c.B; ++b) {
      const int64_t count = chunks(length(c, b), plan.split);
      if (count == 1) continue;
      const Accumulator acc = accumulator(plan.parts + part * stride, c.Q);
      for (int64_t q = 0; q < c.Q; ++q, ++item) {
        if (item % workers != worker) continue;
        merge(acc, count, stride, q);
        emit(c, b * c.Q + q, acc.values + q * KL, acc.max[q], acc.sum[q]);
      }
      part += count;
    }
  });
}

// Nothing may be read through a page id that the cache does not have.
const char* check(const Call& c, int64_t pages) {
  for (int64_t b = 0; b < c.B; ++b) {
    if (c.seq_lens[b] < 0) return "seq_lens: negative";
    const int64_t used = (length(c, b) + c.page - 1) / c.page;
    if (used > c.max_pages) return "block_table: too narrow for a request's length";
    for (int64_t i = 0; i < used; ++i)
      if (uint32_t(c.block_table[b * c.max_pages + i]) >= uint64_t(pages)) return "block_table: id beyond the cache";
  }
  return nullptr;
}

}  // namespace

K3_EXPORT(mla_decode) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  int64_t query[3], cache[3], table[2], lens[1], out[3];
  Call c{};
  c.query = in.tensor<bf16>(3, query);
  c.cache = in.tensor<bf16>(3, cache);
  c.block_table = in.tensor<int32_t>(2, table);
  c.seq_lens = in.tensor<int32_t>(1, lens);
  c.out = in.tensor<bf16>(3, out);
  c.lse = in.tensor<float>(2);
  c.T = in.integer();
  c.scale = in.real();
  c.dcp_rank = in.integer();
  c.dcp_size = in.integer();
  c.interleave = in.integer();
  const int64_t kv_lora = in.integer();
  const int32_t threads = int32_t(in.integer());
  const int64_t split = in.integer();
  c.tile = in.integer();
  c.prefetch = in.integer();
  if (in.finish()) return -1;
  c.B = lens[0];
  c.Q = c.T * H;
  c.page = cache[1];
  c.max_pages = table[1];
  Plan plan;
  if (query[0] != c.B * c.T || table[0] != c.B || query[1] != H || query[2] != ROW || cache[2] != ROW || out[2] != KL || kv_lora != KL)
    in.fail("shapes differ from the geometry this kernel was built for");
  else if (c.T < 1 || c.dcp_size < 1 || c.dcp_rank < 0 || c.dcp_rank >= c.dcp_size || c.interleave < 1)
    in.fail("attributes: out of range");
  else if (threads < 1 || split < 0 || c.tile < kRowsInFlight || c.tile > kMaxTile || c.prefetch < 0)
    in.fail("tunables: value not declared in cpu.toml");
  else if (const char* why = check(c, cache[0])) in.fail(why);
  else if (!plan_call(ctx, c, split, plan)) in.fail("scratch too small for the queries of one request per worker");
  if (in.finish()) return -1;
  run(ctx, c, plan, threads);
  return 0;
}
