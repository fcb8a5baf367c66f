// What opens a draft head's linear layers: the target's features for the first, the next token's embedding
// beside the head's state for the others.
#include "hidden.cuh"

__device__ inline float4 times4(float4 v, float f, float4 w) {
  return make_float4(v.x * f * w.x, v.y * f * w.y, v.z * f * w.z, v.w * f * w.w);
}

// A draft head's view of the target: row (b, t) of the call takes features [slot[b], t], as they are
// or, with a weight, each of gridDim.y equal parts normed. One CTA per row and part.
extern "C" __global__ void __launch_bounds__(kThreads)
    features(const float* features, const int* slot, const float* weight, void* x, int width, int tokens,
             int slots, float eps, int k_blocks, int block) {
  __shared__ float scratch[32];
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x, own = slot[m / tokens], quads = width / 4, first = blockIdx.y * quads;
  const float* row = features + (size_t(own < 0 ? slots : own) * tokens + m % tokens) * gridDim.y * width;
  float inverse = 1.0f;
  if (weight) {
    float squares = 0.0f;
    for (int i = threadIdx.x; i < quads; i += kThreads) squares += square4(load4(row, first + i));
    inverse = rsqrtf(block_sum(squares, scratch) / width + eps);
  }
  for (int i = first + threadIdx.x; i < first + quads; i += kThreads) {
    const float4 v = load4(row, i);
    store_input(x, m, i, weight ? times4(v, inverse, load4(weight, i)) : v, k_blocks, block);
  }
}

struct Pair {
  Embed table;             // h: the head's states [M, hidden], which become its residual
  const float* embedding;  // norm weights
  const float* feedback;   // of states that are the head's own output; may be null
  const float* hidden;
  void* x;
  int token_stride, normed;  // normed: the residual is the normed state
  int k_blocks, block;
  float eps;
};

// x[m] = rms(embedding of the token) * embedding, then rms(h) * hidden. Two CTAs per row.
extern "C" __global__ void __launch_bounds__(kThreads) pair(const __grid_constant__ Pair job) {
  __shared__ float scratch[2][32];
  const Embed& table = job.table;
  const int m = blockIdx.x, quads = table.hidden / 4;
  float4 v[kMax];
  float squares = 0.0f;
  let_next_start();
  wait_for_previous();
  float* h = table.h + size_t(m) * table.hidden;
  const int token = table.tokens[m * job.token_stride], row = token >= 0 && token < table.vocab ? token : 0;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    if (blockIdx.y) {
      v[j] = load4(h, i);
    } else {
      const float2 low = pair_of(table, row, 2 * i), high = pair_of(table, row, 2 * i + 1);
      v[j] = make_float4(low.x, low.y, high.x, high.y);
    }
    squares += square4(v[j]);
  }
  float inverse = rsqrtf(block_sum(squares, scratch[0]) / table.hidden + job.eps);
  if (blockIdx.y && job.feedback) {
    squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= quads) continue;
      v[j] = times4(v[j], inverse, load4(job.feedback, i));
      reinterpret_cast<float4*>(h)[i] = v[j];
      squares += square4(v[j]);
    }
    inverse = rsqrtf(block_sum(squares, scratch[1]) / table.hidden + job.eps);
  }
  const float* weight = blockIdx.y ? job.hidden : job.embedding;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    v[j] = times4(v[j], inverse, load4(weight, i));
    if (blockIdx.y && job.normed) reinterpret_cast<float4*>(h)[i] = v[j];
    store_input(job.x, m, blockIdx.y * quads + i, v[j], job.k_blocks, job.block);
  }
}
