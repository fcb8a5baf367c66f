// The experts of a long prefill chunk: rows are sorted by expert, and each is multiplied by its own expert's matrix.
// Weights are expanded to fragments as they are read, like in decoding (moe.cu).
//
// A CTA multiplies up to 64 rows of one expert by 16 of its units; a unit is two tiles of 16 weight rows (gate's
// and up's of the same features) with all of their inputs. Each warp has two units to itself, and all 64 rows
// beside them: nothing is added across warps. Weights and inputs come through a ring of stages, by cp.async.
#include "tile.cuh"

// ---- Shape of a CTA ----
constexpr int kRows = 64, kColumns = kRows / 8;  // columns of an MMA are eight
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnits = 2, kTiles = 2 * kUnits;  // of a warp
constexpr int kStep = 4, kStages = 3;           // 32-input blocks of a stage
constexpr int kPitch = kStep * 64 + 64;         // bytes: eight rows' loads meet all banks
constexpr int kWeights = kUnits * kStep * kUnitBytes;
constexpr int kStage = kRows * kPitch + kWarps * kWeights;
static_assert(kPitch % 16 == 0 && kUnitBytes % 16 == 0, "Threads copy 16 bytes at a time.");
static_assert(kStages * kStage <= 227 << 10, "The stages fit into a CTA's shared memory.");

struct Job {
  const u8* weight;    // [experts, units, blocks, 2 tiles]
  const float* scale;  // [experts, n] of narrow weights
  const u16* x;        // [rows, k]
  u16* out;            // [rows, n]: bf16
  const int* ends;     // [experts]: where each expert's rows end
  int n, k;            // of an expert; k a multiple of 8
  int units, blocks;   // of an expert; 32-input blocks
  int experts, gated;
};

// Rows of one expert, `count` from `first` on; expert -1 where no rows are left.
struct Entry {
  int expert, first, count;
};

// This CTA's entry: entries are numbered expert by expert.
__device__ inline Entry find(const Job& job) {
  __shared__ int totals[kWarps];
  __shared__ Entry found;
  const int e = threadIdx.x, lane = e % 32, own = blockIdx.y;
  const int first = e < job.experts && e ? job.ends[e - 1] : 0, rows = e < job.experts ? job.ends[e] - first : 0;
  const int parts = (rows + kRows - 1) / kRows;
  int sum = sum_so_far(parts, lane);  // of this expert and all before it
  if (lane == 31) totals[e / 32] = sum;
  if (e == 0) found = {-1, 0, 0};
  __syncthreads();
  for (int w = 0; w < e / 32; w++) sum += totals[w];
  const int part = own - (sum - parts);
  if (part >= 0 && part < parts) found = {e, first + part * kRows, min(kRows, rows - part * kRows)};
  __syncthreads();
  return found;
}

// ---- Copies ----
// 16 bytes, or zeros.
__device__ inline void copy16_or_zero(u32 to, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}

struct Warp {
  int lane, warp, unit;  // the first of its units

  __device__ Warp() : lane(threadIdx.x % 32), warp(threadIdx.x / 32), unit((blockIdx.x * kWarps + warp) * kUnits) {}
};

// Issues a stage's copies.
__device__ inline void ask(const Job& job, const Entry& entry, const Warp& warp, u32 memory, int step) {
  const u32 stage = memory + step % kStages * kStage;
#pragma unroll
  for (int i = 0; i < kRows * kStep * 4 / kThreads; i++) {
    const int piece = threadIdx.x + i * kThreads, row = piece / (kStep * 4), part = piece % (kStep * 4);
    const int f = (step * kStep * 4 + part) * 8;
    const u16* from = job.x + size_t(entry.first + min(row, entry.count - 1)) * job.k;
    copy16_or_zero(stage + row * kPitch + part * 16, from + min(f, job.k - 8), f < job.k);
  }
  const u32 to = stage + kRows * kPitch + warp.warp * kWeights;
  const int bytes = min(kStep, job.blocks - step * kStep) * kUnitBytes;
#pragma unroll
  for (int u = 0; u < kUnits; u++) {
    const int unit = min(warp.unit + u, job.units - 1);
    const u8* from = job.weight + ((size_t(entry.expert) * job.units + unit) * job.blocks + step * kStep) * kUnitBytes;
#pragma unroll
    for (int at = 0; at < kStep * kUnitBytes; at += 512)
      if (at + warp.lane * 16 < bytes) copy16(to + u * kStep * kUnitBytes + at + warp.lane * 16, from + at + warp.lane * 16);
  }
}

// ---- Multiply ----
typedef float Sums[kTiles][kColumns][4];

// blocks: as many as are there.
__device__ inline void multiply(Sums& sums, u32 stage, int blocks, const Entry& entry, const Warp& warp) {
  const u32 weights = stage + kRows * kPitch + warp.warp * kWeights;
  const u32 inputs = stage + warp.lane / 4 * kPitch + warp.lane % 4 * 16;
#pragma unroll
  for (int b = 0; b < kStep; b++) {
    if (b >= blocks) return;
    u32 a[kTiles][2][4];
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      Stored tiles[2];
      load_unit(tiles, weights + (u * kStep + b) * kUnitBytes, warp.lane);
#pragma unroll
      for (int t = 0; t < 2; t++) {
        if (kIntegers) tiles[t].codes.x ^= 0x88888888, tiles[t].codes.y ^= 0x88888888;  // as gemm.cu has them
        expand(tiles[t], 0, a[2 * u + t][0]), expand(tiles[t], 1, a[2 * u + t][1]);
      }
    }
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      if (j * 8 >= entry.count) continue;
      const uint4 x = load(inputs + j * 8 * kPitch + b * 64);
#pragma unroll
      for (int t = 0; t < kTiles; t++) mma_f16(sums[t][j], a[t][0][0], a[t][0][1], a[t][0][2], a[t][0][3], x.x, x.y);
#pragma unroll
      for (int t = 0; t < kTiles; t++) mma_f16(sums[t][j], a[t][1][0], a[t][1][1], a[t][1][2], a[t][1][3], x.z, x.w);
    }
  }
}

// Element e of a fragment: weight row lane / 4 (+ 8 for e >= 2), column 2 (lane % 4) (+ 1 for odd e).
__device__ inline void store(const Job& job, const Sums& sums, const Entry& entry, const Warp& warp) {
#pragma unroll
  for (int i = 0; i < 2 * kTiles; i++) {
    const int t = i / 2, unit = warp.unit + t / 2, row = warp.lane / 4 + i % 2 * 8, half = job.n / 2;
    if (unit >= job.units) continue;
    const int place = (job.gated ? unit : 2 * unit + t % 2) * 16 + row;
    if (place >= (job.gated ? half : job.n)) continue;
    const int n = job.gated ? t % 2 * half + place : place;
    const float scale = job.scale[size_t(entry.expert) * job.n + n];
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = j * 8 + warp.lane % 4 * 2 + e;
        if (token < entry.count)
          job.out[size_t(entry.first + token) * job.n + n] = to_bf16(sums[t][j][i % 2 * 2 + e] * scale);
      }
  }
}

// ---- Kernel ----
// Grid: 16 units, entries; of those there may be fewer. Shared memory: the stages (experts.py).
extern "C" __global__ void __launch_bounds__(kThreads, 1) grouped(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 stages[];
  const Entry entry = find(job);
  if (entry.expert < 0) return;
  const Warp warp;
  const u32 memory = shared_address(stages);
  const int steps = (job.blocks + kStep - 1) / kStep;
#pragma unroll 1
  for (int s = 0; s < kStages - 1; s++) {
    if (s < steps) ask(job, entry, warp, memory, s);
    asked();
  }
  Sums sums = {};
#pragma unroll 1
  for (int s = 0; s < steps; s++) {
    await_asked<kStages - 2>();
    __syncthreads();  // all threads' copies have arrived, and the stage that is refilled next has been read
    if (s + kStages - 1 < steps) ask(job, entry, warp, memory, s + kStages - 1);
    asked();
    multiply(sums, memory + s % kStages * kStage, job.blocks - s * kStep, entry, warp);
  }
  store(job, sums, entry, warp);
}
