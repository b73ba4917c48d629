// The CPU kernels: plain pointers and sizes, no torch, no allocation, no threads. A caller splits the range begin .. end among
// its threads. dtype: 0 = float, 1 = bfloat16.
#pragma once
#include <stdint.h>

namespace tempo {

constexpr int kFloat = 0, kBFloat16 = 1;
// The ranges of the GELU kernels start at multiples of this, so that no two threads write to one byte of side bits.
constexpr int64_t kGeluTile = 16;
// Arrays of per-column floats (gamma, beta, sums) are padded to a multiple of this.
constexpr int64_t kColumnPadding = 16;
// Scratch for a softmax row of K keys: this many floats or words more than K.
constexpr int64_t kRowPadding = 128;

// Which elements a dropout drops; see tempo/philox.py.
struct DropoutDraw {
  uint64_t seed, site;
  uint64_t first_element;  // index of the tensor's first element
  uint64_t threshold;      // dropped where word < threshold; 2^32 drops everything, 0 nothing
  float scale;             // of the kept
};

struct GeluForm {
  bool tanh_form;
  int side_bits;  // 1 or 4
};

struct LayerNormShape {
  int64_t num_columns, num_exact_columns;
  const int64_t* exact_columns;
};

// Scores are [batch, heads, queries, keys] (or any leading dimensions as `batch`), rows counted over the first three.
struct SoftmaxShape {
  int64_t heads, queries, keys;
  float scale;
  bool causal;
  const uint8_t* bool_mask;   // 1 = attend; at most one of the masks is not null
  const float* added_mask;
  float hiding;               // an added mask hides where it is not above this: the lowest number of the dtype it came in
  int64_t mask_strides[4];    // in elements; 0 where broadcast
};

struct CpuKernels {
  const char* name;
  void (*dropout)(int dtype, const void* x, void* y, const DropoutDraw& draw, int64_t begin, int64_t end);
  void (*gelu_forward)(int dtype, const void* x, void* y, uint8_t* side, const GeluForm& form, int64_t begin, int64_t end);
  void (*gelu_backward)(int dtype, const void* grad, const void* y, const uint8_t* side, void* dx, const GeluForm& form,
                        int64_t begin, int64_t end);
  void (*layer_norm_forward)(int dtype, const void* x, const float* gamma, const float* beta, float eps, void* y, float* rstd,
                             void* exact_x_hat, const LayerNormShape& shape, int64_t begin, int64_t end);
  // Adds to dgamma and dbeta, float [num_columns padded].
  void (*layer_norm_backward)(int dtype, const void* grad, const void* y, const float* rstd, const float* gamma,
                              const float* inverse_gamma, const float* beta, const void* exact_x_hat, void* dx, float* dgamma,
                              float* dbeta, const LayerNormShape& shape, int64_t begin, int64_t end);
  // Probabilities over the scores; `dropped` may be null. `row` holds keys + kRowPadding floats, `words` as many words.
  void (*softmax_dropout_forward)(int dtype, void* scores, void* dropped, const SoftmaxShape& shape, const DropoutDraw& draw,
                                  float* row, uint32_t* words, int64_t begin, int64_t end);
  void (*softmax_dropout_backward)(int dtype, void* grad, const void* probabilities, void* dropped, const SoftmaxShape& shape,
                                   const DropoutDraw& draw, uint32_t* words, int64_t begin, int64_t end);
};

// The kernels for the instruction sets of this CPU; TEMPO_CPU_ISA=baseline|avx2|avx512 asks for fewer.
const CpuKernels& cpu_kernels();

}  // namespace tempo
