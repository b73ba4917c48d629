// torch.ops.tempo.*: what the kernels compute, for tensors. The only file that sees torch headers.
//
// Written against LibTorch's stable ABI (target 2.10): one binary serves PyTorch 2.10 and newer under any Python. The schemas
// and the references are in tempo/*.py; a call that no kernel here serves (another dtype, a strange layout) is handed to
// the reference, the op of the same name with the prefix `reference_`.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "common/cpu_kernels.h"

// Named so from PyTorch 2.11 on; 2.10's headers have the same check under its older name.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace {

using tempo::cpu_kernels;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kElementsPerThread = 16384;

int kernel_dtype(ScalarType type) {
  return type == ScalarType::Float ? tempo::kFloat : type == ScalarType::BFloat16 ? tempo::kBFloat16 : -1;
}

// ---- arguments, looked at before they are taken off the stack ----

class Argument {
 public:
  explicit Argument(StableIValue value) { std::memcpy(&handle_, &value, sizeof handle_); }
  bool has_kernel_dtype() const { return kernel_dtype(dtype()) >= 0; }
  bool same_dtype(const Argument& other) const { return dtype() == other.dtype(); }
  int64_t dim() const {
    int64_t result = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle_, &result));
    return result;
  }
  int64_t numel() const {
    int64_t result = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_numel(handle_, &result));
    return result;
  }
  bool is_contiguous() const {
    bool result = false;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_is_contiguous(handle_, &result));
    return result;
  }
  ScalarType dtype() const {
    int32_t code = 0;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle_, &code));
    return torch::stable::detail::to<ScalarType>(torch::stable::detail::from(code));
  }

 private:
  AtenTensorHandle handle_;
};

// A tensor that has elements and at least one dimension.
bool is_plain(const Argument& x) { return x.has_kernel_dtype() && x.dim() >= 1 && x.numel() > 0; }

bool takes_dropout(const StableIValue* stack) { return is_plain(Argument(stack[0])); }

bool takes_gelu_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), side(stack[2]);
  return is_plain(grad) && grad.same_dtype(y) && grad.numel() == y.numel() && side.is_contiguous();
}

bool takes_layer_norm_forward(const StableIValue* stack) {
  Argument x(stack[0]), weight(stack[1]), bias(stack[2]);
  return is_plain(x) && weight.has_kernel_dtype() && bias.has_kernel_dtype();
}

bool takes_layer_norm_backward(const StableIValue* stack) {
  Argument grad(stack[0]), y(stack[1]), weight(stack[3]), bias(stack[4]), exact_x_hat(stack[6]);
  return is_plain(grad) && grad.same_dtype(y) && grad.same_dtype(exact_x_hat) && weight.has_kernel_dtype() &&
         bias.has_kernel_dtype();
}

// An optional argument is a pointer to its value, null where there is none.
bool takes_softmax_forward(const StableIValue* stack) {
  Argument scores(stack[0]);
  if (!is_plain(scores) || scores.dim() < 2 || !scores.is_contiguous()) return false;
  const StableIValue* mask = nullptr;
  std::memcpy(&mask, &stack[1], sizeof mask);
  if (mask == nullptr) return true;
  Argument m(*mask);
  return scores.dim() == 4 && m.dim() == 4 && m.dtype() != ScalarType::Double;
}

bool takes_softmax_backward(const StableIValue* stack) {
  Argument grad(stack[0]), probabilities(stack[1]);
  return is_plain(grad) && grad.dim() >= 2 && grad.same_dtype(probabilities) && grad.is_contiguous() &&
         probabilities.is_contiguous() && grad.numel() == probabilities.numel();
}

// ---- shared by the ops ----

template <class F>
void parallel_over_elements(int64_t numel, const F& f) {
  const int64_t tiles = (numel + tempo::kGeluTile - 1) / tempo::kGeluTile;
  torch::stable::parallel_for(0, tiles, kElementsPerThread / tempo::kGeluTile, [&](int64_t begin, int64_t end) {
    f(begin * tempo::kGeluTile, std::min(end * tempo::kGeluTile, numel));
  });
}

template <class F>
void parallel_over_rows(int64_t rows, int64_t columns, const F& f) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kElementsPerThread / columns), f);
}

Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Like empty_like: the strides of `like`. `result` is contiguous.
Tensor with_layout_of(const Tensor& like, const Tensor& result) {
  if (like.is_contiguous()) return result;
  Tensor out = torch::stable::empty_like(like);
  torch::stable::copy_(out, result);
  return out;
}

// Tells autograd that a kernel wrote over `t`, as PyTorch's own in-place ops do.
void count_as_written(Tensor& t) {
  Tensor nothing = torch::stable::narrow(t, 0, 0, 0);
  torch::stable::zero_(nothing);
}

tempo::DropoutDraw dropout_draw(double p, const Tensor& rng, int64_t site, int64_t numel, int64_t batch) {
  STD_TORCH_CHECK(rng.scalar_type() == ScalarType::Long && rng.numel() == 2, "rng must be int64 [2] = (seed, first_sample)");
  const Tensor row = dense(rng);
  const auto* values = static_cast<const int64_t*>(row.const_data_ptr());
  tempo::DropoutDraw draw;
  draw.seed = static_cast<uint64_t>(values[0]);
  draw.site = static_cast<uint64_t>(site);
  draw.first_element = static_cast<uint64_t>(values[1]) * static_cast<uint64_t>(numel / batch);
  draw.threshold = static_cast<uint64_t>(std::nearbyint(p * 4294967296.0));
  draw.scale = p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f;
  return draw;
}

// ---- dropout ----

Tensor dropout(Tensor x, double p, Tensor rng, int64_t site) {
  if (p == 0.0) return torch::stable::clone(x);
  const Tensor input = dense(x);
  Tensor y = torch::stable::empty_like(input);
  const auto draw = dropout_draw(p, rng, site, x.numel(), x.size(0));
  const int dtype = kernel_dtype(x.scalar_type());
  const void* source = input.const_data_ptr();
  void* target = y.mutable_data_ptr();
  parallel_over_elements(x.numel(), [&](int64_t begin, int64_t end) {
    cpu_kernels().dropout(dtype, source, target, draw, begin, end);
  });
  return with_layout_of(x, y);
}

// ---- GELU ----

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
  parallel_over_elements(numel, [&](int64_t begin, int64_t end) {
    cpu_kernels().gelu_forward(dtype, source, target, bits, form, begin, end);
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
  parallel_over_elements(grad.numel(), [&](int64_t begin, int64_t end) {
    cpu_kernels().gelu_backward(dtype, dy_data, y_data, bits, dx_data, form, begin, end);
  });
  return with_layout_of(grad, dx);
}

// ---- LayerNorm ----

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
    cpu_kernels().layer_norm_forward(dtype, x_data, gamma.data(), beta.data(), static_cast<float>(eps), y_data, rstd_data,
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
      cpu_kernels().layer_norm_backward(dtype, dy_data, y_data, rstd_data, gamma.data(), inverse_gamma.data(), beta.data(),
                                        exact_data, dx_data, sums.dgamma(chunk), sums.dbeta(chunk), shape,
                                        sums.first_row(chunk), sums.first_row(chunk + 1));
  });
  sums.add_up();
  return {dx, from_floats(weight, sums.dgamma(0)), from_floats(bias, sums.dbeta(0))};
}

// ---- softmax and dropout ----

tempo::SoftmaxShape softmax_shape(const Tensor& scores, double scale, bool causal) {
  tempo::SoftmaxShape shape = {};
  shape.keys = scores.size(scores.dim() - 1);
  shape.queries = scores.size(scores.dim() - 2);
  shape.heads = scores.dim() == 4 ? scores.size(1) : 1;
  shape.scale = static_cast<float>(scale);
  shape.causal = causal;
  return shape;
}

float lowest_number(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return -65504.0f;
    case ScalarType::BFloat16: return -3.38953139e+38f;
    default: return -3.402823466e+38f;
  }
}

// The mask with unit stride over the keys, its broadcast dimensions with stride 0; returned to keep it alive.
Tensor set_mask(tempo::SoftmaxShape& shape, const Tensor& given, const Tensor& scores) {
  const bool is_bool = given.scalar_type() == ScalarType::Bool;
  shape.hiding = lowest_number(given.scalar_type());
  Tensor mask = given;
  if (!is_bool && given.scalar_type() != ScalarType::Float)
    mask = torch::stable::to(given, std::make_optional(ScalarType::Float));
  if (mask.size(3) != 1 && mask.stride(3) != 1) mask = torch::stable::contiguous(mask);
  for (int64_t d = 0; d < 4; ++d) {
    STD_TORCH_CHECK(mask.size(d) == 1 || mask.size(d) == scores.size(d), "the mask does not broadcast to the scores");
    shape.mask_strides[d] = mask.size(d) == 1 ? 0 : mask.stride(d);
  }
  const void* data = mask.const_data_ptr();
  (is_bool ? (void)(shape.bool_mask = static_cast<const uint8_t*>(data)) : (void)(shape.added_mask = static_cast<const float*>(data)));
  return mask;
}

Tensor empty_tensor(const Tensor& like) { return torch::stable::new_empty(like, {0}); }

Tensor softmax_dropout_forward(Tensor scores, std::optional<Tensor> mask, double scale, double p, Tensor rng, int64_t site,
                               bool causal) {
  auto shape = softmax_shape(scores, scale, causal);
  const Tensor kept_mask = mask.has_value() ? set_mask(shape, *mask, scores) : scores;
  const auto draw = dropout_draw(p, rng, site, scores.numel(), scores.size(0));
  Tensor dropped = p == 0.0 ? empty_tensor(scores) : torch::stable::empty_like(scores);
  const int dtype = kernel_dtype(scores.scalar_type());
  void* scores_data = scores.mutable_data_ptr();
  void* dropped_data = p == 0.0 ? nullptr : dropped.mutable_data_ptr();
  parallel_over_rows(scores.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
    std::vector<float> row(shape.keys + tempo::kRowPadding);
    std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
    cpu_kernels().softmax_dropout_forward(dtype, scores_data, dropped_data, shape, draw, row.data(), words.data(), begin, end);
  });
  count_as_written(scores);
  return dropped;
}

Tensor softmax_dropout_backward(Tensor grad_dropped, Tensor probabilities, double scale, double p, Tensor rng, int64_t site) {
  const auto shape = softmax_shape(probabilities, scale, false);
  const auto draw = dropout_draw(p, rng, site, probabilities.numel(), probabilities.size(0));
  Tensor dropped = p == 0.0 ? empty_tensor(probabilities) : torch::stable::empty_like(probabilities);
  const int dtype = kernel_dtype(probabilities.scalar_type());
  void* grad_data = grad_dropped.mutable_data_ptr();
  const void* probability_data = probabilities.const_data_ptr();
  void* dropped_data = p == 0.0 ? nullptr : dropped.mutable_data_ptr();
  parallel_over_rows(probabilities.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
    std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
    cpu_kernels().softmax_dropout_backward(dtype, grad_data, probability_data, dropped_data, shape, draw, words.data(), begin, end);
  });
  count_as_written(grad_dropped);
  return dropped;
}

// ---- registration ----

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <const char* kReference, bool (*kTakes)(const StableIValue*), Boxed kKernel>
void kernel_or_reference(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  if (kTakes(stack)) {
    kKernel(stack, num_arguments, num_results);
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(kReference, "", stack, TORCH_ABI_VERSION));
  }
}

constexpr char kDropout[] = "tempo::reference_dropout";
constexpr char kGeluForward[] = "tempo::reference_gelu_forward";
constexpr char kGeluForwardInplace[] = "tempo::reference_gelu_forward_";
constexpr char kGeluBackward[] = "tempo::reference_gelu_backward";
constexpr char kLayerNormForward[] = "tempo::reference_layer_norm_forward";
constexpr char kLayerNormBackward[] = "tempo::reference_layer_norm_backward";
constexpr char kSoftmaxForward[] = "tempo::reference_softmax_dropout_forward";
constexpr char kSoftmaxBackward[] = "tempo::reference_softmax_dropout_backward";

bool takes_gelu_forward(const StableIValue* stack) { return is_plain(Argument(stack[0])); }

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) {
  m.impl("dropout", &kernel_or_reference<kDropout, takes_dropout, TORCH_BOX(&dropout)>);
  m.impl("gelu_forward", &kernel_or_reference<kGeluForward, takes_gelu_forward, TORCH_BOX(&gelu_forward)>);
  m.impl("gelu_forward_", &kernel_or_reference<kGeluForwardInplace, takes_gelu_forward, TORCH_BOX(&gelu_forward_inplace)>);
  m.impl("gelu_backward", &kernel_or_reference<kGeluBackward, takes_gelu_backward, TORCH_BOX(&gelu_backward)>);
  m.impl("layer_norm_forward",
         &kernel_or_reference<kLayerNormForward, takes_layer_norm_forward, TORCH_BOX(&layer_norm_forward)>);
  m.impl("layer_norm_backward",
         &kernel_or_reference<kLayerNormBackward, takes_layer_norm_backward, TORCH_BOX(&layer_norm_backward)>);
  m.impl("softmax_dropout_forward",
         &kernel_or_reference<kSoftmaxForward, takes_softmax_forward, TORCH_BOX(&softmax_dropout_forward)>);
  m.impl("softmax_dropout_backward",
         &kernel_or_reference<kSoftmaxBackward, takes_softmax_backward, TORCH_BOX(&softmax_dropout_backward)>);
}

// ---- for the tests and the start-up report: plain C, no tensors ----

extern "C" __attribute__((visibility("default"))) const char* tempo_cpu_isa() { return cpu_kernels().name; }
