// Inputs of w8a8.cu: e4m3, with a float32 scale per token (and k group, where sums are made apart): the
// largest magnitude / 448, of values / 32 as everywhere (common.cuh).
#pragma once
#include "common.cuh"

constexpr float kMaxE4m3 = 448.0f;

// Where input f of row m lies, in blocks of [m / block][f / 32]: core matrices, [half][token][16]. The 16 are the
// inputs that four neighbouring lanes hold of a weight in the same two words (packing.py).
__device__ inline size_t narrow_offset(int m, int f, int k_blocks, int block) {
  const size_t start = (size_t(m / block) * k_blocks + f / 32) * block * 32;
  return start + (f / 4 % 2 * block + m % block) * 16 + f % 32 / 8 * 4 + f % 4;
}

// The output of a linear layer that left one sum per part of k, [parts, M, width]. They are added as a binary
// tree and scaled when a row is loaded.
struct Groups {
  const float* parts;
  const float* scale;  // [width]
  int count;           // up to 8

  __device__ bool here() const { return true; }
  // Values 4 i to 4 i + 3 of row m.
  __device__ float4 load(int m, int i, int rows, int width) const {
    const float4* at = reinterpret_cast<const float4*>(parts) + size_t(m) * (width / 4) + i;
    const size_t stride = size_t(rows) * (width / 4);
    float4 v[8];
#pragma unroll
    for (int g = 0; g < 8; g++)
      if (g < count) v[g] = at[g * stride];
    const float4 sum = tree_sum(v, count), s = reinterpret_cast<const float4*>(scale)[i];
    return make_float4(sum.x * s.x, sum.y * s.y, sum.z * s.z, sum.w * s.w);
  }
};

// The factor that brings values of up to this magnitude into e4m3.
__device__ inline float into_e4m3(float largest) { return kMaxE4m3 / fmaxf(largest, 1e-12f); }
// Its inverse: what is multiplied with the sums.
__device__ inline float from_e4m3(float largest) { return fmaxf(largest, 1e-12f) / kMaxE4m3; }

// Inputs f to f + 3 (f a multiple of 4) of row m.
__device__ inline void store_four(u8* x, int m, int f, float4 v, float factor, int k_blocks, int block) {
  u16 low, high;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(low) : "f"(v.y * factor), "f"(v.x * factor));
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(high) : "f"(v.w * factor), "f"(v.z * factor));
  *reinterpret_cast<u32*>(x + narrow_offset(m, f, k_blocks, block)) = low | u32(high) << 16;
}
