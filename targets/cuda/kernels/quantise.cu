// Around w8a8.cu: inputs to e4m3 with a scale per token, and the sums of its k groups.
#include "narrow.cuh"

constexpr int kThreads = 512;
constexpr int kPacks = 6;  // of 8 inputs per thread: widths up to 24576

__device__ inline float largest_of(u32 two) {  // of |f16|
  float low, high;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high)
      : "r"(two & 0x7fff7fffu));
  return fmaxf(low, high);
}
__device__ inline float4 floats(u32 first, u32 second) {
  float4 v;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %4; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; mov.b32 {a, b}, %5; "
      "cvt.f32.f16 %2, a; cvt.f32.f16 %3, b; }"
      : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
      : "r"(first), "r"(second));
  return v;
}

// rows: f16 of value / 32, [M, width], width a multiple of 8. One CTA per row.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantise(const uint4* rows, void* x, float* scale, int width, int k_blocks, int block) {
  __shared__ float scratch[32];
  let_next_start();
  wait_for_previous();
  const int packs = width / 8;
  const uint4* row = rows + size_t(blockIdx.x) * packs;
  uint4 held[kPacks];
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= packs) continue;
    held[j] = row[i];
    largest = fmaxf(largest, fmaxf(fmaxf(largest_of(held[j].x), largest_of(held[j].y)),
                                   fmaxf(largest_of(held[j].z), largest_of(held[j].w))));
  }
  const float factor = range(largest, scale, 1.0f / kActivationScale, scratch);
  u8* to = static_cast<u8*>(x);
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= packs) continue;
    const float4 low = floats(held[j].x, held[j].y), high = floats(held[j].z, held[j].w);
    store_four(to, blockIdx.x, 8 * i, low, factor, k_blocks, block);
    store_four(to, blockIdx.x, 8 * i + 4, high, factor, k_blocks, block);
  }
}

// parts [groups, M, n], n a multiple of 4 -> out [M, n]. Grid: (quads of a row in blocks of 256, M).
extern "C" __global__ void __launch_bounds__(256)
    add_groups(const float4* parts, const float4* scale, const float* x_scale, float4* out, int groups, int quads) {
  let_next_start();
  const int i = blockIdx.x * 256 + threadIdx.x;
  const float4 s = i < quads ? scale[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  wait_for_previous();
  if (i >= quads) return;
  const size_t at = size_t(blockIdx.y) * quads + i, stride = size_t(gridDim.y) * quads;
  float4 v[8];
#pragma unroll
  for (int g = 0; g < 8; g++)
    if (g < groups) v[g] = parts[g * stride + at];
  float4 sum = v[0];
#pragma unroll
  for (int g = 1; g < 8; g++)
    if (g < groups) sum.x += v[g].x, sum.y += v[g].y, sum.z += v[g].z, sum.w += v[g].w;
  const float token = x_scale[blockIdx.y];
  out[at] = make_float4(sum.x * s.x * token, sum.y * s.y * token, sum.z * s.z * token, sum.w * s.w * token);
}
