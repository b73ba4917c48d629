// LayerNorm that keeps its output; the method is described in tempo/layer_norm.py.
#pragma once
#include "common/kernels.h"

namespace tempo {

struct LayerNormShape {
  int64_t num_columns, num_exact_columns;
  const int64_t* exact_columns;
};

}  // namespace tempo

TEMPO_CPU_KERNELS(
    void layer_norm_forward(int dtype, const void* x, const float* gamma, const float* beta, float eps, void* y, float* rstd,
                            void* exact_x_hat, const LayerNormShape& shape, int64_t begin, int64_t end);
    // Adds to dgamma and dbeta, float [num_columns padded].
    void layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, const float* gamma,
                             const float* inverse_gamma, const float* beta, const void* exact_x_hat, void* dx, float* dgamma,
                             float* dbeta, const LayerNormShape& shape, int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

int layer_norm_forward(int dtype, const void* x, Parameter gamma, Parameter beta, float eps, void* y, float* rstd,
                       void* exact_x_hat, const LayerNormShape& shape, int64_t num_rows, void* stream);

// How many rows of partial sums the backward pass of this size wants, on the current device.
int64_t layer_norm_num_partials(int64_t num_rows, int64_t num_columns);

// partial: float [num_partials, 2, num_columns], scratch.
int layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, Parameter gamma, Parameter beta,
                        const void* exact_x_hat, void* dx, ParameterGradient dgamma, ParameterGradient dbeta, float* partial,
                        int64_t num_partials, const LayerNormShape& shape, int64_t num_rows, void* stream);

}  // namespace cuda
}  // namespace tempo
