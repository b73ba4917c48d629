// Softmax and dropout of attention in one pass each way; see tempo/attention.py.
//
// Least bytes per score in 16-bit types: forward 6 (scores read; probabilities and dropped probabilities written), backward 8. Up to
// 1024 keys, a multiple of 8, a warp (or half of one) holds a row in registers; else a block goes over the row several times.
#include "attention/softmax_dropout.h"
#include "common/gpu_philox.cuh"
#include "common/gpu_reduce.cuh"
#include "common/gpu_vector.cuh"

namespace tempo {
namespace cuda {
namespace {

// A masked score: float's lowest number, so that a row with nothing left is finite and uniform.
constexpr float kLowest = -3.402823466e+38f;
constexpr float kLog2E = 1.44269504f;
constexpr int kThreads = 128;         // of a block in the kernels on registers
constexpr int kGeneralThreads = 256;  // of a row in the others

// The attention mask, as seen from one row of scores: where its row starts, and how many keys a causal row sees.
struct RowMask {
  int64_t offset, visible;
};

__device__ inline RowMask row_mask(const SoftmaxShape& shape, int64_t row) {
  const int64_t query = row % shape.queries, rest = row / shape.queries;
  const int64_t head = rest % shape.heads, batch = rest / shape.heads;
  const int64_t seen = query + shape.keys - shape.queries + 1;
  return {batch * shape.mask_strides[0] + head * shape.mask_strides[1] + query * shape.mask_strides[2],
          shape.causal ? seen : shape.keys};
}

__device__ inline float add_mask(float v, float added, float hiding) { return added <= hiding ? kLowest : v + added; }

// The scaled score of key c with the mask applied.
__device__ inline float masked1(float score, const SoftmaxShape& shape, const RowMask& row, int64_t c) {
  float v = score * shape.scale;
  const int64_t at = row.offset + c * shape.mask_strides[3];
  if (shape.bool_mask != nullptr && shape.bool_mask[at] == 0) v = kLowest;
  if (shape.added_mask != nullptr) v = add_mask(v, shape.added_mask[at], shape.hiding);
  return c < row.visible ? v : kLowest;
}

// Whether 8 neighbouring values of the mask can be loaded at once.
inline bool mask_in_vectors(const SoftmaxShape& shape) {
  bool result = shape.mask_strides[3] == 1 && is_aligned(shape.bool_mask) && is_aligned(shape.added_mask);
  for (int d = 0; d < 3; ++d) result = result && shape.mask_strides[d] % kVector == 0;
  return result;
}

// Keys c .. c + 7.
__device__ inline void masked8(float (&v)[kVector], const SoftmaxShape& shape, const RowMask& row, int c, bool mask_vectors) {
#pragma unroll
  for (int k = 0; k < kVector; ++k) v[k] *= shape.scale;
  if (shape.bool_mask != nullptr) {
    uint2 attend;  // a byte a key
    if (mask_vectors) {
      attend = *reinterpret_cast<const uint2*>(shape.bool_mask + row.offset + c);
    } else {
      attend = make_uint2(0, 0);
#pragma unroll
      for (int k = 0; k < kVector; ++k) {
        const uint32_t byte = shape.bool_mask[row.offset + (c + k) * shape.mask_strides[3]];
        (k < 4 ? attend.x : attend.y) |= byte << (k % 4 * 8);
      }
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = ((k < 4 ? attend.x : attend.y) & 0xffu << (k % 4 * 8)) != 0 ? v[k] : kLowest;
  } else if (shape.added_mask != nullptr) {
    float added[kVector];
    if (mask_vectors) {
      load8(shape.added_mask + row.offset + c, added);
    } else {
#pragma unroll
      for (int k = 0; k < kVector; ++k) added[k] = shape.added_mask[row.offset + (c + k) * shape.mask_strides[3]];
    }
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = add_mask(v[k], added[k], shape.hiding);
  }
  if (shape.causal) {
    const int visible = (int)row.visible;
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[k] = c + k < visible ? v[k] : kLowest;
  }
}

// ---- rows in registers: kLanes lanes hold kGroups vectors of 8 keys each ----

template <class T, int kLanes, int kGroups>
__global__ void __launch_bounds__(kThreads, 1) forward_kernel(T* scores, T* dropped, SoftmaxShape shape, DeviceDropout draw,
                                                           int64_t num_rows, bool mask_vectors) {
  const int64_t row = ((int64_t)blockIdx.x * kThreads + threadIdx.x) / kLanes;
  const bool exists = row < num_rows;  // lanes of other rows of the warp still need this one in the shuffles
  const int lane = (int)threadIdx.x % kLanes, keys = (int)shape.keys;
  T* out = scores + row * keys;
  float v[kGroups][kVector], largest = kLowest, sum = 0.0f;
  if (exists) {
    const RowMask mask = row_mask(shape, row);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const int c = (g * kLanes + lane) * kVector;
      if (c >= keys) continue;
      load8(out + c, v[g]);
      masked8(v[g], shape, mask, c, mask_vectors);
#pragma unroll
      for (int k = 0; k < kVector; ++k) largest = fmaxf(largest, v[g][k]);
    }
  }
  largest = lane_max<kLanes>(largest);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    if (!exists || (g * kLanes + lane) * kVector >= keys) continue;
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[g][k] = fast_exp2((v[g][k] - largest) * kLog2E), sum += v[g][k];
  }
  const float inverse = 1.0f / lane_sum<kLanes>(sum);
  if (!exists) return;
  const Mask mask(draw);
#pragma unroll
  for (int g = 0; g < kGroups; ++g) {
    const int c = (g * kLanes + lane) * kVector;
    if (c >= keys) continue;
#pragma unroll
    for (int k = 0; k < kVector; ++k) v[g][k] *= inverse;
    const Packed<T> stored = pack<T>(v[g]);
    store_packed(out + c, stored);
    if (dropped == nullptr) continue;
    unpack(stored, v[g]);  // what the backward pass will drop again
    if (mask.drops) mask.drop8(v[g], (uint64_t)(row * keys + c));
    store8(dropped + row * keys + c, v[g]);
  }
}

template <class T, int kLanes, int kGroups>
__global__ void __launch_bounds__(kThreads, 1) backward_kernel(T* grad, const T* probabilities, T* dropped, SoftmaxShape shape,
                                                            DeviceDropout draw, int64_t num_rows) {
  const int64_t row = ((int64_t)blockIdx.x * kThreads + threadIdx.x) / kLanes;
  const bool exists = row < num_rows;
  const int lane = (int)threadIdx.x % kLanes, keys = (int)shape.keys;
  const int64_t start = row * keys;
  const Mask mask(draw);
  float g[kGroups][kVector], p[kGroups][kVector], dot = 0.0f;
  if (exists) {
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      const int c = (i * kLanes + lane) * kVector;
      if (c >= keys) continue;
      load8(grad + start + c, g[i]);
      load8(probabilities + start + c, p[i]);
      if (dropped != nullptr) {
        uint32_t words[kVector];
        float kept[kVector];
        mask.words8((uint64_t)(start + c), words);
#pragma unroll
        for (int k = 0; k < kVector; ++k) {
          kept[k] = mask.drops ? mask.apply(p[i][k], words[k]) : p[i][k];
          g[i][k] = mask.drops ? mask.apply(g[i][k], words[k]) : g[i][k];
        }
        store8(dropped + start + c, kept);
      }
#pragma unroll
      for (int k = 0; k < kVector; ++k) dot = fmaf(g[i][k], p[i][k], dot);
    }
  }
  dot = lane_sum<kLanes>(dot);
  if (!exists) return;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    const int c = (i * kLanes + lane) * kVector;
    if (c >= keys) continue;
#pragma unroll
    for (int k = 0; k < kVector; ++k) g[i][k] = (g[i][k] - dot) * p[i][k] * shape.scale;
    store8(grad + start + c, g[i]);
  }
}

// ---- any number of keys, any alignment: a block does a row ----

template <class T>
__global__ void __launch_bounds__(kGeneralThreads, 1) forward_general_kernel(T* scores, T* dropped, SoftmaxShape shape,
                                                                          DeviceDropout draw) {
  CU_SHARED(WarpPairs, scratch, [2]);
  const int64_t row = blockIdx.x, keys = shape.keys;
  const RowMask mask = row_mask(shape, row);
  T* out = scores + row * keys;
  float largest = kLowest, sum = 0.0f;
  for (int64_t c = threadIdx.x; c < keys; c += kGeneralThreads) largest = fmaxf(largest, masked1(to_float(out[c]), shape, mask, c));
  largest = block_max(largest, scratch[0]);
  for (int64_t c = threadIdx.x; c < keys; c += kGeneralThreads)
    sum += fast_exp2((masked1(to_float(out[c]), shape, mask, c) - largest) * kLog2E);
  const float inverse = 1.0f / block_sum(sum, 0.0f, scratch[1]).x;
  const Mask drawn(draw);
  for (int64_t c = threadIdx.x; c < keys; c += kGeneralThreads) {
    const T p = from_float<T>(fast_exp2((masked1(to_float(out[c]), shape, mask, c) - largest) * kLog2E) * inverse);
    out[c] = p;
    if (dropped == nullptr) continue;
    dropped[row * keys + c] = drawn.drops ? from_float<T>(drawn.drop1(to_float(p), (uint64_t)(row * keys + c))) : p;
  }
}

template <class T>
__global__ void __launch_bounds__(kGeneralThreads, 1) backward_general_kernel(T* grad, const T* probabilities, T* dropped,
                                                                           SoftmaxShape shape, DeviceDropout draw) {
  CU_SHARED(WarpPairs, scratch, [1]);
  const int64_t row = blockIdx.x, keys = shape.keys, start = row * keys;
  const Mask drawn(draw);
  float dot = 0.0f;
  for (int64_t c = threadIdx.x; c < keys; c += kGeneralThreads) {
    float g = to_float(grad[start + c]), kept = to_float(probabilities[start + c]);
    const float p = kept;
    if (drawn.drops) {
      const uint32_t word = drawn.word1((uint64_t)(start + c));
      g = drawn.apply(g, word), kept = drawn.apply(p, word);
    }
    if (dropped != nullptr) dropped[start + c] = from_float<T>(kept);
    dot = fmaf(g, p, dot);
  }
  dot = block_sum(dot, 0.0f, scratch[0]).x;
  for (int64_t c = threadIdx.x; c < keys; c += kGeneralThreads) {
    float g = to_float(grad[start + c]);
    if (drawn.drops) g = drawn.drop1(g, (uint64_t)(start + c));
    grad[start + c] = from_float<T>((g - dot) * to_float(probabilities[start + c]) * shape.scale);
  }
}

// Calls in_registers with the lanes and the vectors of a lane that hold a row, as a type; general where none do.
template <int kLanes, int kGroups>
struct Layout {
  static constexpr int lanes = kLanes, groups = kGroups;
};

template <class F, class G>
int by_layout(int64_t keys, bool aligned, F in_registers, G general) {
  if (keys % kVector != 0 || keys > 1024 || !aligned) return general();
  if (keys <= 128) return in_registers(Layout<16, 1>{});
  if (keys <= 256) return in_registers(Layout<32, 1>{});
  if (keys <= 512) return in_registers(Layout<32, 2>{});
  return in_registers(Layout<32, 4>{});
}

}  // namespace

int softmax_dropout_forward(int dtype, void* scores, void* dropped, const SoftmaxShape& shape, const DeviceDropout& draw,
                            int64_t num_rows, void* stream) {
  const bool aligned = is_aligned(scores) && is_aligned(dropped);
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    return by_layout(
        shape.keys, aligned,
        [&](auto layout) {
          using L = decltype(layout);
          return launch(&forward_kernel<T, L::lanes, L::groups>, num_rows, kThreads / L::lanes, kThreads, stream, (T*)scores,
                        (T*)dropped, shape, draw, num_rows, mask_in_vectors(shape));
        },
        [&] {
          return launch(&forward_general_kernel<T>, num_rows, 1, kGeneralThreads, stream, (T*)scores, (T*)dropped, shape, draw);
        });
  });
}

int softmax_dropout_backward(int dtype, void* grad, const void* probabilities, void* dropped, const SoftmaxShape& shape,
                             const DeviceDropout& draw, int64_t num_rows, void* stream) {
  const bool aligned = is_aligned(grad) && is_aligned(probabilities) && is_aligned(dropped);
  return by_dtype(dtype, [&](auto* tag) {
    using T = element_type<decltype(tag)>;
    const auto* source = (const T*)probabilities;
    return by_layout(
        shape.keys, aligned,
        [&](auto layout) {
          using L = decltype(layout);
          return launch(&backward_kernel<T, L::lanes, L::groups>, num_rows, kThreads / L::lanes, kThreads, stream, (T*)grad, source,
                        (T*)dropped, shape, draw, num_rows);
        },
        [&] {
          return launch(&backward_general_kernel<T>, num_rows, 1, kGeneralThreads, stream, (T*)grad, source, (T*)dropped, shape,
                        draw);
        });
  });
}

}  // namespace cuda
}  // namespace tempo
