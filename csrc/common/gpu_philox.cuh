// Philox4x32-10, the same bits as tempo/philox.py. Source: Salmon, Moraes, Dror, Shaw, SC 2011.
#pragma once
#include "common/gpu.h"

namespace tempo {
namespace cuda {

__device__ inline uint4 philox_block(uint64_t seed, uint64_t site, uint64_t block) {
  uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
  uint32_t word_0 = (uint32_t)block, word_1 = (uint32_t)(block >> 32);
  uint32_t word_2 = (uint32_t)site, word_3 = (uint32_t)(site >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t product_0 = (uint64_t)0xD2511F53u * word_0, product_1 = (uint64_t)0xCD9E8D57u * word_2;
    word_0 = (uint32_t)(product_1 >> 32) ^ word_1 ^ key_0;
    word_2 = (uint32_t)(product_0 >> 32) ^ word_3 ^ key_1;
    word_1 = (uint32_t)product_1;
    word_3 = (uint32_t)product_0;
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  return make_uint4(word_0, word_1, word_2, word_3);
}

// Draws the mask of one tensor. Read from the device's memory once per thread.
struct Mask {
  uint64_t seed, site, first_element;
  uint64_t threshold;

  __device__ explicit Mask(const DeviceDropout& draw)
      : seed((uint64_t)draw.rng[0]),
        site(draw.site),
        first_element((uint64_t)draw.rng[1] * draw.elements_per_sample),
        threshold(draw.threshold) {}

  __device__ bool keeps(uint32_t word) const { return word >= threshold; }

  // Of the tensor's element i.
  __device__ bool keep1(uint64_t i) const {
    const uint64_t element = first_element + i;
    // Counts as the reference does: a shift that floors, also for negative numbers.
    const uint4 words = philox_block(seed, site, (uint64_t)((int64_t)element >> 2));
    switch (element & 3) {
      case 0: return keeps(words.x);
      case 1: return keeps(words.y);
      case 2: return keeps(words.z);
      default: return keeps(words.w);
    }
  }

  // Bit k: whether element i + k is kept, k < 8. first_element + i must be a multiple of 4.
  __device__ uint32_t keep8(uint64_t i) const {
    const uint64_t block = (uint64_t)((int64_t)(first_element + i) >> 2);
    const uint4 a = philox_block(seed, site, block), b = philox_block(seed, site, block + 1);
    return (uint32_t)keeps(a.x) | (uint32_t)keeps(a.y) << 1 | (uint32_t)keeps(a.z) << 2 | (uint32_t)keeps(a.w) << 3 |
           (uint32_t)keeps(b.x) << 4 | (uint32_t)keeps(b.y) << 5 | (uint32_t)keeps(b.z) << 6 | (uint32_t)keeps(b.w) << 7;
  }
};

// A select, so that a dropped NaN or infinity becomes 0.
__device__ inline float drop(float x, bool keep, float scale) { return keep ? x * scale : 0.0f; }

}  // namespace cuda
}  // namespace tempo
