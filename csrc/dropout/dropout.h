// Dropout without a kept mask; see tempo/dropout.py.
#pragma once
#include "common/kernels.h"

TEMPO_CPU_KERNELS(void dropout(int dtype, const void* x, void* y, const DropoutDraw& draw, int64_t begin, int64_t end);)

namespace tempo {
namespace cuda {

int dropout(int dtype, const void* x, void* y, const DeviceDropout& draw, int64_t numel, void* stream);

}  // namespace cuda
}  // namespace tempo
