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

// Draws the mask of one tensor; made once per thread, as it reads the device's memory. Without a draw (threshold 0, nothing is
// dropped) it must not be asked.
struct Mask {
  uint64_t seed = 0, site = 0, first_element = 0;
  uint32_t last_dropped = 0;
  float scale = 1.0f;
  bool drops;

  __device__ explicit Mask(const DeviceDropout& draw) : drops(draw.threshold != 0) {
    if (!drops) return;
    seed = (uint64_t)draw.rng[0];
    site = draw.site;
    first_element = (uint64_t)draw.rng[1] * draw.elements_per_sample;
    last_dropped = (uint32_t)(draw.threshold - 1);  // all of 32 bits where the threshold is 2^32
    scale = draw.scale;
  }

  // A select, so that a dropped NaN or infinity becomes 0.
  __device__ float apply(float x, uint32_t word) const { return word > last_dropped ? x * scale : 0.0f; }

  // The word of the tensor's element i.
  __device__ uint32_t word1(uint64_t i) const {
    const uint64_t element = first_element + i;
    // Counts as the reference does: a shift that floors, also for negative numbers.
    const uint4 words = philox_block(seed, site, (uint64_t)((int64_t)element >> 2));
    switch (element & 3) {
      case 0: return words.x;
      case 1: return words.y;
      case 2: return words.z;
      default: return words.w;
    }
  }

  // The words of elements i .. i + 7. first_element + i must be a multiple of 4.
  __device__ void words8(uint64_t i, uint32_t (&words)[8]) const {
    const uint64_t block = (uint64_t)((int64_t)(first_element + i) >> 2);
    const uint4 a = philox_block(seed, site, block), b = philox_block(seed, site, block + 1);
    words[0] = a.x, words[1] = a.y, words[2] = a.z, words[3] = a.w;
    words[4] = b.x, words[5] = b.y, words[6] = b.z, words[7] = b.w;
  }

  __device__ float drop1(float x, uint64_t i) const { return apply(x, word1(i)); }

  __device__ void drop8(float (&v)[8], uint64_t i) const {
    uint32_t words[8];
    words8(i, words);
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = apply(v[k], words[k]);
  }
};

}  // namespace cuda
}  // namespace tempo
