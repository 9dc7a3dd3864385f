// Trusted CPU runtime: a fork-join pool and the replay of launch lists. It judges nothing and knows no op.
//
// Pool. The calling thread is worker 0; `threads - 1` helpers each own a mailbox. A dispatch stores body and closure,
// then bumps `go` of the helpers it needs; they answer in `done`. Between regions helpers spin, outside a replay only
// for `idle_spin_us`, then sleep on a futex so that an idle process burns nothing. While a replay is in progress they
// never sleep (its gaps are microseconds), but yield when a wait gets long, so that a busy machine makes progress. They
// may run on any CPU that the caller may use except the one on which it started the replay.
//
// Replay. A launch list is an array of (kernel, packed arguments, counter). One native call runs it in order, stops at
// the first error and counts each finished launch in the ledger. One replay at a time per pool (a lock).
//
// Floating-point environment: the default MXCSR of each thread (denormals kept, round to nearest); kernels may not
// change it. AMX tile data is requested from the kernel once per process where the CPU has it.
#include "k3_cpu.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <new>

#define K3_RUNTIME_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kMaxThreads = 256;
// A wait this long means that the awaited thread is probably not running (docs/decisions.md has the measurement).
constexpr int64_t kYieldAfterNs = 20'000;
constexpr int kPausesPerClock = 32;        // reading the clock costs about as much as one pause

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

// Spins until `done()`; gives the core away once the wait is long.
template <typename Done>
void spin_until(Done done) {
  int64_t start = 0;
  for (int n = 1; !done(); ++n) {
    __builtin_ia32_pause();
    if (n % kPausesPerClock) continue;
    const int64_t now = now_ns();
    if (!start) start = now;
    if (now - start > kYieldAfterNs) sched_yield();
  }
}

struct Pool;

struct alignas(64) Mailbox {
  std::atomic<uint32_t> go{0};        // written by worker 0
  std::atomic<uint32_t> doorbell{0};  // futex word, bumped to wake a sleeper
  std::atomic<uint32_t> asleep{0};
  alignas(64) std::atomic<uint32_t> done{0};  // written by the helper
  pthread_t thread{};
  Pool* pool = nullptr;
  int32_t id = 0;
};

struct alignas(64) Pool {
  K3Context context{};
  int32_t threads = 1;
  int64_t idle_spin_ns = 0;
  int caller_cpu = -1;  // where the last replay started
  cpu_set_t allowed{};  // CPUs of whoever made the pool
  pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
  // Current region; published by the mailboxes' `go`.
  K3Body body = nullptr;
  void* closure = nullptr;
  int32_t workers = 1;  // 1 outside regions, so that a barrier of a lone worker never waits
  alignas(64) std::atomic<bool> active{false};  // a replay is in progress
  std::atomic<bool> stop{false};
  alignas(64) std::atomic<int32_t> arrived{0};
  alignas(64) std::atomic<uint32_t> generation{0};
  Mailbox boxes[kMaxThreads];
};

void wake_if_asleep(Mailbox& box) {
  if (!box.asleep.load(std::memory_order_seq_cst)) return;
  box.doorbell.fetch_add(1, std::memory_order_seq_cst);
  syscall(SYS_futex, &box.doorbell, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0);
}

// Sleeps until the doorbell rings. Lost wake-ups are excluded by the order: the helper announces that it is asleep,
// then looks at `go` and `active`; the caller writes those, then looks at `asleep` (all sequentially consistent).
void sleep_in(Mailbox& box, uint32_t seen) {
  Pool& pool = *box.pool;
  box.asleep.store(1, std::memory_order_seq_cst);
  const uint32_t bell = box.doorbell.load(std::memory_order_seq_cst);
  if (box.go.load(std::memory_order_seq_cst) == seen && !pool.active.load(std::memory_order_seq_cst) &&
      !pool.stop.load(std::memory_order_seq_cst)) {
    syscall(SYS_futex, &box.doorbell, FUTEX_WAIT_PRIVATE, bell, nullptr, nullptr, 0);
  }
  box.asleep.store(0, std::memory_order_seq_cst);
}

// Waits for a new value of `go`; acquire, so that the region's body and data are visible after it.
uint32_t await_work(Mailbox& box, uint32_t seen) {
  Pool& pool = *box.pool;
  int64_t start = 0;
  for (int n = 1;; ++n) {
    const uint32_t go = box.go.load(std::memory_order_acquire);
    if (go != seen || pool.stop.load(std::memory_order_relaxed)) return go;
    __builtin_ia32_pause();
    if (n % kPausesPerClock) continue;
    const int64_t now = now_ns();
    if (!start) start = now;
    if (pool.active.load(std::memory_order_relaxed)) {
      if (now - start > kYieldAfterNs) sched_yield();
    } else if (now - start > pool.idle_spin_ns) {
      sleep_in(box, seen);
      start = 0;
    }
  }
}

void* helper_main(void* argument) {
  Mailbox& box = *static_cast<Mailbox*>(argument);
  Pool& pool = *box.pool;
  uint32_t seen = 0;
  for (;;) {
    seen = await_work(box, seen);
    if (pool.stop.load(std::memory_order_acquire)) return nullptr;
    pool.body(pool.closure, box.id, pool.workers);
    box.done.store(seen, std::memory_order_release);
  }
}

void pool_parallel(const K3Context* ctx, int32_t workers, K3Body body, void* closure) {
  Pool& pool = *static_cast<Pool*>(ctx->pool);
  if (workers > pool.threads) workers = pool.threads;
  if (workers <= 1) {
    body(closure, 0, 1);
    return;
  }
  pool.workers = workers;
  pool.body = body;
  pool.closure = closure;
  for (int32_t w = 1; w < workers; ++w) {
    Mailbox& box = pool.boxes[w];
    box.go.store(box.go.load(std::memory_order_relaxed) + 1, std::memory_order_seq_cst);
    wake_if_asleep(box);
  }
  body(closure, 0, workers);
  for (int32_t w = 1; w < workers; ++w) {
    Mailbox& box = pool.boxes[w];
    const uint32_t go = box.go.load(std::memory_order_relaxed);
    spin_until([&] { return box.done.load(std::memory_order_acquire) == go; });
  }
  pool.workers = 1;
}

void pool_barrier(const K3Context* ctx) {
  Pool& pool = *static_cast<Pool*>(ctx->pool);
  if (pool.workers == 1) return;
  const uint32_t generation = pool.generation.load(std::memory_order_acquire);
  if (pool.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == pool.workers) {
    pool.arrived.store(0, std::memory_order_relaxed);
    pool.generation.store(generation + 1, std::memory_order_release);
    return;
  }
  spin_until([&] { return pool.generation.load(std::memory_order_acquire) != generation; });
}

// Linux gives no thread AMX tile data until the process asks for it; CPUs or kernels without it refuse, which is fine:
// objects that need it are not loaded there.
void request_amx() {
  constexpr int kArchReqXcompPerm = 0x1023, kXtileData = 18;
  syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData);
}

// Keeps helpers off the caller's CPU. Left alone, a kernel with one busy foreign process puts caller and helper on the
// same CPU, and every region then costs two yields. Looked up per replay, because the caller is free to move, or to stay
// on a CPU of its own; its affinity is never touched, and with too few CPUs for one each the helpers stay where they are.
void place_helpers(Pool& pool) {
  const int cpu = sched_getcpu();
  if (cpu == pool.caller_cpu || cpu < 0) return;
  pool.caller_cpu = cpu;
  cpu_set_t allowed = pool.allowed;
  CPU_CLR(cpu, &allowed);
  if (CPU_COUNT(&allowed) < pool.threads - 1) return;
  for (int32_t w = 1; w < pool.threads; ++w) pthread_setaffinity_np(pool.boxes[w].thread, sizeof(allowed), &allowed);
}

void stop_helpers(Pool* pool, int32_t started) {
  pool->stop.store(true, std::memory_order_seq_cst);
  for (int32_t w = 1; w < started; ++w) {
    wake_if_asleep(pool->boxes[w]);
    pthread_join(pool->boxes[w].thread, nullptr);
  }
}

void release(Pool* pool) {
  free(pool->context.scratch);
  pool->~Pool();
  free(pool);
}

void copy_text(char* to, int64_t capacity, const char* from, int64_t length) {
  if (capacity < 1) return;
  if (length > capacity - 1) length = capacity - 1;
  memcpy(to, from, size_t(length));
  to[length] = 0;
}

// Moves the error that a kernel raised into `text` as "Kind: message"; says so if it raised none.
void take_error(char* text, int64_t capacity) {
  TVMFFIObjectHandle error = nullptr;
  TVMFFIErrorMoveFromRaised(&error);
  if (!error) {
    static const char kNone[] = "the kernel returned an error status without raising an error";
    copy_text(text, capacity, kNone, sizeof(kNone) - 1);
    return;
  }
  const TVMFFIErrorCell* cell = TVMFFIErrorGetCellPtr(error);
  const int64_t kind = int64_t(cell->kind.size);
  copy_text(text, capacity, cell->kind.data, kind);
  if (kind + 2 < capacity) {
    copy_text(text + kind, capacity - kind, ": ", 2);
    copy_text(text + kind + 2, capacity - kind - 2, cell->message.data, int64_t(cell->message.size));
  }
  TVMFFIObjectDecRef(error);
}

}  // namespace

extern "C" {

typedef struct K3Launch {
  TVMFFISafeCallType kernel;
  const TVMFFIAny* args;
  int64_t num_args;
  int64_t* counter;  // incremented when the launch has finished; may be null
} K3Launch;

}  // extern "C"

K3_RUNTIME_EXPORT int32_t k3_runtime_abi() { return K3_ABI_VERSION; }

// Makes a pool of `threads` workers (caller included); null with errno set if that is impossible.
K3_RUNTIME_EXPORT Pool* k3_pool_create(int32_t threads, int64_t idle_spin_us) {
  if (threads < 1 || threads > kMaxThreads) {
    errno = EINVAL;
    return nullptr;
  }
  void* memory = aligned_alloc(alignof(Pool), sizeof(Pool));
  if (!memory) return nullptr;
  Pool* pool = new (memory) Pool();
  // 2 MiB alignment lets the kernel back scratch with large pages; touching it now keeps page faults out of steps.
  void* scratch = aligned_alloc(size_t(2) << 20, K3_SCRATCH_BYTES);
  if (!scratch) {
    pool->~Pool();
    free(memory);
    errno = ENOMEM;
    return nullptr;
  }
  memset(scratch, 0, K3_SCRATCH_BYTES);
  request_amx();
  pool->threads = threads;
  pool->idle_spin_ns = idle_spin_us * 1000;
  sched_getaffinity(0, sizeof(pool->allowed), &pool->allowed);  // on failure empty: helpers are not moved
  pool->context = K3Context{K3_ABI_VERSION, threads, pool_parallel, pool_barrier, scratch, K3_SCRATCH_BYTES, pool};
  for (int32_t w = 1; w < threads; ++w) {
    Mailbox& box = pool->boxes[w];
    box.pool = pool;
    box.id = w;
    const int status = pthread_create(&box.thread, nullptr, helper_main, &box);
    if (status) {
      stop_helpers(pool, w);
      release(pool);
      errno = status;
      return nullptr;
    }
  }
  return pool;
}

K3_RUNTIME_EXPORT void k3_pool_destroy(Pool* pool) {
  pthread_mutex_lock(&pool->lock);
  stop_helpers(pool, pool->threads);
  pthread_mutex_unlock(&pool->lock);
  release(pool);
}

K3_RUNTIME_EXPORT K3Context* k3_pool_context(Pool* pool) { return &pool->context; }

// Runs `count` launches in order. Returns -1 if all succeeded, else the index of the launch that failed, its error in
// `error` (capacity bytes, terminated). With `times_ns` (count entries) each launch's duration is written there.
K3_RUNTIME_EXPORT int64_t k3_replay(Pool* pool, const K3Launch* launches, int64_t count, int64_t* times_ns, char* error,
                                    int64_t error_capacity) {
  pthread_mutex_lock(&pool->lock);
  if (pool->threads > 1) place_helpers(*pool);
  pool->active.store(true, std::memory_order_seq_cst);
  for (int32_t w = 1; w < pool->threads; ++w) wake_if_asleep(pool->boxes[w]);
  int64_t failed = -1;
  int64_t before = times_ns ? now_ns() : 0;
  for (int64_t i = 0; i < count; ++i) {
    const K3Launch& launch = launches[i];
    TVMFFIAny result;
    memset(&result, 0, sizeof(result));
    if (launch.kernel(nullptr, launch.args, int32_t(launch.num_args), &result) != 0) {
      take_error(error, error_capacity);
      failed = i;
      break;
    }
    if (launch.counter) ++*launch.counter;
    if (times_ns) {
      const int64_t after = now_ns();
      times_ns[i] = after - before;
      before = after;
    }
  }
  pool->active.store(false, std::memory_order_seq_cst);
  pthread_mutex_unlock(&pool->lock);
  return failed;
}
