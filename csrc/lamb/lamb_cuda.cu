// The LAMB step over many tensors; see tempo/lamb.py.
//
// Least bytes per element: 24 (g, w, m, v read; m, v written) and 16 (m, v, w read; w written) with trust ratios, 28 in one pass
// without. Tensors travel in the kernel's arguments, some dozens per launch; a block does one chunk of one tensor. Nothing is
// decided on the host: begin_kernel looks at the norm, and every other kernel at what it found.
#include "common/gpu_reduce.cuh"
#include "common/gpu_vector.cuh"
#include "lamb/lamb.h"

namespace tempo {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kLane = 4;  // a thread's neighbouring elements: 16 bytes of float
constexpr int kRounds = 8;
constexpr int64_t kChunk = (int64_t)kThreads * kLane * kRounds;
constexpr int kTensors = 64;

// Below the 4 KB that arguments may take.
struct Tensors {
  LambTensor tensors[kTensors];
  int32_t first_chunk[kTensors + 1];
  int32_t count;
};
static_assert(sizeof(Tensors) <= 3800, "kernel arguments must stay below 4 KB");

struct State {
  LambFactors factors;
  bool applies;
};

// What lies in the workspace, each part at a multiple of 16 bytes.
struct Workspace {
  State* state;
  float* rates;  // lr * r of each tensor of a launch
  float2* sums;  // of w^2 and u^2 in each chunk of a launch
};
constexpr int64_t kRatesOffset = 64, kSumsOffset = kRatesOffset + kTensors * 4;
static_assert(sizeof(State) <= kRatesOffset && kSumsOffset % 16 == 0, "the parts of the workspace overlap");

Workspace parts_of(void* workspace) {
  auto* bytes = static_cast<unsigned char*>(workspace);
  return {reinterpret_cast<State*>(bytes), reinterpret_cast<float*>(bytes + kRatesOffset),
          reinterpret_cast<float2*>(bytes + kSumsOffset)};
}

int64_t num_chunks(const LambTensor& tensor) { return (tensor.numel + kChunk - 1) / kChunk; }

// ---- four neighbouring elements ----

template <class T>
__device__ inline void load4(const T* p, int64_t count, bool aligned, float (&v)[kLane]) {
  if (aligned && count >= kLane) {
    if constexpr (sizeof(T) == 4) {
      unpack_word(*reinterpret_cast<const uint4*>(p), v, p);
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(p);
      const float2 a = pair_of(words.x, p), b = pair_of(words.y, p);
      v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kLane; ++i) v[i] = i < count ? to_float(p[i]) : 0.0f;
}

template <class T>
__device__ inline void store4(T* p, int64_t count, bool aligned, const float (&v)[kLane]) {
  if (aligned && count >= kLane) {
    if constexpr (sizeof(T) == 4)
      *reinterpret_cast<uint4*>(p) = pack_word(v, p);
    else
      *reinterpret_cast<uint2*>(p) = make_uint2(bits_of(v[0], v[1], p), bits_of(v[2], v[3], p));
    return;
  }
#pragma unroll
  for (int i = 0; i < kLane; ++i)
    if (i < count) p[i] = from_float<T>(v[i]);
}

__device__ inline void store_copy(void* copy, int dtype, int64_t i, int64_t count, bool aligned, const float (&w)[kLane]) {
  if (copy == nullptr) return;
  if (dtype == kHalf)
    store4(static_cast<__half*>(copy) + i, count, aligned, w);
  else
    store4(static_cast<__nv_bfloat16*>(copy) + i, count, aligned, w);
}

// ---- a block's part ----

struct Chunk {
  LambTensor tensor;
  int index;        // of the tensor
  int64_t begin;    // first element of this thread's first round
  bool aligned;
};

__device__ inline Chunk chunk_of_block(const Tensors& all) {
  const int block = (int)blockIdx.x;
  int low = 0, high = all.count;  // first_chunk[low] <= block < first_chunk[high]
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (all.first_chunk[middle] <= block)
      low = middle;
    else
      high = middle;
  }
  Chunk c;
  c.tensor = all.tensors[low];
  c.index = low;
  c.begin = (int64_t)(block - all.first_chunk[low]) * kChunk + (int64_t)threadIdx.x * kLane;
  const uintptr_t addresses = (uintptr_t)c.tensor.param | (uintptr_t)c.tensor.grad | (uintptr_t)c.tensor.exp_avg |
                              (uintptr_t)c.tensor.exp_avg_sq | (uintptr_t)c.tensor.copy;
  c.aligned = addresses % 16 == 0;
  return c;
}

// Calls f(first element, how many are left) for each of this thread's rounds that lies in the tensor.
template <class F>
__device__ inline void in_rounds(const Chunk& c, F f) {
#pragma unroll 2
  for (int round = 0; round < kRounds; ++round) {
    const int64_t i = c.begin + (int64_t)round * kThreads * kLane, left = c.tensor.numel - i;
    if (left > 0) f(i, left);
  }
}

template <class G>
__device__ inline void new_moments(const Chunk& c, const LambFactors& f, int64_t i, int64_t left, float (&m)[kLane],
                                   float (&v)[kLane]) {
  float g[kLane];
  load4(static_cast<const G*>(c.tensor.grad) + i, left, c.aligned, g);
  load4(c.tensor.exp_avg + i, left, c.aligned, m);
  load4(c.tensor.exp_avg_sq + i, left, c.aligned, v);
#pragma unroll
  for (int k = 0; k < kLane; ++k) {
    g[k] *= f.gradient;
    m[k] += (g[k] - m[k]) * f.avg_rate;
    v[k] = v[k] * f.sq_decay + g[k] * g[k] * f.sq_rate;
  }
  store4(c.tensor.exp_avg + i, left, c.aligned, m);
  store4(c.tensor.exp_avg_sq + i, left, c.aligned, v);
}

__device__ inline float update_of(float w, float m, float v, const LambFactors& f) {
  return m * f.avg_scale * fast_reciprocal(fast_sqrt(v * f.sq_scale) + f.eps) + f.weight_decay * w;
}

__device__ inline void write_weights(const Chunk& c, const LambFactors& f, float rate, int copy_dtype, int64_t i, int64_t left,
                                     const float (&m)[kLane], const float (&v)[kLane]) {
  float w[kLane];
  load4(c.tensor.param + i, left, c.aligned, w);
#pragma unroll
  for (int k = 0; k < kLane; ++k) w[k] -= rate * update_of(w[k], m[k], v[k], f);
  store4(c.tensor.param + i, left, c.aligned, w);
  store_copy(c.tensor.copy, copy_dtype, i, left, c.aligned, w);
}

// ---- kernels ----

__global__ void begin_kernel(LambSettings settings, const float* grad_norm, const float* found_inf, int64_t* step, State* state) {
  state->applies = lamb_applies(*grad_norm, found_inf);
  if (!state->applies) return;
  state->factors = lamb_factors(settings, *grad_norm, ++*step);
}

// m, v and the sums of a chunk.
template <class G>
__global__ void __launch_bounds__(kThreads) moments_kernel(Tensors all, const State* state, float2* sums) {
  CU_SHARED(WarpPairs, scratch, [1]);
  if (!state->applies) return;
  const LambFactors f = state->factors;
  const Chunk c = chunk_of_block(all);
  float weight = 0.0f, change = 0.0f;
  in_rounds(c, [&](int64_t i, int64_t left) {
    float w[kLane], m[kLane], v[kLane];
    load4(c.tensor.param + i, left, c.aligned, w);
    new_moments<G>(c, f, i, left, m, v);
#pragma unroll
    for (int k = 0; k < kLane; ++k) {
      if (k >= left) continue;  // with eps 0 these would be 0 / 0
      const float u = update_of(w[k], m[k], v[k], f);
      weight += w[k] * w[k];
      change += u * u;
    }
  });
  const float2 sum = block_sum(weight, change, scratch[0]);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// One block for each tensor: its trust ratio, times the learning rate.
__global__ void __launch_bounds__(kThreads) norms_kernel(Tensors all, const State* state, const float2* sums, float lr,
                                                         float* rates) {
  CU_SHARED(WarpPairs, scratch, [1]);
  if (!state->applies) return;
  double weight = 0.0, change = 0.0;
  for (int k = all.first_chunk[blockIdx.x] + (int)threadIdx.x; k < all.first_chunk[blockIdx.x + 1]; k += kThreads)
    weight += sums[k].x, change += sums[k].y;
  const float2 sum = block_sum((float)weight, (float)change, scratch[0]);
  if (threadIdx.x == 0) rates[blockIdx.x] = lamb_rate(lr, sqrtf(sum.x), sqrtf(sum.y));
}

__global__ void __launch_bounds__(kThreads) weights_kernel(Tensors all, const State* state, const float* rates, int copy_dtype) {
  if (!state->applies) return;
  const LambFactors f = state->factors;
  const Chunk c = chunk_of_block(all);
  const float rate = rates[c.index];
  in_rounds(c, [&](int64_t i, int64_t left) {
    float m[kLane], v[kLane];
    load4(c.tensor.exp_avg + i, left, c.aligned, m);
    load4(c.tensor.exp_avg_sq + i, left, c.aligned, v);
    write_weights(c, f, rate, copy_dtype, i, left, m, v);
  });
}

// Without trust ratios.
template <class G>
__global__ void __launch_bounds__(kThreads) one_pass_kernel(Tensors all, const State* state, float lr, int copy_dtype) {
  if (!state->applies) return;
  const LambFactors f = state->factors;
  const Chunk c = chunk_of_block(all);
  in_rounds(c, [&](int64_t i, int64_t left) {
    float m[kLane], v[kLane];
    new_moments<G>(c, f, i, left, m, v);
    write_weights(c, f, lr, copy_dtype, i, left, m, v);
  });
}

// Calls f(Tensors, how many chunks) for each launch's share; stops at an error.
template <class F>
int in_launches(const LambTensor* tensors, int64_t count, F f) {
  for (int64_t begin = 0; begin < count;) {
    Tensors all;
    int64_t chunks = 0;
    all.count = 0;
    while (begin < count && all.count < kTensors && chunks + num_chunks(tensors[begin]) <= 0x7fffffff) {
      all.first_chunk[all.count] = (int32_t)chunks;
      all.tensors[all.count++] = tensors[begin];
      chunks += num_chunks(tensors[begin++]);
    }
    if (all.count == 0) return (int)cudaErrorInvalidValue;
    all.first_chunk[all.count] = (int32_t)chunks;
    const int error = f(all, chunks);
    if (error != 0) return error;
  }
  return 0;
}

template <class G>
int step_of(const Tensors& all, int64_t chunks, int copy_dtype, const LambSettings& settings, const Workspace& work,
            cudaStream_t stream) {
  const dim3 grid((unsigned)chunks), block(kThreads);
  if (!settings.use_trust_ratio) {
    CU_LAUNCH((one_pass_kernel<G>), grid, block, 0, stream, all, work.state, settings.lr, copy_dtype);
    return (int)cudaGetLastError();
  }
  CU_LAUNCH((moments_kernel<G>), grid, block, 0, stream, all, work.state, work.sums);
  CU_LAUNCH(norms_kernel, dim3((unsigned)all.count), block, 0, stream, all, work.state, work.sums, settings.lr, work.rates);
  CU_LAUNCH(weights_kernel, grid, block, 0, stream, all, work.state, work.rates, copy_dtype);
  return (int)cudaGetLastError();
}

}  // namespace

int64_t lamb_workspace_bytes(const LambTensor* tensors, int64_t count, bool use_trust_ratio) {
  int64_t most = 0;
  if (use_trust_ratio)
    in_launches(tensors, count, [&](const Tensors&, int64_t chunks) {
      if (chunks > most) most = chunks;
      return 0;
    });
  return kSumsOffset + most * (int64_t)sizeof(float2);
}

int lamb_step(int grad_dtype, int copy_dtype, const LambTensor* tensors, int64_t count, const LambSettings& settings,
              const float* grad_norm, const float* found_inf, int64_t* step, void* workspace, void* stream) {
  const Workspace work = parts_of(workspace);
  CU_LAUNCH(begin_kernel, dim3(1), dim3(1), 0, (cudaStream_t)stream, settings, grad_norm, found_inf, step, work.state);
  const int error = (int)cudaGetLastError();
  if (error != 0) return error;
  return by_dtype(grad_dtype, [&](auto* tag) {
    using G = element_type<decltype(tag)>;
    return in_launches(tensors, count, [&](const Tensors& all, int64_t chunks) {
      return step_of<G>(all, chunks, copy_dtype, settings, work, (cudaStream_t)stream);
    });
  });
}

}  // namespace cuda
}  // namespace tempo
