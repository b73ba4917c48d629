// Written by csrc/gelu/fit_gelu.py, which describes the pieces: do not edit by hand.
#pragma once
#include "common/gpu.h"

namespace tempo {
namespace cuda {

struct ErfPieces {
  static constexpr float kXMinAbove = -0.7517914772033691f;
  static constexpr float kXMinHigh = -0.7517915368080139f;
  static constexpr float kXMinLow = 1.211444988769017e-08f;
  static constexpr float kYMinHigh = -0.16997121274471283f;
  static constexpr float kYMinLow = 5.264809033178608e-09f;
  static constexpr float kLog2Depth = -2.556637763977051f;
  static constexpr float kLowBeta = 0.865617036819458f;
  static constexpr float kLowK = -1.01748526096344f;
  static constexpr float kHighBeta = 0.79348224401474f;
  __device__ static float low_right(float t) {
    float p = 0.319696843624115f;
    p = fmaf(p, t, -1.4433802366256714f);
    p = fmaf(p, t, 2.573763370513916f);
    p = fmaf(p, t, -1.3100628852844238f);
    p = fmaf(p, t, -1.3137120008468628f);
    p = fmaf(p, t, 1.3640282154083252f);
    p = fmaf(p, t, 0.9491438269615173f);
    return p;
  }
  __device__ static float low_left(float q) {
    float p = 0.019848143681883812f;
    p = fmaf(p, q, -0.14979428052902222f);
    p = fmaf(p, q, 0.4641529321670532f);
    p = fmaf(p, q, -0.7776327133178711f);
    p = fmaf(p, q, 1.8698115348815918f);
    return p;
  }
  __device__ static float high_right_near(float t) {
    const float u = t - 0.6000000238418579f;
    float p = -0.006468497216701508f;
    p = fmaf(p, u, -0.02575153484940529f);
    p = fmaf(p, u, 0.04641030356287956f);
    p = fmaf(p, u, 0.009084334596991539f);
    p = fmaf(p, u, 0.10045001655817032f);
    p = fmaf(p, u, -0.0019365741172805429f);
    p = fmaf(p, u, 0.20122213661670685f);
    p = fmaf(p, u, -0.814362645149231f);
    p = fmaf(p, u, -0.07783433794975281f);
    p = fmaf(p, u, 1.2282248735427856f);
    return p;
  }
  __device__ static float high_right_far(float t) {
    const float u = t - 1.7000000476837158f;
    float p = -4.529055118560791f;
    p = fmaf(p, u, -6.188990592956543f);
    p = fmaf(p, u, 1.887139916419983f);
    p = fmaf(p, u, 7.87848424911499f);
    p = fmaf(p, u, 5.8448638916015625f);
    p = fmaf(p, u, 3.995084524154663f);
    p = fmaf(p, u, 4.23310661315918f);
    p = fmaf(p, u, 3.557297706604004f);
    p = fmaf(p, u, 1.353072166442871f);
    return p;
  }
  __device__ static float high_left_near(float t) {
    const float u = t - 0.14000000059604645f;
    float p = -109.19094848632812f;
    p = fmaf(p, u, -22.383638381958008f);
    p = fmaf(p, u, -6.7370476722717285f);
    p = fmaf(p, u, -3.696368932723999f);
    p = fmaf(p, u, -2.049165964126587f);
    p = fmaf(p, u, -2.059847354888916f);
    p = fmaf(p, u, -1.686218023300171f);
    p = fmaf(p, u, 0.7287718653678894f);
    return p;
  }
  __device__ static float high_left_far(float q) {
    const float u = q - 2.0f;
    float p = 0.0002786594850476831f;
    p = fmaf(p, u, -0.0007847611559554935f);
    p = fmaf(p, u, 0.0016525725368410349f);
    p = fmaf(p, u, -0.004476507660001516f);
    p = fmaf(p, u, 0.008456284180283546f);
    p = fmaf(p, u, -0.005146849900484085f);
    p = fmaf(p, u, 1.1367148160934448f);
    p = fmaf(p, u, 2.584123373031616f);
    return p;
  }
  __device__ static float near_minimum(float d) {
    float p = 0.0005373007152229548f;
    p = fmaf(p, d, 0.002694208174943924f);
    p = fmaf(p, d, -0.0024576529394835234f);
    p = fmaf(p, d, -0.02279350534081459f);
    p = fmaf(p, d, -0.004550156183540821f);
    p = fmaf(p, d, 0.12942807376384735f);
    p = fmaf(p, d, 0.21574699878692627f);
    return p;
  }
};

struct TanhPieces {
  static constexpr float kXMinAbove = -0.7524613738059998f;
  static constexpr float kXMinHigh = -0.7524614334106445f;
  static constexpr float kXMinLow = 1.1339627903339533e-08f;
  static constexpr float kYMinHigh = -0.17004075646400452f;
  static constexpr float kYMinLow = 5.892750287728177e-09f;
  static constexpr float kLog2Depth = -2.5560476779937744f;
  static constexpr float kLowBeta = 0.9377517700195312f;
  static constexpr float kLowK = -1.0189716815948486f;
  static constexpr float kHighBeta = 0.7213475108146667f;
  __device__ static float low_right(float t) {
    float p = 0.594444751739502f;
    p = fmaf(p, t, -2.430964946746826f);
    p = fmaf(p, t, 3.974534511566162f);
    p = fmaf(p, t, -2.2187490463256836f);
    p = fmaf(p, t, -1.0801222324371338f);
    p = fmaf(p, t, 1.355666160583496f);
    p = fmaf(p, t, 0.950076162815094f);
    return p;
  }
  __device__ static float low_left(float q) {
    float p = 0.017669852823019028f;
    p = fmaf(p, q, -0.1344534456729889f);
    p = fmaf(p, q, 0.4539715349674225f);
    p = fmaf(p, q, -0.773263156414032f);
    p = fmaf(p, q, 1.8664510250091553f);
    return p;
  }
  __device__ static float high_right_near(float t) {
    const float u = t - 0.6000000238418579f;
    float p = -0.0037278325762599707f;
    p = fmaf(p, u, -0.026590470224618912f);
    p = fmaf(p, u, 0.037765663117170334f);
    p = fmaf(p, u, 0.008803482167422771f);
    p = fmaf(p, u, 0.09945431351661682f);
    p = fmaf(p, u, 0.0042061638087034225f);
    p = fmaf(p, u, 0.20590627193450928f);
    p = fmaf(p, u, -0.817632257938385f);
    p = fmaf(p, u, -0.07802540063858032f);
    p = fmaf(p, u, 1.228058099746704f);
    return p;
  }
  __device__ static float high_right_far(float t) {
    const float u = t - 1.7000000476837158f;
    float p = 1.9109848737716675f;
    p = fmaf(p, u, 6.9275803565979f);
    p = fmaf(p, u, 9.354696273803711f);
    p = fmaf(p, u, 3.3967607021331787f);
    p = fmaf(p, u, -4.712713718414307f);
    p = fmaf(p, u, -5.437481880187988f);
    p = fmaf(p, u, -1.349013328552246f);
    p = fmaf(p, u, 1.3732560873031616f);
    p = fmaf(p, u, 0.9337797164916992f);
    return p;
  }
  __device__ static float high_left_near(float t) {
    const float u = t - 0.14000000059604645f;
    float p = -118.15235900878906f;
    p = fmaf(p, u, -23.411388397216797f);
    p = fmaf(p, u, -6.716867923736572f);
    p = fmaf(p, u, -3.6223955154418945f);
    p = fmaf(p, u, -1.965190052986145f);
    p = fmaf(p, u, -2.018958806991577f);
    p = fmaf(p, u, -1.6795681715011597f);
    p = fmaf(p, u, 0.7279255390167236f);
    return p;
  }
  __device__ static float high_left_far(float q) {
    const float u = q - 2.0f;
    float p = 0.0002758677874226123f;
    p = fmaf(p, u, 0.000298438681056723f);
    p = fmaf(p, u, 0.0010031441925093532f);
    p = fmaf(p, u, -0.014447148889303207f);
    p = fmaf(p, u, 0.026143932715058327f);
    p = fmaf(p, u, 0.1284896731376648f);
    p = fmaf(p, u, 1.3458737134933472f);
    p = fmaf(p, u, 2.689575672149658f);
    return p;
  }
  __device__ static float near_minimum(float d) {
    float p = 0.0006203018710948527f;
    p = fmaf(p, d, 0.0027252845466136932f);
    p = fmaf(p, d, -0.002764603355899453f);
    p = fmaf(p, d, -0.022780146449804306f);
    p = fmaf(p, d, -0.003946006763726473f);
    p = fmaf(p, d, 0.12917254865169525f);
    p = fmaf(p, d, 0.2152000516653061f);
    return p;
  }
};

constexpr float kNearMinimum = 0.4000000059604645f, kTailScale = 0.30000001192092896f;
constexpr float kLowTailEnd = 13.5f;

struct NormalTail {
  __device__ static float high(float t) {
    float p = -0.020612807944417f;
    p = fmaf(p, t, 0.1123756617307663f);
    p = fmaf(p, t, -0.22806723415851593f);
    p = fmaf(p, t, 0.19158130884170532f);
    p = fmaf(p, t, -0.07924702018499374f);
    p = fmaf(p, t, 0.09605765342712402f);
    p = fmaf(p, t, 0.07842563837766647f);
    p = fmaf(p, t, 0.1102273091673851f);
    p = fmaf(p, t, 0.11957284063100815f);
    p = fmaf(p, t, 0.11968663334846497f);
    return p;
  }
  __device__ static float low(float a) {
    float p = 1.814176253667199e-09f;
    p = fmaf(p, a, -1.3430613421405724e-07f);
    p = fmaf(p, a, 4.365694167063339e-06f);
    p = fmaf(p, a, -8.245161734521389e-05f);
    p = fmaf(p, a, 0.0010127667337656021f);
    p = fmaf(p, a, -0.008636175654828548f);
    p = fmaf(p, a, 0.053901154547929764f);
    p = fmaf(p, a, 0.4588126242160797f);
    p = fmaf(p, a, 1.1510283946990967f);
    return p;
  }
};

}  // namespace cuda
}  // namespace tempo
