// GELU that keeps its output and 1 or 4 bits per element, and the backward pass from the input of op 5. One thread: 8 elements.
//
// Least bytes per element, in 16-bit types: forward 4.125 (1 bit) or 4.5 (4 bits), backward 6.125 or 6.5, from the input 8.
#include "common/gpu_vector.cuh"
#include "gelu/gelu.h"
#include "gelu/gelu_math.cuh"

namespace tempo {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
constexpr bool kIsHigh = sizeof(T) == 4;

// With 4 bits, half keeps where in its cell the result lies: that takes more digits than half itself has.
template <class T, int kSideBits>
constexpr bool kForwardIsHigh = kIsHigh<T> || (std::is_same<T, __half>::value && kSideBits == 4);

__device__ inline int64_t first_element() { return ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kVector; }

// Writes kSideBits bits for each of `count` elements (8 unless the tensor ends here).
template <int kSideBits>
__device__ inline void store_side(uint8_t* side, int64_t first, int64_t count, uint32_t packed) {
  uint8_t* target = side + first * kSideBits / 8;
  if (kSideBits == 1) {
    *target = (uint8_t)packed;
  } else if (count >= kVector) {
    *reinterpret_cast<uint32_t*>(target) = packed;
  } else {
    for (int i = 0; i < (int)(count + 1) / 2; ++i) target[i] = (uint8_t)(packed >> 8 * i);
  }
}

template <int kSideBits>
__device__ inline uint32_t load_side(const uint8_t* side, int64_t first, int64_t count) {
  const uint8_t* source = side + first * kSideBits / 8;
  if (kSideBits == 1) return *source;
  if (count >= kVector) return *reinterpret_cast<const uint32_t*>(source);
  uint32_t packed = 0;
  for (int i = 0; i < (int)(count + 1) / 2; ++i) packed |= (uint32_t)source[i] << 8 * i;
  return packed;
}

template <class T, class Form, int kSideBits>
__device__ inline uint32_t side_field(float x, float exact) {
  const uint32_t is_right = !(x < Form::kXMinAbove);
  if constexpr (kSideBits == 1)
    return is_right;
  else if constexpr (kIsHigh<T>)
    return is_right << 3;
  else
    return is_right << 3 | place_in_cell<Form, T>(exact, to_float(from_float<T>(exact)));
}

// y may be x.
template <class T, class Form, int kSideBits>
__global__ void __launch_bounds__(kThreads) forward_kernel(const T* x, T* y, uint8_t* side, int64_t numel, bool aligned) {
  const int64_t first = first_element(), count = numel - first;
  if (count <= 0) return;
  float v[kVector];
  load8(x + first, count, aligned, v);
  uint32_t packed = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float exact = gelu_of<Form, kForwardIsHigh<T, kSideBits>>(v[i]);
    const uint32_t field = side_field<T, Form, kSideBits>(v[i], exact);
    if (i < count) packed |= field << (i * kSideBits);  // bits past the last element are 0
    v[i] = exact;
  }
  store8(y + first, count, aligned, v);
  store_side<kSideBits>(side, first, count, packed);
}

// dx may be grad.
template <class T, class Form, int kSideBits>
__global__ void __launch_bounds__(kThreads) backward_kernel(const T* grad, const T* y, const uint8_t* side, T* dx, int64_t numel,
                                                            bool aligned) {
  const int64_t first = first_element(), count = numel - first;
  if (count <= 0) return;
  float g[kVector], v[kVector];
  load8(grad + first, count, aligned, g);
  load8(y + first, count, aligned, v);
  const uint32_t packed = load_side<kSideBits>(side, first, count);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t field = packed >> (i * kSideBits);
    float output = v[i], t = fast_sqrt(depth<Form>(output));
    if constexpr (kSideBits == 4 && !kIsHigh<T>) refine<Form, T>(output, t, field & 7);
    g[i] *= gelu_derivative<Form, kIsHigh<T>>(output, t, (field >> (kSideBits - 1) & 1) != 0);
  }
  store8(dx + first, count, aligned, g);
}

// dx may be grad, y may be x.
template <class T, class Form>
__global__ void __launch_bounds__(kThreads) recompute_kernel(const T* grad, const T* x, T* dx, T* y, int64_t numel, bool aligned) {
  const int64_t first = first_element(), count = numel - first;
  if (count <= 0) return;
  float g[kVector], v[kVector];
  load8(grad + first, count, aligned, g);
  load8(x + first, count, aligned, v);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const Tail tail = Form::tail(fminf(fabsf(v[i]), kFarLeft));
    g[i] *= gelu_derivative_of_input(v[i], tail);
    v[i] = gelu_of<Form, kIsHigh<T>>(v[i], tail);
  }
  store8(dx + first, count, aligned, g);
  store8(y + first, count, aligned, v);
}

// Calls f with the Form as a type.
template <bool kHigh, class F>
int by_form(bool tanh_form, F f) {
  if (tanh_form) return f(TanhForm<kHigh>{});
  return f(ErfForm<kHigh>{});
}

template <class T, int kSideBits>
int launch_forward(const void* x, void* y, uint8_t* side, bool tanh_form, int64_t numel, void* stream) {
  const bool aligned = is_aligned(x) && is_aligned(y);
  return by_form<kForwardIsHigh<T, kSideBits>>(tanh_form, [&](auto chosen) {
    return launch(&forward_kernel<T, decltype(chosen), kSideBits>, numel, kThreads * kVector, kThreads, stream, (const T*)x, (T*)y,
                  side, numel, aligned);
  });
}

}  // namespace

int gelu_forward(int dtype, const void* x, void* y, uint8_t* side, const GeluForm& form, int64_t numel, void* stream) {
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    if (form.side_bits == 1) return launch_forward<T, 1>(x, y, side, form.tanh_form, numel, stream);
    return launch_forward<T, 4>(x, y, side, form.tanh_form, numel, stream);
  });
}

int gelu_backward(int dtype, const void* grad, const void* y, const uint8_t* side, void* dx, const GeluForm& form, int64_t numel,
                  void* stream) {
  const bool aligned = is_aligned(grad) && is_aligned(y) && is_aligned(dx);
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    return by_form<kIsHigh<T>>(form.tanh_form, [&](auto chosen) {
      using Form = decltype(chosen);
      auto* kernel = form.side_bits == 1 ? &backward_kernel<T, Form, 1> : &backward_kernel<T, Form, 4>;
      return launch(kernel, numel, kThreads * kVector, kThreads, stream, (const T*)grad, (const T*)y, side, (T*)dx, numel, aligned);
    });
  });
}

int gelu_recompute_backward(int dtype, const void* grad, const void* x, void* dx, void* y, bool tanh_form, int64_t numel,
                            void* stream) {
  const bool aligned = is_aligned(grad) && is_aligned(x) && is_aligned(dx) && is_aligned(y);
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    return by_form<kIsHigh<T>>(tanh_form, [&](auto chosen) {
      return launch(&recompute_kernel<T, decltype(chosen)>, numel, kThreads * kVector, kThreads, stream, (const T*)grad,
                    (const T*)x, (T*)dx, (T*)y, numel, aligned);
    });
  });
}

}  // namespace cuda
}  // namespace tempo
