// Binds GELU's kernels to torch.ops.tempo.gelu_*.
#include "gelu/gelu.h"

#include "common/op.h"

namespace {

using tempo::GeluForm;

struct Cpu : CpuDevice {
  static void gelu_forward(const Tensor& x, Tensor& y, Tensor& side, const GeluForm& form) {
    const int dtype = kernel_dtype(x.scalar_type());
    const void* source = x.const_data_ptr();
    void* target = y.mutable_data_ptr();
    auto* bits = static_cast<uint8_t*>(side.mutable_data_ptr());
    parallel_over_elements(x.numel(), tempo::kGeluTile, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(gelu_forward)(dtype, source, target, bits, form, begin, end);
    });
  }

  static void gelu_backward(const Tensor& grad, const Tensor& y, const Tensor& side, Tensor& dx, const GeluForm& form) {
    const int dtype = kernel_dtype(grad.scalar_type());
    const void *grad_data = grad.const_data_ptr(), *y_data = y.const_data_ptr();
    const auto* bits = static_cast<const uint8_t*>(side.const_data_ptr());
    void* dx_data = dx.mutable_data_ptr();
    parallel_over_elements(grad.numel(), tempo::kGeluTile, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(gelu_backward)(dtype, grad_data, y_data, bits, dx_data, form, begin, end);
    });
  }

  static void gelu_recompute_backward(const Tensor& grad, const Tensor& x, Tensor& dx, Tensor& y, bool tanh_form) {
    const int dtype = kernel_dtype(x.scalar_type());
    const void *grad_data = grad.const_data_ptr(), *x_data = x.const_data_ptr();
    void *dx_data = dx.mutable_data_ptr(), *y_data = y.mutable_data_ptr();
    parallel_over_elements(x.numel(), tempo::kGeluTile, [&](int64_t begin, int64_t end) {
      TEMPO_CPU(gelu_recompute_backward)(dtype, grad_data, x_data, dx_data, y_data, tanh_form, begin, end);
    });
  }
};

struct Cuda : CudaDevice {
  static void gelu_forward(const Tensor& x, Tensor& y, Tensor& side, const GeluForm& form) {
    const Launch launch(x);
    launch.check(tempo::cuda::gelu_forward(kernel_dtype(x.scalar_type()), x.const_data_ptr(), y.mutable_data_ptr(),
                                           static_cast<uint8_t*>(side.mutable_data_ptr()), form, x.numel(), launch.stream()),
                 "gelu_forward");
  }

  static void gelu_backward(const Tensor& grad, const Tensor& y, const Tensor& side, Tensor& dx, const GeluForm& form) {
    const Launch launch(grad);
    launch.check(tempo::cuda::gelu_backward(kernel_dtype(grad.scalar_type()), grad.const_data_ptr(), y.const_data_ptr(),
                                            static_cast<const uint8_t*>(side.const_data_ptr()), dx.mutable_data_ptr(), form,
                                            grad.numel(), launch.stream()),
                 "gelu_backward");
  }

  static void gelu_recompute_backward(const Tensor& grad, const Tensor& x, Tensor& dx, Tensor& y, bool tanh_form) {
    const Launch launch(x);
    launch.check(tempo::cuda::gelu_recompute_backward(kernel_dtype(x.scalar_type()), grad.const_data_ptr(), x.const_data_ptr(),
                                                      dx.mutable_data_ptr(), y.mutable_data_ptr(), tanh_form, x.numel(),
                                                      launch.stream()),
                 "gelu_recompute_backward");
  }
};

GeluForm gelu_form(const std::string& approximate, int64_t side_bits) {
  STD_TORCH_CHECK(approximate == "none" || approximate == "tanh", "approximate must be 'none' or 'tanh'");
  STD_TORCH_CHECK(side_bits == 1 || side_bits == 4, "side_bits must be 1 or 4");
  return {approximate == "tanh", static_cast<int>(side_bits)};
}

// ---- forward ----

template <class Device>
bool takes_forward(const StableIValue* stack) {
  return is_plain<Device>(Argument(stack[0]));
}

template <class Device>
Tensor forward_into(const Tensor& x, Tensor& y, const GeluForm& form) {
  Tensor side = torch::stable::new_empty(x, {(x.numel() * form.side_bits + 7) / 8}, std::make_optional(ScalarType::Byte));
  Device::gelu_forward(x, y, side, form);
  return side;
}

template <class Device>
std::tuple<Tensor, Tensor> forward(Tensor x, std::string approximate, int64_t side_bits) {
  const auto form = gelu_form(approximate, side_bits);
  const Tensor input = dense(x);
  Tensor y = torch::stable::empty_like(input);
  Tensor side = forward_into<Device>(input, y, form);
  return {with_layout_of(x, y), side};
}

template <class Device>
Tensor forward_inplace(Tensor x, std::string approximate, int64_t side_bits) {
  const auto form = gelu_form(approximate, side_bits);
  if (!x.is_contiguous()) {
    Tensor copy = torch::stable::contiguous(x);
    Tensor side = forward_into<Device>(copy, copy, form);
    torch::stable::copy_(x, copy);
    return side;
  }
  Tensor side = forward_into<Device>(x, x, form);
  count_as_written(x);
  return side;
}

// ---- backward ----

template <class Device>
bool takes_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), side(stack[2]);
  return is_plain<Device>(grad) && grad.same_dtype(y) && grad.numel() == y.numel() && side.is_contiguous();
}

template <class Device>
Tensor backward(Tensor grad, Tensor y, Tensor side, std::string approximate, int64_t side_bits) {
  auto form = gelu_form(approximate, side_bits);
  STD_TORCH_CHECK(side.scalar_type() == ScalarType::Byte && side.numel() == (y.numel() * side_bits + 7) / 8,
                  "side must be uint8 with side_bits bits per element of y");
  check_same_device(grad, y, side);
  const Tensor dy = dense(grad), output = dense(y);
  Tensor dx = torch::stable::empty_like(dy);
  form.streaming = worth_streaming(dx);
  Device::gelu_backward(dy, output, side, dx, form);
  return with_layout_of(grad, dx);
}

// ---- backward from the input, which also gives the output again ----

template <class Device>
bool takes_recompute(const StableIValue* stack) {
  Argument grad(stack[0]), x(stack[1]);
  return is_plain<Device>(grad) && grad.same_dtype(x) && grad.numel() == x.numel();
}

template <class Device>
std::tuple<Tensor, Tensor> recompute_backward(Tensor grad, Tensor x, std::string approximate) {
  check_same_device(grad, x);
  const Tensor dy = dense(grad), input = dense(x);
  Tensor dx = torch::stable::empty_like(dy), y = torch::stable::empty_like(input);
  Device::gelu_recompute_backward(dy, input, dx, y, gelu_form(approximate, 1).tanh_form);
  return {with_layout_of(grad, dx), with_layout_of(x, y)};
}

template <class Device>
bool takes_recompute_inplace(const StableIValue* stack) {
  return takes_recompute<Device>(stack) && Argument(stack[0]).is_contiguous() && Argument(stack[1]).is_contiguous();
}

template <class Device>
void recompute_backward_inplace(Tensor grad, Tensor x, std::string approximate) {
  check_same_device(grad, x);
  Device::gelu_recompute_backward(grad, x, grad, x, gelu_form(approximate, 1).tanh_form);
  count_as_written(grad);
  count_as_written(x);
}

constexpr char kForward[] = "tempo::reference_gelu_forward";
constexpr char kForwardInplace[] = "tempo::reference_gelu_forward_";
constexpr char kBackward[] = "tempo::reference_gelu_backward";
constexpr char kRecompute[] = "tempo::reference_gelu_recompute_backward";
constexpr char kRecomputeInplace[] = "tempo::reference_gelu_recompute_backward_";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("gelu_forward", &kernel_or_reference<kForward, takes_forward<Device>, TORCH_BOX(&forward<Device>)>);
  m.impl("gelu_forward_", &kernel_or_reference<kForwardInplace, takes_forward<Device>, TORCH_BOX(&forward_inplace<Device>)>);
  m.impl("gelu_backward", &kernel_or_reference<kBackward, takes_backward<Device>, TORCH_BOX(&backward<Device>)>);
  m.impl("gelu_recompute_backward",
         &kernel_or_reference<kRecompute, takes_recompute<Device>, TORCH_BOX(&recompute_backward<Device>)>);
  m.impl("gelu_recompute_backward_", &kernel_or_reference<kRecomputeInplace, takes_recompute_inplace<Device>,
                                                          TORCH_BOX(&recompute_backward_inplace<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
