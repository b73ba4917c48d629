// LayerNorm that keeps its output; the method is described in tempo/layer_norm.py.
#include "common/simd.h"
#include "layer_norm/layer_norm.h"

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
  vfloat first[2] = {}, second[2] = {};
  auto add = [&](int64_t i, int k, auto part) {
    vfloat dy = load(grad + i, part);
    first[k] += dy * load(gamma + i, Whole{});
    second[k] += dy * (load(y + i, part) - load(beta + i, Whole{}));
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= shape.num_columns; i += 2 * kLanes) {
    add(i, 0, Whole{});
    add(i + kLanes, 1, Whole{});
  }
  in_vectors(shape.num_columns - i, [&](int64_t k, auto part) { add(i + k, 0, part); });
  float correction = 0.0f;
  for (int64_t k = 0; k < shape.num_exact_columns; ++k) {
    const int64_t c = shape.exact_columns[k];
    correction += get(grad + c) * (get(exact_x_hat + k) * gamma[c] - (get(y + c) - beta[c]));
  }
  return {sum_of(first[0] + first[1]), sum_of(second[0] + second[1]) + correction};
}

template <class T>
struct BackwardRows {
  const T *grad, *y, *exact_x_hat;
  const float *rstd, *gamma, *inverse_gamma, *beta;
  T* dx;
  float *dgamma, *dbeta;
  const LayerNormShape& shape;
};

// kRows rows at once share the loads and stores per column. inverse_gamma is 0 in the exact columns: the vector loop leaves
// their x_hat out, and the scalar loop puts it in.
template <int kRows, class T>
TEMPO_INLINE void backward_rows(const BackwardRows<T>& a, int64_t r) {
  const int64_t columns = a.shape.num_columns, num_exact = a.shape.num_exact_columns;
  const T *dy = a.grad + r * columns, *y = a.y + r * columns, *exact = a.exact_x_hat + r * num_exact;
  T* dx = a.dx + r * columns;
  // Copies: a store to any of these arrays could otherwise change the pointers, for all that the compiler knows.
  const float *gammas = a.gamma, *inverses = a.inverse_gamma, *betas = a.beta;
  float *dgammas = a.dgamma, *dbetas = a.dbeta;
  float mean_first[kRows], mean_second[kRows], scale[kRows];
  for (int k = 0; k < kRows; ++k) {
    const RowSums sums = row_sums(dy + k * columns, y + k * columns, a.gamma, a.beta, exact + k * num_exact, a.shape);
    mean_first[k] = sums.dx_hat / (float)columns;
    mean_second[k] = sums.dx_hat_x_hat / (float)columns;
    scale[k] = a.rstd[r + k];
  }
  in_vectors(columns, [&](int64_t i, auto part) {
    const vfloat gamma = load(gammas + i, Whole{}), inverse = load(inverses + i, Whole{}), beta = load(betas + i, Whole{});
    vfloat dgamma = load(dgammas + i, Whole{}), dbeta = load(dbetas + i, Whole{});
    for (int k = 0; k < kRows; ++k) {
      const int64_t at = k * columns + i;
      // The next rows, while this loop computes: the sums above then find them in the cache.
      __builtin_prefetch(dy + kRows * columns + at);
      __builtin_prefetch(y + kRows * columns + at);
      vfloat g = load(dy + at, part), x_hat = (load(y + at, part) - beta) * inverse;
      dgamma += g * x_hat;
      dbeta += g;
      store(dx + at, (g * gamma - mean_first[k] - x_hat * mean_second[k]) * scale[k], part);
    }
    store(dgammas + i, dgamma, Whole{});
    store(dbetas + i, dbeta, Whole{});
  });
  for (int k = 0; k < kRows; ++k)
    for (int64_t e = 0; e < num_exact; ++e) {
      const int64_t c = a.shape.exact_columns[e];
      const float g = get(dy + k * columns + c), x_hat = get(exact + k * num_exact + e);
      dgammas[c] += g * x_hat;
      put(dx + k * columns + c, (g * gammas[c] - mean_first[k] - x_hat * mean_second[k]) * scale[k]);
    }
}

template <class T>
void backward_range(const BackwardRows<T>& arrays, int64_t begin, int64_t end) {
  constexpr int kRows = 2;
  int64_t r = begin;
  for (; r + kRows <= end; r += kRows) backward_rows<kRows>(arrays, r);
  for (; r < end; ++r) backward_rows<1>(arrays, r);
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
  if (dtype == kFloat) {
    backward_range<float>({(const float*)grad, (const float*)y, (const float*)exact_x_hat, rstd, gamma, inverse_gamma, beta,
                           (float*)dx, dgamma, dbeta, shape},
                          begin, end);
  } else {
    backward_range<bfloat16>({(const bfloat16*)grad, (const bfloat16*)y, (const bfloat16*)exact_x_hat, rstd, gamma,
                              inverse_gamma, beta, (bfloat16*)dx, dgamma, dbeta, shape},
                             begin, end);
  }
}

}  // namespace TEMPO_ISA
}  // namespace tempo
