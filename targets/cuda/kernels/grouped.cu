// The experts of many rows of a prompt: rows are sorted by expert, and each is multiplied by its own expert's matrix.
// Weights are expanded to fragments as they are read, like in decoding (moe.cu).
//
// `grouped` takes rows that are sorted already. Of a call of decoding's kernels, `order_pairs` sorts the pairs of row
// and rank, `gate_up_sorted` gathers their rows, and `down_sorted` scatters its results. The order of pairs within an
// expert is whatever comes first: a pair's result is its own alone.
//
// A CTA multiplies up to 64 rows of one expert by 16 of its units; a unit is two tiles of 16 weight rows (gate's
// and up's of the same features) with all of their inputs. Each warp has two units to itself, and all 64 rows
// beside them: nothing is added across warps. Weights and inputs come through a ring of stages, by cp.async.
#include "tile.cuh"

// ---- Shape of a CTA ----
constexpr int kRows = 64, kColumns = kRows / 8;  // columns of an MMA are eight
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kUnits = 2, kTiles = 2 * kUnits;  // of a warp
constexpr int kStep = BITS == 8 ? 2 : 4;        // 32-input blocks of a stage
constexpr int kStages = 3;
constexpr int kAsks = kRows * kStep * 4 / kThreads;  // 16-byte pieces of a stage's inputs that a thread copies
constexpr int kMostExperts = 256;
constexpr int kPitch = kStep * 64 + 64;         // bytes: eight rows' loads meet all banks
constexpr int kWeights = kUnits * kStep * kUnitBytes;
constexpr int kStage = kRows * kPitch + kWarps * kWeights;
static_assert(kPitch % 16 == 0 && kUnitBytes % 16 == 0, "Threads copy 16 bytes at a time.");
static_assert(kStages * kStage <= 227 << 10, "The stages fit into a CTA's shared memory.");

struct Job {
  const u8* weight;    // [experts, units, blocks, 2 tiles]
  const float* scale;  // [experts, n] of narrow weights
  const u16* x;        // [rows, k]; for `gate_up_sorted` in blocks of fewer than 32 tokens (common.cuh)
  void* out;           // [rows, n]: bf16; of `gate_up_sorted` [pairs, n / 2] f16, of `down_sorted` [pairs, n] float32
  const int* ends;     // [experts]: where each expert's rows end
  const int* order;    // [pairs]: the pair that a sorted row is; `grouped` has none
  int n, k;            // of an expert; k a multiple of 8
  int units, blocks;   // of an expert; 32-input blocks
  int experts, gated;
  int top_k, k_blocks, block;  // of `gate_up_sorted`: pairs of a row, and how x lies
};
enum Form { kSorted, kGateUp, kDown };

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

// Where the rows of a thread's pieces begin in x, and how far apart their 32-input blocks are.
struct Rows {
  const u16* from[kAsks];
  int stride;

  template <Form kForm>
  __device__ void find(const Job& job, const Entry& entry) {
    stride = kForm == kGateUp ? job.block * 32 : 32;
#pragma unroll
    for (int i = 0; i < kAsks; i++) {
      const int row = (threadIdx.x + i * kThreads) / (kStep * 4), sorted = entry.first + min(row, entry.count - 1);
      if (kForm != kGateUp) {
        from[i] = job.x + size_t(sorted) * job.k;
        continue;
      }
      const int m = job.order[sorted] / job.top_k;
      from[i] = job.x + size_t(m / job.block) * job.k_blocks * stride + m % job.block * 32;
    }
  }
};

// Issues a stage's copies.
__device__ inline void ask(const Job& job, const Rows& rows, const Entry& entry, const Warp& warp, u32 memory, int step) {
  const u32 stage = memory + step % kStages * kStage;
#pragma unroll
  for (int i = 0; i < kAsks; i++) {
    const int piece = threadIdx.x + i * kThreads, row = piece / (kStep * 4), part = piece % (kStep * 4);
    const int f = (step * kStep * 4 + part) * 8, at = min(f, job.k - 8);
    copy16_or_zero(stage + row * kPitch + part * 16, rows.from[i] + at / 32 * rows.stride + at % 32, f < job.k);
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
#if BITS == 4
        if (kIntegers) tiles[t].codes.x ^= 0x88888888, tiles[t].codes.y ^= 0x88888888;  // as gemm.cu has them
#endif
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
template <Form kForm>
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
        if (token >= entry.count) continue;
        const int sorted = entry.first + token;
        const float v = sums[t][j][i % 2 * 2 + e] * scale;
        if (kForm == kSorted)
          static_cast<u16*>(job.out)[size_t(sorted) * job.n + n] = to_bf16(v);
        else
          static_cast<float*>(job.out)[size_t(job.order[sorted]) * job.n + n] = v;
      }
  }
}

// The same where a unit's tiles are the gates and ups of 16 features: the input of `down_sorted`.
__device__ inline void store_gated(const Job& job, const Sums& sums, const Entry& entry, const Warp& warp) {
  const int half = job.n / 2;
#pragma unroll
  for (int i = 0; i < 2 * kUnits; i++) {
    const int unit = warp.unit + i / 2, n = unit * 16 + warp.lane / 4 + i % 2 * 8;
    if (unit >= job.units || n >= half) continue;
    const float* scales = job.scale + size_t(entry.expert) * job.n + n;
    const float gate_scale = scales[0], up_scale = scales[half];
#pragma unroll
    for (int j = 0; j < kColumns; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const int token = j * 8 + warp.lane % 4 * 2 + e, at = i % 2 * 2 + e;
        if (token >= entry.count) continue;
        const float gate = sums[i / 2 * 2][j][at] * gate_scale, up = sums[i / 2 * 2 + 1][j][at] * up_scale;
        static_cast<u16*>(job.out)[size_t(entry.first + token) * half + n] = input_of_fp8(gelu_tanh(gate) * up);
      }
  }
}

template <Form kForm>
__device__ inline void run(const Job& job) {
  extern __shared__ __align__(128) u8 stages[];
  const Entry entry = find(job);
  if (entry.expert < 0) return;
  const Warp warp;
  Rows rows;
  rows.find<kForm>(job, entry);
  const u32 memory = shared_address(stages);
  const int steps = (job.blocks + kStep - 1) / kStep;
#pragma unroll 1
  for (int s = 0; s < kStages - 1; s++) {
    if (s < steps) ask(job, rows, entry, warp, memory, s);
    asked();
  }
  Sums sums = {};
#pragma unroll 1
  for (int s = 0; s < steps; s++) {
    await_asked<kStages - 2>();
    __syncthreads();  // all threads' copies have arrived, and the stage that is refilled next has been read
    if (s + kStages - 1 < steps) ask(job, rows, entry, warp, memory, s + kStages - 1);
    asked();
    multiply(sums, memory + s % kStages * kStage, job.blocks - s * kStep, entry, warp);
  }
  if (kForm == kGateUp)
    store_gated(job, sums, entry, warp);
  else
    store<kForm>(job, sums, entry, warp);
}

// Grid: 16 units, entries; of those there may be fewer. Shared memory: the stages (experts.py).
extern "C" __global__ void __launch_bounds__(kThreads, 1) grouped(const __grid_constant__ Job job) { run<kSorted>(job); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) gate_up_sorted(const __grid_constant__ Job job) { run<kGateUp>(job); }
extern "C" __global__ void __launch_bounds__(kThreads, 1) down_sorted(const __grid_constant__ Job job) { run<kDown>(job); }

// Sorts pairs by expert. Grid: one CTA. numbers [pairs]: -1 for a pair that picked none, which gets no place.
extern "C" __global__ void __launch_bounds__(1024, 1) order_pairs(const int* numbers, int* order, int* ends, int pairs, int experts) {
  __shared__ int next[kMostExperts], totals[kMostExperts / 32];
  const int e = threadIdx.x;
  if (e < kMostExperts) next[e] = 0;
  __syncthreads();
  for (int p = e; p < pairs; p += 1024)
    if (numbers[p] >= 0) atomicAdd(&next[numbers[p]], 1);
  __syncthreads();
  const int rows = e < kMostExperts ? next[e] : 0;
  int sum = sum_so_far(rows, e % 32);
  if (e < kMostExperts && e % 32 == 31) totals[e / 32] = sum;
  __syncthreads();
  for (int w = 0; w < min(e / 32, kMostExperts / 32); w++) sum += totals[w];
  if (e < experts) ends[e] = sum;
  if (e < kMostExperts) next[e] = sum - rows;
  __syncthreads();
  for (int p = e; p < pairs; p += 1024)
    if (numbers[p] >= 0) order[atomicAdd(&next[numbers[p]], 1)] = p;
}
