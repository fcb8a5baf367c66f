// The candidates' logits (screen.cu), from the head's own weights: sixteen of them at a time as if they
// were a tile, with gemm.cu's MMAs in gemm.cu's order, so that they are the same bits.
#include "common.cuh"

constexpr int kWarps = 4;
constexpr int kTogether = 8;  // blocks of 32 inputs that are fetched as one
constexpr int kAhead = 4;     // so many of these are on their way at once
constexpr int kBlockBytes = 1024;

struct Job {
  const u32* weight;  // bf16, tiled
  const u8* x;        // blocked input, bf16
  const int* found;   // [M, room]
  const int* count;   // [M]; below 0, or more than there is room for: the whole head is computed
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

// Starts 4 bytes on their way to shared memory.
__device__ inline void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// A lane's words of `kTogether` blocks from block i on, each where the lane will read it.
__device__ inline void fetch(const Job& job, u32 to, const Row& low, const Row& high, int k_group, int i, int blocks) {
#pragma unroll
  for (int d = 0; d < kTogether; d++) {
    if (i + d >= blocks) break;
    const u32 *l = low.at(job, k_group, i + d), *h = high.at(job, k_group, i + d);
#pragma unroll
    for (int s = 0; s < 2; s++) {
      const u32 at = to + d * kBlockBytes + s * 512;
      copy4(at, l + s * 128), copy4(at + 128, h + s * 128);
      copy4(at + 256, l + s * 128 + 2), copy4(at + 384, h + s * 128 + 2);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

__device__ inline u32 load_word(u32 from) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from));
  return v;
}

__device__ inline void add(float (&sum)[4], u32 from, const uint4& b) {
#pragma unroll
  for (int s = 0; s < 2; s++) {
    u32 a[4];
#pragma unroll
    for (int f = 0; f < 4; f++) a[f] = load_word(from + s * 512 + f * 128);
    mma_bf16(sum, a[0], a[1], a[2], a[3], s ? b.z : b.x, s ? b.w : b.y);
  }
}

// One k group of a warp's tile.
__device__ inline void multiply(const Job& job, float (&sum)[4], u32 ring, const uint4* x, const Row& low,
                                const Row& high, int k_group) {
  const int blocks = job.steps * job.depth;
#pragma unroll
  for (int r = 0; r < kAhead - 1; r++)
    fetch(job, ring + r * kTogether * kBlockBytes, low, high, k_group, r * kTogether, blocks);
  for (int i = 0, r = 0; i < blocks; i += kTogether, r = (r + 1) % kAhead) {
    const int next = (r + kAhead - 1) % kAhead;
    fetch(job, ring + next * kTogether * kBlockBytes, low, high, k_group, i + (kAhead - 1) * kTogether, blocks);
    asm volatile("cp.async.wait_group %0;" ::"n"(kAhead - 1) : "memory");
#pragma unroll
    for (int d = 0; d < kTogether; d++)
      if (i + d < blocks) add(sum, ring + (r * kTogether + d) * kBlockBytes, x[((i + d) * job.k_groups + k_group) * 4]);
  }
  asm volatile("cp.async.wait_all;" ::: "memory");
}

// grid: (room / 16 / kWarps, M)
extern "C" __global__ void __launch_bounds__(kWarps * 32) rescore(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];  // the warps' rings, then this row of x
  __shared__ float4 parts[8][kWarps * 32];
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int count = job.count[m];
  if (count > job.room || int(blockIdx.x) * kWarps * 16 >= count) return;
  uint4* x = reinterpret_cast<uint4*>(memory + kWarps * kAhead * kTogether * kBlockBytes);
  for (int i = threadIdx.x; i < job.steps * job.depth * job.k_groups * 4; i += kWarps * 32)
    x[i] = *reinterpret_cast<const uint4*>(job.x + size_t(i / 4) * job.x_bytes + m * 64 + i % 4 * 16);
  __syncthreads();
  const int first = (blockIdx.x * kWarps + warp) * 16;
  if (first >= count) return;
  const int* found = job.found + size_t(m) * job.room;
  const int n = found[min(first + lane / 4, count - 1)], n8 = found[min(first + lane / 4 + 8, count - 1)];
  const Row low(job, n, lane), high(job, n8, lane);
  const u32 ring = shared_address(memory) + warp * kAhead * kTogether * kBlockBytes + lane * 4;
#pragma unroll 1
  for (int g = 0; g < job.k_groups; g++) {
    float sum[4] = {};
    multiply(job, sum, ring, x + lane % 4, low, high, g);  // every column of the MMAs is this row
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
