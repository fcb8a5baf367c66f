// The candidates' logits (screen.cu), from the head's own weights: sixteen of them at a time as if they
// were a tile, with gemm.cu's MMAs in gemm.cu's order, so that they are the same bits.
#include "common.cuh"

constexpr int kWarps = 4;
constexpr int kAhead = 8;  // blocks of 32 inputs that are on their way at once

struct Job {
  const u32* weight;  // bf16, tiled
  const u8* x;        // blocked input, bf16
  const int* found;   // [M, room]
  const int* count;   // [M]; -1: the whole head is computed
  float* logits;      // [M, vocab]
  int room, vocab;
  int ctas, tiles, steps, row_groups, k_groups, wide, depth;  // how the weight is dealt (tiles.py)
  int x_bytes;        // of 32 inputs of all tokens
  float softcap;      // 0: none
};

// Where 32-input block `block` of a row's tile is, in words.
struct Row {
  const u32* first;
  size_t step;  // words from a step to the next

  __device__ Row(const Job& job, int n, int lane) {
    const int tile = n / 16, each = job.ctas * job.tiles, rest = tile % each;
    const int in = rest % job.tiles, row_group = in / job.wide;
    const int cta = rest / job.tiles, tiles_of_step = job.k_groups * job.row_groups * job.depth * job.wide;
    step = size_t(job.ctas) * tiles_of_step * 256;
    first = job.weight + size_t(tile / each) * job.steps * step + size_t(cta) * tiles_of_step * 256 +
            (row_group * job.depth * job.wide + in % job.wide) * 256 + (n % 8 * 4 + lane % 4) * 4 + n % 16 / 8;
  }
  __device__ const u32* at(const Job& job, int k_group, int i) const {
    return first + i / job.depth * step + (k_group * job.row_groups * job.depth + i % job.depth) * job.wide * 256;
  }
};

struct Block {
  u32 a[2][4];  // [k16 step][fragment]
  uint4 b;
};

__device__ inline void fetch(const Job& job, Block& to, const Row& low, const Row& high, const u8* x, int k_group,
                             int i) {
  const u32 *l = low.at(job, k_group, i), *h = high.at(job, k_group, i);
#pragma unroll
  for (int s = 0; s < 2; s++) {
    to.a[s][0] = __ldg(l + s * 128), to.a[s][1] = __ldg(h + s * 128);
    to.a[s][2] = __ldg(l + s * 128 + 2), to.a[s][3] = __ldg(h + s * 128 + 2);
  }
  to.b = *reinterpret_cast<const uint4*>(x + size_t(i * job.k_groups + k_group) * job.x_bytes);
}

__device__ inline void add(float (&sum)[4], const Block& block) {
  const uint4 b = block.b;
  mma_bf16(sum, block.a[0][0], block.a[0][1], block.a[0][2], block.a[0][3], b.x, b.y);
  mma_bf16(sum, block.a[1][0], block.a[1][1], block.a[1][2], block.a[1][3], b.z, b.w);
}

// grid: (room / 16 / kWarps, M)
extern "C" __global__ void __launch_bounds__(kWarps * 32) rescore(const __grid_constant__ Job job) {
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.y, lane = threadIdx.x % 32, first = (blockIdx.x * kWarps + threadIdx.x / 32) * 16;
  const int count = job.count[m];
  if (first >= count) return;
  const int* found = job.found + size_t(m) * job.room;
  const int n = found[min(first + lane / 4, count - 1)], n8 = found[min(first + lane / 4 + 8, count - 1)];
  const Row low(job, n, lane), high(job, n8, lane);
  const u8* x = job.x + m * 64 + lane % 4 * 16;  // every column of the MMAs is this row
  const int blocks = job.steps * job.depth;
  __shared__ float4 parts[8][kWarps * 32];
#pragma unroll 1
  for (int g = 0; g < job.k_groups; g++) {
    float sum[4] = {};
    Block now[kAhead], next[kAhead];
    int i = 0;
    if (blocks >= kAhead) {
#pragma unroll
      for (int d = 0; d < kAhead; d++) fetch(job, now[d], low, high, x, g, d);
    }
    for (; i + kAhead <= blocks; i += kAhead) {
      const bool more = i + 2 * kAhead <= blocks;
      if (more)
#pragma unroll
        for (int d = 0; d < kAhead; d++) fetch(job, next[d], low, high, x, g, i + kAhead + d);
#pragma unroll
      for (int d = 0; d < kAhead; d++) add(sum, now[d]);
      if (more)
#pragma unroll
        for (int d = 0; d < kAhead; d++) now[d] = next[d];
    }
    for (; i < blocks; i++) {
      Block last;
      fetch(job, last, low, high, x, g, i);
      add(sum, last);
    }
    parts[g][threadIdx.x] = make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
  float4 sums[8];
#pragma unroll
  for (int g = 0; g < 8; g++)
    if (g < job.k_groups) sums[g] = parts[g][threadIdx.x];
  const float4 all = tree_sum(sums, job.k_groups);
  if (lane % 4) return;
  float* row = job.logits + size_t(m) * job.vocab;
  row[n] = job.softcap > 0.0f ? soft_cap(all.x, job.softcap) : all.x;
  row[n8] = job.softcap > 0.0f ? soft_cap(all.z, job.softcap) : all.z;
}
