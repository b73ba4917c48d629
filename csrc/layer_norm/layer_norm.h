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
