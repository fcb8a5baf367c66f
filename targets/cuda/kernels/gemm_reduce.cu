// What wide.cu left of each k group, added in ascending order, and then what gemm.cu does with a sum.
#include "linear.cuh"

#ifndef TOKENS  // wide.cu's
#define TOKENS 64
#endif

__device__ inline void add_parts(const Job& job, Four& sum, int tile) {
  // [k_groups][tile][token block][4 TOKENS]
  const float4* part = job.partial + (size_t(tile) * gridDim.y + blockIdx.y) * (4 * TOKENS) + threadIdx.x;
  const size_t stride = size_t(job.passes) * job.ctas * job.tiles * gridDim.y * (4 * TOKENS);
  float4 v[8];
#pragma unroll
  for (int g = 0; g < 8; g++)
    if (g < job.k_groups) v[g] = part[g * stride];
  sum[0] = v[0].x, sum[1] = v[0].y, sum[2] = v[0].z, sum[3] = v[0].w;
#pragma unroll
  for (int g = 1; g < 8; g++)
    if (g < job.k_groups) sum[0] += v[g].x, sum[1] += v[g].y, sum[2] += v[g].z, sum[3] += v[g].w;
}

// A thread per four sums; grid: (tiles or pairs of them, token blocks).
extern "C" __global__ void __launch_bounds__(4 * TOKENS)
    gather(const __grid_constant__ Job job) {
  let_next_start();
  const int lane = threadIdx.x % 32, first_token = blockIdx.y * TOKENS + threadIdx.x / 32 * 8;
  const bool gated = job.epilogue == kGated;
  const int tile = gated ? 2 * blockIdx.x : blockIdx.x;
  Scales scales, up_scales;
  load_scales(job, scales, tile, lane);
  if (gated) load_scales(job, up_scales, tile + 1, lane);
  wait_for_previous();
  Four sum, up;
  add_parts(job, sum, tile);
  if (!gated) return finish(job, sum, scales, tile, first_token, TOKENS, lane);
  add_parts(job, up, tile + 1);
  finish_gated(job, sum, up, scales, up_scales, tile, first_token, TOKENS, lane);
}
