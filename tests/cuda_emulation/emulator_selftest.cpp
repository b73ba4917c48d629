// Small kernels which exercise the emulator itself; argv[1] names one, or "all" for those that pass.
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "cuemu.h"

#define CHECK(c) do { if (!(c)) { std::printf("FAILED %s:%d %s\n", __FILE__, __LINE__, #c); std::exit(1); } } while (0)

__global__ void shuffles(int* out) {
  int t = threadIdx.x, v = t * 10;
  out[t * 6 + 0] = __shfl_sync(~0u, v, 3);
  out[t * 6 + 1] = __shfl_up_sync(~0u, v, 2);
  out[t * 6 + 2] = __shfl_down_sync(~0u, v, 2);
  out[t * 6 + 3] = __shfl_xor_sync(~0u, v, 1);
  out[t * 6 + 4] = __shfl_sync(~0u, v, 1, 8);
  out[t * 6 + 5] = __shfl_down_sync(~0u, v, 5, 8);
}
__global__ void votes(unsigned* out) {
  unsigned t = threadIdx.x;
  out[t * 4 + 0] = __ballot_sync(~0u, t % 3 == 0);
  out[t * 4 + 1] = (unsigned)__any_sync(~0u, t == 40);
  out[t * 4 + 2] = (unsigned)__all_sync(~0u, t < 32);
  out[t * 4 + 3] = __match_any_sync(~0u, t % 4);
}
__global__ void halves(int* out) {  // the two halves of a warp take different branches
  int t = threadIdx.x;
  if (t < 16) out[t] = __shfl_xor_sync(0x0000ffffu, t, 1);
  else out[t] = __shfl_xor_sync(0xffff0000u, t, 2) + 100;
}
__global__ void early_exit(int* out, int n) {
  int t = threadIdx.x;
  if (t >= n) return;
  __syncthreads();
  out[t] = __syncthreads_count(t % 2 == 0);
}
__global__ void grid3(int* out) {
  unsigned b = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  unsigned t = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  out[b * blockDim.x * blockDim.y * blockDim.z + t] = (int)(b * 1000 + t);
}
__global__ void atomics(float* f, unsigned* u, int* m) {
  atomicAdd(f, 0.5f);
  atomicInc(u, 6);
  atomicMax(m, (int)threadIdx.x);
}
__global__ void last_block(const float* x, float* part, unsigned* ticket, float* out, bool fence) {
  CU_SHARED(bool, last, [1]);
  CU_SHARED(float, s, [64]);
  s[threadIdx.x] = x[blockIdx.x * 64 + threadIdx.x];
  __syncthreads();
  if (threadIdx.x == 0) {
    float v = 0;
    for (int i = 0; i < 64; ++i) v += s[i];
    part[blockIdx.x] = v;
    if (fence) __threadfence();
    last[0] = atomicAdd(ticket, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (last[0] && threadIdx.x == 5) {
    float v = 0;
    for (unsigned b = 0; b < gridDim.x; ++b) v += part[b];
    *out = v;
  }
}
__global__ void warp_exchange(int* out, bool sync) {  // through shared memory, inside one warp
  CU_SHARED(int, s, [32]);
  s[threadIdx.x] = (int)threadIdx.x;
  if (sync) __syncwarp();
  out[threadIdx.x] = s[31 - threadIdx.x];
}
__global__ void bf16_atomic(__nv_bfloat16* p, __half* q) {
  atomicAdd(p, __float2bfloat16(1.0f));
  atomicAdd(q, __float2half(0.5f));
}

// The kernels below are wrong on purpose.
__global__ void divergent(int* out) {
  if (threadIdx.x < 32) {
    out[threadIdx.x] = 0;
    __syncthreads();
  } else {
    __syncthreads();
    out[threadIdx.x] = 1;
  }
}
__global__ void hang() { if (threadIdx.x == 0) __syncwarp(); else __syncthreads(); }
__global__ void not_in_mask() { __syncwarp(0xfffffffeu); }
__global__ void static_oob(int* out, int k) { CU_SHARED(int, s, [32]); s[threadIdx.x] = 1; __syncthreads(); out[threadIdx.x] = s[threadIdx.x + k]; }
template <class T> __global__ void plain_oob(T* out, int k) { __shared__ T s[32]; s[threadIdx.x] = 1; __syncthreads(); T* p = s; out[threadIdx.x] = p[threadIdx.x + k]; }
__global__ void misaligned(const float* x, float* out) { float4 v = *reinterpret_cast<const float4*>(x + 1); out[threadIdx.x] = v.x; }
__global__ void block_race(int* x) { if (threadIdx.x == blockIdx.x) x[0] += 1; }
__global__ void uninitialised(float* out) { CU_SHARED(float, s, [64]); if (threadIdx.x < 32) s[threadIdx.x] = 1; __syncthreads(); out[threadIdx.x] = s[threadIdx.x]; }

static bool is(const char* a, const char* b) { return !std::strcmp(a, b); }

int main(int argc, char** argv) {
  const char* what = argc > 1 ? argv[1] : "all";
  std::vector<int> o(4096);
  if (is(what, "all")) {
    CU_LAUNCH(shuffles, dim3(1), dim3(32), 0, nullptr, o.data());
    for (int t = 0; t < 32; ++t) {
      int w[6] = {30, t < 2 ? t * 10 : (t - 2) * 10, t > 29 ? t * 10 : (t + 2) * 10, (t ^ 1) * 10, (t / 8 * 8 + 1) * 10, t % 8 + 5 < 8 ? (t + 5) * 10 : t * 10};
      for (int k = 0; k < 6; ++k) CHECK(o[t * 6 + k] == w[k]);
    }
    std::vector<unsigned> u(4 * 64);
    CU_LAUNCH(votes, dim3(1), dim3(64), 0, nullptr, u.data());
    for (unsigned t = 0; t < 64; ++t) {
      unsigned b = 0;
      for (unsigned l = 0; l < 32; ++l) b |= (unsigned)((t / 32 * 32 + l) % 3 == 0) << l;
      CHECK(u[t * 4] == b && u[t * 4 + 1] == t / 32 && u[t * 4 + 2] == (t < 32) && u[t * 4 + 3] == 0x11111111u << t % 4);
    }
    CU_LAUNCH(halves, dim3(1), dim3(32), 0, nullptr, o.data());
    for (int t = 0; t < 32; ++t) CHECK(o[t] == (t < 16 ? t ^ 1 : (t ^ 2) + 100));
    CU_LAUNCH(early_exit, dim3(1), dim3(70), 0, nullptr, o.data(), 51);
    for (int t = 0; t < 51; ++t) CHECK(o[t] == 26);
    CU_LAUNCH(grid3, dim3(2, 3, 2), dim3(5, 2, 3), 0, nullptr, o.data());
    for (int b = 0; b < 12; ++b) for (int t = 0; t < 30; ++t) CHECK(o[b * 30 + t] == b * 1000 + t);
    float f = 0; unsigned c = 0; int m = -1;
    CU_LAUNCH(atomics, dim3(3), dim3(100), 0, nullptr, &f, &c, &m);
    CHECK(f == 150.0f && c == 300 % 7 && m == 99);
    std::vector<float> x(640, 0.25f), part(10);
    CU_LAUNCH(last_block, dim3(10), dim3(64), 0, nullptr, x.data(), part.data(), &(c = 0), &f, true);
    CHECK(f == 160.0f);
    CU_LAUNCH(warp_exchange, dim3(1), dim3(32), 0, nullptr, o.data(), true);
    for (int t = 0; t < 32; ++t) CHECK(o[t] == 31 - t);
    __nv_bfloat16 b16 = __float2bfloat16(0.0f); __half h16 = __float2half(0.0f);
    CU_LAUNCH(bf16_atomic, dim3(2), dim3(40), 0, nullptr, &b16, &h16);
    CHECK(__bfloat162float(b16) == 80.0f && __half2float(h16) == 40.0f);
    CU_LAUNCH(grid3, dim3(1), dim3(1024), 0, nullptr, o.data());
    for (int t = 0; t < 1024; ++t) CHECK(o[t] == t);
    CHECK(cudaGetLastError() == cudaSuccess);
    std::printf("selftest passed\n");
    return 0;
  }
  std::vector<float> x(64, 1.0f), y(64);
  if (is(what, "divergent")) CU_LAUNCH(divergent, dim3(1), dim3(64), 0, nullptr, o.data());
  if (is(what, "hang")) CU_LAUNCH(hang, dim3(1), dim3(64), 0, nullptr);
  if (is(what, "mask")) CU_LAUNCH(not_in_mask, dim3(1), dim3(32), 0, nullptr);
  if (is(what, "static_oob")) CU_LAUNCH(static_oob, dim3(1), dim3(32), 0, nullptr, o.data(), 1);
  if (is(what, "plain_oob")) CU_LAUNCH(plain_oob<float>, dim3(1), dim3(32), 0, nullptr, y.data(), 1);
  if (is(what, "misaligned")) CU_LAUNCH(misaligned, dim3(1), dim3(32), 0, nullptr, x.data(), y.data());
  if (is(what, "block_race")) CU_LAUNCH(block_race, dim3(40), dim3(64), 0, nullptr, o.data());
  if (is(what, "uninit")) { CU_LAUNCH(uninitialised, dim3(1), dim3(64), 0, nullptr, y.data()); std::printf("y[40] = %f\n", y[40]); }
  if (is(what, "warp_race")) CU_LAUNCH(warp_exchange, dim3(1), dim3(32), 0, nullptr, o.data(), false);
  if (is(what, "no_fence")) { unsigned c = 0; float f; std::vector<float> xx(640, 0.25f), part(10); CU_LAUNCH(last_block, dim3(10), dim3(64), 0, nullptr, xx.data(), part.data(), &c, &f, false); }
  if (is(what, "big_smem")) CU_LAUNCH(hang, dim3(1), dim3(64), 100000, nullptr);
  if (is(what, "big_block")) CU_LAUNCH(hang, dim3(1), dim3(1025), 0, nullptr);
  cudaError_t e = cudaGetLastError();
  std::printf("%s: cudaGetLastError() = %d (%s)\n", what, (int)e, cuemu_error());
  return e ? 3 : 0;
}
