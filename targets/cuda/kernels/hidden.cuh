// What the kernels of the residual stream share: rows in registers, inputs of the next linear layer, and
// the embedding's table, which is the head's weight, tiled.
#pragma once
#include "common.cuh"

#ifndef FP8  // what the next linear layer's weights are
#define FP8 1
#endif

#ifndef QUADS_PER_THREAD  // float4 of a row that a thread has: 4 reach hidden sizes of 8192
#define QUADS_PER_THREAD 4
#endif

constexpr int kThreads = 512;
constexpr int kMax = QUADS_PER_THREAD;
static_assert(QUADS_PER_THREAD >= 1 && QUADS_PER_THREAD <= 4, "A row has at most 8,192 values.");

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
  const u8* table;   // the head's weight, tiled: int16, or bf16 where there are no rows' scales
  const float* row;  // [vocab]
  const int* tokens;
  float* h;
  int vocab, hidden;
  int ctas, tiles, steps, row_groups, k_groups, wide, depth;  // how it was dealt (gemm.cu)
  float factor;
};

// Where a row's block of 32 inputs is in a table of one k group or more: [pass][step][CTA], of a step's `all` tiles it is
// `tile`: [k group][row group][depth][tile].
struct Block {
  size_t step;
  int all, tile;

  __device__ Block(const Embed& job, int row, int block) {
    const int owner = row / 16 / job.tiles, mine = row / 16 % job.tiles;
    const int group = block % job.k_groups, part = block / job.k_groups, warp = group * job.row_groups + mine / job.wide;
    step = size_t(owner / job.ctas * job.steps + part / job.depth) * job.ctas + owner % job.ctas;
    all = job.row_groups * job.k_groups * job.depth * job.wide;
    tile = (warp * job.depth + part % job.depth) * job.wide + mine % job.wide;
  }
};

// Inputs 2 i and 2 i + 1 of a row. In a tile, of bf16: [16 inputs][lane][word of two]; of int16 [lane][word of four] of
// codes, with scales behind them, and behind all codes of the step their 256ths.
__device__ inline float2 pair_of(const Embed& job, int row, int i) {
  const Block at(job, row, i / 16);
  const int lane = row % 8 * 4 + i % 16 / 4, half = row % 16 / 8;
  if (!job.row) {
    const u32* words = reinterpret_cast<const u32*>(job.table) + (at.step * at.all + at.tile) * 256;
    const u32 both = words[i % 4 / 2 * 128 + lane * 4 + i % 2 * 2 + half];
    return make_float2(from_bf16(u16(both)), from_bf16(both >> 16));
  }
  constexpr int kCodes = 512 + 32, kFine = 512;
  const u8* step = job.table + at.step * at.all * (kCodes + kFine);
  const u8* codes = step + at.tile * kCodes;
  const int place = lane * 16 + i % 4 / 2 * 8 + half * 4 + i % 2 * 2;
  const u32 code = *reinterpret_cast<const u16*>(codes + place);
  const u32 fine = *reinterpret_cast<const u16*>(step + at.all * kCodes + at.tile * kFine + place);
  float scale;
  asm("cvt.f32.f16 %0, %1;" : "=f"(scale) : "h"(*reinterpret_cast<const u16*>(codes + 512 + row % 8 * 4 + half * 2)));
  const auto value = [&](u32 code, u32 fine) {
    const float whole = float(int(code * 256 + fine) - 32896);
    return from_bf16(to_bf16(__fmul_rn(whole, scale * (1.0f / 256.0f)))) * job.row[row];
  };
  return make_float2(value(code & 0xff, fine & 0xff), value(code >> 8, fine >> 8));
}
