// Binds LayerNorm's CPU kernels to torch.ops.tempo.layer_norm_*.
#include "common/op.h"
#include "layer_norm/layer_norm.h"

namespace {

bool takes_layer_norm_forward(const StableIValue* stack) {
  Argument x(stack[0]), weight(stack[1]), bias(stack[2]);
  return is_plain(x) && weight.has_kernel_dtype() && bias.has_kernel_dtype();
}

bool takes_layer_norm_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), weight(stack[3]), bias(stack[4]), exact_x_hat(stack[6]);
  return is_plain(grad) && grad.same_dtype(y) && grad.same_dtype(exact_x_hat) && weight.has_kernel_dtype() &&
         bias.has_kernel_dtype();
}

int64_t padded(int64_t columns) {
  return (columns + tempo::kColumnPadding - 1) / tempo::kColumnPadding * tempo::kColumnPadding;
}

std::vector<float> as_floats(const Tensor& parameter, int64_t columns) {
  STD_TORCH_CHECK(parameter.numel() == columns, "weight and bias must have as many elements as x has columns");
  std::vector<float> values(padded(columns), 0.0f);
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

Tensor from_floats(const Tensor& like, const float* values) {
  const int64_t columns = like.numel();
  Tensor result = torch::stable::new_empty(like, {columns}, std::make_optional(ScalarType::Float));
  std::memcpy(result.mutable_data_ptr(), values, sizeof(float) * columns);
  if (like.scalar_type() == ScalarType::Float) return result;
  return torch::stable::to(result, std::make_optional(like.scalar_type()));
}

tempo::LayerNormShape layer_norm_shape(const Tensor& x, const Tensor& exact_columns) {
  STD_TORCH_CHECK(exact_columns.scalar_type() == ScalarType::Long && exact_columns.is_contiguous(),
                  "exact_columns must be contiguous int64");
  const int64_t columns = x.size(x.dim() - 1);
  tempo::LayerNormShape shape{columns, exact_columns.numel(), static_cast<const int64_t*>(exact_columns.const_data_ptr())};
  for (int64_t k = 0; k < shape.num_exact_columns; ++k)
    STD_TORCH_CHECK(shape.exact_columns[k] >= 0 && shape.exact_columns[k] < columns, "exact_columns out of range");
  return shape;
}

std::tuple<Tensor, Tensor, Tensor> layer_norm_forward(Tensor x, Tensor weight, Tensor bias, double eps, Tensor exact_columns) {
  const auto shape = layer_norm_shape(x, exact_columns);
  const int64_t rows = x.numel() / shape.num_columns;
  const Tensor input = dense(x);
  const auto gamma = as_floats(weight, shape.num_columns), beta = as_floats(bias, shape.num_columns);
  Tensor y = torch::stable::empty_like(input);
  Tensor rstd = torch::stable::new_empty(x, {rows}, std::make_optional(ScalarType::Float));
  Tensor exact_x_hat = torch::stable::new_empty(x, {rows, shape.num_exact_columns});
  const int dtype = kernel_dtype(x.scalar_type());
  const void* x_data = input.const_data_ptr();
  void *y_data = y.mutable_data_ptr(), *exact_data = exact_x_hat.mutable_data_ptr();
  auto* rstd_data = static_cast<float*>(rstd.mutable_data_ptr());
  parallel_over_rows(rows, shape.num_columns, [&](int64_t begin, int64_t end) {
    TEMPO_CPU(layer_norm_forward)(dtype, x_data, gamma.data(), beta.data(), static_cast<float>(eps), y_data, rstd_data,
                                     exact_data, shape, begin, end);
  });
  return {y, rstd, exact_x_hat};
}

// The rows are cut into chunks by their number alone, each chunk sums into its own row of partial sums, and these are added
// in order: dweight and dbias do not depend on the number of threads.
struct PartialSums {
  int64_t rows, columns, num_chunks;
  std::vector<float> values;

  PartialSums(int64_t num_rows, int64_t num_columns)
      : rows(num_rows), columns(padded(num_columns)), num_chunks(std::clamp<int64_t>(num_rows / 32, 1, 64)),
        values(2 * num_chunks * columns, 0.0f) {}
  float* dgamma(int64_t chunk) { return values.data() + 2 * chunk * columns; }
  float* dbeta(int64_t chunk) { return dgamma(chunk) + columns; }
  int64_t first_row(int64_t chunk) const { return rows * chunk / num_chunks; }

  void add_up() {
    parallel_over_rows(2 * columns, num_chunks, [&](int64_t begin, int64_t end) {
      float* __restrict sums = values.data();
      for (int64_t chunk = 1; chunk < num_chunks; ++chunk) {
        const float* __restrict part = sums + 2 * chunk * columns;
        for (int64_t i = begin; i < end; ++i) sums[i] += part[i];
      }
    });
  }
};

std::tuple<Tensor, Tensor, Tensor> layer_norm_backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias,
                                                       Tensor exact_columns, Tensor exact_x_hat) {
  const auto shape = layer_norm_shape(y, exact_columns);
  const int64_t rows = y.numel() / shape.num_columns;
  STD_TORCH_CHECK(rstd.numel() == rows && rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous(), "rstd must be float [rows]");
  STD_TORCH_CHECK(exact_x_hat.numel() == rows * shape.num_exact_columns, "exact_x_hat must be [rows, exact columns]");
  const Tensor dy = dense(grad), output = dense(y), exact = dense(exact_x_hat);
  const auto gamma = as_floats(weight, shape.num_columns), beta = as_floats(bias, shape.num_columns);
  std::vector<float> inverse_gamma(gamma.size(), 0.0f);
  // 0 for gamma = 0: in more columns than are kept it must not spread NaN over the row.
  for (int64_t i = 0; i < shape.num_columns; ++i)
    inverse_gamma[i] = std::fabs(gamma[i]) < std::numeric_limits<float>::min() ? 0.0f : 1.0f / gamma[i];
  for (int64_t k = 0; k < shape.num_exact_columns; ++k) inverse_gamma[shape.exact_columns[k]] = 0.0f;
  Tensor dx = torch::stable::empty_like(dy);
  PartialSums sums(rows, shape.num_columns);
  const int dtype = kernel_dtype(grad.scalar_type());
  const void *dy_data = dy.const_data_ptr(), *y_data = output.const_data_ptr(), *exact_data = exact.const_data_ptr();
  const auto* rstd_data = static_cast<const float*>(rstd.const_data_ptr());
  void* dx_data = dx.mutable_data_ptr();
  parallel_over_rows(sums.num_chunks, y.numel() / sums.num_chunks, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk)
      TEMPO_CPU(layer_norm_backward)(dtype, dy_data, y_data, rstd_data, gamma.data(), inverse_gamma.data(), beta.data(),
                                        exact_data, dx_data, sums.dgamma(chunk), sums.dbeta(chunk), shape,
                                        sums.first_row(chunk), sums.first_row(chunk + 1));
  });
  sums.add_up();
  return {dx, from_floats(weight, sums.dgamma(0)), from_floats(bias, sums.dbeta(0))};
}


constexpr char kForward[] = "tempo::reference_layer_norm_forward";
constexpr char kBackward[] = "tempo::reference_layer_norm_backward";

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) {
  m.impl("layer_norm_forward", &kernel_or_reference<kForward, takes_layer_norm_forward, TORCH_BOX(&layer_norm_forward)>);
  m.impl("layer_norm_backward", &kernel_or_reference<kBackward, takes_layer_norm_backward, TORCH_BOX(&layer_norm_backward)>);
}
