// LayerNorm that keeps its output; the method is described in tempo/layer_norm.py.
#include "common/cpu_kernels.h"
#include "common/simd.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

struct RowMoments {
  float mean, rstd;
};

// Two passes over a row that lies in the first-level cache: exact, and hidden behind the memory traffic.
template <class T>
TEMPO_INLINE RowMoments row_moments(const T* x, int64_t num_columns, float eps) {
  vfloat sum[2] = {}, square[2] = {};
  int64_t i = 0;
  for (; i + 2 * kLanes <= num_columns; i += 2 * kLanes) {
    sum[0] += load(x + i, Whole{});
    sum[1] += load(x + i + kLanes, Whole{});
  }
  in_vectors(num_columns - i, [&](int64_t k, auto part) { sum[0] += load(x + i + k, part); });
  const float mean = sum_of(sum[0] + sum[1]) / (float)num_columns;
  for (i = 0; i + 2 * kLanes <= num_columns; i += 2 * kLanes) {
    vfloat a = load(x + i, Whole{}) - mean, b = load(x + i + kLanes, Whole{}) - mean;
    square[0] += a * a;
    square[1] += b * b;
  }
  for (; i + kLanes <= num_columns; i += kLanes) {
    vfloat a = load(x + i, Whole{}) - mean;
    square[0] += a * a;
  }
  float rest = 0.0f;
  for (; i < num_columns; ++i) rest += (get(x + i) - mean) * (get(x + i) - mean);
  const float variance = (sum_of(square[0] + square[1]) + rest) / (float)num_columns;
  return {mean, 1.0f / __builtin_sqrtf(variance + eps)};
}

template <class T>
void forward_range(const T* x, const float* gamma, const float* beta, float eps, T* y, float* rstd, T* exact_x_hat,
                   const LayerNormShape& shape, int64_t begin, int64_t end) {
  const int64_t columns = shape.num_columns, num_exact = shape.num_exact_columns;
  for (int64_t r = begin; r < end; ++r) {
    const T* row = x + r * columns;
    T* out = y + r * columns;
    const RowMoments moments = row_moments(row, columns, eps);
    rstd[r] = moments.rstd;
    for (int64_t k = 0; k < num_exact; ++k)
      put(exact_x_hat + r * num_exact + k, (get(row + shape.exact_columns[k]) - moments.mean) * moments.rstd);
    in_vectors(columns, [&](int64_t i, auto part) {
      vfloat x_hat = (load(row + i, part) - moments.mean) * moments.rstd;
      store(out + i, x_hat * load(gamma + i, Whole{}) + load(beta + i, Whole{}), part);
    });
  }
}

struct RowSums {
  float dx_hat, dx_hat_x_hat;
};

// Sums of dy * gamma and of dy * gamma * x_hat; y - beta is gamma * x_hat without the error of a division.
template <class T>
TEMPO_INLINE RowSums row_sums(const T* grad, const T* y, const float* gamma, const float* beta, const T* exact_x_hat,
                              const LayerNormShape& shape) {
  vfloat first = {}, second = {};
  in_vectors(shape.num_columns, [&](int64_t i, auto part) {
    vfloat dy = load(grad + i, part);
    first += dy * load(gamma + i, Whole{});
    second += dy * (load(y + i, part) - load(beta + i, Whole{}));
  });
  float correction = 0.0f;
  for (int64_t k = 0; k < shape.num_exact_columns; ++k) {
    const int64_t c = shape.exact_columns[k];
    correction += get(grad + c) * (get(exact_x_hat + k) * gamma[c] - (get(y + c) - beta[c]));
  }
  return {sum_of(first), sum_of(second) + correction};
}

// inverse_gamma is 0 in the exact columns: the vector loop leaves their x_hat out, and the scalar loop puts it in.
template <class T>
void backward_range(const T* grad, const T* y, const float* rstd, const float* gamma, const float* inverse_gamma,
                    const float* beta, const T* exact_x_hat, T* dx, float* dgamma, float* dbeta, const LayerNormShape& shape,
                    int64_t begin, int64_t end) {
  const int64_t columns = shape.num_columns, num_exact = shape.num_exact_columns;
  for (int64_t r = begin; r < end; ++r) {
    const T *dy_row = grad + r * columns, *y_row = y + r * columns, *exact_row = exact_x_hat + r * num_exact;
    T* dx_row = dx + r * columns;
    const RowSums sums = row_sums(dy_row, y_row, gamma, beta, exact_row, shape);
    const float mean_first = sums.dx_hat / (float)columns, mean_second = sums.dx_hat_x_hat / (float)columns;
    const float scale = rstd[r];
    in_vectors(columns, [&](int64_t i, auto part) {
      vfloat dy = load(dy_row + i, part);
      vfloat x_hat = (load(y_row + i, part) - load(beta + i, Whole{})) * load(inverse_gamma + i, Whole{});
      store(dgamma + i, load(dgamma + i, Whole{}) + dy * x_hat, Whole{});
      store(dbeta + i, load(dbeta + i, Whole{}) + dy, Whole{});
      store(dx_row + i, (dy * load(gamma + i, Whole{}) - mean_first - x_hat * mean_second) * scale, part);
    });
    for (int64_t k = 0; k < num_exact; ++k) {
      const int64_t c = shape.exact_columns[k];
      const float dy = get(dy_row + c), x_hat = get(exact_row + k);
      dgamma[c] += dy * x_hat;
      put(dx_row + c, (dy * gamma[c] - mean_first - x_hat * mean_second) * scale);
    }
  }
}

}  // namespace

void layer_norm_forward(int dtype, const void* x, const float* gamma, const float* beta, float eps, void* y, float* rstd,
                        void* exact_x_hat, const LayerNormShape& shape, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    forward_range((const float*)x, gamma, beta, eps, (float*)y, rstd, (float*)exact_x_hat, shape, begin, end);
  else
    forward_range((const bfloat16*)x, gamma, beta, eps, (bfloat16*)y, rstd, (bfloat16*)exact_x_hat, shape, begin, end);
}

void layer_norm_backward(int dtype, const void* grad, const void* y, const float* rstd, const float* gamma,
                         const float* inverse_gamma, const float* beta, const void* exact_x_hat, void* dx, float* dgamma,
                         float* dbeta, const LayerNormShape& shape, int64_t begin, int64_t end) {
  if (dtype == kFloat)
    backward_range((const float*)grad, (const float*)y, rstd, gamma, inverse_gamma, beta, (const float*)exact_x_hat, (float*)dx,
                   dgamma, dbeta, shape, begin, end);
  else
    backward_range((const bfloat16*)grad, (const bfloat16*)y, rstd, gamma, inverse_gamma, beta, (const bfloat16*)exact_x_hat,
                   (bfloat16*)dx, dgamma, dbeta, shape, begin, end);
}

}  // namespace TEMPO_ISA
}  // namespace tempo
