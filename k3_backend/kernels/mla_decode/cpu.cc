// MLA decode core on CPU: softmax(<query, row> * scale) over paged latent rows, value = row[:kv_lora], base-2 LSE.
//
// All T*H queries of a request share one pass over its cache rows, read in place through the block table. Rows come in
// tiles: scores of the tile, online softmax, then the values; on AMX tiles where the level has them and the request has
// enough queries, else in vector lanes.
// A request may be cut into chunks of `split` rows that different workers take; their partial results are merged in
// ascending order. Bits depend on the level and the tunables, not on the number of workers or on other requests.
#include <math.h>

#include <algorithm>

#include "common/bind.h"
#include "mla_decode/matrix.h"
#include "mla_decode/tile.h"
#include "mla_decode/vector.h"

namespace {

using namespace k3;
using namespace k3::mla;

struct Call {
  const bf16* query;
  const bf16* cache;
  const int32_t* block_table;
  const int32_t* seq_lens;
  bf16* out;
  float* lse;
  float scale;
  int64_t B, T, Q;  // Q = T * H queries per request
  int64_t pages, page, max_pages;
  int64_t dcp_rank, dcp_size, interleave;
  int64_t tile, prefetch;
};

// Positions below `end` that live on this shard; they are its local positions 0 .. count - 1.
int64_t local_count(const Call& c, int64_t end) {
  if (end <= 0) return 0;
  const int64_t stride = c.interleave * c.dcp_size, rest = end % stride - c.dcp_rank * c.interleave;
  return end / stride * c.interleave + std::clamp<int64_t>(rest, 0, c.interleave);
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

// A run of rows of one request.
struct Chunk {
  int64_t b, begin, end;
};

// Temporary memory of one worker.
template <class Form>
struct Workspace {
  typename Form::Workspace form;
  float* s;  // [queries][kMaxTile] scores, then weights
  float* keep;
  Accumulator own;
  Workspace(Arena& arena, int64_t queries)
      : form(arena, queries),
        s(arena.take<float>(queries * kMaxTile)),
        keep(arena.take<float>(queries)),
        own(arena.accumulator(Form::padded_queries(queries))) {}
};

// Turns one query's first `count` products of a tile into weights e^(scale * product - max); the rest of the vector gets 0.
// Returns the factor for everything accumulated before.
float weights(float* s, int64_t count, float scale, float& running_max, float& running_sum) {
  const int64_t padded = (count + kLanes - 1) / kLanes * kLanes;
  std::fill(s + count, s + padded, -INFINITY);
  vf top = set1(running_max);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vf x = load(s + i) * set1(scale);
    store(s + i, x);
    top = k3::max(top, x);
  }
  const float new_max = k3::max(top);
  vf total = zero();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const vf p = k3::exp(load(s + i) - set1(new_max));
    total = total + p;
    store(s + i, p);
  }
  const float keep = first(k3::exp(set1(running_max - new_max)));
  running_max = new_max;
  running_sum = running_sum * keep + k3::sum(total);
  return keep;
}

template <class Form>
void attend(const Call& c, Chunk chunk, Workspace<Form>& w, Accumulator acc) {
  memset(acc.values, 0, Form::padded_queries(c.Q) * KL * sizeof(float));
  std::fill(acc.max, acc.max + c.Q, -INFINITY);
  std::fill(acc.sum, acc.sum + c.Q, 0.0f);
  Form::pack_queries(w.form, c.query + chunk.b * c.Q * ROW, c.Q);
  Cursor cursor(c, chunk.b, chunk.begin), cursor_ahead(c, chunk.b, chunk.begin);
  const int64_t distance = c.prefetch * c.tile;
  for (int64_t r = 0; r < distance && chunk.begin + r < chunk.end; ++r) cursor_ahead.next();
  const int64_t everyone = std::min(visible(c, chunk.b, 0), chunk.end);  // the first token sees least
  RowTile tile;
  tile.prefetch = c.prefetch != 0;
  for (int64_t at = chunk.begin; at < chunk.end; at += tile.count) {
    tile.count = std::min(c.tile, (at < everyone ? everyone : chunk.end) - at);
    for (int64_t r = 0; r < tile.count; ++r) {
      tile.rows[r] = cursor.next();
      tile.ahead[r] = at + distance + r < chunk.end ? cursor_ahead.next() : tile.rows[r];
    }
    tile.pad();
    Form::scores(w.form, tile, c.Q, w.s);
    if (at < everyone) {
      for (int64_t q = 0; q < c.Q; ++q) w.keep[q] = weights(w.s + q * kMaxTile, tile.count, c.scale, acc.max[q], acc.sum[q]);
      Form::add_values(w.form, tile, c.Q, w.s, w.keep, acc.values);
      continue;
    }
    // Tokens of this step are causal among themselves. A later token's row is left out, not weighted by zero: it may be NaN.
    for (int64_t q = 0; q < c.Q; ++q) {
      const int64_t seen = std::min(visible(c, chunk.b, q / H) - at, tile.count);
      if (seen <= 0) continue;
      const float keep = weights(w.s + q * kMaxTile, seen, c.scale, acc.max[q], acc.sum[q]);
      VectorForm::add_values_of(tile, seen, w.s + q * kMaxTile, keep, acc.values + q * KL);
    }
  }
}

// Normalises and stores the result of one query, given its row of `out`; nothing seen gives 0 and -inf.
void emit(const Call& c, int64_t row, Accumulator acc, int64_t q) {
  bf16* out = c.out + row * KL;
  const float* values = acc.values + q * KL;
  const vf scale = set1(acc.sum[q] == 0.0f ? 0.0f : 1.0f / acc.sum[q]);
  for (int d = 0; d < KL; d += kPairs) {
    const vb x = pair(load(values + d) * scale, load(values + d + kLanes) * scale);
    memcpy(out + d, &x, sizeof x);
  }
  c.lse[row] = acc.sum[q] == 0.0f ? -INFINITY : acc.max[q] * 1.4426950408889634f + log2f(acc.sum[q]);
}

// How a call is cut and where its temporary data lie: one workspace per worker, then one accumulator per chunk of requests
// that have several chunks.
template <class Form>
struct Plan {
  int64_t split;  // rows of a chunk
  int64_t rows;   // cache rows of all requests together
  char* scratch;
  int64_t workspace_bytes, part_bytes;
  char* parts;

  Workspace<Form> workspace(int32_t worker, int64_t Q) const {
    Arena arena(scratch + worker * workspace_bytes);
    return Workspace<Form>(arena, Q);
  }
  Accumulator part(int64_t i, int64_t Q) const {
    Arena arena(parts + i * part_bytes);
    return arena.accumulator(Form::padded_queries(Q));
  }
};

int64_t chunks(int64_t rows, int64_t split) { return rows > split ? (rows + split - 1) / split : 1; }

// Chunks grow until their partial results fit the scratch. False if not even the workspaces do.
template <class Form>
bool plan_call(const K3Context* ctx, const Call& c, int64_t split, Plan<Form>& plan) {
  Arena workspace(nullptr), part(nullptr);
  Workspace<Form>(workspace, c.Q);
  part.accumulator(Form::padded_queries(c.Q));
  const int64_t workspaces = ctx->max_workers * workspace.bytes();
  char* scratch = static_cast<char*>(ctx->scratch);
  plan = {split ? split : INT64_MAX, 0, scratch, workspace.bytes(), part.bytes(), scratch + workspaces};
  for (int64_t b = 0; b < c.B; ++b) plan.rows += length(c, b);
  for (;; plan.split *= 2) {
    int64_t parts = 0;
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t count = chunks(length(c, b), plan.split);
      parts += count > 1 ? count : 0;
    }
    if (workspaces + parts * part.bytes() <= ctx->scratch_bytes) return true;
    if (!parts) return false;
  }
}

// Merges the parts first, first + 1, ... of one query into the first one.
template <class Form>
void merge(const Plan<Form>& plan, const Call& c, int64_t first_part, int64_t count, int64_t q) {
  const Accumulator total = plan.part(first_part, c.Q);
  float top = -INFINITY;
  for (int64_t i = 0; i < count; ++i) top = std::max(top, plan.part(first_part + i, c.Q).max[q]);
  float sum = 0.0f;
  for (int64_t i = 0; i < count; ++i) {
    const Accumulator part = plan.part(first_part + i, c.Q);
    if (part.sum[q] == 0.0f) continue;  // saw nothing; its maximum is -inf and its values are 0
    const float weight = first(k3::exp(set1(part.max[q] - top)));
    sum += weight * part.sum[q];
    for (int64_t d = q * KL; d < (q + 1) * KL; d += kLanes)
      store(total.values + d, fma(set1(weight), load(part.values + d), i ? load(total.values + d) : zero()));
  }
  total.max[q] = top;
  total.sum[q] = sum;
}

template <class Form>
void run(const K3Context* ctx, const Call& c, const Plan<Form>& plan, int32_t threads) {
  parallel(ctx, threads, [&](int32_t worker, int32_t workers) {
    Workspace<Form> w = plan.workspace(worker, c.Q);
    // A worker takes the chunks that start in its share of all rows.
    const Range mine = share(plan.rows, worker, workers);
    int64_t start = 0, parts = 0;
    for (int64_t b = 0; b < c.B; ++b) {
      const int64_t rows = length(c, b), count = chunks(rows, plan.split);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t begin = i * plan.split, end = i + 1 < count ? begin + plan.split : rows;
        const bool taken = start >= mine.begin && (start < mine.end || worker == workers - 1);
        start += end - begin;
        if (!taken) continue;
        const Accumulator acc = count > 1 ? plan.part(parts + i, c.Q) : w.own;
        attend<Form>(c, {b, begin, end}, w, acc);
        for (int64_t q = 0; count == 1 && q < c.Q; ++q) emit(c, b * c.Q + q, acc, q);
      }
      parts += count > 1 ? count : 0;
    }
    if (!parts) return;
    if (workers > 1) ctx->barrier(ctx);  // every part is written
    for (int64_t b = 0, part = 0, item = 0; b < c.B; ++b) {
      const int64_t count = chunks(length(c, b), plan.split);
      if (count == 1) continue;
      for (int64_t q = 0; q < c.Q; ++q, ++item) {
        if (item % workers != worker) continue;
        merge(plan, c, part, count, q);
        emit(c, b * c.Q + q, plan.part(part, c.Q), q);
      }
      part += count;
    }
  });
}

template <class Form>
const char* plan_and_run(const K3Context* ctx, const Call& c, int64_t split, int32_t threads) {
  Plan<Form> plan;
  if (!plan_call(ctx, c, split, plan)) return "scratch too small for the queries of one request per worker";
  run(ctx, c, plan, threads);
  return nullptr;
}

const char* plan_and_run(const K3Context* ctx, const Call& c, int64_t split, int32_t threads) {
#if defined(__AMX_BF16__)
  if constexpr (MatrixForm::kFits)
    if (c.Q >= MatrixForm::kWorthwhile) return plan_and_run<MatrixForm>(ctx, c, split, threads);
#endif
  return plan_and_run<VectorForm>(ctx, c, split, threads);
}

// Nothing may be read through a page id that the cache does not have.
const char* check(const Call& c) {
  if (c.T < 1 || c.dcp_size < 1 || c.dcp_rank < 0 || c.dcp_rank >= c.dcp_size || c.interleave < 1)
    return "attributes: out of range";
  if (c.tile < 1 || c.tile > kMaxTile || c.prefetch < 0) return "tunables: value not declared in cpu.toml";
  for (int64_t b = 0; b < c.B; ++b) {
    if (c.seq_lens[b] < 0) return "seq_lens: negative";
    const int64_t used = (length(c, b) + c.page - 1) / c.page;
    if (used > c.max_pages) return "block_table: too narrow for a request's length";
    for (int64_t i = 0; i < used; ++i)
      if (uint32_t(c.block_table[b * c.max_pages + i]) >= uint64_t(c.pages)) return "block_table: id beyond the cache";
  }
  return nullptr;
}

}  // namespace

K3_EXPORT(mla_decode) {
  Args in(args, num_args, result);
  const K3Context* ctx = in.context();
  Call c{};
  int64_t M = 0, cache[3] = {}, table[2] = {};
  c.query = bind<const bf16>(in, {kAny, H, ROW}, "query must be [M, H, ROW]", &M);
  c.cache = in.tensor<const bf16>(3, cache);
  in.tensor<const uint8_t>(3);  // kv_cache_e4m3: no such call is supported
  c.block_table = in.tensor<const int32_t>(2, table);
  c.seq_lens = bind<const int32_t>(in, {table[0]}, "seq_lens must be [B]");
  c.out = bind<bf16>(in, {M, H, KL}, "out must be [M, H, KL]");
  c.lse = bind<float>(in, {M, H}, "lse must be [M, H]");
  c.T = in.integer();
  c.scale = in.real();
  c.dcp_rank = in.integer();
  c.dcp_size = in.integer();
  c.interleave = in.integer();
  const int64_t kv_lora = in.integer(), cache_format = in.integer();
  in.real();  // k_scale is 1 with bf16 rows
  const int32_t threads = int32_t(in.integer());
  const int64_t split = in.integer();
  c.tile = in.integer();
  c.prefetch = in.integer();
  c.B = table[0];
  c.Q = c.T * H;
  c.pages = cache[0];
  c.page = cache[1];
  c.max_pages = table[1];
  if (cache[2] != ROW || kv_lora != KL || M != c.B * c.T) in.fail("kv_cache must be [pages, page, ROW], kv_lora KL, M = B * T");
  if (cache_format != 0 || !c.cache) in.fail("cache_format must be 0, with kv_cache");
  if (in.finish()) return -1;
  const char* why = check(c);
  if (!why) why = plan_and_run(ctx, c, split, threads);
  if (why) in.fail(why);
  return in.finish();
}
