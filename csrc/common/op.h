// What the bindings of all layers share: looking at arguments, layouts, threads, and handing over to the references.
//
// <layer>_op.cpp binds the kernels of a layer to torch.ops.tempo.*: the tensor's side of an op is written once, as a template over
// the device, whose kernels a struct Cpu and a struct Cuda call. These files and this header alone see torch headers. They are written against
// LibTorch's stable ABI (target 2.10): one binary serves PyTorch 2.10 and newer under any Python. The schemas and the references
// are in tempo/*.py; a call that no kernel serves (another dtype, a strange layout) is handed to the reference, the op of the
// same name with the prefix `reference_`.
#pragma once
#include <torch/csrc/stable/accelerator.h>
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

#ifdef TEMPO_CUDA
// In torch's CUDA library; null where torch has none, and then no CUDA tensor gets here.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);
#endif

namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Fewer elements than this are not worth waking a thread for.
constexpr int64_t kElementsPerThread = 16384;

inline int kernel_dtype(ScalarType type) {
  switch (type) {
    case ScalarType::Float: return tempo::kFloat;
    case ScalarType::BFloat16: return tempo::kBFloat16;
    case ScalarType::Half: return tempo::kHalf;
    default: return -1;
  }
}

struct CpuDevice {
  static bool serves(ScalarType type) { return type == ScalarType::Float || type == ScalarType::BFloat16; }
};

struct CudaDevice {
  static bool serves(ScalarType type) { return kernel_dtype(type) >= 0; }
};

// ---- arguments, looked at before they are taken off the stack ----

class Argument {
 public:
  explicit Argument(StableIValue value) { std::memcpy(&handle_, &value, sizeof handle_); }
  template <class Device>
  bool served_by() const { return Device::serves(dtype()); }
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
template <class Device>
bool is_plain(const Argument& x) { return x.served_by<Device>() && x.dim() >= 1 && x.numel() > 0; }

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

// A CPU's output of this many bytes is streamed past the caches: the next operation would not find it there.
constexpr int64_t kStreamedBytes = 8 << 20;

inline bool worth_streaming(const Tensor& t) {
  return t.numel() * (t.scalar_type() == ScalarType::Float ? 4 : 2) >= kStreamedBytes;
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

// A pointer to another device's memory would end the process, or its use of the GPU.
template <class... Others>
void check_same_device(const Tensor& first, const Others&... others) {
  const auto same = [&](const Tensor& other) {
    return first.is_cuda() == other.is_cuda() && (!first.is_cuda() || first.get_device_index() == other.get_device_index());
  };
  STD_TORCH_CHECK((same(others) && ...), "all tensors of the call must be on one device");
}

// ---- the draw of a dropout: read here on the CPU, by the kernel on a GPU ----

inline void check_rng(const Tensor& rng) {
  STD_TORCH_CHECK(rng.scalar_type() == ScalarType::Long && rng.numel() == 2, "rng must be int64 [2] = (seed, first_sample)");
}

inline uint64_t drop_threshold(double p) { return static_cast<uint64_t>(std::nearbyint(p * 4294967296.0)); }

inline float keep_scale(double p) { return p < 1.0 ? static_cast<float>(1.0 / (1.0 - p)) : 0.0f; }

inline tempo::DropoutDraw dropout_draw(double p, const Tensor& rng, int64_t site, int64_t numel, int64_t batch) {
  check_rng(rng);
  const Tensor row = dense(rng);
  const auto* values = static_cast<const int64_t*>(row.const_data_ptr());
  const uint64_t first_element = static_cast<uint64_t>(values[1]) * static_cast<uint64_t>(numel / batch);
  return {static_cast<uint64_t>(values[0]), static_cast<uint64_t>(site), first_element, drop_threshold(p), keep_scale(p)};
}

// `rng` must be dense and outlive the launch.
inline tempo::DeviceDropout device_dropout(double p, const Tensor& rng, int64_t site, int64_t numel, int64_t batch) {
  check_rng(rng);
  return {static_cast<const int64_t*>(rng.const_data_ptr()), static_cast<uint64_t>(site), static_cast<uint64_t>(numel / batch),
          drop_threshold(p), keep_scale(p)};
}

// ---- launching on a GPU ----

inline tempo::Parameter parameter(const Tensor& t) { return {t.const_data_ptr(), kernel_dtype(t.scalar_type())}; }
inline tempo::ParameterGradient parameter_gradient(Tensor& t) { return {t.mutable_data_ptr(), kernel_dtype(t.scalar_type())}; }

// Makes the tensor's device the current one, and finds its current stream.
class Launch {
 public:
#ifdef TEMPO_CUDA
  explicit Launch(const Tensor& on) : guard_(on.get_device_index()) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(on.get_device_index(), &stream_));
  }
#else  // in the emulation
  explicit Launch(const Tensor&) {}
#endif
  void* stream() const { return stream_; }
  void check(int error, const char* op) const {
    STD_TORCH_CHECK(error == 0, "tempo::", op, ": ", tempo::cuda::explain(error));
  }

 private:
#ifdef TEMPO_CUDA
  torch::stable::accelerator::DeviceGuard guard_;
#endif
  void* stream_ = nullptr;
};

inline Tensor float_tensor(const Tensor& on_device_of, std::initializer_list<int64_t> shape) {
  return torch::stable::new_empty(on_device_of, shape, std::make_optional(ScalarType::Float));
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

// Registers the ops of a layer: `function<Device>(m)` calls m.impl for each.
#if defined(TEMPO_EMULATED)  // the CUDA kernels, run on the CPU by the tests
#define TEMPO_REGISTER(function) \
  STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) { function<Cuda>(m); }
#elif defined(TEMPO_CUDA)
#define TEMPO_REGISTER(function)                                  \
  STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) { function<Cpu>(m); } \
  STABLE_TORCH_LIBRARY_IMPL(tempo, CUDA, m) { function<Cuda>(m); }
#else
#define TEMPO_REGISTER(function) \
  STABLE_TORCH_LIBRARY_IMPL(tempo, CPU, m) { function<Cpu>(m); }
#endif
