// What the kernels of the residual stream share: rows in registers, inputs of the next linear layer, and
// the embedding's table, which is the head's weight, tiled.
#pragma once
#include "common.cuh"

#ifndef FP8  // what the next linear layer's weights are
#define FP8 1
#endif

#ifndef QUADS  // float4 of a row that a thread has: 4 reach hidden sizes of 8192
#define QUADS 4
#endif

constexpr int kThreads = 512;
constexpr int kMax = QUADS;

__device__ inline float4 load4(const float* p, int i) { return reinterpret_cast<const float4*>(p)[i]; }
__device__ inline float square4(float4 v) {
  return __fmaf_rn(v.w, v.w, __fmaf_rn(v.z, v.z, __fmaf_rn(v.y, v.y, __fmul_rn(v.x, v.x))));
}
__device__ inline u16 as_input(float v, bool narrow) { return narrow ? input_of_fp8(v) : to_bf16(v); }

// narrow: whether the next layer's weights are (tile.cuh).
__device__ inline void store_input(void* x, int m, int i, float4 v, int k_blocks, int block, bool narrow = FP8) {
  const u32 low = as_input(v.x, narrow) | u32(as_input(v.y, narrow)) << 16;
  const u32 high = as_input(v.z, narrow) | u32(as_input(v.w, narrow)) << 16;
  store_inputs(x, m, 4 * i, low, high, k_blocks, block);
}

struct Embed {
  const u32* table;  // the head's bf16 weight, tiled
  const int* tokens;
  float* h;
  int vocab, hidden;
  int ctas, tiles, steps, row_groups, k_groups, wide, depth;  // how it was dealt (gemm.cu)
  float factor;
};

// Where inputs 2 i and 2 i + 1 of a row lie, in 4-byte words: [pass][step][CTA], then [k group]
// [row group][depth][tile], then [16 inputs][lane][word].
__device__ inline size_t pair_at(const Embed& job, int row, int i) {
  const int owner = row / 16 / job.tiles, mine = row / 16 % job.tiles;
  const int block = i / 16, group = block % job.k_groups, part = block / job.k_groups;
  const int step = (owner / job.ctas * job.steps + part / job.depth) * job.ctas + owner % job.ctas;
  const int warp = group * job.row_groups + mine / job.wide;
  const int tile = (warp * job.depth + part % job.depth) * job.wide + mine % job.wide;
  const int lane = row % 8 * 4 + i % 16 / 4, word = i % 2 * 2 + row % 16 / 8;
  return (size_t(step) * job.row_groups * job.k_groups * job.depth * job.wide + tile) * 256 + i % 4 / 2 * 128 +
         lane * 4 + word;
}
