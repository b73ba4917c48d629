// LayerNorm(residual + dropout(x + x_bias)) in one kernel each way; see tempo/dropout_add_layer_norm.py.
#pragma once
#include "common/kernels.h"
#include "layer_norm/layer_norm.h"

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
