// What the kernels of all layers share: dtype codes, the draw of a dropout, and the choice among the CPU's instruction sets.
//
// Kernels know no torch: pointers and sizes, no allocation. A CPU kernel does the range begin .. end; its caller splits the work
// among threads. A CUDA launcher (namespace tempo::cuda) takes a stream and returns a cudaError_t as an int.
#pragma once
#include <stdint.h>

namespace tempo {

constexpr int kFloat = 0, kBFloat16 = 1, kHalf = 2;  // the CPU has kernels for the first two

// Arrays of per-column floats (gamma, beta, sums) are padded to a multiple of this on the CPU.
constexpr int64_t kColumnPadding = 16;
// Scratch for a row of K words of Philox: this many more than K.
constexpr int64_t kRowPadding = 128;

// Which elements a dropout drops; see tempo/philox.py.
struct DropoutDraw {
  uint64_t seed, site;
  uint64_t first_element;  // index of the tensor's first element
  uint64_t threshold;      // dropped where word < threshold; 2^32 drops everything, 0 nothing
  float scale;             // of the kept
};

// The same, where (seed, first_sample) lie in the device's memory.
struct DeviceDropout {
  const int64_t* rng;
  uint64_t site, elements_per_sample, threshold;
  float scale;
};

// A row of parameters, or of their gradients, on a GPU: float or a 16-bit type, whatever the activations are.
struct Parameter {
  const void* data;
  int dtype;
};
struct ParameterGradient {
  void* data;
  int dtype;
};

// 0 baseline, 1 AVX2, 2 AVX-512: what this CPU has, at most what TEMPO_CPU_ISA=baseline|avx2|avx512 asks for.
int cpu_instruction_set();
const char* cpu_instruction_set_name();

namespace cuda {

// What a cudaError_t says, and what to do about it where that is known.
const char* explain(int error);
// Multiprocessors of the current device.
int num_multiprocessors();

}  // namespace cuda

}  // namespace tempo

// Declares CPU kernels once per instruction set; TEMPO_CPU(name) is the one to call here.
#if defined(__x86_64__) && !defined(TEMPO_PLAIN)
#define TEMPO_CPU_KERNELS(...)   \
  namespace tempo {              \
  namespace baseline {           \
  __VA_ARGS__                    \
  }                              \
  namespace avx2 {               \
  __VA_ARGS__                    \
  }                              \
  namespace avx512 {             \
  __VA_ARGS__                    \
  }                              \
  }
#define TEMPO_CPU(name)                                                   \
  (*(::tempo::cpu_instruction_set() == 2   ? &::tempo::avx512::name       \
     : ::tempo::cpu_instruction_set() == 1 ? &::tempo::avx2::name         \
                                           : &::tempo::baseline::name))
#else
#define TEMPO_CPU_KERNELS(...) \
  namespace tempo {            \
  namespace baseline {         \
  __VA_ARGS__                  \
  }                            \
  }
#define TEMPO_CPU(name) ::tempo::baseline::name
#endif
