// LayerNorm that keeps its output, with or without bias + dropout + residual before it, forward and backward. The method is
// described in tempo/layer_norm.py.
//
// A thread holds vectors of 8 neighbouring columns in registers. Where the columns are no multiple of 8, too many, or a tensor is
// not aligned, slower kernels that loop over single elements take over.
#pragma once
#include "common/gpu_philox.cuh"
#include "common/gpu_reduce.cuh"
#include "common/gpu_vector.cuh"
#include "layer_norm/layer_norm.h"

namespace tempo {
namespace cuda {
namespace {

// What lies before the LayerNorm: LayerNorm(x), or LayerNorm(residual + dropout(x + x_bias)).
template <class T>
struct NormForward {
  const T* x;
  const T* residual;
  Parameter x_bias, gamma, beta;
  DeviceDropout draw;
  float eps;
  T* y;
  float* rstd;
  T* exact_x_hat;
  LayerNormShape shape;
  int64_t num_rows;
};

template <class T>
struct NormBackward {
  const T *grad, *y, *exact_x_hat;
  const float* rstd;
  Parameter gamma, beta;
  DeviceDropout draw;
  T* dx;         // null where nothing is dropped and there is a residual: its gradient is that of x
  T* dresidual;  // null where there is no residual
  float* partial;  // [blocks, sums, columns]
  LayerNormShape shape;
  int64_t num_rows;
};

constexpr int kGroups = 4;            // vectors a thread of the forward pass holds: 32 values
constexpr int kForwardThreads = 256;  // of a block, where a row takes more than a warp
constexpr int kMaxBackwardThreads = 512;
constexpr int kGeneralThreads = 256;

// ---- forward ----

template <class T, bool kResidual>
__device__ inline float input1(const NormForward<T>& a, const Mask& mask, int64_t row, int64_t column) {
  const int64_t i = row * a.shape.num_columns + column;
  float v = to_float(a.x[i]);
  if (!kResidual) return v;
  v += load1(a.x_bias, column);
  if (mask.drops) v = mask.drop1(v, (uint64_t)i);
  return v + to_float(a.residual[i]);
}

template <class T, bool kResidual>
__device__ inline void input8(const NormForward<T>& a, const Mask& mask, int64_t row, int64_t column, float (&v)[kVector]) {
  const int64_t i = row * a.shape.num_columns + column;
  load8(a.x + i, v);
  if (!kResidual) return;
  float other[kVector];
  load8(a.x_bias, column, other);
#pragma unroll
  for (int k = 0; k < kVector; ++k) v[k] += other[k];
  load8(a.residual + i, other);
  if (mask.drops) mask.drop8(v, (uint64_t)i);
#pragma unroll
  for (int k = 0; k < kVector; ++k) v[k] += other[k];
}

// A row is worked on by a warp or by a block.
template <bool kWarpPerRow>
__device__ inline float row_sum(float v, WarpPairs& scratch) {
  return kWarpPerRow ? lane_sum<kWarp>(v) : block_sum(v, 0.0f, scratch).x;
}

template <class T, bool kResidual>
__device__ inline void keep_exact_columns(const NormForward<T>& a, const Mask& mask, int64_t row, float mean, float rstd, int thread,
                                          int threads) {
  for (int64_t k = thread; k < a.shape.num_exact_columns; k += threads) {
    const int64_t column = a.shape.exact_columns[k];
    if ((uint64_t)column >= (uint64_t)a.shape.num_columns) continue;
    const float x_hat = (input1<T, kResidual>(a, mask, row, column) - mean) * rstd;
    a.exact_x_hat[row * a.shape.num_exact_columns + k] = from_float<T>(x_hat);
  }
}

template <class T, bool kResidual, bool kWarpPerRow>
__global__ void __launch_bounds__(kWarpPerRow ? 4 * kWarp : kForwardThreads, 2) norm_forward_kernel(NormForward<T> a) {
  CU_SHARED(WarpPairs, scratch, [2]);
  constexpr int kThreads = kWarpPerRow ? kWarp : kForwardThreads;  // of a row
  const int64_t row = kWarpPerRow ? (int64_t)blockIdx.x * 4 + threadIdx.x / kWarp : (int64_t)blockIdx.x;
  if (row >= a.num_rows) return;  // whole warps, and whole blocks where a block does a row
  const int thread = (int)threadIdx.x % kThreads, columns = (int)a.shape.num_columns;
  const Mask mask(a.draw);

  float v[kGroups][kVector], sum = 0.0f, square = 0.0f;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = (g * kThreads + thread) * kVector;
    if (column >= columns) continue;
    input8<T, kResidual>(a, mask, row, column, v[g]);
#pragma unroll
    for (int k = 0; k < kVector; ++k) sum += v[g][k];
  }
  const float mean = row_sum<kWarpPerRow>(sum, scratch[0]) / (float)columns;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if ((g * kThreads + thread) * kVector >= columns) continue;
#pragma unroll
    for (int k = 0; k < kVector; ++k) square += (v[g][k] - mean) * (v[g][k] - mean);
  }
  const float rstd = rsqrtf(row_sum<kWarpPerRow>(square, scratch[1]) / (float)columns + a.eps);
  if (thread == 0) a.rstd[row] = rstd;
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int column = (g * kThreads + thread) * kVector;
    if (column >= columns) continue;
    float gamma[kVector], beta[kVector];
    load8(a.gamma, column, gamma);
    load8(a.beta, column, beta);
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[g][k] = fmaf((v[g][k] - mean) * rstd, gamma[k], beta[k]);
    store8(a.y + row * columns + column, v[g]);
  }
  keep_exact_columns<T, kResidual>(a, mask, row, mean, rstd, thread, kThreads);
}

// Any number of columns, any alignment; a block does a row, and goes over it three times.
template <class T, bool kResidual>
__global__ void __launch_bounds__(kGeneralThreads, 1) norm_forward_general_kernel(NormForward<T> a) {
  CU_SHARED(WarpPairs, scratch, [2]);
  const int64_t row = blockIdx.x, columns = a.shape.num_columns;
  const int thread = (int)threadIdx.x;
  const Mask mask(a.draw);
  float sum = 0.0f, square = 0.0f;
  for (int64_t c = thread; c < columns; c += kGeneralThreads) sum += input1<T, kResidual>(a, mask, row, c);
  const float mean = block_sum(sum, 0.0f, scratch[0]).x / (float)columns;
  for (int64_t c = thread; c < columns; c += kGeneralThreads) {
    const float centred = input1<T, kResidual>(a, mask, row, c) - mean;
    square += centred * centred;
  }
  const float rstd = rsqrtf(block_sum(square, 0.0f, scratch[1]).x / (float)columns + a.eps);
  if (thread == 0) a.rstd[row] = rstd;
  for (int64_t c = thread; c < columns; c += kGeneralThreads) {
    const float x_hat = (input1<T, kResidual>(a, mask, row, c) - mean) * rstd;
    a.y[row * columns + c] = from_float<T>(fmaf(x_hat, load1(a.gamma, c), load1(a.beta, c)));
  }
  keep_exact_columns<T, kResidual>(a, mask, row, mean, rstd, thread, kGeneralThreads);
}

template <class T, bool kResidual>
int launch_norm_forward(const NormForward<T>& a, void* stream) {
  const int64_t columns = a.shape.num_columns;
  bool vectors = columns % kVector == 0 && columns <= kForwardThreads * kGroups * kVector && is_aligned(a.x) && is_aligned(a.y) &&
                 is_aligned(a.gamma.data) && is_aligned(a.beta.data);
  if (kResidual) vectors = vectors && is_aligned(a.residual) && is_aligned(a.x_bias.data);
  const int64_t rows = a.num_rows;
  if (!vectors) return launch(&norm_forward_general_kernel<T, kResidual>, rows, 1, kGeneralThreads, stream, a);
  if (columns > kWarp * kGroups * kVector)
    return launch(&norm_forward_kernel<T, kResidual, false>, rows, 1, kForwardThreads, stream, a);
  return launch(&norm_forward_kernel<T, kResidual, true>, rows, 4, 4 * kWarp, stream, a);
}

// ---- backward ----
//
// A block does every gridDim-th row. A thread has the same columns in each, sums their part of the parameters' gradients in
// registers, and writes them to the block's row of `partial`; a second kernel adds those up in order.

// 0 for gamma = 0: in more columns than are kept it must not spread NaN over the row.
__device__ inline float safe_inverse(float gamma) { return fabsf(gamma) < 1.17549435e-38f ? 0.0f : 1.0f / gamma; }

// Where x_hat of a column is kept, or -1.
__device__ inline int exact_index(const LayerNormShape& shape, int64_t column) {
  int found = -1;
  for (int64_t k = 0; k < shape.num_exact_columns; ++k)
    if (shape.exact_columns[k] == column) found = (int)k;
  return found;
}

template <bool kResidual>
constexpr int kNumSums = kResidual ? 3 : 2;  // gamma, beta, and the bias of x

template <class T, bool kResidual>
__global__ void __launch_bounds__(kMaxBackwardThreads) norm_backward_kernel(NormBackward<T> a) {
  CU_SHARED(WarpPairs, scratch, [2]);
  CU_SHARED(short, exact, [kMaxBackwardThreads][kVector]);
  const int columns = (int)a.shape.num_columns, column = (int)threadIdx.x * kVector;
  const Mask mask(a.draw);
  const bool active = column < columns;
  float gamma[kVector], beta[kVector], inverse[kVector], dgamma[kVector] = {}, dbeta[kVector] = {};
  float dx_bias[kResidual ? kVector : 1] = {};
  bool has_exact = false;
  if (active) {
    load8(a.gamma, column, gamma);
    load8(a.beta, column, beta);
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      inverse[k] = safe_inverse(gamma[k]);
      const int kept = exact_index(a.shape, column + k);
      exact[threadIdx.x][k] = (short)kept;
      has_exact = has_exact || kept >= 0;
    }
  }

  Packed<T> next_grad = {}, next_y = {};
  if (active && blockIdx.x < a.num_rows) {
    next_grad = load_packed(a.grad + (int64_t)blockIdx.x * columns + column);
    next_y = load_packed(a.y + (int64_t)blockIdx.x * columns + column);
  }
  int parity = 0;
  for (int64_t row = blockIdx.x; row < a.num_rows; row += gridDim.x, parity ^= 1) {
    float dy[kVector] = {}, scaled[kVector] = {}, x_hat[kVector] = {}, sum = 0.0f, sum_x_hat = 0.0f;
    if (active) {
      unpack(next_grad, dy);
      unpack(next_y, scaled);
      // The next row's loads are under way while this one is computed.
      const int64_t next = row + gridDim.x;
      if (next < a.num_rows) {
        next_grad = load_packed(a.grad + next * columns + column);
        next_y = load_packed(a.y + next * columns + column);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        scaled[k] -= beta[k];  // gamma * x_hat, which does not see the error of a division
        x_hat[k] = scaled[k] * inverse[k];
      }
      if (has_exact) {
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          const int kept = exact[threadIdx.x][k];
          if (kept < 0) continue;
          x_hat[k] = to_float(a.exact_x_hat[row * a.shape.num_exact_columns + kept]);
          scaled[k] = x_hat[k] * gamma[k];
        }
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        sum = fmaf(dy[k], gamma[k], sum);
        sum_x_hat = fmaf(dy[k], scaled[k], sum_x_hat);
      }
    }
    const float2 sums = block_sum(sum, sum_x_hat, scratch[parity]);
    if (!active) continue;
    const float mean = sums.x / (float)columns, mean_x_hat = sums.y / (float)columns, rstd = a.rstd[row];
    const int64_t i = row * columns + column;
    float dx[kVector];
#pragma unroll
    for (int k = 0; k < kVector; ++k) {
      dgamma[k] = fmaf(dy[k], x_hat[k], dgamma[k]);
      dbeta[k] += dy[k];
      dx[k] = (fmaf(dy[k], gamma[k], -mean) - x_hat[k] * mean_x_hat) * rstd;
    }
    if (kResidual) {
      store8(a.dresidual + i, dx);
      if (mask.drops) {
        mask.drop8(dx, (uint64_t)i);
        store8(a.dx + i, dx);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) dx_bias[k % (kResidual ? kVector : 1)] += dx[k];
    } else {
      store8(a.dx + i, dx);
    }
  }
  if (!active) return;
  float* partial = a.partial + (int64_t)blockIdx.x * kNumSums<kResidual> * columns + column;
  store8(partial, dgamma);
  store8(partial + columns, dbeta);
  if constexpr (kResidual) store8(partial + 2 * columns, dx_bias);
}

// Any number of columns, any alignment. The sums of a block are in its row of `partial` from the start.
template <class T, bool kResidual>
__global__ void __launch_bounds__(kGeneralThreads, 1) norm_backward_general_kernel(NormBackward<T> a) {
  CU_SHARED(WarpPairs, scratch, [2]);
  const int64_t columns = a.shape.num_columns;
  const Mask mask(a.draw);
  float* partial = a.partial + (int64_t)blockIdx.x * kNumSums<kResidual> * columns;
  for (int64_t c = threadIdx.x; c < columns; c += kGeneralThreads)
    for (int s = 0; s < kNumSums<kResidual>; ++s) partial[s * columns + c] = 0.0f;
  int parity = 0;
  for (int64_t row = blockIdx.x; row < a.num_rows; row += gridDim.x, parity ^= 1) {
    const T *grad = a.grad + row * columns, *y = a.y + row * columns;
    const T* exact = a.exact_x_hat + row * a.shape.num_exact_columns;
    float sum = 0.0f, sum_x_hat = 0.0f;
    for (int64_t c = threadIdx.x; c < columns; c += kGeneralThreads) {
      const float dy = to_float(grad[c]), gamma = load1(a.gamma, c);
      const int kept = exact_index(a.shape, c);
      sum = fmaf(dy, gamma, sum);
      sum_x_hat = fmaf(dy, kept < 0 ? to_float(y[c]) - load1(a.beta, c) : to_float(exact[kept]) * gamma, sum_x_hat);
    }
    const float2 sums = block_sum(sum, sum_x_hat, scratch[parity]);
    const float mean = sums.x / (float)columns, mean_x_hat = sums.y / (float)columns, rstd = a.rstd[row];
    for (int64_t c = threadIdx.x; c < columns; c += kGeneralThreads) {
      const int64_t i = row * columns + c;
      const float dy = to_float(grad[c]), gamma = load1(a.gamma, c);
      const int kept = exact_index(a.shape, c);
      const float x_hat = kept < 0 ? (to_float(y[c]) - load1(a.beta, c)) * safe_inverse(gamma) : to_float(exact[kept]);
      float dx = (fmaf(dy, gamma, -mean) - x_hat * mean_x_hat) * rstd;
      partial[c] = fmaf(dy, x_hat, partial[c]);
      partial[columns + c] += dy;
      if (kResidual) {
        a.dresidual[i] = from_float<T>(dx);
        if (mask.drops) {
          dx = mask.drop1(dx, (uint64_t)i);
          a.dx[i] = from_float<T>(dx);
        }
        partial[2 * columns + c] += dx;
      } else {
        a.dx[i] = from_float<T>(dx);
      }
    }
  }
}

constexpr int kSumColumns = 32, kSumRows = 8;

// One column of one sum: 8 threads each add every 8th block's part, then the 8 are added.
template <int kSums>
__global__ void __launch_bounds__(kSumColumns* kSumRows) add_partials_kernel(const float* partial, int64_t num_partials,
                                                                             int64_t columns, ParameterGradient out_0,
                                                                             ParameterGradient out_1, ParameterGradient out_2) {
  CU_SHARED(float, parts, [kSumRows][kSumColumns + 1]);
  const int64_t i = (int64_t)blockIdx.x * kSumColumns + threadIdx.x, width = kSums * columns;
  float sum = 0.0f;
  if (i < width)
    for (int64_t p = threadIdx.y; p < num_partials; p += kSumRows) sum += partial[p * width + i];
  parts[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || i >= width) return;
  for (int r = 1; r < kSumRows; ++r) sum += parts[r][threadIdx.x];
  if (i < columns)
    store1(out_0, i, sum);
  else if (i < 2 * columns)
    store1(out_1, i - columns, sum);
  else
    store1(out_2, i - 2 * columns, sum);
}

inline int backward_threads(int64_t columns) { return (int)((columns / kVector + kWarp - 1) / kWarp * kWarp); }

inline bool backward_takes_vectors(int64_t columns) { return columns % kVector == 0 && columns <= kMaxBackwardThreads * kVector; }

// Enough blocks to fill the device, as far as there are rows: registers allow 512 threads a multiprocessor.
inline int64_t backward_blocks(int64_t num_rows, int64_t columns) {
  const int threads = backward_takes_vectors(columns) ? backward_threads(columns) : kGeneralThreads;
  const int64_t blocks = (int64_t)num_multiprocessors() * (512 / threads > 1 ? 512 / threads : 1);
  return blocks < num_rows ? blocks : num_rows;
}

template <class T, bool kResidual>
int launch_norm_backward(const NormBackward<T>& a, int64_t num_partials, ParameterGradient dgamma, ParameterGradient dbeta,
                         ParameterGradient dx_bias, void* stream) {
  const int64_t columns = a.shape.num_columns;
  bool vectors = backward_takes_vectors(columns) && is_aligned(a.grad) && is_aligned(a.y) && is_aligned(a.gamma.data) &&
                 is_aligned(a.beta.data) && is_aligned(a.dx) && is_aligned(a.dresidual) && a.shape.num_exact_columns < 0x7fff;
  if (num_partials <= 0 || num_partials > a.num_rows) return (int)cudaErrorInvalidValue;
  const dim3 grid((unsigned)num_partials);
  if (vectors)
    CU_LAUNCH((norm_backward_kernel<T, kResidual>), grid, dim3((unsigned)backward_threads(columns)), 0, (cudaStream_t)stream, a);
  else
    CU_LAUNCH((norm_backward_general_kernel<T, kResidual>), grid, dim3(kGeneralThreads), 0, (cudaStream_t)stream, a);
  const int error = (int)cudaGetLastError();
  if (error != 0) return error;
  const unsigned sum_grid = grid_size(kNumSums<kResidual> * columns, kSumColumns);
  CU_LAUNCH(add_partials_kernel<kNumSums<kResidual>>, dim3(sum_grid), dim3(kSumColumns, kSumRows), 0, (cudaStream_t)stream,
            (const float*)a.partial, num_partials, columns, dgamma, dbeta, dx_bias);
  return (int)cudaGetLastError();
}

}  // namespace
}  // namespace cuda
}  // namespace tempo
