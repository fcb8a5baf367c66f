// What wide.cu left of each k group, added as gemm.cu adds them, and then what gemm.cu does with a sum.
#include "linear.cuh"

#ifndef TOKENS  // wide.cu's
#define TOKENS 64
#endif

// A thread per four sums; grid: (tiles, token blocks).
extern "C" __global__ void __launch_bounds__(4 * TOKENS)
    reduce(const __grid_constant__ Job job) {
  let_next_start();
  const int lane = threadIdx.x % 32, tile = blockIdx.x;
  Scales scales;
  load_scales(job, scales, tile, lane);
  wait_for_previous();
  // [k_groups][tile][token block][4 TOKENS]
  const float4* part = job.partial + (size_t(tile) * gridDim.y + blockIdx.y) * (4 * TOKENS) + threadIdx.x;
  const size_t stride = size_t(gridDim.x) * gridDim.y * (4 * TOKENS);
  float4 v[8];
#pragma unroll
  for (int g = 0; g < 8; g++)
    if (g < job.k_groups) v[g] = part[g * stride];
  const float4 all = tree_sum(v, job.k_groups);
  const Four sum = {all.x, all.y, all.z, all.w};
  finish(job, sum, scales, tile, blockIdx.y * TOKENS + threadIdx.x / 32 * 8, TOKENS, lane);
}
