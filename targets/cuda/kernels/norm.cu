// The residual stream: embedding, RMS norms fused with the residual addition. One CTA per row.
#include "hidden.cuh"
#include "narrow.cuh"

#ifndef W8A8  // 1: the next linear layer's inputs are e4m3
#define W8A8 0
#endif

// A linear layer's output as it is: what the norms read but for Groups (narrow.cuh). Two kernels of each,
// since loads that may be of groups would wait for one another: 1 us more a norm.
struct Whole {
  const float* rows;  // may be null

  __device__ bool here() const { return rows; }
  __device__ float4 load(int m, int i, int, int width) const { return load4(rows + size_t(m) * width, i); }
};

struct AddNorm {
  float* h;
  const float *post, *scalar, *pre;
  void* x;
  float* scale;
  int hidden, k_blocks, block;
  float eps;
};

// h = (h + rms(branch) * post) * scalar; x = rms(h) * pre. The branch, scalar, pre may be missing, and
// post: the branch is then added as it is.
template <class Branch>
__device__ inline void add_and_norm(const AddNorm& job, const Branch& branch) {
  __shared__ float scratch[3][32];
  let_next_start();
  const int m = blockIdx.x, quads = job.hidden / 4;
  float4 weight[kMax], closing[kMax], stream[kMax], added[kMax];
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (job.pre && i < quads) weight[j] = load4(job.pre, i);
    if (job.post && i < quads) closing[j] = load4(job.post, i);
  }
  const float factor = job.scalar ? *job.scalar : 1.0f;
  wait_for_previous();
  float* row = job.h + size_t(m) * job.hidden;
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    stream[j] = load4(row, i);
    if (!branch.here()) continue;
    added[j] = branch.load(m, i, gridDim.x, job.hidden);
    squares += square4(added[j]);
  }
  if (branch.here()) {
    const float inverse = job.post ? rsqrtf(block_sum(squares, scratch[0]) / job.hidden + job.eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= quads) continue;
      const float4 w = job.post ? closing[j] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      float4 v = stream[j];
      v.x = (v.x + added[j].x * inverse * w.x) * factor;
      v.y = (v.y + added[j].y * inverse * w.y) * factor;
      v.z = (v.z + added[j].z * inverse * w.z) * factor;
      v.w = (v.w + added[j].w * inverse * w.w) * factor;
      stream[j] = v;
      reinterpret_cast<float4*>(row)[i] = v;
    }
  }
  if (!job.x) return;
  float inverse = 1.0f;
  if (job.pre) {
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++)
      if (threadIdx.x + j * kThreads < quads) squares += square4(stream[j]);
    inverse = rsqrtf(block_sum(squares, scratch[1]) / job.hidden + job.eps);
  }
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    float4& v = stream[j];
    if (job.pre) {
      v.x *= inverse * weight[j].x, v.y *= inverse * weight[j].y;
      v.z *= inverse * weight[j].z, v.w *= inverse * weight[j].w;
    }
    if (W8A8)
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    else
      store_input(job.x, m, i, v, job.k_blocks, job.block);
  }
#if W8A8
  largest = block_max(largest, scratch[2]);
  const float to_e4m3 = into_e4m3(largest);
  if (threadIdx.x == 0) job.scale[m] = from_e4m3(largest) * kActivationScale;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) store_four(static_cast<u8*>(job.x), m, 4 * i, stream[j], to_e4m3, job.k_blocks, job.block);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads) add_norm(const __grid_constant__ AddNorm job, const float* branch) {
  add_and_norm(job, Whole{branch});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_groups(const __grid_constant__ AddNorm job, const __grid_constant__ Groups branch) {
  add_and_norm(job, branch);
}

struct Join {
  const float *first_weight, *second, *second_weight;
  float* out;
  int hidden;
  float eps;
};

// out = rms(first) * first_weight + rms(second) * second_weight: the two branches of a MoE layer.
template <class Branch>
__device__ inline void join_of(const Join& job, const Branch& first) {
  __shared__ float scratch[2][32];
  let_next_start();
  wait_for_previous();
  const size_t row = size_t(blockIdx.x) * job.hidden;
  const int quads = job.hidden / 4;
  float4 a[kMax], b[kMax];
  float a_squares = 0.0f, b_squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    a[j] = first.load(blockIdx.x, i, gridDim.x, job.hidden), b[j] = load4(job.second + row, i);
    a_squares += square4(a[j]), b_squares += square4(b[j]);
  }
  const float p = rsqrtf(block_sum(a_squares, scratch[0]) / job.hidden + job.eps);
  const float q = rsqrtf(block_sum(b_squares, scratch[1]) / job.hidden + job.eps);
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    const float4 u = load4(job.first_weight, i), v = load4(job.second_weight, i);
    reinterpret_cast<float4*>(job.out + row)[i] =
        make_float4(a[j].x * p * u.x + b[j].x * q * v.x, a[j].y * p * u.y + b[j].y * q * v.y,
                    a[j].z * p * u.z + b[j].z * q * v.z, a[j].w * p * u.w + b[j].w * q * v.w);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) join(const __grid_constant__ Join job, const float* first) {
  join_of(job, Whole{first});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    join_groups(const __grid_constant__ Join job, const __grid_constant__ Groups first) {
  join_of(job, first);
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
