// Picks the kernels for the instruction sets that this CPU has.
#include "common/cpu_kernels.h"

#include <cstdlib>
#include <cstring>

#if defined(__x86_64__) && !defined(TEMPO_PLAIN)
#define TEMPO_EACH_ISA(X) X(baseline) X(avx2) X(avx512)
#else
#define TEMPO_EACH_ISA(X) X(baseline)
#endif

namespace tempo {

#define TEMPO_DECLARE(isa)                                                                                                    \
  namespace isa {                                                                                                             \
  void dropout(int, const void*, void*, const DropoutDraw&, int64_t, int64_t);                                                \
  void gelu_forward(int, const void*, void*, uint8_t*, const GeluForm&, int64_t, int64_t);                                    \
  void gelu_backward(int, const void*, const void*, const uint8_t*, void*, const GeluForm&, int64_t, int64_t);                \
  void layer_norm_forward(int, const void*, const float*, const float*, float, void*, float*, void*, const LayerNormShape&,   \
                          int64_t, int64_t);                                                                                  \
  void layer_norm_backward(int, const void*, const void*, const float*, const float*, const float*, const float*,             \
                           const void*, void*, float*, float*, const LayerNormShape&, int64_t, int64_t);                      \
  void softmax_dropout_forward(int, void*, void*, const SoftmaxShape&, const DropoutDraw&, float*, uint32_t*, int64_t,        \
                               int64_t);                                                                                      \
  void softmax_dropout_backward(int, void*, const void*, void*, const SoftmaxShape&, const DropoutDraw&, uint32_t*, int64_t,  \
                                int64_t);                                                                                     \
  static const CpuKernels kKernels = {#isa,                                                                                   \
                                      dropout,                                                                                \
                                      gelu_forward,                                                                           \
                                      gelu_backward,                                                                          \
                                      layer_norm_forward,                                                                     \
                                      layer_norm_backward,                                                                    \
                                      softmax_dropout_forward,                                                                \
                                      softmax_dropout_backward};                                                              \
  }
TEMPO_EACH_ISA(TEMPO_DECLARE)

namespace {

const CpuKernels& choose() {
#if defined(__x86_64__) && !defined(TEMPO_PLAIN)
  const char* wanted = std::getenv("TEMPO_CPU_ISA");
  const bool any = wanted == nullptr || *wanted == '\0';
  const bool at_most_avx2 = !any && std::strcmp(wanted, "avx512") != 0;
  const bool at_most_baseline = at_most_avx2 && std::strcmp(wanted, "avx2") != 0;
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && !at_most_avx2) return avx512::kKernels;
  if (has_avx2 && !at_most_baseline) return avx2::kKernels;
#endif
  return baseline::kKernels;
}

}  // namespace

const CpuKernels& cpu_kernels() {
  static const CpuKernels& kernels = choose();
  return kernels;
}

}  // namespace tempo
