// The residual stream: embedding, RMS norms fused with the residual addition. One CTA per row.
#include "norm.cuh"

// ---- Kernels ----
extern "C" __global__ void __launch_bounds__(kThreads) add_norm(const __grid_constant__ AddNorm job, const float* branch) {
  add_and_norm(job, Whole{branch});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_groups(const __grid_constant__ AddNorm job, const __grid_constant__ Groups branch) {
  add_and_norm(job, branch);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_thrice(const __grid_constant__ AddNorm job, const float* branch, const __grid_constant__ Others others) {
  add_and_norm(job, Whole{branch}, &others);
}

// The norms' weights on their way to shared memory: each thread loads what it reads.
__device__ inline void keep_norms(const AddNorm& job, const Mixture& mixture, float4* norms) {
  for (int i = threadIdx.x; i < min(kKept, job.hidden / 4); i += kThreads) {
    copy16(shared_address(norms + i), mixture.dense_norm + 4 * i);
    copy16(shared_address(norms + kKept + i), mixture.routed_norm + 4 * i);
  }
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_mixture(const __grid_constant__ AddNorm job, const float* dense, const __grid_constant__ Mixture mixture) {
  __shared__ float4 norms[2 * kKept];
  keep_norms(job, mixture, norms);
  add_and_norm(job, Mixed<Whole>{mixture, Whole{dense}, norms});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_mixture_groups(const __grid_constant__ AddNorm job, const __grid_constant__ Groups dense,
                            const __grid_constant__ Mixture mixture) {
  __shared__ float4 norms[2 * kKept];
  keep_norms(job, mixture, norms);
  add_and_norm(job, Mixed<Groups>{mixture, dense, norms});
}

// h[m] = table[token] * factor; the token becomes text, where there are texts and its row runs.
extern "C" __global__ void __launch_bounds__(kThreads)
    embed(const __grid_constant__ Embed job, int* texts, const int* start, const int* slot, int stride, int tokens) {
  let_next_start();
  const int token = job.tokens[blockIdx.x], row = token >= 0 && token < job.vocab ? token : 0;
  const int b = blockIdx.x / tokens;
  if (texts && !threadIdx.x && slot[b] >= 0) texts[size_t(slot[b]) * stride + start[b] + blockIdx.x % tokens] = token;
  float2* h = reinterpret_cast<float2*>(job.h + size_t(blockIdx.x) * job.hidden);
  for (int i = threadIdx.x; i < job.hidden / 2; i += kThreads) {
    const float2 v = pair_of(job, row, i);
    h[i] = make_float2(v.x * job.factor, v.y * job.factor);
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
