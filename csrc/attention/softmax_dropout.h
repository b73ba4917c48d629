// Softmax and dropout of attention in one pass each way; see tempo/attention.py.
#pragma once
#include "common/kernels.h"

namespace tempo {

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

}  // namespace tempo

TEMPO_CPU_KERNELS(
    // Probabilities over the scores; `dropped` may be null. `row` holds keys + kRowPadding floats, `words` as many words.
    void softmax_dropout_forward(int dtype, void* scores, void* dropped, const SoftmaxShape& shape, const DropoutDraw& draw,
                                 float* row, uint32_t* words, int64_t begin, int64_t end);
    void softmax_dropout_backward(int dtype, void* grad, const void* probabilities, void* dropped, const SoftmaxShape& shape,
                                  const DropoutDraw& draw, uint32_t* words, int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

// Probabilities over the scores; `dropped` may be null.
int softmax_dropout_forward(int dtype, void* scores, void* dropped, const SoftmaxShape& shape, const DeviceDropout& draw,
                            int64_t num_rows, void* stream);
// The gradient of the scores over that of the dropped probabilities; `dropped` may be null.
int softmax_dropout_backward(int dtype, void* grad, const void* probabilities, void* dropped, const SoftmaxShape& shape,
                             const DeviceDropout& draw, int64_t num_rows, void* stream);

}  // namespace cuda
}  // namespace tempo
