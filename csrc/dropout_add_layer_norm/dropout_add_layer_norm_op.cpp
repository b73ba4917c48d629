// Binds the kernels of bias, dropout, residual and LayerNorm to torch.ops.tempo.dropout_add_layer_norm_*.
#include "dropout_add_layer_norm/dropout_add_layer_norm.h"

#include "layer_norm/layer_norm_op.h"

namespace {

struct Dropping {
  double p;
  const Tensor& rng;
  int64_t site;
};

struct Gradients {
  Tensor dx, dresidual, dx_bias, dweight, dbias;
};

void* data_or_null(Tensor& t) { return t.numel() == 0 ? nullptr : t.mutable_data_ptr(); }

// ---- CPU ----

struct Cpu : CpuDevice {
  static void forward(const Tensor& x, const Tensor& x_bias, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                      double eps, const Dropping& dropping, const LayerNormShape& shape, Saved& saved) {
    const CpuOutput output(weight, bias, eps, shape, saved);
    const Floats added = as_floats(x_bias);
    const auto draw = dropout_draw(dropping.p, dropping.rng, dropping.site, x.numel(), x.size(0));
    const tempo::DropoutAddInput input{x.const_data_ptr(), residual.const_data_ptr(), added.data(), draw};
    const int dtype = kernel_dtype(x.scalar_type());
    parallel_over_rows(saved.rstd.numel(), shape.num_columns, [&](int64_t begin, int64_t end) {
      Floats row(padded(shape.num_columns));
      std::vector<uint32_t> words(shape.num_columns + tempo::kRowPadding);
      TEMPO_CPU(dropout_add_layer_norm_forward)(dtype, input, output.arrays, row.data(), words.data(), begin, end);
    });
  }

  static void backward(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias, const Dropping& dropping,
                       const LayerNormShape& shape, Gradients& out) {
    const CpuGradient gradient(grad, saved, weight, bias, shape);
    const auto draw = dropout_draw(dropping.p, dropping.rng, dropping.site, grad.numel(), grad.size(0));
    PartialSums sums(saved.rstd.numel(), shape.num_columns, 3);
    const int dtype = kernel_dtype(grad.scalar_type());
    void *dx = data_or_null(out.dx), *dresidual = out.dresidual.mutable_data_ptr();
    sums.over_chunks([&](float* dgamma, int64_t first, int64_t last) {
      Floats x_hat(sums.columns);
      std::vector<uint32_t> words(shape.num_columns + tempo::kRowPadding);
      const tempo::DropoutAddGradient arrays{draw, dx, dresidual, dgamma + 2 * sums.columns, dgamma, dgamma + sums.columns};
      TEMPO_CPU(dropout_add_layer_norm_backward)(dtype, gradient.arrays, arrays, x_hat.data(), words.data(), first, last);
    });
    out.dweight = sums.total(0, weight), out.dbias = sums.total(1, bias), out.dx_bias = sums.total(2, weight);
  }
};

// ---- CUDA ----

struct Cuda : CudaDevice {
  static void forward(const Tensor& x, const Tensor& x_bias, const Tensor& residual, const Tensor& weight, const Tensor& bias,
                      double eps, const Dropping& dropping, const LayerNormShape& shape, Saved& saved) {
    const Launch launch(x);
    const Tensor added = dense(x_bias), gamma = dense(weight), beta = dense(bias), rng = dense(dropping.rng);
    const auto draw = device_dropout(dropping.p, rng, dropping.site, x.numel(), x.size(0));
    launch.check(tempo::cuda::dropout_add_layer_norm_forward(
                     kernel_dtype(x.scalar_type()), x.const_data_ptr(), parameter(added), residual.const_data_ptr(),
                     parameter(gamma), parameter(beta), draw, static_cast<float>(eps), saved.y.mutable_data_ptr(),
                     static_cast<float*>(saved.rstd.mutable_data_ptr()), saved.exact_x_hat.mutable_data_ptr(), shape,
                     saved.rstd.numel(), launch.stream()),
                 "dropout_add_layer_norm_forward");
  }

  static void backward(const Tensor& grad, const Saved& saved, const Tensor& weight, const Tensor& bias, const Dropping& dropping,
                       const LayerNormShape& shape, Gradients& out) {
    const Launch launch(grad);
    const Tensor gamma = dense(weight), beta = dense(bias), rng = dense(dropping.rng);
    const auto draw = device_dropout(dropping.p, rng, dropping.site, grad.numel(), grad.size(0));
    const int64_t rows = saved.rstd.numel(), num_partials = tempo::cuda::layer_norm_num_partials(rows, shape.num_columns);
    Tensor partial = float_tensor(grad, {num_partials, 3, shape.num_columns});
    out.dx_bias = torch::stable::empty_like(gamma), out.dweight = torch::stable::empty_like(gamma);
    out.dbias = torch::stable::empty_like(beta);
    launch.check(tempo::cuda::dropout_add_layer_norm_backward(
                     kernel_dtype(grad.scalar_type()), grad.const_data_ptr(), saved.y.const_data_ptr(),
                     static_cast<const float*>(saved.rstd.const_data_ptr()), parameter(gamma), parameter(beta),
                     saved.exact_x_hat.const_data_ptr(), draw, data_or_null(out.dx), out.dresidual.mutable_data_ptr(),
                     parameter_gradient(out.dx_bias), parameter_gradient(out.dweight), parameter_gradient(out.dbias),
                     static_cast<float*>(partial.mutable_data_ptr()), num_partials, shape, rows, launch.stream()),
                 "dropout_add_layer_norm_backward");
  }
};

// ---- forward ----

template <class Device>
bool takes_forward(const StableIValue* stack) {
  Argument x(stack[0]), x_bias(stack[1]), residual(stack[2]), weight(stack[3]), bias(stack[4]);
  return is_plain<Device>(x) && x.same_dtype(residual) && x_bias.served_by<Device>() && weight.served_by<Device>() &&
         bias.served_by<Device>();
}

template <class Device>
std::tuple<Tensor, Tensor, Tensor> forward(Tensor x, Tensor x_bias, Tensor residual, Tensor weight, Tensor bias, double eps,
                                           Tensor exact_columns, double p, Tensor rng, int64_t site) {
  check_same_device(x, x_bias, residual, weight, bias, exact_columns, rng);
  const auto shape = layer_norm_shape(x, exact_columns);
  check_parameters(shape, weight, bias);
  STD_TORCH_CHECK(x_bias.numel() == shape.num_columns, "x_bias must have as many elements as the last dimension");
  STD_TORCH_CHECK(residual.numel() == x.numel(), "residual must have the shape of x");
  const Tensor input = dense(x);
  Saved saved = empty_outputs(input, shape);
  Device::forward(input, x_bias, dense(residual), weight, bias, eps, {p, rng, site}, shape, saved);
  return {saved.y, saved.rstd, saved.exact_x_hat};
}

// ---- backward ----

template <class Device>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward(Tensor grad, Tensor y, Tensor rstd, Tensor weight, Tensor bias,
                                                            Tensor exact_columns, Tensor exact_x_hat, double p, Tensor rng,
                                                            int64_t site) {
  check_same_device(grad, y, rstd, weight, bias, exact_columns, exact_x_hat, rng);
  const auto shape = layer_norm_shape(y, exact_columns);
  check_parameters(shape, weight, bias);
  const Saved saved = checked(grad, y, rstd, exact_x_hat, shape);
  const Tensor dy = dense(grad);
  const bool drops = drop_threshold(p) != 0;
  Gradients out{drops ? torch::stable::empty_like(dy) : empty_tensor(dy), torch::stable::empty_like(dy), {}, {}, {}};
  Device::backward(dy, saved, weight, bias, {p, rng, site}, shape, out);
  // p = 0 promises an empty dx, a p below 2^-33, which drops nothing either, a full one.
  if (p != 0.0 && !drops) out.dx = torch::stable::clone(out.dresidual);
  return {out.dx, out.dresidual, out.dx_bias, out.dweight, out.dbias};
}

constexpr char kForward[] = "tempo::reference_dropout_add_layer_norm_forward";
constexpr char kBackward[] = "tempo::reference_dropout_add_layer_norm_backward";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("dropout_add_layer_norm_forward", &kernel_or_reference<kForward, takes_forward<Device>, TORCH_BOX(&forward<Device>)>);
  m.impl("dropout_add_layer_norm_backward", &kernel_or_reference<kBackward, takes_backward<Device>, TORCH_BOX(&backward<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
