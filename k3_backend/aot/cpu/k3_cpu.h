// Calling convention of specialised CPU kernels. PROTECTED: kernels include it, only the launcher defines it.
//
// A kernel object exports one symbol per op, `__tvm_ffi_<op>`, with apache-tvm-ffi's packed C signature. Arguments, in
// order: args[0] launch context (opaque pointer), the op's tensors (DLTensor pointers, None where an optional one is
// absent), the op's attributes (int or float), then the schedule's tunables (int) in the order in which the kernel's
// `cpu.toml` declares them. The caller owns every buffer. A kernel keeps no state between calls, allocates nothing,
// starts no thread: it forks over the context's workers and takes temporary memory from the context's scratch.
//
// An object has no constructors and may leave undefined only the symbols that `harness.toml` lists for the audit gate.
#pragma once

#include <tvm/ffi/c_api.h>

#include <stddef.h>
#include <stdint.h>

#define K3_ABI_VERSION 1

extern "C" {

// Body of a parallel region; runs once per worker, worker in [0, workers).
typedef void (*K3Body)(void* closure, int32_t worker, int32_t workers);

typedef struct K3Context {
  int32_t abi_version;
  int32_t max_workers;  // workers that `parallel` can use, caller included
  // Runs body on `workers` (clamped to max_workers) workers and returns when all have finished.
  void (*parallel)(const struct K3Context* ctx, int32_t workers, K3Body body, void* closure);
  // Inside a parallel region: waits until all its workers arrive; orders their memory accesses.
  void (*barrier)(const struct K3Context* ctx);
  void* scratch;          // 64-byte aligned, content undefined at entry, not preserved
  int64_t scratch_bytes;  // at least K3_SCRATCH_BYTES
  void* pool;             // the launcher's own
} K3Context;

}  // extern "C"

#define K3_SCRATCH_BYTES (int64_t(8) << 20)

#define K3_EXPORT(op) \
  extern "C" __attribute__((visibility("default"))) int __tvm_ffi_##op(void*, const TVMFFIAny* args, int32_t num_args, TVMFFIAny* result)

namespace k3 {

// Reads the packed arguments front to back; each accessor checks the kind and returns a plain value.
class Args {
 public:
  Args(const TVMFFIAny* args, int32_t count, TVMFFIAny* result) : at_(args), end_(args + count) {
    result->type_index = kTVMFFINone;
    result->zero_padding = 0;
    result->v_int64 = 0;
  }

  const K3Context* context() {
    const TVMFFIAny* a = next(kTVMFFIOpaquePtr);
    const K3Context* ctx = a ? static_cast<const K3Context*>(a->v_ptr) : nullptr;
    if (!ctx || ctx->abi_version != K3_ABI_VERSION) fail("launch context has another ABI version");
    return ctx;
  }

  // Tensor data with the given element size in bytes and number of dimensions; null if absent.
  template <typename T>
  T* tensor(int32_t ndim, int64_t* shape = nullptr) {
    if (at_ < end_ && at_->type_index == kTVMFFINone) {
      ++at_;
      return nullptr;
    }
    const DLTensor* t = dltensor();
    if (!t) return nullptr;
    if (t->ndim != ndim || (t->dtype.bits + 7) / 8 != int(sizeof(T))) {
      fail("tensor has another rank or element size than the op's interface");
      return nullptr;
    }
    for (int32_t i = 0; shape && i < ndim; ++i) shape[i] = t->shape[i];
    return reinterpret_cast<T*>(static_cast<char*>(t->data) + t->byte_offset);
  }

  int64_t integer() {
    const TVMFFIAny* a = next(kTVMFFIInt);
    return a ? a->v_int64 : 0;
  }

  float real() {
    const TVMFFIAny* a = next(kTVMFFIFloat);
    return a ? float(a->v_float64) : 0.0f;
  }

  void fail(const char* why) {
    if (!error_) error_ = why;
  }

  // Call after the last accessor: 0 if every argument was there and none is left, else raises and returns -1.
  int finish() {
    if (!error_ && at_ != end_) error_ = "more arguments than the op's interface and the kernel's tunables name";
    if (!error_) return 0;
    TVMFFIErrorSetRaisedFromCStr("ValueError", error_);
    return -1;
  }

 private:
  const TVMFFIAny* next(int32_t type_index) {
    if (at_ >= end_ || at_->type_index != type_index) {
      fail(at_ >= end_ ? "fewer arguments than the op's interface and the kernel's tunables name"
                       : "argument has another kind than the op's interface");
      return nullptr;
    }
    return at_++;
  }

  const DLTensor* dltensor() {
    if (at_ < end_ && at_->type_index == kTVMFFIDLTensorPtr) return static_cast<const DLTensor*>((at_++)->v_ptr);
    if (at_ < end_ && at_->type_index == kTVMFFITensor)
      return reinterpret_cast<const DLTensor*>(reinterpret_cast<const char*>((at_++)->v_obj) + sizeof(TVMFFIObject));
    fail("expected a tensor");
    return nullptr;
  }

  const TVMFFIAny* at_;
  const TVMFFIAny* end_;
  const char* error_ = nullptr;
};

// Runs `body(worker, workers)` on the context's workers.
template <typename F>
inline void parallel(const K3Context* ctx, int32_t workers, F&& body) {
  if (workers <= 1) {
    body(0, 1);
    return;
  }
  ctx->parallel(
      ctx, workers, [](void* f, int32_t w, int32_t n) { (*static_cast<F*>(f))(w, n); }, const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace k3
