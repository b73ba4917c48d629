// What the bindings of LayerNorm, alone and with bias, dropout and residual before it, share.
#pragma once
#include "common/op.h"
#include "layer_norm/layer_norm.h"

#include <memory>

namespace {

using tempo::LayerNormShape;

struct Saved {
  Tensor y, rstd, exact_x_hat;
};

inline LayerNormShape layer_norm_shape(const Tensor& x, const Tensor& exact_columns) {
  STD_TORCH_CHECK(exact_columns.scalar_type() == ScalarType::Long && exact_columns.is_contiguous(),
                  "exact_columns must be contiguous int64");
  return {x.size(x.dim() - 1), exact_columns.numel(), static_cast<const int64_t*>(exact_columns.const_data_ptr())};
}

inline void check_parameters(const LayerNormShape& shape, const Tensor& weight, const Tensor& bias) {
  STD_TORCH_CHECK(weight.numel() == shape.num_columns && bias.numel() == shape.num_columns,
                  "weight and bias must have as many elements as the last dimension");
}

inline Saved empty_outputs(const Tensor& x, const LayerNormShape& shape) {
  const int64_t rows = x.numel() / shape.num_columns;
  return {torch::stable::empty_like(x), float_tensor(x, {rows}), torch::stable::new_empty(x, {rows, shape.num_exact_columns})};
}

// Checked against the gradient of y, and dense.
inline Saved checked(const Tensor& grad, const Tensor& y, const Tensor& rstd, const Tensor& exact_x_hat, const LayerNormShape& shape) {
  const int64_t rows = y.numel() / shape.num_columns;
  STD_TORCH_CHECK(grad.numel() == y.numel(), "grad must have the shape of y");
  STD_TORCH_CHECK(rstd.numel() == rows && rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous(), "rstd must be float [rows]");
  STD_TORCH_CHECK(exact_x_hat.numel() == rows * shape.num_exact_columns, "exact_x_hat must be [rows, exact columns]");
  return {dense(y), rstd, dense(exact_x_hat)};
}

// Both backward ops begin with grad, y, rstd, weight, bias, exact_columns, exact_x_hat.
template <class Device>
bool takes_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), weight(stack[3]), bias(stack[4]), exact_x_hat(stack[6]);
  return is_plain<Device>(grad) && grad.same_dtype(y) && grad.same_dtype(exact_x_hat) && weight.served_by<Device>() &&
         bias.served_by<Device>();
}

// ---- CPU ----

// Floats that start at a multiple of 64 bytes: a vector never lies across two cache lines. Their values are unknown.
class Floats {
 public:
  explicit Floats(int64_t count) : lines_(new Line[(count + kPerLine - 1) / kPerLine]) {}
  float* data() { return lines_[0].values; }
  const float* data() const { return lines_[0].values; }
  float& operator[](int64_t i) { return data()[i]; }

 private:
  static constexpr int64_t kPerLine = 16;
  struct alignas(64) Line {
    float values[kPerLine];
  };
  std::unique_ptr<Line[]> lines_;
};

inline int64_t padded(int64_t columns) {
  return (columns + tempo::kColumnPadding - 1) / tempo::kColumnPadding * tempo::kColumnPadding;
}

// A row of float or bfloat16, padded with zeros.
inline Floats as_floats(const Tensor& parameter) {
  const int64_t columns = parameter.numel();
  Floats values(padded(columns));
  std::fill(values.data() + columns, values.data() + padded(columns), 0.0f);
  const Tensor row = dense(parameter);
  if (row.scalar_type() == ScalarType::Float) {
    std::memcpy(values.data(), row.const_data_ptr(), sizeof(float) * columns);
    return values;
  }
  const auto* bits = static_cast<const uint16_t*>(row.const_data_ptr());
  for (int64_t i = 0; i < columns; ++i) {
    const uint32_t wide = static_cast<uint32_t>(bits[i]) << 16;
    std::memcpy(&values[i], &wide, sizeof wide);
  }
  return values;
}

inline Tensor from_floats(const Tensor& like, const float* values) {
  const int64_t columns = like.numel();
  Tensor result = float_tensor(like, {columns});
  std::memcpy(result.mutable_data_ptr(), values, sizeof(float) * columns);
  if (like.scalar_type() == ScalarType::Float) return result;
  return torch::stable::to(result, std::make_optional(like.scalar_type()));
}

inline void check_exact_columns(const LayerNormShape& shape) {
  for (int64_t k = 0; k < shape.num_exact_columns; ++k)
    STD_TORCH_CHECK(shape.exact_columns[k] >= 0 && shape.exact_columns[k] < shape.num_columns, "exact_columns out of range");
}

struct CpuOutput {
  Floats gamma, beta;
  tempo::LayerNormOutput arrays;

  CpuOutput(const Tensor& weight, const Tensor& bias, double eps, const LayerNormShape& shape, Saved& saved)
      : gamma(as_floats(weight)), beta(as_floats(bias)) {
    check_exact_columns(shape);
    arrays = {gamma.data(), beta.data(), static_cast<float>(eps), saved.y.mutable_data_ptr(),
              static_cast<float*>(saved.rstd.mutable_data_ptr()), saved.exact_x_hat.mutable_data_ptr(), shape,
              worth_streaming(saved.y)};
  }
};

struct CpuGradient {
  Floats gamma, beta, inverse_gamma;
  tempo::LayerNormGradient arrays;

  CpuGradient(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias, const LayerNormShape& shape)
      : gamma(as_floats(weight)), beta(as_floats(bias)), inverse_gamma(padded(shape.num_columns)) {
    check_exact_columns(shape);
    // 0 for gamma = 0: in more columns than are kept it must not spread NaN over the row.
    for (int64_t i = 0; i < padded(shape.num_columns); ++i)
      inverse_gamma[i] = std::fabs(gamma[i]) < std::numeric_limits<float>::min() ? 0.0f : 1.0f / gamma[i];
    for (int64_t k = 0; k < shape.num_exact_columns; ++k) inverse_gamma[shape.exact_columns[k]] = 0.0f;
    arrays = {grad.const_data_ptr(), saved.y.const_data_ptr(), static_cast<const float*>(saved.rstd.const_data_ptr()),
              gamma.data(), beta.data(), inverse_gamma.data(), saved.exact_x_hat.const_data_ptr(), shape, worth_streaming(grad)};
  }
};

// Sums over the rows, `num_sums` for each column. The rows are cut into chunks by their number alone, each chunk sums into its
// own place, and these are added in order: the sums do not depend on the number of threads.
class PartialSums {
 public:
  const int64_t columns;  // padded

  PartialSums(int64_t num_rows, int64_t num_columns, int64_t num_sums)
      : columns(padded(num_columns)), rows_(num_rows), num_chunks_(std::clamp<int64_t>(num_rows / 32, 1, 64)),
        per_chunk_(num_sums * columns), values_(num_chunks_ * per_chunk_) {}

  // Calls f(sums of the chunk, first row, row after the last), in parallel, and adds up.
  template <class F>
  void over_chunks(const F& f) {
    parallel_over_rows(num_chunks_, std::max<int64_t>(1, rows_ / num_chunks_) * columns, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        float* sums = values_.data() + chunk * per_chunk_;
        std::fill(sums, sums + per_chunk_, 0.0f);
        f(sums, rows_ * chunk / num_chunks_, rows_ * (chunk + 1) / num_chunks_);
      }
    });
    add_up();
  }

  // Sum number `which`, as a tensor like `parameter`.
  Tensor total(int64_t which, const Tensor& parameter) const { return from_floats(parameter, values_.data() + which * columns); }

 private:
  void add_up() {
    parallel_over_rows(per_chunk_, num_chunks_, [&](int64_t begin, int64_t end) {
      float* __restrict sums = values_.data();
      for (int64_t chunk = 1; chunk < num_chunks_; ++chunk) {
        const float* __restrict part = sums + chunk * per_chunk_;
        for (int64_t i = begin; i < end; ++i) sums[i] += part[i];
      }
    });
  }

  const int64_t rows_, num_chunks_, per_chunk_;
  Floats values_;
};

}  // namespace
