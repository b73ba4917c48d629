// LayerNorm that keeps its output; the method is described in tempo/layer_norm.py.
#include "layer_norm/layer_norm_rows.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

template <bool kStream, class T>
void forward_range(const T* x, const LayerNormOutput& out, int64_t begin, int64_t end) {
  const int64_t columns = out.shape.num_columns;
  for (int64_t r = begin; r < end; ++r) {
    const T *row = x + r * columns, *ahead = row + 2 * columns;
    normalise_row<kStream>(row, out, r, (T*)out.y + r * columns, [&](int64_t i) { __builtin_prefetch(ahead + i); });
  }
  if (kStream) finish_streaming();
}

template <class T>
void forward(const T* x, const LayerNormOutput& out, int64_t begin, int64_t end) {
  if (out.streaming && can_stream((const T*)out.y, out.shape.num_columns))
    forward_range<true>(x, out, begin, end);
  else
    forward_range<false>(x, out, begin, end);
}

template <bool kStream, class T>
void backward_range(const LayerNormGradient& in, T* dx, float* dgamma, float* dbeta, float* x_hat, int64_t begin, int64_t end) {
  for (int64_t r = begin; r < end; ++r) {
    T* row = dx + r * in.shape.num_columns;
    backward_row<T>(in, r, x_hat, dgamma, dbeta,
                    [&](int64_t i, vfloat gradient, auto part) { store_or_stream<kStream>(row + i, gradient, part); });
  }
  if (kStream) finish_streaming();
}

template <class T>
void backward(const LayerNormGradient& in, T* dx, float* dgamma, float* dbeta, float* x_hat, int64_t begin, int64_t end) {
  if (in.streaming && can_stream(dx, in.shape.num_columns))
    backward_range<true>(in, dx, dgamma, dbeta, x_hat, begin, end);
  else
    backward_range<false>(in, dx, dgamma, dbeta, x_hat, begin, end);
}

}  // namespace

void layer_norm_forward(int dtype, const void* x, const LayerNormOutput& out, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    forward((const float*)x, out, begin, end);
  else
    forward((const bfloat16*)x, out, begin, end);
}

void layer_norm_backward(int dtype, const LayerNormGradient& in, void* dx, float* dgamma, float* dbeta, float* x_hat,
                         int64_t begin, int64_t end) {
  if (dtype == kFloat)
    backward(in, (float*)dx, dgamma, dbeta, x_hat, begin, end);
  else
    backward(in, (bfloat16*)dx, dgamma, dbeta, x_hat, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
