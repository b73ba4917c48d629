// What the bindings ask about the device.
#include "common/gpu.h"

#include <string>

#ifndef TEMPO_CUDA_ARCHS
#define TEMPO_CUDA_ARCHS ""
#endif

namespace tempo {
namespace cuda {

#ifdef CUEMU

const char* explain(int) { return cuemu_error(); }
int num_multiprocessors() { return 2; }

#else

const char* explain(int error) {
  if (error == (int)cudaErrorNoKernelImageForDevice || error == (int)cudaErrorUnsupportedPtxVersion) {
    static const std::string message =
        std::string("these CUDA kernels were built for compute capabilities ") + TEMPO_CUDA_ARCHS +
        ", which do not cover this GPU; build tempo-bert again with TEMPO_CUDA_ARCHS set to the GPU's (torch.cuda.get_device_capability())";
    return message.c_str();
  }
  return cudaGetErrorString((cudaError_t)error);
}

int num_multiprocessors() {
  int device = 0, count = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 1;
  if (cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device) != cudaSuccess) return 1;
  return count;
}

#endif

}  // namespace cuda
}  // namespace tempo

// For the start-up report, through ctypes: the compute capabilities these kernels were built for, as TEMPO_CUDA_ARCHS has them.
extern "C" __attribute__((visibility("default"))) const char* tempo_cuda_archs() { return TEMPO_CUDA_ARCHS; }
