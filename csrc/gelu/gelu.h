// GELU that keeps its output and 1 or 4 bits per element; see tempo/gelu.py.
#pragma once
#include "common/kernels.h"

namespace tempo {

// The ranges of the CPU kernels start at multiples of this: no two threads write to one byte of side bits, and ranges of an
// aligned tensor are aligned.
constexpr int64_t kGeluTile = 32;

struct GeluForm {
  bool tanh_form;
  int side_bits;           // 1 or 4
  bool streaming = false;  // on the CPU: dx, which no cache can hold, is streamed past them
};

}  // namespace tempo

TEMPO_CPU_KERNELS(
    // y may be x.
    void gelu_forward(int dtype, const void* x, void* y, uint8_t* side, const GeluForm& form, int64_t begin, int64_t end);
    void gelu_backward(int dtype, const void* grad, const void* y, const uint8_t* side, void* dx, const GeluForm& form,
                       int64_t begin, int64_t end);
    // From the input: dx may be grad, y may be x.
    void gelu_recompute_backward(int dtype, const void* grad, const void* x, void* dx, void* y, bool tanh_form, int64_t begin,
                                 int64_t end);)

namespace tempo {
namespace cuda {

// side: (numel * side_bits + 7) / 8 bytes. y may be x, dx may be grad.
int gelu_forward(int dtype, const void* x, void* y, uint8_t* side, const GeluForm& form, int64_t numel, void* stream);
int gelu_backward(int dtype, const void* grad, const void* y, const uint8_t* side, void* dx, const GeluForm& form,
                  int64_t numel, void* stream);
// From the input: dx may be grad, y may be x.
int gelu_recompute_backward(int dtype, const void* grad, const void* x, void* dx, void* y, bool tanh_form, int64_t numel,
                            void* stream);

}  // namespace cuda
}  // namespace tempo
