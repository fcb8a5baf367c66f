// Codes of 4 bits times inputs of 16, all whole numbers: an input is two signed bytes, which are two columns of an MMA, so
// that its sums are exact whatever their order.
#pragma once
#include "tile.cuh"

constexpr float kMostInput = 127 * 256 + 127;  // the largest input: both its bytes are signed
// The larger of two values, in each half of a word.
__device__ inline u32 larger(u32 a, u32 b) {
  u32 v;
  asm("max.u16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ inline float2 floats(u32 pair) {  // of two f16
  float2 v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(v.x), "=f"(v.y) : "r"(pair));
  return v;
}
// The largest magnitudes of eight inputs, in either half, or NaN: bits of magnitudes are ordered like the magnitudes.
__device__ inline u32 largest_of(uint4 v) {
  return larger(larger(v.x & 0x7fff7fff, v.y & 0x7fff7fff), larger(v.z & 0x7fff7fff, v.w & 0x7fff7fff));
}
__device__ inline float largest_of_warp(u32 pair) {
  return floats(__reduce_max_sync(~0u, max(pair & 0xffff, pair >> 16))).x;
}
__device__ inline u32 bytes(u32 a, u32 b, u32 which) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(which));
  return v;
}
// An integer of 16 bits and 128, as a float's last bits: its upper byte is then the high one, and its lower the low one + 128.
__device__ inline u32 rounded(float v, float factor) { return __float_as_uint(fmaf(v, factor, 12582912.0f + 128.0f)); }
// Eight inputs' high bytes, and their low ones 32 bytes behind, in the order of the codes in `signed_bytes`.
__device__ inline void store_rounded(u32 to, uint4 v, float factor) {
  const float2 a = floats(v.x), b = floats(v.y), c = floats(v.z), d = floats(v.w);  // 0 1, 2 3, 4 5, 6 7
  const auto pair = [&](float x, float y) { return bytes(rounded(x, factor), rounded(y, factor), 0x5140); };
  const u32 p04 = pair(a.x, c.x), p15 = pair(a.y, c.y), p26 = pair(b.x, d.x), p37 = pair(b.y, d.y);
  const u32 high0 = bytes(p04, p15, 0x7632), high1 = bytes(p26, p37, 0x7632);
  const u32 low0 = bytes(p04, p15, 0x5410) ^ 0x80808080, low1 = bytes(p26, p37, 0x5410) ^ 0x80808080;
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(high0), "r"(high1) : "memory");
  asm volatile("st.shared.v2.u32 [%0 + 32], {%1, %2};" ::"r"(to), "r"(low0), "r"(low1) : "memory");
}

#if BITS == 4
// A tile's codes as signed bytes, 16 times as much: the A fragment of an integer MMA.
__device__ inline void signed_bytes(const Stored& from, u32 (&a)[4]) {
  const u32 words[2] = {from.codes.x, from.codes.y};
#pragma unroll
  for (int i = 0; i < 2; i++) a[i] = words[i] << 4 & 0xf0f0f0f0, a[i + 2] = words[i] & 0xf0f0f0f0;
}
// D[16 x 8] = A[16 x 32] B[32 x 8]
__device__ inline void mma_s8(int (&d)[4], const u32 (&a)[4], uint2 b) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.x), "r"(b.y), "r"(0));
}
#endif
