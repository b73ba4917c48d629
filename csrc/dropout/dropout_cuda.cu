// Dropout without a kept mask. One thread: 8 elements; least bytes per element: read and write it.
#include "common/gpu_philox.cuh"
#include "common/gpu_vector.cuh"
#include "dropout/dropout.h"

namespace tempo {
namespace cuda {
namespace {

constexpr int kThreads = 256;

template <class T>
__global__ void __launch_bounds__(kThreads) dropout_kernel(const T* x, T* y, DeviceDropout draw, int64_t numel, bool aligned) {
  const int64_t first = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * kVector, count = numel - first;
  if (count <= 0) return;
  const Mask mask(draw);
  float v[kVector];
  load8(x + first, count, aligned, v);
  if (!mask.drops) {
    // p is below 2^-33
  } else if ((mask.first_element & 3) == 0) {
    mask.drop8(v, (uint64_t)first);
  } else {
    // Samples whose size is no multiple of 4: the mask's blocks lie across the thread's elements.
    for (int i = 0; i < kVector; ++i) v[i] = mask.drop1(v[i], (uint64_t)(first + i));
  }
  store8(y + first, count, aligned, v);
}

}  // namespace

int dropout(int dtype, const void* x, void* y, const DeviceDropout& draw, int64_t numel, void* stream) {
  const bool aligned = is_aligned(x) && is_aligned(y);
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    return launch(&dropout_kernel<T>, numel, kThreads * kVector, kThreads, stream, (const T*)x, (T*)y, draw, numel, aligned);
  });
}

}  // namespace cuda
}  // namespace tempo
