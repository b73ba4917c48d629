// Binds GELU's CPU kernels to torch.ops.tempo.gelu_*.
#include "common/op.h"
#include "gelu/gelu.h"

namespace {

bool takes_gelu_forward(const StableIValue* stack) { return is_plain(Argument(stack[0])); }

bool takes_gelu_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), side(stack[2]);
  return is_plain(grad) && grad.same_dtype(y) && grad.numel() == y.numel() && side.is_contiguous();
}

tempo::GeluForm gelu_form(const std::string& approximate, int64_t side_bits) {
  STD_TORCH_CHECK(approximate == "none" || approximate == "tanh", "approximate must be 'none' or 'tanh'");
  STD_TORCH_CHECK(side_bits == 1 || side_bits == 4, "side_bits must be 1 or 4");
  return {approximate == "tanh", static_cast<int>(side_bits)};
}

Tensor gelu_into(const Tensor& x, Tensor& y, const tempo::GeluForm& form) {
  const int64_t numel = x.numel();
  Tensor side = torch::stable::new_empty(x, {(numel * form.side_bits + 7) / 8}, std::make_optional(ScalarType::Byte));
  const int dtype = kernel_dtype(x.scalar_type());
  const void* source = x.const_data_ptr();
  void* target = y.mutable_data_ptr();
  auto* bits = static_cast<uint8_t*>(side.mutable_data_ptr());
  parallel_over_elements(numel, tempo::kGeluTile, [&](int64_t begin, int64_t end) {
    TEMPO_CPU(gelu_forward)(dtype, source, target, bits, form, begin, end);
  });
  return side;
}

std::tuple<Tensor, Tensor> gelu_forward(Tensor x, std::string approximate, int64_t side_bits) {
  const auto form = gelu_form(approximate, side_bits);
  const Tensor input = dense(x);
  Tensor y = torch::stable::empty_like(input);
  Tensor side = gelu_into(input, y, form);
  return {with_layout_of(x, y), side};
}

Tensor gelu_forward_inplace(Tensor x, std::string approximate, int64_t side_bits) {
  const auto form = gelu_form(approximate, side_bits);
  if (!x.is_contiguous()) {
    Tensor copy = torch::stable::contiguous(x);
    Tensor side = gelu_into(copy, copy, form);
    torch::stable::copy_(x, copy);
    return side;
  }
  Tensor side = gelu_into(x, x, form);
  count_as_written(x);
  return side;
}

Tensor gelu_backward(Tensor grad, Tensor y, Tensor side, std::string approximate, int64_t side_bits) {
  const auto form = gelu_form(approximate, side_bits);
  STD_TORCH_CHECK(side.scalar_type() == ScalarType::Byte && side.numel() == (y.numel() * side_bits + 7) / 8,
                  "side must be uint8 with side_bits bits per element of y");
  const Tensor dy = dense(grad), output = dense(y);
  Tensor dx = torch::stable::empty_like(dy);
  const int dtype = kernel_dtype(grad.scalar_type());
  const void *dy_data = dy.const_data_ptr(), *y_data = output.const_data_ptr();
  const auto* bits = static_cast<const uint8_t*>(side.const_data_ptr());
  void* dx_data = dx.mutable_data_ptr();
  parallel_over_elements(grad.numel(), tempo::kGeluTile, [&](int64_t begin, int64_t end) {
    TEMPO_CPU(gelu_backward)(dtype, dy_data, y_data, bits, dx_data, form, begin, end);
  });
  return with_layout_of(grad, dx);
}


constexpr char kForward[] = "tempo::reference_gelu_forward";
constexpr char kForwardInplace[] = "tempo::reference_gelu_forward_";
constexpr char kBackward[] = "tempo::reference_gelu_backward";

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) {
  m.impl("gelu_forward", &kernel_or_reference<kForward, takes_gelu_forward, TORCH_BOX(&gelu_forward)>);
  m.impl("gelu_forward_", &kernel_or_reference<kForwardInplace, takes_gelu_forward, TORCH_BOX(&gelu_forward_inplace)>);
  m.impl("gelu_backward", &kernel_or_reference<kBackward, takes_gelu_backward, TORCH_BOX(&gelu_backward)>);
}
