// Around w8a8.cu: inputs to e4m3 with a scale per token and k group, and the sums of k groups.
#include "narrow.cuh"

constexpr int kThreads = 1024;
constexpr int kPacks = 3;  // of 8 inputs per thread: widths up to 24576

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

// rows: f16 of value / 32, [M, width], width a multiple of 8. scale [8, M]: of an eighth of `each` inputs (a
// multiple of 8). One CTA per row, four warps per eighth.
extern "C" __global__ void __launch_bounds__(kThreads)
    quantise(const uint4* rows, void* x, float* scale, int width, int each, int k_blocks, int block) {
  __shared__ __align__(16) float scratch[32];
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp / 4 * (each / 8);
  const int end = min(first + each / 8, width / 8);
  const uint4* row = rows + size_t(blockIdx.x) * (width / 8);
  uint4 held[kPacks];
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = first + warp % 4 * 32 + lane + j * 128;
    if (i >= end) continue;
    held[j] = row[i];
    largest = fmaxf(largest, fmaxf(fmaxf(largest_of(held[j].x), largest_of(held[j].y)),
                                   fmaxf(largest_of(held[j].z), largest_of(held[j].w))));
  }
  largest = warp_max(largest);
  if (lane == 0) scratch[warp] = largest;
  __syncthreads();
  const float4 four = reinterpret_cast<const float4*>(scratch)[warp / 4];
  largest = fmaxf(fmaxf(four.x, four.y), fmaxf(four.z, four.w));
  if (threadIdx.x % 128 == 0) scale[warp / 4 * gridDim.x + blockIdx.x] = from_e4m3(largest);
  const float factor = into_e4m3(largest);
  u8* to = static_cast<u8*>(x);
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = first + warp % 4 * 32 + lane + j * 128;
    if (i >= end) continue;
    const float4 low = floats(held[j].x, held[j].y), high = floats(held[j].z, held[j].w);
    store_four(to, blockIdx.x, 8 * i, low, factor, k_blocks, block);
    store_four(to, blockIdx.x, 8 * i + 4, high, factor, k_blocks, block);
  }
}

// out [M, width], width a multiple of 4. Grid: (quads of a row in blocks of 256, M).
extern "C" __global__ void __launch_bounds__(256)
    add_groups(const __grid_constant__ Groups groups, float4* out, int width) {
  let_next_start();
  const int i = blockIdx.x * 256 + threadIdx.x;
  wait_for_previous();
  if (i < width / 4) out[size_t(blockIdx.y) * (width / 4) + i] = groups.load(blockIdx.y, i, gridDim.y, width);
}
