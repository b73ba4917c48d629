// The LAMB step over many tensors; see tempo/lamb.py.
#pragma once
#include "common/kernels.h"

#ifdef __CUDACC__
#define TEMPO_LAMB_BOTH __host__ __device__
#else
#define TEMPO_LAMB_BOTH
#endif

namespace tempo {

// A parameter and all that belongs to it; float unless said otherwise.
struct LambTensor {
  float* param;
  const void* grad;
  float *exp_avg, *exp_avg_sq;
  void* copy;  // 16-bit, null: none
  int64_t numel;
};

struct LambSettings {
  double beta1, beta2;
  float lr, eps, weight_decay, max_grad_norm;
  bool use_trust_ratio, bias_correction;
};

// What an element's arithmetic needs of a step.
struct LambFactors {
  float gradient;                    // 1 / max(1, G / max_grad_norm)
  float avg_rate, sq_decay, sq_rate;  // 1 - b1, b2, 1 - b2
  float avg_scale, sq_scale;         // 1 / (1 - b1^t), 1 / (1 - b2^t)
  float eps, weight_decay;
};

TEMPO_LAMB_BOTH static inline double lamb_inverse_correction(double beta, int64_t step) {
  double power = 1.0;  // beta^step
  for (double square = beta; step > 0; step >>= 1, square *= square)
    if (step & 1) power *= square;
  return 1.0 / (1.0 - power);
}

TEMPO_LAMB_BOTH static inline bool lamb_applies(float grad_norm, const float* found_inf) {
  return grad_norm - grad_norm == 0.0f && !(found_inf != nullptr && *found_inf > 0.0f);
}

// step: counted from 1.
TEMPO_LAMB_BOTH static inline LambFactors lamb_factors(const LambSettings& s, float grad_norm, int64_t step) {
  const double clip = s.max_grad_norm > 0.0f ? (double)grad_norm / s.max_grad_norm : 1.0;
  LambFactors f;
  f.gradient = clip > 1.0 ? (float)(1.0 / clip) : 1.0f;
  f.avg_rate = (float)(1.0 - s.beta1), f.sq_decay = (float)s.beta2, f.sq_rate = (float)(1.0 - s.beta2);
  f.avg_scale = s.bias_correction ? (float)lamb_inverse_correction(s.beta1, step) : 1.0f;
  f.sq_scale = s.bias_correction ? (float)lamb_inverse_correction(s.beta2, step) : 1.0f;
  f.eps = s.eps, f.weight_decay = s.weight_decay;
  return f;
}

// Of lr * r, where the norms are of w and u.
TEMPO_LAMB_BOTH static inline float lamb_rate(float lr, double weight_norm, double update_norm) {
  return weight_norm > 0.0 && update_norm > 0.0 ? (float)(lr * (weight_norm / update_norm)) : lr;
}

// Elements whose squares are summed by themselves on the CPU, so that the result does not depend on the threads.
constexpr int64_t kLambChunk = 4096;

// Sums of squares of one chunk.
struct LambSums {
  double weight, update;
};

}  // namespace tempo

TEMPO_CPU_KERNELS(
    // m and v of the elements begin .. end of a tensor, and the sums of w^2 and u^2.
    LambSums lamb_moments(const LambTensor& tensor, const LambFactors& factors, int64_t begin, int64_t end);
    // The weights from them: w - rate u. A copy is bfloat16.
    void lamb_weights(const LambTensor& tensor, const LambFactors& factors, float rate, int64_t begin, int64_t end);
    // Both in one pass.
    void lamb_all(const LambTensor& tensor, const LambFactors& factors, float rate, int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

// Bytes of the workspace that lamb_step wants, 16-byte aligned; the tensors' sizes are looked at.
int64_t lamb_workspace_bytes(const LambTensor* tensors, int64_t count, bool use_trust_ratio);
// All gradients have one dtype, and all copies. grad_norm, found_inf (null: none) and step lie in the device's memory.
int lamb_step(int grad_dtype, int copy_dtype, const LambTensor* tensors, int64_t count, const LambSettings& settings,
              const float* grad_norm, const float* found_inf, int64_t* step, void* workspace, void* stream);

}  // namespace cuda
}  // namespace tempo
