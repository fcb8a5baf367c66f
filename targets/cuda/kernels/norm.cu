// The residual stream: embedding, RMS norms fused with the residual addition. One CTA per row.
#include "hidden.cuh"
#include "narrow.cuh"

#ifndef W8A8  // 1: the next linear layer's inputs are e4m3
#define W8A8 0
#endif

// h = (h + rms(branch) * post) * scalar; x = rms(h) * pre. branch.parts, scalar, pre may be null, and
// post: the branch is then added as it is.
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm(float* h, const __grid_constant__ Branch branch, const float* post, const float* scalar, const float* pre,
             void* x, float* scale, int hidden, float eps, int k_blocks, int block) {
  __shared__ float scratch[3][32];
  let_next_start();
  const int m = blockIdx.x, quads = hidden / 4;
  float4 weight[kMax], closing[kMax], stream[kMax], added[kMax];
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (pre && i < quads) weight[j] = load4(pre, i);
    if (post && i < quads) closing[j] = load4(post, i);
  }
  const float factor = scalar ? *scalar : 1.0f;
  wait_for_previous();
  float* row = h + size_t(m) * hidden;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    stream[j] = load4(row, i);
    if (!branch.parts) continue;
    added[j] = branch.load(m, i, gridDim.x, hidden);
    squares += square4(added[j]);
  }
  if (branch.parts) {
    const float inverse = post ? rsqrtf(block_sum(squares, scratch[0]) / hidden + eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= quads) continue;
      const float4 w = post ? closing[j] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
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
  float inverse = 1.0f;
  if (pre) {
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++)
      if (threadIdx.x + j * kThreads < quads) squares += square4(stream[j]);
    inverse = rsqrtf(block_sum(squares, scratch[1]) / hidden + eps);
  }
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    float4& v = stream[j];
    if (pre) {
      v.x *= inverse * weight[j].x, v.y *= inverse * weight[j].y;
      v.z *= inverse * weight[j].z, v.w *= inverse * weight[j].w;
    }
    if (W8A8)
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    else
      store_input(x, m, i, v, k_blocks, block);
  }
#if W8A8
  const float to_e4m3 = range(largest, scale, 1.0f, scratch[2]);
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) store_four(static_cast<u8*>(x), m, 4 * i, stream[j], to_e4m3, k_blocks, block);
  }
#endif
}

// out = rms(first) * first_weight + rms(second) * second_weight: the two branches of a MoE layer.
extern "C" __global__ void __launch_bounds__(kThreads)
    join(const __grid_constant__ Branch first, const float* first_weight, const float* second,
         const float* second_weight, float* out, int hidden, float eps) {
  __shared__ float scratch[2][32];
  let_next_start();
  wait_for_previous();
  const size_t row = size_t(blockIdx.x) * hidden;
  const int quads = hidden / 4;
  float4 a[kMax], b[kMax];
  float a_squares = 0.0f, b_squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    a[j] = first.load(blockIdx.x, i, gridDim.x, hidden), b[j] = load4(second + row, i);
    a_squares += square4(a[j]), b_squares += square4(b[j]);
  }
  const float p = rsqrtf(block_sum(a_squares, scratch[0]) / hidden + eps);
  const float q = rsqrtf(block_sum(b_squares, scratch[1]) / hidden + eps);
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    const float4 u = load4(first_weight, i), v = load4(second_weight, i);
    reinterpret_cast<float4*>(out + row)[i] =
        make_float4(a[j].x * p * u.x + b[j].x * q * v.x, a[j].y * p * u.y + b[j].y * q * v.y,
                    a[j].z * p * u.z + b[j].z * q * v.z, a[j].w * p * u.w + b[j].w * q * v.w);
  }
}

// h[m] = table[token] * factor.
extern "C" __global__ void __launch_bounds__(kThreads) embed(const __grid_constant__ Embed job) {
  const int token = job.tokens[blockIdx.x], row = token >= 0 && token < job.vocab ? token : 0;
  float2* h = reinterpret_cast<float2*>(job.h + size_t(blockIdx.x) * job.hidden);
  for (int i = threadIdx.x; i < job.hidden / 2; i += kThreads) {
    const u32 both = job.table[pair_at(job, row, i)];
    h[i] = make_float2(from_bf16(u16(both)) * job.factor, from_bf16(both >> 16) * job.factor);
  }
}

// Per-layer inputs of E2B and E4B: (rms(mixed * hidden^-1/2) * weight + table row) / sqrt(2).
// One warp per layer of a row; width is at most 1024.
extern "C" __global__ void __launch_bounds__(256)
    per_layer_inputs(const float* mixed, const u16* table, const float* weight,
                     const int* tokens, float* out, int layers, int width, int vocab, float eps,
                     float mixed_factor, float table_factor) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % 32, layer = blockIdx.y * 8 + threadIdx.x / 32, m = blockIdx.x;
  if (layer >= layers) return;
  const int token = tokens[m];
  const size_t at = size_t(m) * layers * width + size_t(layer) * width;
  const u16* row =
      table + size_t(token >= 0 && token < vocab ? token : 0) * layers * width + size_t(layer) * width;
  float squares = 0.0f;
  for (int i = lane; i < width; i += 32) {
    const float v = mixed[at + i] * mixed_factor;
    squares += v * v;
  }
  const float inverse = rsqrtf(warp_sum(squares) / width + eps);
  for (int i = lane; i < width; i += 32) {
    const float v = mixed[at + i] * mixed_factor * inverse * weight[i];
    const float own = from_bf16(row[i]) * table_factor;
    out[at + i] = (v + own) * 0.70710678118654752f;
  }
}
