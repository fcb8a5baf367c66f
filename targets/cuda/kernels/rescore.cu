// The candidates' logits (screen.cu), from the head's own weights: a warp takes eight of them at a time as if they
// were a tile, with gemm.cu's MMAs in gemm.cu's order, so that they are the same bits.
//
// Few candidates take as long as one warp's chain of MMAs, so nothing else may take longer: each has its own
// multiprocessor as far as there are any, and much on its way. 16 bytes of a tile are of two rows, one a candidate's.
#include "common.cuh"

constexpr int kWarps = 4;
constexpr int kEight = 8;      // candidates of a warp, and blocks of 32 inputs that are fetched together
constexpr int kAhead = 5;      // eights of blocks on their way
constexpr int kBlockBytes = kEight * 128;
constexpr int kStageBytes = kEight * (kBlockBytes + 64);  // weights, then this row's inputs
constexpr int kRingBytes = (kAhead + 1) * kStageBytes;

struct Job {
  const u8* weight;  // bf16, tiled
  const u8* x;       // blocked input, bf16
  const int* found;  // [M, room]
  const int* count;  // [M]; below 0, or more than there is room for: the whole head is computed
  float* logits;     // [M, vocab]
  int room, vocab, rows;
  int ctas, tiles, steps, row_groups, k_groups, wide, depth;  // how the weight is dealt (tiles.py)
  int x_bytes;       // of 32 inputs of all tokens
  float softcap;     // 0: none
};

// Where a row's blocks of 32 inputs are, one after another, in bytes.
struct Row {
  const u8 *first, *at;
  size_t step;          // from a step's last block to the next one's first
  int wide, depth, in;  // bytes from a step's block to its next; how many; which one this is

  __device__ Row(const Job& job, int n) : wide(job.wide * 1024), depth(job.depth) {
    const int tile = n / 16, dealt = job.ctas * job.tiles, pass = quotient(tile, dealt), rest = tile - pass * dealt;
    const int cta = quotient(rest, job.tiles), mine = rest - cta * job.tiles, group = quotient(mine, job.wide);
    const size_t bytes = size_t(job.k_groups) * job.row_groups * depth * wide;  // of a CTA's step
    first = job.weight + size_t(pass) * job.steps * job.ctas * bytes + cta * bytes + group * depth * wide +
            (mine - group * job.wide) * 1024 + n % 8 * 64;
    step = job.ctas * bytes - (depth - 1) * wide;
  }
  __device__ void start(const Job& job, int k_group) {
    at = first + k_group * job.row_groups * depth * wide, in = 0;
  }
  __device__ void next() {
    in++;
    const bool over = in == depth;
    at += over ? step : wide, in = over ? 0 : in;
  }
};

// Eights of candidates of all rows, in order.
struct Item {
  int m, first;  // row, `rows` past the last; first candidate
};

__device__ inline Item item_of(const Job& job, int i, int lane) {
  const int count = lane < job.rows ? job.count[lane] : 0;
  const int mine = count > job.room ? 0 : (max(count, 0) + kEight - 1) / kEight;
  const int end = sum_so_far(mine, lane), m = __popc(__ballot_sync(~0u, end <= i));
  if (m == 32) return {job.rows, 0};
  return {m, (i - __shfl_sync(~0u, end - mine, m)) * kEight};
}

// A warp's way through a k group of its candidates' rows.
struct Chain {
  const Job& job;
  Row row;
  const u8* x;    // this row's inputs
  int lane;
  bool second;    // whether the candidate is the second of the rows in its lanes' 16 bytes
  u8* memory;     // the ring
  u32 ring;
  float sum[4];
  int blocks, asked;

  // The next block of weights, into place d of a stage.
  __device__ void fetch(int stage, int d) {
    if (asked++ >= blocks) return;
    const u32 to = ring + stage * kStageBytes + d * kBlockBytes + lane * 16;
    const u8* from = row.at + lane % 4 * 16;
    copy16(to, from), copy16(to + 512, from + 512);
    row.next();
  }
  // Inputs of the eight blocks from `block` on: of 32 lanes each has a quarter of one.
  __device__ void fetch_inputs(int stage, int block, int k_group) {
    const int at = min(block + lane / 4, blocks - 1) * job.k_groups + k_group;
    copy16(ring + stage * kStageBytes + kEight * kBlockBytes + lane * 16, x + size_t(at) * job.x_bytes + lane % 4 * 16);
  }
  __device__ void multiply(uint4 a, u32 b0, u32 b1) {
    mma_bf16(sum, second ? a.y : a.x, 0, second ? a.w : a.z, 0, b0, b1);
  }

  __device__ float4 of_group(int k_group) {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f;
    row.start(job, k_group), asked = 0;
#pragma unroll 1
    for (int r = 0; r < kAhead; r++) {
      fetch_inputs(r, r * kEight, k_group);
#pragma unroll
      for (int d = 0; d < kEight; d++) fetch(r, d);
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (int i = 0, r = 0, free = kAhead; i < blocks; i += kEight) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
      __syncwarp();
      const uint4* weights = reinterpret_cast<const uint4*>(memory + r * kStageBytes) + lane;
      const uint4* inputs = reinterpret_cast<const uint4*>(memory + r * kStageBytes + kEight * kBlockBytes) + lane % 4;
      fetch_inputs(free, i + kAhead * kEight, k_group);
      uint4 a = weights[0], a16 = weights[32], x = inputs[0];
#pragma unroll
      for (int d = 0; d < kEight; d++) {
        const int next = min(d + 1, kEight - 1);  // is here when its turn comes
        const uint4 then = weights[next * 64], then16 = weights[next * 64 + 32], then_x = inputs[next * 4];
        if (i + d < blocks) multiply(a, x.x, x.y);
        fetch(free, d);  // while the chain waits for itself
        if (i + d < blocks) multiply(a16, x.z, x.w);
        a = then, a16 = then16, x = then_x;
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      r = r == kAhead ? 0 : r + 1, free = free == kAhead ? 0 : free + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return make_float4(sum[0], sum[1], sum[2], sum[3]);
  }
};

// grid: as many CTAs as multiprocessors
extern "C" __global__ void __launch_bounds__(kWarps * 32) rescore(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];  // a ring for each warp
  __shared__ float4 parts[8][kWarps * 32];
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = warp * gridDim.x + blockIdx.x;; i += kWarps * gridDim.x) {
    const Item item = item_of(job, i, lane);
    if (item.m >= job.rows) return;
    const int n = job.found[size_t(item.m) * job.room + min(item.first + lane / 4, job.count[item.m] - 1)];
    u8* mine = memory + warp * kRingBytes;
    Chain chain = {job, Row(job, n), job.x + item.m * 64, lane, n % 16 >= 8, mine, shared_address(mine)};
    chain.blocks = job.steps * job.depth;
#pragma unroll 1
    for (int g = 0; g < job.k_groups; g++) parts[g][threadIdx.x] = chain.of_group(g);
    float4 sums[8];
#pragma unroll
    for (int g = 0; g < 8; g++)
      if (g < job.k_groups) sums[g] = parts[g][threadIdx.x];
    const float v = tree_sum(sums, job.k_groups).x;
    if (lane % 4 == 0)
      job.logits[size_t(item.m) * job.vocab + n] = job.softcap > 0.0f ? soft_cap(v, job.softcap) : v;
  }
}
