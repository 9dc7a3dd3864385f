// Drives the launcher under ThreadSanitizer: regions of changing width, barriers, sleeping helpers, two callers.
#include "runtime.cc"

#include <stdio.h>

#include <string>

extern "C" {
void TVMFFIErrorMoveFromRaised(TVMFFIObjectHandle* result) { *result = nullptr; }
int TVMFFIObjectDecRef(TVMFFIObjectHandle) { return 0; }
}

namespace {

constexpr int kWorkers = 4;

struct Shared {
  int64_t cells[kWorkers * 8];  // plain memory: every ordering comes from the pool
  int64_t sum;
};

int kernel(void*, const TVMFFIAny* args, int32_t, TVMFFIAny*) {
  const K3Context* ctx = static_cast<const K3Context*>(args[0].v_ptr);
  Shared* shared = static_cast<Shared*>(args[1].v_ptr);
  const int32_t workers = int32_t(args[2].v_int64);
  k3::parallel(ctx, workers, [&](int32_t me, int32_t n) {
    shared->cells[me * 8] += 1;
    ctx->barrier(ctx);
    if (me == n - 1)
      for (int32_t w = 0; w < n; ++w) shared->sum += shared->cells[w * 8];
    ctx->barrier(ctx);
    shared->cells[me * 8] = 0;
  });
  return 0;
}

struct Caller {
  Pool* pool;
  Shared* shared;
  int32_t rounds;
  bool idle;
};

void* call(void* argument) {
  const Caller& caller = *static_cast<Caller*>(argument);
  for (int32_t round = 0; round < caller.rounds; ++round) {
    TVMFFIAny args[3] = {};
    args[0].v_ptr = k3_pool_context(caller.pool);
    args[1].v_ptr = caller.shared;
    args[2].v_int64 = 1 + round % kWorkers;
    int64_t count = 0;
    const K3Launch launches[2] = {{kernel, args, 3, &count}, {kernel, args, 3, &count}};
    char error[64];
    if (k3_replay(caller.pool, launches, 2, nullptr, error, sizeof(error)) != -1 || count != 2) _exit(3);
    if (caller.idle && round % 8 == 0) usleep(300);  // longer than the idle spin: helpers go to sleep
  }
  return nullptr;
}

}  // namespace

int main() {
  constexpr int32_t kRounds = 400;
  Pool* pool = k3_pool_create(kWorkers, 50);
  if (!pool) return 2;
  Shared shared = {};
  Caller callers[2] = {{pool, &shared, kRounds, true}, {pool, &shared, kRounds, false}};
  pthread_t threads[2];
  for (int i = 0; i < 2; ++i) pthread_create(&threads[i], nullptr, call, &callers[i]);
  for (pthread_t thread : threads) pthread_join(thread, nullptr);
  int64_t expected = 0;  // a region of n workers adds n
  for (int32_t round = 0; round < kRounds; ++round) expected += 2 * 2 * (1 + round % kWorkers);
  k3_pool_destroy(pool);
  printf("%s\n", shared.sum == expected ? "ok" : "wrong sum");
  return shared.sum == expected ? 0 : 1;
}
