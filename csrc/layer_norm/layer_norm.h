// LayerNorm that keeps its output; the method is described in tempo/layer_norm.py.
#pragma once
#include "common/kernels.h"

namespace tempo {

struct LayerNormShape {
  int64_t num_columns, num_exact_columns;
  const int64_t* exact_columns;
};

// On the CPU: gamma, beta and inverse_gamma are padded to whole multiples of kColumnPadding and start at one of 64 bytes.
// Outputs that no cache can hold are streamed past them.
struct LayerNormOutput {
  const float *gamma, *beta;
  float eps;
  void* y;
  float* rstd;
  void* exact_x_hat;
  LayerNormShape shape;
  bool streaming;
};

struct LayerNormGradient {
  const void *grad, *y;
  const float *rstd, *gamma, *beta;
  const float* inverse_gamma;  // 0 in the exact columns, and where gamma is 0
  const void* exact_x_hat;
  LayerNormShape shape;
  bool streaming;
};

}  // namespace tempo

TEMPO_CPU_KERNELS(
    void layer_norm_forward(int dtype, const void* x, const LayerNormOutput& out, int64_t begin, int64_t end);
    // Adds to dgamma and dbeta; x_hat is scratch. All float [padded columns].
    void layer_norm_backward(int dtype, const LayerNormGradient& in, void* dx, float* dgamma, float* dbeta, float* x_hat,
                             int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

// The num_chosen columns with the largest |beta / gamma|, infinite where |gamma| < min_gamma, in that order.
int layer_norm_exact_columns(Parameter gamma, Parameter beta, float min_gamma, int64_t* chosen, int64_t num_chosen,
                             int64_t num_columns, void* stream);

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
