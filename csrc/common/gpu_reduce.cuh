// Sums and maxima over the lanes of a warp and over the threads of a block; every thread gets the result.
#pragma once
#include "common/gpu.h"

namespace tempo {
namespace cuda {

// Over each group of kLanes neighbouring lanes. All lanes of the warp take part.
template <int kLanes>
__device__ inline float lane_sum(float v) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// Of lanes that are not NaN.
template <int kLanes>
__device__ inline float lane_max(float v) {
#pragma unroll
  for (int d = kLanes / 2; d > 0; d /= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

// Scratch: one pair a warp. A scratch may be written again once every thread has passed another barrier.
using WarpPairs = float2[kWarp];

__device__ inline float2 block_sum(float a, float b, WarpPairs& scratch) {
  a = lane_sum<kWarp>(a), b = lane_sum<kWarp>(b);
  const int num_warps = (int)(blockDim.x + kWarp - 1) / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = make_float2(a, b);
  __syncthreads();
  float2 sum = make_float2(0.0f, 0.0f);
  for (int w = 0; w < num_warps; ++w) sum.x += scratch[w].x, sum.y += scratch[w].y;
  return sum;
}

__device__ inline float block_max(float v, WarpPairs& scratch) {
  v = lane_max<kWarp>(v);
  const int num_warps = (int)(blockDim.x + kWarp - 1) / kWarp;
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp].x = v;
  __syncthreads();
  float largest = scratch[0].x;
  for (int w = 1; w < num_warps; ++w) largest = fmaxf(largest, scratch[w].x);
  return largest;
}

}  // namespace cuda
}  // namespace tempo
