// A long prefill chunk between its matmuls: one CTA per token, each row in one fixed order.
//
// A row leaves as a linear layer's input, [T, width]: e4m3 with a float32 scale per token (its
// largest magnitude / 448), bf16, or f16 of value / 32 (common.cuh). Widths are multiples of 8.
#include "common.cuh"

#ifndef FP8  // what the next linear layer's weights are
#define FP8 1
#endif
#ifndef F16  // of those that are not FP8: whether they are f16
#define F16 0
#endif

// ---- Shape and conversions ----
constexpr int kThreads = 512;
constexpr int kQuads = 4;  // of 4 elements per thread: hidden sizes up to 8192
constexpr int kPacks = 6;  // of 8 elements per thread: widths up to 24576
constexpr float kMaxE4m3 = 448.0f;

// The factor that brings a row into e4m3; its inverse is kept for the matmul.
__device__ inline float range(float largest, float* scale, float* scratch) {
  if (!FP8) return 1.0f;
  largest = fmaxf(block_max(largest, scratch), 1e-12f);
  if (threadIdx.x == 0) scale[blockIdx.x] = largest / kMaxE4m3;
  return kMaxE4m3 / largest;
}

__device__ inline u32 two_e4m3(float low, float high) {
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(high), "f"(low));
  return two;
}
__device__ inline u32 two_bf16(float low, float high) { return to_bf16(low) | u32(to_bf16(high)) << 16; }
__device__ inline u32 two_f16(float low, float high) { return input_of_fp8(low) | u32(input_of_fp8(high)) << 16; }
__device__ inline u32 two_wide(float low, float high) { return F16 ? two_f16(low, high) : two_bf16(low, high); }
__device__ inline float low_of(u32 two) { return from_bf16(u16(two)); }
__device__ inline float high_of(u32 two) { return __uint_as_float(two & 0xffff0000u); }

__device__ inline float4 load4(const float* p, int i) { return reinterpret_cast<const float4*>(p)[i]; }
__device__ inline float4 load4(const u16* p, int i) {
  const uint2 raw = reinterpret_cast<const uint2*>(p)[i];
  return make_float4(low_of(raw.x), high_of(raw.x), low_of(raw.y), high_of(raw.y));
}
__device__ inline float square4(float4 v) { return v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w; }
__device__ inline float largest4(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

// ---- Norms ----
// h = (h + rms(branch) * post) * scalar; x = rms(h) * pre. branch (bf16, or float32 where `wide`),
// scalar, pre and x may be null; without pre, x is h itself.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm(float* h, const void* branch, const float* post, const float* scalar, const float* pre,
             void* x, float* scale, int hidden, float eps, int wide) {
  __shared__ float scratch[3][32];
  const int quads = hidden / 4;
  const size_t first = size_t(blockIdx.x) * hidden;
  float* row = h + first;
  float4 stream[kQuads], added[kQuads];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kQuads; j++) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= quads) continue;
    stream[j] = load4(row, i);
    if (!branch) continue;
    added[j] = wide ? load4(static_cast<const float*>(branch) + first, i)
                    : load4(static_cast<const u16*>(branch) + first, i);
    squares += square4(added[j]);
  }
  if (branch) {
    const float inverse = rsqrtf(block_sum(squares, scratch[0]) / hidden + eps);
    const float factor = scalar ? *scalar : 1.0f;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i >= quads) continue;
      const float4 w = load4(post, i);
      float4 v = stream[j];
      v.x = (v.x + added[j].x * inverse * w.x) * factor;
      v.y = (v.y + added[j].y * inverse * w.y) * factor;
      v.z = (v.z + added[j].z * inverse * w.z) * factor;
      v.w = (v.w + added[j].w * inverse * w.w) * factor;
      stream[j] = v;
      reinterpret_cast<float4*>(row)[i] = v;
    }
  }
  if (!x) return;
  if (pre) {
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kQuads; j++)
      if (threadIdx.x + j * blockDim.x < quads) squares += square4(stream[j]);
    const float inverse = rsqrtf(block_sum(squares, scratch[1]) / hidden + eps);
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      const int i = threadIdx.x + j * blockDim.x;
      if (i >= quads) continue;
      const float4 w = load4(pre, i);
      stream[j].x *= inverse * w.x, stream[j].y *= inverse * w.y;
      stream[j].z *= inverse * w.z, stream[j].w *= inverse * w.w;
    }
  }
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kQuads; j++)
    if (threadIdx.x + j * blockDim.x < quads) largest = fmaxf(largest, largest4(stream[j]));
  const float factor = range(largest, scale, scratch[2]);
#pragma unroll
  for (int j = 0; j < kQuads; j++) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= quads) continue;
    const float4 v = stream[j];
    if (FP8)
      reinterpret_cast<u32*>(static_cast<u8*>(x) + first)[i] =
          two_e4m3(v.x * factor, v.y * factor) | two_e4m3(v.z * factor, v.w * factor) << 16;
    else
      reinterpret_cast<uint2*>(static_cast<u16*>(x) + first)[i] =
          make_uint2(two_wide(v.x, v.y), two_wide(v.z, v.w));
  }
}

// ---- Rows as inputs ----
__device__ inline float largest_of(uint4 v) {
  float largest = 0.0f;
  const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int i = 0; i < 4; i++)
    largest = fmaxf(largest, fmaxf(fabsf(low_of(words[i])), fabsf(high_of(words[i]))));
  return largest;
}

// Stores a row of bf16 in x, eight elements at a time. Rows of x are `stride` apart.
__device__ inline void store_row(const uint4 (&packs)[kPacks], float largest, void* x, float* scale,
                                 int width, int stride, float* scratch) {
  const size_t first = size_t(blockIdx.x) * stride;
  const float factor = range(largest, scale, scratch);
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= width / 8) continue;
    const uint4 v = packs[j];
    const u32 words[4] = {v.x, v.y, v.z, v.w};
    u32 pairs[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float low = low_of(words[e]) * factor, high = high_of(words[e]) * factor;
      pairs[e] = FP8 ? two_e4m3(low, high) : two_wide(low, high);
    }
    if (FP8)
      reinterpret_cast<uint2*>(static_cast<u8*>(x) + first)[i] =
          make_uint2(pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16);
    else
      reinterpret_cast<uint4*>(static_cast<u16*>(x) + first)[i] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
  }
}

// ---- Gates ----
__device__ inline float gated(float gate, float up) { return gelu_tanh(gate) * up; }
__device__ inline u32 gated2(u32 gate, u32 up) {
  return two_bf16(gated(low_of(gate), low_of(up)), gated(high_of(gate), high_of(up)));
}

// Eight of a row's values: bf16, or float32 that are yet to be multiplied, each by its factor.
template <bool kScaled>
__device__ inline uint4 eight(const void* row, const float* factors, int i) {
  if (!kScaled) return static_cast<const uint4*>(row)[i];
  u32 pairs[4];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 v = load4(static_cast<const float*>(row), 2 * i + half), f = load4(factors, 2 * i + half);
    pairs[2 * half] = two_bf16(v.x * f.x, v.y * f.y), pairs[2 * half + 1] = two_bf16(v.z * f.z, v.w * f.w);
  }
  return make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
}

// x = gelu_tanh(gate) * up; a row of gate_up is gate's `width` values, then up's, and so are the factors.
template <bool kScaled>
__device__ inline void gate_row(const void* gate_up, const float* factors, void* x, float* scale, int width, int stride) {
  __shared__ float scratch[32];
  const u8* row = static_cast<const u8*>(gate_up) + size_t(blockIdx.x) * 2 * width * (kScaled ? 4 : 2);
  uint4 packs[kPacks];
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= width / 8) continue;
    const uint4 g = eight<kScaled>(row, factors, i), u = eight<kScaled>(row, factors, width / 8 + i);
    packs[j] = make_uint4(gated2(g.x, u.x), gated2(g.y, u.y), gated2(g.z, u.z), gated2(g.w, u.w));
    largest = fmaxf(largest, largest_of(packs[j]));
  }
  store_row(packs, largest, x, scale, width, stride, scratch);
}
extern "C" __global__ void __launch_bounds__(kThreads, 3)
    gate(const void* gate_up, const float* factors, void* x, float* scale, int width, int stride) {
  gate_row<false>(gate_up, factors, x, scale, width, stride);
}
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    scaled_gate(const void* gate_up, const float* factors, void* x, float* scale, int width, int stride) {
  gate_row<true>(gate_up, factors, x, scale, width, stride);
}

// ---- Kernel that joins pieces ----
// A row of x is made of `runs` pieces: in is [runs, T, width / runs].
extern "C" __global__ void __launch_bounds__(kThreads, 2)
    narrow(const u16* in, void* x, float* scale, int width, int runs) {
  __shared__ float scratch[32];
  const uint4* from = reinterpret_cast<const uint4*>(in);
  const int run = width / runs / 8;
  uint4 packs[kPacks];
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kPacks; j++) {
    const int i = threadIdx.x + j * blockDim.x;
    if (i >= width / 8) continue;
    packs[j] = from[(size_t(i / run) * gridDim.x + blockIdx.x) * run + i % run];
    largest = fmaxf(largest, largest_of(packs[j]));
  }
  store_row(packs, largest, x, scale, width, width, scratch);
}
