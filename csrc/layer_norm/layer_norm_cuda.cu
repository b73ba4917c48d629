// LayerNorm that keeps its output. Least bytes per element in 16-bit types: forward 4, backward 6; and 4 bytes a row each way.
#include "layer_norm/layer_norm_rows.cuh"

namespace tempo {
namespace cuda {
namespace {

constexpr int kChoiceThreads = 256;

// |beta / gamma| of a column, the worst first; infinite where it is not a number.
__device__ inline float badness(Parameter gamma, Parameter beta, float min_gamma, int64_t column) {
  const float g = fabsf(load1(gamma, column)), ratio = fabsf(load1(beta, column)) / g;
  return g >= min_gamma && ratio >= 0.0f ? ratio : INFINITY;
}

// A thread counts how many columns are worse than its own: that is its column's place, if it is among the first.
__global__ void __launch_bounds__(kChoiceThreads)
    exact_columns_kernel(Parameter gamma, Parameter beta, float min_gamma, int64_t* chosen, int64_t num_chosen, int64_t num_columns) {
  CU_SHARED(float, others, [kChoiceThreads]);
  const int64_t mine = (int64_t)blockIdx.x * kChoiceThreads + threadIdx.x;
  const float bad = mine < num_columns ? badness(gamma, beta, min_gamma, mine) : 0.0f;
  int64_t place = 0;
  for (int64_t start = 0; start < num_columns; start += kChoiceThreads) {
    const int64_t count = num_columns - start < kChoiceThreads ? num_columns - start : (int64_t)kChoiceThreads;
    __syncthreads();
    if (threadIdx.x < count) others[threadIdx.x] = badness(gamma, beta, min_gamma, start + threadIdx.x);
    __syncthreads();
    for (int k = 0; k < (int)count; ++k) place += others[k] > bad || (others[k] == bad && start + k < mine);
  }
  if (mine < num_columns && place < num_chosen) chosen[place] = mine;
}

}  // namespace

int layer_norm_exact_columns(Parameter gamma, Parameter beta, float min_gamma, int64_t* chosen, int64_t num_chosen,
                             int64_t num_columns, void* stream) {
  const unsigned grid = grid_size(num_columns, kChoiceThreads);
  if (grid == 0) return (int)cudaErrorInvalidValue;
  CU_LAUNCH(exact_columns_kernel, dim3(grid), dim3(kChoiceThreads), 0, (cudaStream_t)stream, gamma, beta, min_gamma, chosen,
            num_chosen, num_columns);
  return (int)cudaGetLastError();
}

int layer_norm_forward(int dtype, const void* x, Parameter gamma, Parameter beta, float eps, void* y, float* rstd,
                       void* exact_x_hat, const LayerNormShape& shape, int64_t num_rows, void* stream) {
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    NormForward<T> a = {};
    a.x = (const T*)x, a.gamma = gamma, a.beta = beta, a.eps = eps;
    a.y = (T*)y, a.rstd = rstd, a.exact_x_hat = (T*)exact_x_hat, a.shape = shape, a.num_rows = num_rows;
    return launch_norm_forward<T, false>(a, stream);
  });
}

int64_t layer_norm_num_partials(int64_t num_rows, int64_t num_columns) { return backward_blocks(num_rows, num_columns); }

int layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, Parameter gamma, Parameter beta,
                        const void* exact_x_hat, void* dx, ParameterGradient dgamma, ParameterGradient dbeta, float* partial,
                        int64_t num_partials, const LayerNormShape& shape, int64_t num_rows, void* stream) {
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    NormBackward<T> a = {};
    a.grad = (const T*)grad, a.y = (const T*)y, a.exact_x_hat = (const T*)exact_x_hat, a.rstd = rstd;
    a.gamma = gamma, a.beta = beta, a.dx = (T*)dx, a.partial = partial, a.shape = shape, a.num_rows = num_rows;
    return launch_norm_backward<T, false>(a, num_partials, dgamma, dbeta, ParameterGradient{}, stream);
  });
}

}  // namespace cuda
}  // namespace tempo
