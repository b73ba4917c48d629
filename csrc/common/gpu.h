// The one door to CUDA for kernel files: the CUDA runtime, or (-DCUEMU) its emulation on the CPU in tests/cuda_emulation.
//
// Kernels launch through CU_LAUNCH and declare shared arrays through CU_SHARED. What has no emulation (inline PTX) stands
// behind #ifndef CUEMU with a plain alternative. Nothing here needs more than sm_70.
#pragma once
#ifdef CUEMU
#include "cuemu.h"
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define CU_LAUNCH(kernel, grid, block, smem, stream, ...) kernel<<<grid, block, smem, stream>>>(__VA_ARGS__)
#define CU_SHARED(type, name, dims) __shared__ type name dims
#endif
#include <stdint.h>

#include <type_traits>

#include "common/kernels.h"

namespace tempo {
namespace cuda {

constexpr int kWarp = 32;
// A thread works on this many neighbouring elements: one 16-byte access in 16-bit types, two in float.
constexpr int kVector = 8;

// Calls f with a null pointer of the element type that dtype names.
template <class F>
int by_dtype(int dtype, F f) {
  switch (dtype) {
    case kFloat: return f(static_cast<float*>(nullptr));
    case kBFloat16: return f(static_cast<__nv_bfloat16*>(nullptr));
    case kHalf: return f(static_cast<__half*>(nullptr));
    default: return (int)cudaErrorInvalidValue;
  }
}
template <class Tag>
using element_type = std::remove_pointer_t<Tag>;

inline bool is_aligned(const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; }

// Blocks of a grid for `count` items; 0 where it would not be launchable.
inline unsigned grid_size(int64_t count, int64_t per_block) {
  const int64_t blocks = (count + per_block - 1) / per_block;
  return blocks <= 0x7fffffff ? (unsigned)blocks : 0u;
}

// The special function unit's own instructions: within 1 or 2 units in the last place (the logarithm: of the result's magnitude
// or 2^-22, whichever is larger), subnormal numbers as 0, without the instructions around them that C's functions need.
#ifdef CUEMU
__device__ inline float fast_sqrt(float x) { return sqrtf(x); }
__device__ inline float fast_exp2(float x) { return exp2f(x); }
__device__ inline float fast_log2(float x) { return log2f(x); }
__device__ inline float fast_reciprocal(float x) { return 1.0f / x; }
#else
#define TEMPO_FAST(name, instruction)                       \
  __device__ inline float name(float x) {                   \
    float y;                                                \
    asm(instruction ".ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); \
    return y;                                               \
  }
TEMPO_FAST(fast_sqrt, "sqrt.approx")
TEMPO_FAST(fast_exp2, "ex2.approx")
TEMPO_FAST(fast_log2, "lg2.approx")
TEMPO_FAST(fast_reciprocal, "rcp.approx")
#undef TEMPO_FAST
#endif

// Launches the blocks that `count` items need, and returns the error if there is one.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), int64_t count, int64_t per_block, int threads, void* stream, Arguments... arguments) {
  const unsigned grid = grid_size(count, per_block);
  if (grid == 0) return (int)cudaErrorInvalidValue;
  CU_LAUNCH(kernel, dim3(grid), dim3((unsigned)threads), 0, (cudaStream_t)stream, arguments...);
  return (int)cudaGetLastError();
}

}  // namespace cuda
}  // namespace tempo
