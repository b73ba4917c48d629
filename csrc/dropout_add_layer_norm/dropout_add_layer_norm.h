// LayerNorm(residual + dropout(x + x_bias)) in one kernel each way; see tempo/dropout_add_layer_norm.py.
#pragma once
#include "common/kernels.h"
#include "layer_norm/layer_norm.h"

namespace tempo {

// What is normalised, on the CPU: x_bias is padded and aligned as gamma is.
struct DropoutAddInput {
  const void *x, *residual;
  const float* x_bias;
  DropoutDraw draw;
};

// dx is not written where draw.threshold is 0: it is dresidual. The three sums are added to, float [padded columns].
struct DropoutAddGradient {
  DropoutDraw draw;
  void *dx, *dresidual;
  float *dx_bias, *dgamma, *dbeta;
};

}  // namespace tempo

// Scratch: row and x_hat float [padded columns], words [columns + kRowPadding].
TEMPO_CPU_KERNELS(
    void dropout_add_layer_norm_forward(int dtype, const DropoutAddInput& in, const LayerNormOutput& out, float* row,
                                        uint32_t* words, int64_t begin, int64_t end);
    void dropout_add_layer_norm_backward(int dtype, const LayerNormGradient& in, const DropoutAddGradient& out, float* x_hat,
                                         uint32_t* words, int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

// draw.threshold 0 drops nothing.
int dropout_add_layer_norm_forward(int dtype, const void* x, Parameter x_bias, const void* residual, Parameter gamma,
                                   Parameter beta, const DeviceDropout& draw, float eps, void* y, float* rstd, void* exact_x_hat,
                                   const LayerNormShape& shape, int64_t num_rows, void* stream);

// dx is not written where draw.threshold is 0: it is dresidual. partial: float [num_partials, 3, num_columns], scratch, with
// num_partials from layer_norm_num_partials.
int dropout_add_layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, Parameter gamma, Parameter beta,
                                    const void* exact_x_hat, const DeviceDropout& draw, void* dx, void* dresidual,
                                    ParameterGradient dx_bias, ParameterGradient dgamma, ParameterGradient dbeta, float* partial,
                                    int64_t num_partials, const LayerNormShape& shape, int64_t num_rows, void* stream);

}  // namespace cuda
}  // namespace tempo
