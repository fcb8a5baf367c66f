// The candidates' logits (screen.cu), from the head itself: a warp takes eight of them at a time as if they
// were a tile, with gemm.cu's MMAs in gemm.cu's order, so that they are the same bits.
//
// Few candidates take as long as one warp's chain of MMAs, so nothing else may take longer: each has its own
// multiprocessor as far as there are any, and much on its way. 16 bytes of a tile are of two rows, one a candidate's.
#define BITS 8
#define FINE 1
#include "tile.cuh"

constexpr int kWarps = 4;
constexpr int kEight = 8;  // candidates of a warp, and blocks of 32 inputs that are fetched together
constexpr int kAhead = 5;  // eights of blocks on their way
constexpr int kHalf = kEight * 64;                   // bytes of a block's codes, and of their 256ths
constexpr int kBlockBytes = 2 * kHalf + kEight * 4;  // then the scales of both rows of each pair
constexpr int kStageBytes = kEight * (kBlockBytes + 64);  // weights, then this row's inputs
constexpr int kRingBytes = (kAhead + 1) * kStageBytes;

struct Job {
  const u8* weight;  // int16, tiled
  const float* scale;  // [vocab]
  const u8* x;       // blocked input, bf16
  const int* found;  // [M, room]
  const int* count;  // [M]; below 0, or more than there is room for: the whole head is computed
  float* logits;     // [M, vocab]
  int room, vocab, rows;
  int ctas, tiles, steps, row_groups, wide, depth;  // how the weight is dealt (tiles.py), in one k group
  int x_bytes;       // of 32 inputs of all tokens
  float softcap;     // 0: none
};

// Where a row's blocks of 32 inputs are, one after another: its codes, what is beside them, its scale.
struct Row {
  const u8 *codes, *fine, *scale;
  size_t step;      // bytes from a step to the next
  int wide, depth;  // tiles from a step's block to its next; how many
  int in = 0;       // which block of its step this is

  __device__ Row(const Job& job, int n, int lane) : wide(job.wide), depth(job.depth) {
    const int tile = n / 16, dealt = job.ctas * job.tiles, pass = quotient(tile, dealt), rest = tile - pass * dealt;
    const int cta = quotient(rest, job.tiles), mine = rest - cta * job.tiles, group = quotient(mine, wide);
    const int tiles_of_step = job.row_groups * depth * wide, first = (group * depth - group) * wide + mine;
    const int bytes = tiles_of_step * kTileBytes;  // of a CTA's step
    step = size_t(job.ctas) * bytes;
    const u8* at = job.weight + size_t(pass) * job.steps * step + size_t(cta) * bytes;
    codes = at + first * kCodeBytes + n % 8 * 64 + lane % 4 * 16;
    scale = at + first * kCodeBytes + kScalesAt + n % 8 * 4;
    fine = at + tiles_of_step * kCodeBytes + first * kFineBytes + n % 8 * 64 + lane % 4 * 16;
  }
  __device__ void next() {
    in++;
    const bool over = in == depth;
    const size_t back = over ? step - size_t((depth - 1) * wide) * kCodeBytes : wide * kCodeBytes;
    codes += back, scale += back;
    fine += over ? step - size_t((depth - 1) * wide) * kFineBytes : wide * kFineBytes;
    in = over ? 0 : in;
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

// Starts 4 bytes on their way to shared memory.
__device__ inline void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// What a lane needs of a block: its candidate's codes and 256ths of both halves, its scale, the inputs.
struct Block {
  uint4 codes, fine, x;
  u32 scales;

  __device__ Block(const u8* at, const u8* inputs, int lane) {
    codes = reinterpret_cast<const uint4*>(at)[lane], fine = reinterpret_cast<const uint4*>(at + kHalf)[lane];
    scales = reinterpret_cast<const u32*>(at + 2 * kHalf)[lane / 4];
    x = reinterpret_cast<const uint4*>(inputs)[lane % 4];
  }
};

// A warp's way through its candidates' rows.
struct Chain {
  const Job& job;
  Row row;
  const u8* x;  // this row's inputs
  int lane;
  bool second;  // whether the candidate is the second of the rows in its lanes' 16 bytes
  u8* memory;   // the ring
  u32 ring;
  int blocks;
  float sum[4];
  int asked;

  // The next block of weights, into place d of a stage.
  __device__ void fetch(int stage, int d) {
    if (asked++ >= blocks) return;
    const u32 to = ring + stage * kStageBytes + d * kBlockBytes;
    copy16(to + lane * 16, row.codes), copy16(to + kHalf + lane * 16, row.fine);
    if (lane % 4 == 0) copy4(to + 2 * kHalf + lane, row.scale);
    row.next();
  }
  // Inputs of the eight blocks from `block` on: of 32 lanes each has a quarter of one.
  __device__ void fetch_inputs(int stage, int block) {
    const int at = min(block + lane / 4, blocks - 1);
    copy16(ring + stage * kStageBytes + kEight * kBlockBytes + lane * 16, x + size_t(at) * job.x_bytes + lane % 4 * 16);
  }
  __device__ void multiply(u32 codes, u32 fine, float scale, u32 b0, u32 b1) {
    u32 a0, a2;
    decode(codes, fine, scale, a0, a2);
    mma_bf16(sum, a0, 0, a2, 0, b0, b1);
  }

  __device__ float result() {
    sum[0] = sum[1] = sum[2] = sum[3] = 0.0f, asked = 0;
#pragma unroll 1
    for (int r = 0; r < kAhead; r++) {
      fetch_inputs(r, r * kEight);
#pragma unroll
      for (int d = 0; d < kEight; d++) fetch(r, d);
      asm volatile("cp.async.commit_group;" ::: "memory");
    }
#pragma unroll 1
    for (int i = 0, r = 0, free = kAhead; i < blocks; i += kEight) {
      asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
      __syncwarp();
      const u8 *weights = memory + r * kStageBytes, *inputs = weights + kEight * kBlockBytes;
      fetch_inputs(free, i + kAhead * kEight);
      Block now(weights, inputs, lane);
#pragma unroll
      for (int d = 0; d < kEight; d++) {
        const int next = min(d + 1, kEight - 1);  // is here when its turn comes
        const Block then(weights + next * kBlockBytes, inputs + next * 64, lane);
        const float scale = fine_scale(now.scales, second);
        const uint4 c = now.codes, f = now.fine;
        if (i + d < blocks) multiply(second ? c.y : c.x, second ? f.y : f.x, scale, now.x.x, now.x.y);
        fetch(free, d);  // while the chain waits for itself
        if (i + d < blocks) multiply(second ? c.w : c.z, second ? f.w : f.z, scale, now.x.z, now.x.w);
        now = then;
      }
      asm volatile("cp.async.commit_group;" ::: "memory");
      r = r == kAhead ? 0 : r + 1, free = free == kAhead ? 0 : free + 1;
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    return sum[0];
  }
};

// grid: as many CTAs as multiprocessors
extern "C" __global__ void __launch_bounds__(kWarps * 32) rescore(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];  // a ring for each warp
  let_next_start();
  wait_for_previous();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = warp * gridDim.x + blockIdx.x;; i += kWarps * gridDim.x) {
    const Item item = item_of(job, i, lane);
    if (item.m >= job.rows) return;
    const int n = job.found[size_t(item.m) * job.room + min(item.first + lane / 4, job.count[item.m] - 1)];
    u8* mine = memory + warp * kRingBytes;
    Chain chain = {job,  Row(job, n, lane),    job.x + item.m * 64,   lane, n % 16 >= 8,
                   mine, shared_address(mine), job.steps * job.depth, {},   0};
    const float v = chain.result() * job.scale[n];
    if (lane % 4 == 0)
      job.logits[size_t(item.m) * job.vocab + n] = job.softcap > 0.0f ? soft_cap(v, job.softcap) : v;
  }
}
