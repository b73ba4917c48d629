// What the bindings of all layers share: looking at arguments, layouts, threads, and handing over to the references.
//
// Files named *_op.cpp bind kernels to torch.ops.tempo.*; they and this header alone see torch headers. They are written against
// LibTorch's stable ABI (target 2.10): one binary serves PyTorch 2.10 and newer under any Python. The schemas and the references
// are in tempo/*.py; a call that no kernel serves (another dtype, a strange layout) is handed to the reference, the op of the
// same name with the prefix `reference_`.
#pragma once
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

#include "common/kernels.h"

// Named so from PyTorch 2.11 on; 2.10's headers have the same check under its older name.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK(call) TORCH_ERROR_CODE_CHECK(call)
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kElementsPerThread = 16384;

inline int kernel_dtype(ScalarType type) {
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
inline bool is_plain(const Argument& x) { return x.has_kernel_dtype() && x.dim() >= 1 && x.numel() > 0; }

// Splits 0 .. numel at multiples of `tile`.
template <class F>
void parallel_over_elements(int64_t numel, int64_t tile, const F& f) {
  torch::stable::parallel_for(0, (numel + tile - 1) / tile, std::max<int64_t>(1, kElementsPerThread / tile),
                              [&](int64_t begin, int64_t end) { f(begin * tile, std::min(end * tile, numel)); });
}

template <class F>
void parallel_over_rows(int64_t rows, int64_t columns, const F& f) {
  torch::stable::parallel_for(0, rows, std::max<int64_t>(1, kElementsPerThread / columns), f);
}

inline Tensor dense(const Tensor& t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

// Like empty_like: the strides of `like`. `result` is contiguous.
inline Tensor with_layout_of(const Tensor& like, const Tensor& result) {
  if (like.is_contiguous()) return result;
  Tensor out = torch::stable::empty_like(like);
  torch::stable::copy_(out, result);
  return out;
}

// Tells autograd that a kernel wrote over `t`, as PyTorch's own in-place ops do.
inline void count_as_written(Tensor& t) {
  Tensor nothing = torch::stable::narrow(t, 0, 0, 0);
  torch::stable::zero_(nothing);
}

inline tempo::DropoutDraw dropout_draw(double p, const Tensor& rng, int64_t site, int64_t numel, int64_t batch) {
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

inline Tensor empty_tensor(const Tensor& like) { return torch::stable::new_empty(like, {0}); }

using Boxed = void (*)(StableIValue*, uint64_t, uint64_t);

template <const char* kReference, bool (*kTakes)(const StableIValue*), Boxed kKernel>
void kernel_or_reference(StableIValue* stack, uint64_t num_arguments, uint64_t num_results) {
  if (kTakes(stack)) {
    kKernel(stack, num_arguments, num_results);
  } else {
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(kReference, "", stack, TORCH_ABI_VERSION));
  }
}

}  // namespace
