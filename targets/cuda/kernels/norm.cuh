// The arithmetic of a norm between two branches, a float4 at a time: kernels of their own do it (norm.cu),
// and linear layers for themselves (gemm.cu). How products and sums are rounded is spelled out, not left
// to the compiler: both give the same bits.
#pragma once
#include "common.cuh"

constexpr int kNormThreads = 512;  // of a row: thread t has its quads t, t + 512, ...

// h = (h + rms(branch) * post) * scalar goes to `out`; x = rms(h) * pre. The branch, scalar and pre may be
// missing, and post: the branch is then added as it is.
struct AddNorm {
  const float* h;
  float* out;
  const float *post, *scalar, *pre;
  void* x;
  float* scale;
  int hidden, k_blocks, block;
  float eps;
};

__device__ inline float4 load4(const float* p, int i) { return reinterpret_cast<const float4*>(p)[i]; }
__device__ inline float square4(float4 v) {
  return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmul_rn(v.x, v.x))));
}
__device__ inline float inverse_rms(float squares, int count, float eps) { return rsqrtf(__fadd_rn(squares / count, eps)); }

__device__ inline float close_one(float h, float added, float inverse, float weight, float factor) {
  return __fmul_rn(__fmaf_rn(__fmul_rn(added, inverse), weight, h), factor);
}
__device__ inline float4 close4(float4 h, float4 added, float inverse, float4 weight, float factor) {
  return make_float4(close_one(h.x, added.x, inverse, weight.x, factor), close_one(h.y, added.y, inverse, weight.y, factor),
                     close_one(h.z, added.z, inverse, weight.z, factor), close_one(h.w, added.w, inverse, weight.w, factor));
}
__device__ inline float4 open4(float4 v, float inverse, float4 weight) {
  return make_float4(__fmul_rn(v.x, __fmul_rn(inverse, weight.x)), __fmul_rn(v.y, __fmul_rn(inverse, weight.y)),
                     __fmul_rn(v.z, __fmul_rn(inverse, weight.z)), __fmul_rn(v.w, __fmul_rn(inverse, weight.w)));
}
__device__ inline u16 as_input(float v, bool narrow) { return narrow ? input_of_fp8(v) : to_bf16(v); }
