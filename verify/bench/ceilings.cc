// Ceilings of this machine: how fast trusted code reads, writes, copies and multiplies with a number of threads.
//
// A program of its own, built with fixed flags and run by verify/bench/ceilings.py. One argument: threads. Prints one
// JSON object. Each figure is the best of several repetitions: a ceiling is what the machine can do, not what it does on
// average. Vector width and matrix units are chosen at run time.
#include <immintrin.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace {

constexpr double kSliceSeconds = 0.003;  // least duration of one repetition
constexpr double kTotalSeconds = 0.02;   // repetitions of one figure together
constexpr int kRepeats = 3;              // least number of them

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Runs work(thread, rounds) on all threads between two barriers; seconds of the slowest.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {}

  template <typename Work>
  double run(int64_t rounds, Work work) {
    std::vector<pthread_t> handles(threads_);
    std::vector<Task<Work>> tasks(threads_);
    std::atomic<int> ready{0};
    std::atomic<bool> go{false};
    for (int i = 0; i < threads_; ++i) {
      tasks[i] = {&work, i, rounds, &ready, &go, 0};
      pthread_create(&handles[i], nullptr, &Task<Work>::main, &tasks[i]);
    }
    while (ready.load() < threads_) sched_yield();
    const int64_t start = now_ns();
    go.store(true);
    int64_t end = start;
    for (int i = 0; i < threads_; ++i) {
      pthread_join(handles[i], nullptr);
      end = std::max(end, tasks[i].end);
    }
    return double(end - start) * 1e-9;
  }

  // Best rate in units per nanosecond, where one round of all threads is `units`.
  template <typename Work>
  double best(double units, Work work) {
    int64_t rounds = 1;
    double seconds = run(rounds, work);
    while (seconds < kSliceSeconds) {
      rounds = std::max<int64_t>(rounds + 1, int64_t(double(rounds) * 1.2 * kSliceSeconds / std::max(seconds, 1e-7)));
      seconds = run(rounds, work);
    }
    double rate = 0;
    double total = 0;
    for (int i = 0; i < kRepeats || total < kTotalSeconds; ++i, total += seconds) {
      seconds = run(rounds, work);
      rate = std::max(rate, units * double(rounds) / seconds * 1e-9);
    }
    return rate;
  }

 private:
  template <typename Work>
  struct Task {
    Work* work;
    int id;
    int64_t rounds;
    std::atomic<int>* ready;
    std::atomic<bool>* go;
    int64_t end;

    static void* main(void* self) {
      auto* t = static_cast<Task*>(self);
      (*t->work)(t->id, 0);  // touch, request units
      t->ready->fetch_add(1);
      while (!t->go->load()) sched_yield();
      (*t->work)(t->id, t->rounds);
      t->end = now_ns();
      return nullptr;
    }
  };
  int threads_;
};

volatile float sink;

#define K3_LEVELS                                                  \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))

using Lane = float __attribute__((vector_size(64)));

K3_LEVELS void read_once(const char* data, int64_t bytes) {
  const Lane* p = reinterpret_cast<const Lane*>(data);
  Lane sum[4] = {};
  for (int64_t i = 0; i + 4 <= bytes / 64; i += 4)
    for (int j = 0; j < 4; ++j) sum[j] += p[i + j];
  for (int j = 1; j < 4; ++j) sum[0] += sum[j];
  sink = sum[0][0];
}

K3_LEVELS void write_once(char* data, int64_t bytes, float value) {
  Lane* p = reinterpret_cast<Lane*>(data);
  const Lane v = Lane{} + value;
  for (int64_t i = 0; i < bytes / 64; ++i) p[i] = v;
  __asm__ volatile("" ::: "memory");
}

K3_LEVELS void update_once(char* data, int64_t bytes) {
  Lane* p = reinterpret_cast<Lane*>(data);
  for (int64_t i = 0; i < bytes / 64; ++i) p[i] *= 0.5f;
}

__attribute__((target("avx2"))) void write_around(char* data, int64_t bytes, float value) {
  const __m256 v = _mm256_set1_ps(value);
  for (int64_t i = 0; i < bytes; i += 32) _mm256_stream_ps(reinterpret_cast<float*>(data + i), v);
  _mm_sfence();
}

constexpr int kWideChains = 12, kNarrowChains = 10;  // enough independent sums to hide the latency, few enough registers

__attribute__((target("avx512f"))) void fma_wide(int64_t rounds) {
  __m512 x[kWideChains];
  for (int j = 0; j < kWideChains; ++j) x[j] = _mm512_set1_ps(float(j));
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(0.5f);
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kWideChains; ++j) x[j] = _mm512_fmadd_ps(x[j], a, b);
  for (int j = 1; j < kWideChains; ++j) x[0] = _mm512_add_ps(x[0], x[j]);
  sink = _mm512_cvtss_f32(x[0]);
}

__attribute__((target("avx2,fma"))) void fma_narrow(int64_t rounds) {
  __m256 x[kNarrowChains];
  for (int j = 0; j < kNarrowChains; ++j) x[j] = _mm256_set1_ps(float(j));
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(0.5f);
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kNarrowChains; ++j) x[j] = _mm256_fmadd_ps(x[j], a, b);
  for (int j = 1; j < kNarrowChains; ++j) x[0] = _mm256_add_ps(x[0], x[j]);
  sink = _mm256_cvtss_f32(x[0]);
}

__attribute__((target("avx512f,avx512bf16"))) void dot_rounds(int64_t rounds) {
  __m512 x[kWideChains];
  for (int j = 0; j < kWideChains; ++j) x[j] = _mm512_set1_ps(float(j));
  const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3F80), b = (__m512bh)_mm512_set1_epi16(0x3C00);
  for (int64_t i = 0; i < rounds; ++i)
    for (int j = 0; j < kWideChains; ++j) x[j] = _mm512_dpbf16_ps(x[j], a, b);
  for (int j = 1; j < kWideChains; ++j) x[0] = _mm512_add_ps(x[0], x[j]);
  sink = _mm512_cvtss_f32(x[0]);
}

constexpr double kTileFlops = 4 * 2.0 * 16 * 16 * 32;  // four products of 16x32 by 32x16

__attribute__((target("amx-tile,amx-bf16"))) void tile_rounds(int64_t rounds) {
  // Static: the compiler does not know that the instruction reads all 64 bytes of a local one.
  struct alignas(64) Config {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static const Config config = {1, 0, {}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
  alignas(64) static const uint16_t zeros[16 * 32] = {};
  _tile_loadconfig(&config);
  _tile_loadd(4, zeros, 64);
  _tile_loadd(5, zeros, 64);
  _tile_loadd(6, zeros, 64);
  _tile_loadd(7, zeros, 64);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t i = 0; i < rounds; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

bool has_flag(const char* flag) {
  FILE* file = fopen("/proc/cpuinfo", "r");
  if (!file) return false;
  char* line = nullptr;
  size_t size = 0;
  bool found = false;
  const size_t length = strlen(flag);
  while (!found && getline(&line, &size, file) > 0) {
    if (strncmp(line, "flags", 5)) continue;
    for (char* at = strstr(line, flag); at && !found; at = strstr(at + 1, flag))
      found = at[-1] == ' ' && (at[length] == ' ' || at[length] == '\n');
    break;
  }
  free(line);
  fclose(file);
  return found;
}

bool request_tiles() {
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return has_flag("amx_bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

enum class Kind { read, write, copy };

// Best GB/s over a working set that the threads share out evenly and touch again and again.
double bandwidth(Team& team, int threads, char* data, int64_t bytes, Kind kind) {
  const int64_t part = bytes / threads / 1024 * 1024;
  auto work = [&](bool other) {
    return [=](int id, int64_t rounds) {
      char* own = data + id * part;
      for (int64_t i = 0; i < rounds; ++i) {
        if (kind == Kind::read) read_once(own, part);
        if (kind == Kind::write && !other) write_once(own, part, float(i));
        if (kind == Kind::write && other) write_around(own, part, float(i));
        if (kind == Kind::copy && !other) memcpy(own, own + part / 2, part / 2);
        if (kind == Kind::copy && other) update_once(own, part);
      }
    };
  };
  const double moved = double(part) * threads;
  if (kind == Kind::read) return team.best(moved, work(false));
  // An update in place reads and writes every byte.
  const double other = kind == Kind::copy ? 2 * moved : moved;
  return std::max(team.best(moved, work(false)), team.best(other, work(true)));
}

}  // namespace

int main(int count, char** values) {
  const int threads = count == 2 ? atoi(values[1]) : 0;
  if (threads < 1 || threads > 1024 || !has_flag("avx2") || !has_flag("fma")) {
    fprintf(stderr, "usage: ceilings THREADS, on a CPU with AVX2 and FMA\n");
    return 2;
  }
  Team team(threads);
  const bool tiles = request_tiles();
  constexpr int64_t kLargest = int64_t(128) << 20;
  char* data = static_cast<char*>(aligned_alloc(1 << 21, kLargest));
  if (!data) {
    fprintf(stderr, "ceilings: no memory for %lld bytes\n", (long long)kLargest);
    return 1;
  }
  madvise(data, kLargest, MADV_HUGEPAGE);  // as the arms have them
  memset(data, 1, kLargest);
  printf("{\"threads\":%d", threads);
  const char* names[] = {"read", "write", "copy"};
  for (Kind kind : {Kind::read, Kind::write, Kind::copy}) {
    printf(",\"%s\":[", names[int(kind)]);
    for (int64_t bytes = int64_t(threads) << 14, first = 1; bytes <= kLargest; bytes *= 2, first = 0)
      printf("%s[%lld,%.17g]", first ? "" : ",", (long long)bytes, bandwidth(team, threads, data, bytes, kind));
    printf("]");
  }
  double fma = team.best(threads * kNarrowChains * 8 * 2.0, [](int, int64_t rounds) { fma_narrow(rounds); });
  if (has_flag("avx512f")) {
    const double wide = team.best(threads * kWideChains * 16 * 2.0, [](int, int64_t rounds) { fma_wide(rounds); });
    fma = std::max(fma, wide);
  }
  double bf16 = fma;
  const char* unit = "fma";
  if (has_flag("avx512_bf16")) {
    const double dots = team.best(threads * kWideChains * 32 * 2.0, [](int, int64_t rounds) { dot_rounds(rounds); });
    if (dots > bf16) bf16 = dots, unit = "avx512_bf16";
  }
  if (tiles) {
    const double products = team.best(threads * kTileFlops, [](int, int64_t rounds) { tile_rounds(rounds); });
    if (products > bf16) bf16 = products, unit = "amx";
  }
  printf(",\"fma_gflops\":%.17g,\"bf16_gflops\":%.17g,\"bf16_unit\":\"%s\"}\n", fma, bf16, unit);
  free(data);
  return 0;
}
