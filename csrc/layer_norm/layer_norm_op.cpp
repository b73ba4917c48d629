// Binds LayerNorm's kernels to torch.ops.tempo.layer_norm_*.
#include "layer_norm/layer_norm.h"

#include "common/op.h"

namespace {

using tempo::LayerNormShape;

struct Saved {
  Tensor y, rstd, exact_x_hat;
};

LayerNormShape layer_norm_shape(const Tensor& x, const Tensor& exact_columns) {
  STD_TORCH_CHECK(exact_columns.scalar_type() == ScalarType::Long && exact_columns.is_contiguous(),
                  "exact_columns must be contiguous int64");
  return {x.size(x.dim() - 1), exact_columns.numel(), static_cast<const int64_t*>(exact_columns.const_data_ptr())};
}

// ---- CPU ----

int64_t padded(int64_t columns) {
  return (columns + tempo::kColumnPadding - 1) / tempo::kColumnPadding * tempo::kColumnPadding;
}

std::vector<float> as_floats(const Tensor& parameter, int64_t columns) {
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

void check_exact_columns(const LayerNormShape& shape) {
  for (int64_t k = 0; k < shape.num_exact_columns; ++k)
    STD_TORCH_CHECK(shape.exact_columns[k] >= 0 && shape.exact_columns[k] < shape.num_columns, "exact_columns out of range");
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

struct Cpu : CpuDevice {
  static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const LayerNormShape& shape,
                      Saved& saved) {
    check_exact_columns(shape);
    const auto gamma = as_floats(weight, shape.num_columns), beta = as_floats(bias, shape.num_columns);
    const int dtype = kernel_dtype(x.scalar_type());
    const void* x_data = x.const_data_ptr();
    void *y_data = saved.y.mutable_data_ptr(), *exact_data = saved.exact_x_hat.mutable_data_ptr();
    auto* rstd_data = static_cast<float*>(saved.rstd.mutable_data_ptr());
    parallel_over_rows(saved.rstd.numel(), shape.num_columns, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(layer_norm_forward)(dtype, x_data, gamma.data(), beta.data(), static_cast<float>(eps), y_data, rstd_data,
                                    exact_data, shape, begin, end);
    });
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias,
                                             const LayerNormShape& shape, Tensor& dx) {
    check_exact_columns(shape);
    const auto gamma = as_floats(weight, shape.num_columns), beta = as_floats(bias, shape.num_columns);
    std::vector<float> inverse_gamma(gamma.size(), 0.0f);
    // 0 for gamma = 0: in more columns than are kept it must not spread NaN over the row.
    for (int64_t i = 0; i < shape.num_columns; ++i)
      inverse_gamma[i] = std::fabs(gamma[i]) < std::numeric_limits<float>::min() ? 0.0f : 1.0f / gamma[i];
    for (int64_t k = 0; k < shape.num_exact_columns; ++k) inverse_gamma[shape.exact_columns[k]] = 0.0f;
    PartialSums sums(saved.rstd.numel(), shape.num_columns);
    const int dtype = kernel_dtype(grad.scalar_type());
    const void *grad_data = grad.const_data_ptr(), *y_data = saved.y.const_data_ptr();
    const void* exact_data = saved.exact_x_hat.const_data_ptr();
    const auto* rstd_data = static_cast<const float*>(saved.rstd.const_data_ptr());
    void* dx_data = dx.mutable_data_ptr();
    parallel_over_rows(sums.num_chunks, grad.numel() / sums.num_chunks, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk)
        TEMPO_CPU(layer_norm_backward)(dtype, grad_data, y_data, rstd_data, gamma.data(), inverse_gamma.data(), beta.data(),
                                       exact_data, dx_data, sums.dgamma(chunk), sums.dbeta(chunk), shape, sums.first_row(chunk),
                                       sums.first_row(chunk + 1));
    });
    sums.add_up();
    return {from_floats(weight, sums.dgamma(0)), from_floats(bias, sums.dbeta(0))};
  }
};

// ---- CUDA ----

struct Cuda : CudaDevice {
  static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const LayerNormShape& shape,
                      Saved& saved) {
    const Launch launch(x);
    const Tensor gamma = dense(weight), beta = dense(bias);
    launch.check(tempo::cuda::layer_norm_forward(kernel_dtype(x.scalar_type()), x.const_data_ptr(), parameter(gamma),
                                                 parameter(beta), static_cast<float>(eps), saved.y.mutable_data_ptr(),
                                                 static_cast<float*>(saved.rstd.mutable_data_ptr()),
                                                 saved.exact_x_hat.mutable_data_ptr(), shape, saved.rstd.numel(), launch.stream()),
                 "layer_norm_forward");
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias,
                                             const LayerNormShape& shape, Tensor& dx) {
    const Launch launch(grad);
    const Tensor gamma = dense(weight), beta = dense(bias);
    const int64_t rows = saved.rstd.numel(), num_partials = tempo::cuda::layer_norm_num_partials(rows, shape.num_columns);
    Tensor partial = float_tensor(grad, {num_partials, 2, shape.num_columns});
    Tensor dweight = torch::stable::empty_like(gamma), dbias = torch::stable::empty_like(beta);
    launch.check(tempo::cuda::layer_norm_backward(kernel_dtype(grad.scalar_type()), grad.const_data_ptr(),
                                                  saved.y.const_data_ptr(), static_cast<const float*>(saved.rstd.const_data_ptr()),
                                                  parameter(gamma), parameter(beta), saved.exact_x_hat.const_data_ptr(),
                                                  dx.mutable_data_ptr(), parameter_gradient(dweight), parameter_gradient(dbias),
                                                  static_cast<float*>(partial.mutable_data_ptr()), num_partials, shape, rows,
                                                  launch.stream()),
                 "layer_norm_backward");
    return {dweight, dbias};
  }
};

// ---- forward ----

template <class Device>
bool takes_forward(const StableIValue* stack) {
  Argument x(stack[0]), weight(stack[1]), bias(stack[2]);
  return is_plain<Device>(x) && weight.served_by<Device>() && bias.served_by<Device>();
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, Tensor bias, double eps, Tensor exact_columns) {
  const auto shape = layer_norm_shape(x, exact_columns);
  STD_TORCH_CHECK(weight.numel() == shape.num_columns && bias.numel() == shape.num_columns,
                  "weight and bias must have as many elements as x has columns");
  const int64_t rows = x.numel() / shape.num_columns;
  const Tensor input = dense(x);
  Saved saved{torch::stable::empty_like(input), float_tensor(x, {rows}),
              torch::stable::new_empty(x, {rows, shape.num_exact_columns})};
  Device::forward(input, weight, bias, eps, shape, saved);
  return {saved.y, saved.rstd, saved.exact_x_hat};
}

// ---- backward ----

template <class Device>
bool takes_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), weight(stack[3]), bias(stack[4]), exact_x_hat(stack[6]);
  return is_plain<Device>(grad) && grad.same_dtype(y) && grad.same_dtype(exact_x_hat) && weight.served_by<Device>() &&
         bias.served_by<Device>();
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias, Tensor exact_columns,
                                            Tensor exact_x_hat) {
  const auto shape = layer_norm_shape(y, exact_columns);
  const int64_t rows = y.numel() / shape.num_columns;
  STD_TORCH_CHECK(grad.numel() == y.numel(), "grad must have the shape of y");
  STD_TORCH_CHECK(weight.numel() == shape.num_columns && bias.numel() == shape.num_columns,
                  "weight and bias must have as many elements as y has columns");
  STD_TORCH_CHECK(rstd.numel() == rows && rstd.scalar_type() == ScalarType::Float && rstd.is_contiguous(), "rstd must be float [rows]");
  STD_TORCH_CHECK(exact_x_hat.numel() == rows * shape.num_exact_columns, "exact_x_hat must be [rows, exact columns]");
  const Tensor dy = dense(grad);
  Tensor dx = torch::stable::empty_like(dy);
  auto [dweight, dbias] = Device::backward(dy, {dense(y), rstd, dense(exact_x_hat)}, weight, bias, shape, dx);
  return {dx, dweight, dbias};
}

constexpr char kForward[] = "tempo::reference_layer_norm_forward";
constexpr char kBackward[] = "tempo::reference_layer_norm_backward";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("layer_norm_forward", &kernel_or_reference<kForward, takes_forward<Device>, TORCH_BOX(&forward<Device>)>);
  m.impl("layer_norm_backward", &kernel_or_reference<kBackward, takes_backward<Device>, TORCH_BOX(&backward<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
