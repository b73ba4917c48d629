// Rows of a LayerNorm that keeps its output, forward and backward, on the CPU; the method is described in tempo/layer_norm.py.
#pragma once
#include "common/simd.h"
#include "layer_norm/layer_norm.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

// Whether every vector of every row of `p` starts where `stream` can store.
template <class T>
TEMPO_INLINE bool can_stream(const T* p, int64_t num_columns) {
  return num_columns % kLanes == 0 && (uintptr_t)p % (sizeof(T) * kLanes) == 0;
}

template <bool kStream, class T, class Part>
TEMPO_INLINE void store_or_stream(T* p, vfloat v, Part part) {
  if constexpr (kStream)
    stream(p, v);
  else
    store(p, v, part);
}

// The sum of f(i, part) over a row; four sums, so that additions do not wait for one another.
template <class F>
TEMPO_INLINE float row_sum(int64_t num_columns, F f) {
  vfloat sums[4] = {};
  int64_t i = 0;
  for (; i + 4 * kLanes <= num_columns; i += 4 * kLanes)
    for (int k = 0; k < 4; ++k) sums[k] += f(i + k * kLanes, Whole{});
  in_vectors(num_columns - i, [&](int64_t k, auto part) { sums[0] += f(i + k, part); });
  return sum_of((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

// ---- forward ----

// Normalises row r, which lies in the first-level cache: the passes over it are hidden behind the memory traffic. fetch(i) may
// prefetch what later rows need.
template <bool kStream, class S, class T, class Fetch>
TEMPO_INLINE void normalise_row(const S* row, const LayerNormOutput& out, int64_t r, T* y, Fetch fetch) {
  const int64_t columns = out.shape.num_columns, num_exact = out.shape.num_exact_columns;
  const float *gamma = out.gamma, *beta = out.beta;
  const float mean = row_sum(columns, [&](int64_t i, auto part) { return load(row + i, part); }) / (float)columns;
  const float variance = row_sum(columns, [&](int64_t i, auto part) {
                           const vfloat centred = only(load(row + i, part) - mean, part);
                           return centred * centred;
                         }) / (float)columns;
  const float rstd = 1.0f / __builtin_sqrtf(variance + out.eps);
  out.rstd[r] = rstd;
  T* exact_x_hat = (T*)out.exact_x_hat + r * num_exact;
  for (int64_t k = 0; k < num_exact; ++k) put(exact_x_hat + k, (get(row + out.shape.exact_columns[k]) - mean) * rstd);
  in_vectors(columns, [&](int64_t i, auto part) {
    fetch(i);
    const vfloat x_hat = (load(row + i, part) - mean) * rstd;
    store_or_stream<kStream>(y + i, x_hat * load(gamma + i, Whole{}) + load(beta + i, Whole{}), part);
  });
}

// ---- backward ----

struct RowMeans {
  float dx_hat, dx_hat_x_hat;
};

// Writes x_hat of row r, float [padded columns], and returns the means of dy * gamma and of dy * gamma * x_hat. These take
// y - beta for gamma * x_hat, which has no error of a division.
template <class T>
TEMPO_INLINE RowMeans rebuild_row(const LayerNormGradient& in, int64_t r, float* x_hat) {
  const int64_t columns = in.shape.num_columns, num_exact = in.shape.num_exact_columns;
  const T *dy = (const T*)in.grad + r * columns, *y = (const T*)in.y + r * columns;
  const T* exact = (const T*)in.exact_x_hat + r * num_exact;
  const float *gamma = in.gamma, *beta = in.beta, *inverse = in.inverse_gamma;
  vfloat first[2] = {}, second[2] = {};
  auto add = [&](int64_t i, int k, auto part) {
    // Each pass over a row fetches one of the next row's two: the hardware's prefetching stops at the end of a page.
    __builtin_prefetch(y + columns + i);
    const vfloat g = load(dy + i, part), shifted = load(y + i, part) - load(beta + i, Whole{});
    store(x_hat + i, shifted * load(inverse + i, Whole{}), Whole{});
    first[k] += g * load(gamma + i, Whole{});
    second[k] += g * shifted;
  };
  int64_t i = 0;
  for (; i + 2 * kLanes <= columns; i += 2 * kLanes) {
    add(i, 0, Whole{});
    add(i + kLanes, 1, Whole{});
  }
  in_vectors(columns - i, [&](int64_t k, auto part) { add(i + k, 0, part); });
  float correction = 0.0f;
  for (int64_t k = 0; k < num_exact; ++k) {
    const int64_t c = in.shape.exact_columns[k];
    const float kept = get(exact + k);
    x_hat[c] = kept;
    correction += get(dy + c) * (kept * gamma[c] - (get(y + c) - beta[c]));
  }
  const float count = (float)columns;
  return {sum_of(first[0] + first[1]) / count, (sum_of(second[0] + second[1]) + correction) / count};
}

// The gradient of row r: write(i, gradient, part) takes it away. Adds to dgammas and dbetas; x_hats: float [padded columns], scratch.
template <class T, class Write>
TEMPO_INLINE void backward_row(const LayerNormGradient& in, int64_t r, float* x_hats, float* dgammas, float* dbetas, Write write) {
  const int64_t columns = in.shape.num_columns;
  const T* dy = (const T*)in.grad + r * columns;
  const float* gammas = in.gamma;
  const RowMeans means = rebuild_row<T>(in, r, x_hats);
  const float scale = in.rstd[r];
  in_vectors(columns, [&](int64_t i, auto part) {
    __builtin_prefetch(dy + columns + i);
    const vfloat g = load(dy + i, part), x_hat = load(x_hats + i, Whole{});
    store(dgammas + i, load(dgammas + i, Whole{}) + g * x_hat, Whole{});
    store(dbetas + i, load(dbetas + i, Whole{}) + g, Whole{});
    write(i, (g * load(gammas + i, Whole{}) - means.dx_hat - x_hat * means.dx_hat_x_hat) * scale, part);
  });
}

}  // namespace
}  // namespace TEMPO_ISA
}  // namespace tempo
