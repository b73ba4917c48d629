// What the bindings of attention's softmax share.
#pragma once
#include "attention/softmax_dropout.h"
#include "common/op.h"

namespace {

// An optional argument is a pointer to its value, null where there is none.
inline bool takes_softmax_forward(const StableIValue* stack) {
  Argument scores(stack[0]);
  if (!is_plain(scores) || scores.dim() < 2 || !scores.is_contiguous()) return false;
  const StableIValue* mask = nullptr;
  std::memcpy(&mask, &stack[1], sizeof mask);
  if (mask == nullptr) return true;
  Argument m(*mask);
  return scores.dim() == 4 && m.dim() == 4 && m.dtype() != ScalarType::Double;
}

inline bool takes_softmax_backward(const StableIValue* stack) {
  Argument grad(stack[0]), probabilities(stack[1]);
  return is_plain(grad) && grad.dim() >= 2 && grad.same_dtype(probabilities) && grad.is_contiguous() &&
         probabilities.is_contiguous() && grad.numel() == probabilities.numel();
}

inline tempo::SoftmaxShape softmax_shape(const Tensor& scores, double scale, bool causal) {
  tempo::SoftmaxShape shape = {};
  shape.keys = scores.size(scores.dim() - 1);
  shape.queries = scores.size(scores.dim() - 2);
  shape.heads = scores.dim() == 4 ? scores.size(1) : 1;
  shape.scale = static_cast<float>(scale);
  shape.causal = causal;
  return shape;
}

inline float lowest_number(ScalarType type) {
  switch (type) {
    case ScalarType::Half: return -65504.0f;
    case ScalarType::BFloat16: return -3.38953139e+38f;
    default: return -3.402823466e+38f;
  }
}

// The mask with unit stride over the keys, its broadcast dimensions with stride 0; returned to keep it alive.
inline Tensor set_mask(tempo::SoftmaxShape& shape, const Tensor& given, const Tensor& scores) {
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

constexpr char kForward[] = "tempo::reference_softmax_dropout_forward";
constexpr char kBackward[] = "tempo::reference_softmax_dropout_backward";

}  // namespace
