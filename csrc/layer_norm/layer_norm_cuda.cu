// LayerNorm that keeps its output. Least bytes per element in 16-bit types: forward 4, backward 6; and 4 bytes a row each way.
#include "layer_norm/layer_norm_rows.cuh"

namespace tempo {
namespace cuda {

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
