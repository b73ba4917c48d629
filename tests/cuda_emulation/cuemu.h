// cuemu: run CUDA C++ device code on the CPU, one fiber per CUDA thread.
//
// A translation unit compiled with -DCUEMU includes this file instead of <cuda_runtime.h>. Kernel
// source stays the same apart from three macros, which csrc/gpu.h defines for both compilers:
//   CU_LAUNCH(kernel, grid, block, smem_bytes, stream, args...)
//   CU_SHARED(type, name, [dims])     static shared array
//   CU_DYN_SHARED(type, name)         dynamic shared array
// Blocks run one after another; the threads of a block are fibers which switch only at barriers and
// warp collectives, in an order chosen by CUEMU_ORDER = fwd | rev | rand:<seed>.
// Launch and synchronisation errors are printed, kept for cuemu_error(), and returned by
// cudaGetLastError().
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <driver_types.h>
#include <vector_functions.h>
#include <vector_types.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <tuple>
#include <type_traits>

#undef __shared__
#undef __global__
#undef __device__
#undef __host__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __shared__ static  // works, but has neither red zones nor poison: prefer CU_SHARED
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __launch_bounds__(...)
#define __grid_constant__
#define warpSize 32

namespace cuemu {

enum class Op : uint8_t { syncwarp, shfl_idx, shfl_up, shfl_down, shfl_xor, ballot, any, all, match_any };
enum class BarOp : uint8_t { sync, count, all, any };

struct Site {
  const char* file;
  int line;
};

struct Thread {  // the part of a CUDA thread's state which kernels may read
  uint3 tid;
  unsigned lane;
};

extern Thread* cur;
extern uint3 block_idx;
extern dim3 block_dim, grid_dim;

void run_grid(dim3 grid, dim3 block, size_t dyn_smem, const void* kernel, void (*body)(void*), void* arg);
uint64_t warp_op(Op op, unsigned mask, uint64_t value, int arg, int width, Site site);
int block_barrier(BarOp op, int pred, Site site);
void* static_shared(const void* tag, size_t bytes);
void* dynamic_shared();
void threadfence();
void set_max_dynamic_shared(const void* kernel, int bytes);

template <class... P, class... A>
void launch(void (*kernel)(P...), dim3 grid, dim3 block, size_t smem, cudaStream_t, A&&... args) {
  struct Call {
    void (*kernel)(P...);
    std::tuple<P...> args;
  } call{kernel, std::tuple<P...>(static_cast<P>(args)...)};  // arguments are evaluated once, as in CUDA
  run_grid(grid, block, smem, reinterpret_cast<const void*>(kernel), [](void* p) {
    auto* c = static_cast<Call*>(p);
    std::apply(c->kernel, c->args);
  }, &call);
}

template <class T>
T shuffle(Op op, unsigned mask, T v, int arg, int width, Site site) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "shuffle: 8 bytes at most");
  uint64_t bits = 0;
  std::memcpy(&bits, &v, sizeof v);
  bits = warp_op(op, mask, bits, arg, width, site);
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

}  // namespace cuemu

#define threadIdx (::cuemu::cur->tid)
#define blockIdx (::cuemu::block_idx)
#define blockDim (::cuemu::block_dim)
#define gridDim (::cuemu::grid_dim)

#define CU_LAUNCH(kernel, grid, block, smem, stream, ...) \
  ::cuemu::launch(kernel, grid, block, smem, stream __VA_OPT__(, ) __VA_ARGS__)
#define CU_SHARED(type, name, dims)   \
  static const char name##_tag_ = 0;  \
  typedef type name##_array_ dims;    \
  auto& name = *static_cast<name##_array_*>(::cuemu::static_shared(&name##_tag_, sizeof(name##_array_)))
#define CU_DYN_SHARED(type, name) type* name = static_cast<type*>(::cuemu::dynamic_shared())

// ---- barriers and warp collectives --------------------------------------------------------------
#define CUEMU_SITE const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()
#define CUEMU_HERE ::cuemu::Site{file_, line_}
inline void __syncthreads(CUEMU_SITE) { cuemu::block_barrier(cuemu::BarOp::sync, 0, CUEMU_HERE); }
inline int __syncthreads_count(int p, CUEMU_SITE) { return cuemu::block_barrier(cuemu::BarOp::count, p, CUEMU_HERE); }
inline int __syncthreads_and(int p, CUEMU_SITE) { return cuemu::block_barrier(cuemu::BarOp::all, p, CUEMU_HERE); }
inline int __syncthreads_or(int p, CUEMU_SITE) { return cuemu::block_barrier(cuemu::BarOp::any, p, CUEMU_HERE); }
inline void __syncwarp(unsigned m = ~0u, CUEMU_SITE) { cuemu::warp_op(cuemu::Op::syncwarp, m, 0, 0, 32, CUEMU_HERE); }
inline unsigned __ballot_sync(unsigned m, int p, CUEMU_SITE) { return (unsigned)cuemu::warp_op(cuemu::Op::ballot, m, p != 0, 0, 32, CUEMU_HERE); }
inline int __any_sync(unsigned m, int p, CUEMU_SITE) { return (int)cuemu::warp_op(cuemu::Op::any, m, p != 0, 0, 32, CUEMU_HERE); }
inline int __all_sync(unsigned m, int p, CUEMU_SITE) { return (int)cuemu::warp_op(cuemu::Op::all, m, p != 0, 0, 32, CUEMU_HERE); }
template <class T> unsigned __match_any_sync(unsigned m, T v, CUEMU_SITE) { uint64_t b = 0; std::memcpy(&b, &v, sizeof v); return (unsigned)cuemu::warp_op(cuemu::Op::match_any, m, b, 0, 32, CUEMU_HERE); }
template <class T> T __shfl_sync(unsigned m, T v, int src, int w = 32, CUEMU_SITE) { return cuemu::shuffle(cuemu::Op::shfl_idx, m, v, src, w, CUEMU_HERE); }
template <class T> T __shfl_up_sync(unsigned m, T v, unsigned d, int w = 32, CUEMU_SITE) { return cuemu::shuffle(cuemu::Op::shfl_up, m, v, (int)d, w, CUEMU_HERE); }
template <class T> T __shfl_down_sync(unsigned m, T v, unsigned d, int w = 32, CUEMU_SITE) { return cuemu::shuffle(cuemu::Op::shfl_down, m, v, (int)d, w, CUEMU_HERE); }
template <class T> T __shfl_xor_sync(unsigned m, T v, int x, int w = 32, CUEMU_SITE) { return cuemu::shuffle(cuemu::Op::shfl_xor, m, v, x, w, CUEMU_HERE); }
inline void __threadfence() { cuemu::threadfence(); }
inline void __threadfence_block() { cuemu::threadfence(); }
[[noreturn]] inline void __trap() { std::fprintf(stderr, "cuemu: __trap()\n"); std::abort(); }

// ---- atomics (fibers never run at once; the builtins are for ThreadSanitizer) ---------------------
template <class T, class F>
T cuemu_rmw(T* p, F f) {
  T old, next;
  __atomic_load(p, &old, __ATOMIC_RELAXED);
  do next = f(old);
  while (!__atomic_compare_exchange(p, &old, &next, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return old;
}
template <class T> struct cuemu_same { using type = T; };
template <class T> using cuemu_arg = typename cuemu_same<T>::type;
template <class T> T atomicAdd(T* p, cuemu_arg<T> v) { return cuemu_rmw(p, [v](T o) { return T(o + v); }); }
template <class T> T atomicMax(T* p, cuemu_arg<T> v) { return cuemu_rmw(p, [v](T o) { return o < v ? v : o; }); }
template <class T> T atomicMin(T* p, cuemu_arg<T> v) { return cuemu_rmw(p, [v](T o) { return v < o ? v : o; }); }
template <class T> T atomicExch(T* p, cuemu_arg<T> v) { return cuemu_rmw(p, [v](T) { return v; }); }
template <class T> T atomicCAS(T* p, cuemu_arg<T> c, cuemu_arg<T> v) { return cuemu_rmw(p, [c, v](T o) { return o == c ? v : o; }); }
template <class T> T atomicOr(T* p, cuemu_arg<T> v) { return cuemu_rmw(p, [v](T o) { return T(o | v); }); }
inline unsigned atomicInc(unsigned* p, unsigned m) { return cuemu_rmw(p, [m](unsigned o) { return o >= m ? 0u : o + 1; }); }

// ---- intrinsics -----------------------------------------------------------------------------------
// <math.h> of glibc declares __expf and friends itself, hence macros.
#define __expf(x) expf(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __powf(x, y) powf(x, y)
#define __fdividef(a, b) ((a) / (b))
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1.0f) : 0.0f; }
template <class To, class From> To cuemu_bits(From v) { To r; static_assert(sizeof r == sizeof v, ""); std::memcpy(&r, &v, sizeof r); return r; }
inline unsigned __float_as_uint(float x) { return cuemu_bits<unsigned>(x); }
inline int __float_as_int(float x) { return cuemu_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return cuemu_bits<float>(x); }
inline float __int_as_float(int x) { return cuemu_bits<float>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((uint64_t)a * b) >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __brev(unsigned x) { unsigned r = 0; for (int i = 0; i < 32; ++i) r |= ((x >> i) & 1u) << (31 - i); return r; }
template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> void __stcs(T* p, cuemu_arg<T> v) { *p = v; }
template <class T> void __stcg(T* p, cuemu_arg<T> v) { *p = v; }
using std::max;
using std::min;

// ---- the few host API calls which launchers use ----------------------------------------------------
extern "C" const char* cuemu_error();
#define cudaGetLastError cuemu_get_last_error
cudaError_t cuemu_get_last_error();
template <class K> cudaError_t cuemu_func_set_attribute(K* k, cudaFuncAttribute a, int v) {
  if (a == cudaFuncAttributeMaxDynamicSharedMemorySize) cuemu::set_max_dynamic_shared(reinterpret_cast<const void*>(k), v);
  return cudaSuccess;
}
#define cudaFuncSetAttribute cuemu_func_set_attribute
