// LayerNorm(residual + dropout(x + x_bias)). Least bytes per element in 16-bit types: forward 6, backward 8; and 4 bytes a row.
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"
#include "layer_norm/layer_norm_rows.cuh"

namespace tempo {
namespace cuda {

int dropout_add_layer_norm_forward(int dtype, const void* x, Parameter x_bias, const void* residual, Parameter gamma,
                                   Parameter beta, const DeviceDropout& draw, float eps, void* y, float* rstd, void* exact_x_hat,
                                   const LayerNormShape& shape, int64_t num_rows, void* stream) {
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    NormForward<T> a = {};
    a.x = (const T*)x, a.x_bias = x_bias, a.residual = (const T*)residual, a.gamma = gamma, a.beta = beta;
    a.draw = draw, a.eps = eps;
    a.y = (T*)y, a.rstd = rstd, a.exact_x_hat = (T*)exact_x_hat, a.shape = shape, a.num_rows = num_rows;
    return launch_norm_forward<T, true>(a, stream);
  });
}

int dropout_add_layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, Parameter gamma, Parameter beta,
                                    const void* exact_x_hat, const DeviceDropout& draw, void* dx, void* dresidual,
                                    ParameterGradient dx_bias, ParameterGradient dgamma, ParameterGradient dbeta, float* partial,
                                    int64_t num_partials, const LayerNormShape& shape, int64_t num_rows, void* stream) {
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    NormBackward<T> a = {};
    a.grad = (const T*)grad, a.y = (const T*)y, a.exact_x_hat = (const T*)exact_x_hat, a.rstd = rstd;
    a.gamma = gamma, a.beta = beta, a.draw = draw, a.dx = (T*)dx, a.dresidual = (T*)dresidual;
    a.partial = partial, a.shape = shape, a.num_rows = num_rows;
    return launch_norm_backward<T, true>(a, num_partials, dgamma, dbeta, dx_bias, stream);
  });
}

}  // namespace cuda
}  // namespace tempo
