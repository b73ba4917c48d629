// Binds attention's kernels to torch.ops.tempo.softmax_dropout_*.
#include "attention/softmax_dropout.h"

#include "common/op.h"

namespace {

using tempo::SoftmaxShape;

struct Dropping {
  double p;
  const Tensor& rng;
  int64_t site;
};

void* data_or_null(Tensor& t) { return t.numel() == 0 ? nullptr : t.mutable_data_ptr(); }

struct Cpu : CpuDevice {
  static void forward(Tensor& scores, Tensor& dropped, const SoftmaxShape& shape, const Dropping& dropping) {
    const auto draw = dropout_draw(dropping.p, dropping.rng, dropping.site, scores.numel(), scores.size(0));
    const int dtype = kernel_dtype(scores.scalar_type());
    void *scores_data = scores.mutable_data_ptr(), *dropped_data = data_or_null(dropped);
    parallel_over_rows(scores.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
      std::vector<float> row(shape.keys + tempo::kRowPadding);
      std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
      TEMPO_CPU(softmax_dropout_forward)(dtype, scores_data, dropped_data, shape, draw, row.data(), words.data(), begin, end);
    });
  }

  static void backward(Tensor& grad, const Tensor& probabilities, Tensor& dropped, const SoftmaxShape& shape,
                       const Dropping& dropping) {
    const auto draw = dropout_draw(dropping.p, dropping.rng, dropping.site, grad.numel(), grad.size(0));
    const int dtype = kernel_dtype(grad.scalar_type());
    void *grad_data = grad.mutable_data_ptr(), *dropped_data = data_or_null(dropped);
    const void* probability_data = probabilities.const_data_ptr();
    parallel_over_rows(grad.numel() / shape.keys, shape.keys, [&](int64_t begin, int64_t end) {
      std::vector<uint32_t> words(shape.keys + tempo::kRowPadding);
      TEMPO_CPU(softmax_dropout_backward)(dtype, grad_data, probability_data, dropped_data, shape, draw, words.data(), begin, end);
    });
  }
};

struct Cuda : CudaDevice {
  static void forward(Tensor& scores, Tensor& dropped, const SoftmaxShape& shape, const Dropping& dropping) {
    const Launch launch(scores);
    const Tensor rng = dense(dropping.rng);
    const auto draw = device_dropout(dropping.p, rng, dropping.site, scores.numel(), scores.size(0));
    launch.check(tempo::cuda::softmax_dropout_forward(kernel_dtype(scores.scalar_type()), scores.mutable_data_ptr(),
                                                      data_or_null(dropped), shape, draw, scores.numel() / shape.keys,
                                                      launch.stream()),
                 "softmax_dropout_forward");
  }

  static void backward(Tensor& grad, const Tensor& probabilities, Tensor& dropped, const SoftmaxShape& shape,
                       const Dropping& dropping) {
    const Launch launch(grad);
    const Tensor rng = dense(dropping.rng);
    const auto draw = device_dropout(dropping.p, rng, dropping.site, grad.numel(), grad.size(0));
    launch.check(tempo::cuda::softmax_dropout_backward(kernel_dtype(grad.scalar_type()), grad.mutable_data_ptr(),
                                                       probabilities.const_data_ptr(), data_or_null(dropped), shape, draw,
                                                       grad.numel() / shape.keys, launch.stream()),
                 "softmax_dropout_backward");
  }
};

SoftmaxShape softmax_shape(const Tensor& scores, double scale, bool causal) {
  SoftmaxShape shape = {};
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
Tensor set_mask(SoftmaxShape& shape, const Tensor& given, const Tensor& scores) {
  check_same_device(scores, given);
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
  if (is_bool)
    shape.bool_mask = static_cast<const uint8_t*>(data);
  else
    shape.added_mask = static_cast<const float*>(data);
  return mask;
}

// ---- forward ----

// An optional argument is a pointer to its value, null where there is none.
template <class Device>
bool takes_forward(const StableIValue* stack) {
  Argument scores(stack[0]);
  if (!is_plain<Device>(scores) || scores.dim() < 2 || !scores.is_contiguous()) return false;
  const StableIValue* mask = nullptr;
  std::memcpy(&mask, &stack[1], sizeof mask);
  if (mask == nullptr) return true;
  Argument m(*mask);
  return scores.dim() == 4 && m.dim() == 4 && m.dtype() != ScalarType::Double;
}

template <class Device>
Tensor forward(Tensor scores, std::optional<Tensor> mask, double scale, double p, Tensor rng, int64_t site, bool causal) {
  check_same_device(scores, rng);
  auto shape = softmax_shape(scores, scale, causal);
  const Tensor kept_mask = mask.has_value() ? set_mask(shape, *mask, scores) : scores;
  Tensor dropped = p == 0.0 ? empty_tensor(scores) : torch::stable::empty_like(scores);
  Device::forward(scores, dropped, shape, {p, rng, site});
  count_as_written(scores);
  return dropped;
}

// ---- backward ----

template <class Device>
bool takes_backward(const StableIValue* stack) {
  Argument grad(stack[0]), probabilities(stack[1]);
  return is_plain<Device>(grad) && grad.dim() >= 2 && grad.same_dtype(probabilities) && grad.is_contiguous() &&
         probabilities.is_contiguous() && grad.numel() == probabilities.numel();
}

template <class Device>
Tensor backward(Tensor grad_dropped, Tensor probabilities, double scale, double p, Tensor rng, int64_t site) {
  check_same_device(grad_dropped, probabilities, rng);
  const auto shape = softmax_shape(probabilities, scale, false);
  Tensor dropped = p == 0.0 ? empty_tensor(probabilities) : torch::stable::empty_like(probabilities);
  Device::backward(grad_dropped, probabilities, dropped, shape, {p, rng, site});
  count_as_written(grad_dropped);
  return dropped;
}

constexpr char kForward[] = "tempo::reference_softmax_dropout_forward";
constexpr char kBackward[] = "tempo::reference_softmax_dropout_backward";

template <class Device, class Library>
void register_ops(Library& m) {
  m.impl("softmax_dropout_forward", &kernel_or_reference<kForward, takes_forward<Device>, TORCH_BOX(&forward<Device>)>);
  m.impl("softmax_dropout_backward", &kernel_or_reference<kBackward, takes_backward<Device>, TORCH_BOX(&backward<Device>)>);
}

}  // namespace

TEMPO_REGISTER(register_ops)
