// Philox4x32-10 on vectors, the same bits as tempo/philox.py. Source: Salmon, Moraes, Dror, Shaw, SC 2011.
//
// A 64-bit lane holds one 32-bit word of one block in its low half. The multiplication ignores the high half, so nothing is
// masked between the rounds: 2 multiplications, 2 shifts and 4 exclusive ors a round.
#pragma once
#include "common/kernels.h"
#include "common/simd.h"

namespace tempo {
namespace TEMPO_ISA {
namespace {

// Words 4i .. 4i + 3 of `words` become those of block `first + i`, for 2 * kWideLanes blocks.
TEMPO_INLINE void philox_blocks(uint64_t seed, uint64_t site, uint64_t first, uint32_t* words) {
  constexpr int kVectors = 2;
  vwide word_0[kVectors], word_1[kVectors], word_2[kVectors], word_3[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    vwide block;
    for (int i = 0; i < kWideLanes; ++i) block[i] = first + (uint64_t)(v * kWideLanes + i);
    word_0[v] = block;
    word_1[v] = block >> 32;
    word_2[v] = (site & 0xffffffffu) - vwide{};
    word_3[v] = (site >> 32) - vwide{};
  }
  uint32_t key_0 = (uint32_t)seed, key_1 = (uint32_t)(seed >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    for (int v = 0; v < kVectors; ++v) {
      vwide product_0 = multiply_low(word_0[v], 0xD2511F53u), product_1 = multiply_low(word_2[v], 0xCD9E8D57u);
      word_0[v] = (product_1 >> 32) ^ word_1[v] ^ (uint64_t)key_0;
      word_2[v] = (product_0 >> 32) ^ word_3[v] ^ (uint64_t)key_1;
      word_1[v] = product_1;
      word_3[v] = product_0;
    }
    key_0 += 0x9E3779B9u;
    key_1 += 0xBB67AE85u;
  }
  for (int v = 0; v < kVectors; ++v) {
    vwide low = (word_0[v] & 0xffffffffu) | (word_1[v] << 32), high = (word_2[v] & 0xffffffffu) | (word_3[v] << 32);
    uint32_t* out = words + v * 4 * kWideLanes;
#if defined(__AVX512F__)
    const __m512i even = _mm512_set_epi64(11, 3, 10, 2, 9, 1, 8, 0), odd = _mm512_set_epi64(15, 7, 14, 6, 13, 5, 12, 4);
    _mm512_storeu_si512(out, _mm512_permutex2var_epi64((__m512i)low, even, (__m512i)high));
    _mm512_storeu_si512(out + kLanes, _mm512_permutex2var_epi64((__m512i)low, odd, (__m512i)high));
#elif defined(__AVX2__)
    __m256i a = _mm256_unpacklo_epi64((__m256i)low, (__m256i)high), b = _mm256_unpackhi_epi64((__m256i)low, (__m256i)high);
    _mm256_storeu_si256((__m256i*)out, _mm256_permute2x128_si256(a, b, 0x20));
    _mm256_storeu_si256((__m256i*)(out + kLanes), _mm256_permute2x128_si256(a, b, 0x31));
#else
    for (int i = 0; i < kWideLanes; ++i) {
      uint64_t pair[2] = {low[i], high[i]};
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the two words of a lane are stored low half first"
#endif
      memcpy(out + 4 * i, pair, sizeof pair);
    }
#endif
  }
}

// Room that draw_words needs beyond the words asked for.
constexpr int kExtraWords = 4 * kLanes + 4;

// Draws the words of elements `element` .. `element + count`; returns where the first lies in `words`.
TEMPO_INLINE const uint32_t* draw_words(const DropoutDraw& draw, uint64_t element, int64_t count, uint32_t* words) {
  // Counts as the reference does: shifts that floor, also for negative numbers.
  uint64_t block = (uint64_t)((int64_t)element >> 2);
  int64_t offset = (int64_t)(element & 3);
  for (int64_t i = 0; i < offset + count; i += 4 * kLanes) philox_blocks(draw.seed, draw.site, block + (uint64_t)(i / 4), words + i);
  return words + offset;
}

TEMPO_INLINE vuint load_words(const uint32_t* p, Whole) {
  vuint v;
  memcpy(&v, p, sizeof v);
  return v;
}
TEMPO_INLINE vuint load_words(const uint32_t* p, First part) {
  vuint v = {};
  memcpy(&v, p, sizeof(uint32_t) * (size_t)part.count);
  return v;
}

// x * scale where kept, else 0: a select, so that a dropped NaN or infinity becomes 0.
TEMPO_INLINE vfloat drop(vfloat x, vuint words, uint32_t threshold, float scale) {
  vint keep = (vint)(words >= threshold);
  return keep ? x * scale : vfloat{};
}

}  // namespace
}  // namespace TEMPO_ISA
}  // namespace tempo
