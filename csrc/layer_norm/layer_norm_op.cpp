// Binds LayerNorm's kernels to torch.ops.tempo.layer_norm_*.
#include "layer_norm/layer_norm_op.h"

#include <numeric>

namespace {

constexpr int64_t kNumExactColumns = 16;  // NUM_EXACT_COLUMNS and _UNSAFE_RATIO of tempo/layer_norm.py
constexpr double kUnsafeRatio = 8.0;

struct Cpu : CpuDevice {
  static constexpr bool kCountsUnsafeColumns = true;

  static Tensor exact_columns(const Tensor& weight, const Tensor& bias, double min_gamma, bool all_unsafe) {
    const int64_t num_columns = weight.numel();
    const Floats gamma = as_floats(weight), beta = as_floats(bias);
    std::vector<double> ratio(num_columns);
    int64_t num_unsafe = 0;
    for (int64_t i = 0; i < num_columns; ++i) {
      const double g = std::fabs(static_cast<double>(gamma.data()[i])), b = std::fabs(static_cast<double>(beta.data()[i]));
      // Worst of all, too, where it is not a number.
      ratio[i] = g >= min_gamma && b / g >= 0.0 ? b / g : std::numeric_limits<double>::infinity();
      num_unsafe += ratio[i] > kUnsafeRatio;
    }
    const int64_t num_chosen = std::max(std::min(kNumExactColumns, num_columns), all_unsafe ? num_unsafe : 0);
    std::vector<int64_t> columns(num_columns);
    std::iota(columns.begin(), columns.end(), 0);
    std::partial_sort(columns.begin(), columns.begin() + num_chosen, columns.end(), [&](int64_t a, int64_t b) {
      return ratio[a] > ratio[b] || (ratio[a] == ratio[b] && a < b);
    });
    std::sort(columns.begin(), columns.begin() + num_chosen);
    Tensor chosen = torch::stable::new_empty(weight, {num_chosen}, std::make_optional(ScalarType::Long));
    std::memcpy(chosen.mutable_data_ptr(), columns.data(), sizeof(int64_t) * num_chosen);
    return chosen;
  }

  static void forward(const Tensor& x, const Tensor& weight, const Tensor& bias, double eps, const LayerNormShape& shape,
                      Saved& saved) {
    const CpuOutput output(weight, bias, eps, shape, saved);
    const int dtype = kernel_dtype(x.scalar_type());
    const void* x_data = x.const_data_ptr();
    parallel_over_rows(saved.rstd.numel(), shape.num_columns, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(layer_norm_forward)(dtype, x_data, output.arrays, begin, end);
    });
  }

  static std::tuple<Tensor, Tensor> backward(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias,
                                             const LayerNormShape& shape, Tensor& dx) {
    const CpuGradient gradient(grad, saved, weight, bias, shape);
    PartialSums sums(saved.rstd.numel(), shape.num_columns, 2);
    const int dtype = kernel_dtype(grad.scalar_type());
    void* dx_data = dx.mutable_data_ptr();
    sums.over_chunks([&](float* dgamma, int64_t first, int64_t last) {
      Floats x_hat(sums.columns);
      TEMPO_CPU(layer_norm_backward)(dtype, gradient.arrays, dx_data, dgamma, dgamma + sums.columns, x_hat.data(), first, last);
    });
    return {sums.total(0, weight), sums.total(1, bias)};
  }
};

// ---- CUDA ----

struct Cuda : CudaDevice {
  static constexpr bool kCountsUnsafeColumns = false;  // the number of columns would have to be known on the host

  static Tensor exact_columns(const Tensor& weight, const Tensor& bias, double min_gamma, bool) {
    const Launch launch(weight);
    const Tensor gamma = dense(weight), beta = dense(bias);
    const int64_t num_columns = weight.numel(), num_chosen = std::min(kNumExactColumns, num_columns);
    Tensor chosen = torch::stable::new_empty(weight, {num_chosen}, std::make_optional(ScalarType::Long));
    launch.check(tempo::cuda::layer_norm_exact_columns(parameter(gamma), parameter(beta), static_cast<float>(min_gamma),
                                                       static_cast<int64_t*>(chosen.mutable_data_ptr()), num_chosen, num_columns,
                                                       launch.stream()),
                 "layer_norm_exact_columns");
    return chosen;
  }

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

// ---- the choice of the exact columns ----

template <class Device>
bool takes_exact_columns(const StableIValue* stack) {
  Argument weight(stack[0]), bias(stack[1]);
  const bool all_unsafe = torch::stable::detail::to<bool>(stack[3]);
  return is_plain<Device>(weight) && bias.served_by<Device>() && (Device::kCountsUnsafeColumns || !all_unsafe);
}

template <class Device>
Tensor exact_columns(Tensor weight, Tensor bias, double min_gamma, bool all_unsafe) {
  STD_TORCH_CHECK(weight.numel() == bias.numel(), "weight and bias must have the same number of elements");
  check_same_device(weight, bias);
  return Device::exact_columns(weight, bias, min_gamma, all_unsafe);
}

// ---- forward ----

template <class Device>
bool takes_forward(const StableIValue* stack) {
  Argument x(stack[0]), weight(stack[1]), bias(stack[2]);
  return is_plain<Device>(x) && weight.served_by<Device>() && bias.served_by<Device>();
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor weight, Tensor bias, double eps, Tensor exact_columns) {
  check_same_device(x, weight, bias, exact_columns);
  const auto shape = layer_norm_shape(x, exact_columns);
  check_parameters(shape, weight, bias);
  const Tensor input = dense(x);
  Saved saved = empty_outputs(input, shape);
  Device::forward(input, weight, bias, eps, shape, saved);
  return {saved.y, saved.rstd, saved.exact_x_hat};
}

// ---- backward ----

template <class Device>
std::tuple<Tensor, Tensor, Tensor> backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias, Tensor exact_columns,
                                            Tensor exact_x_hat) {
  check_same_device(grad, y, rstd, weight, bias, exact_columns, exact_x_hat);
  const auto shape = layer_norm_shape(y, exact_columns);
  check_parameters(shape, weight, bias);
  const Saved saved = checked(grad, y, rstd, exact_x_hat, shape);
  const Tensor dy = dense(grad);
  Tensor dx = torch::stable::empty_like(dy);
  auto [dweight, dbias] = Device::backward(dy, saved, weight, bias, shape, dx);
  return {dx, dweight, dbias};
}

constexpr char kExactColumns[] = "tempo::reference_layer_norm_exact_columns";
constexpr char kForward[] = "tempo::reference_layer_norm_forward";
constexpr char kBackward[] = "tempo::reference_layer_norm_backward";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("layer_norm_exact_columns",
         &kernel_or_reference<kExactColumns, takes_exact_columns<Device>, TORCH_BOX(&exact_columns<Device>)>);
  m.impl("layer_norm_forward", &kernel_or_reference<kForward, takes_forward<Device>, TORCH_BOX(&forward<Device>)>);
  m.impl("layer_norm_backward", &kernel_or_reference<kBackward, takes_backward<Device>, TORCH_BOX(&backward<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
