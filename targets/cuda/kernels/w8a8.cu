// GEMM of e4m3 weights and e4m3 inputs: out[m, n] = scale[n] x_scale[m] sum_k w[n, k] x[m, k].
//
// For any number of rows m the same warpgroup MMAs: 64 weight rows from registers, a tile of 16 from
// each warp, by TOKENS tokens in shared memory. A row of a weight walks a k group's inputs in ascending
// order; CTA (c, g) does k group g of its tiles, and who reads them (narrow.cuh) adds the groups in
// ascending order. Which rows are together, in a CTA or an MMA, is nothing to any sum.
//
// A warp holds TILES tiles: those of as many passes, which are then one walk over the inputs. Grid:
// (token blocks, CTAs x k groups): blocks of the same weights run beside each other.
#include "qgmma.cuh"
#include "ring.cuh"

#ifndef DEPTH  // the job's: blocks of 32 inputs of a step
#define DEPTH 4
#endif
#ifndef TILES  // per warp: 1, 2
#define TILES 1
#endif

enum Epilogue { kPlain = 0, kGated = 1, kPart = 2 };

// Twelve warps and a producer. Where sums take 64 registers and more it is a warpgroup, which leaves its
// own to the others.
constexpr int kAll = TILES * kHalves * kSums;
constexpr int kProducers = kAll >= 64 ? 4 : 1, kThreads = 32 * (12 + kProducers);
constexpr int kTileBytes = 512, kInputBytes = TOKENS * 32, kSlice = DEPTH * kInputBytes;

struct Job {
  const u8* weight;
  const float* scale;    // [n]
  const u8* x;           // blocked (`narrow_offset`)
  const float* x_scale;  // [rows]
  void* out;             // floats [rows, n]; kGated: f16 of value / 32 [rows, n / 2]; kPart: [k_groups, rows, n]
  int n, ctas, tiles;    // rows of the weight; CTAs that share them; tiles per CTA and pass
  int passes, steps;     // steps along k per pass
  int k_groups, k_blocks;  // 32-input blocks of x
  int stages, rows, epilogue;
};

struct Share {
  int cta, group, piece, stage;  // the last two in bytes
  __device__ Share(const Job& job)
      : cta(blockIdx.y / job.k_groups),
        group(blockIdx.y % job.k_groups),
        piece(DEPTH * job.tiles * kTileBytes),
        stage(TILES * piece + kSlice) {}
};

__device__ inline void produce(const Job& job, const Share& own, u32 ring, u32 full, u32 empty) {
  const u64 once = read_once(), often = read_often();
  const size_t step_bytes = size_t(job.ctas) * job.k_groups * own.piece, pass_bytes = job.steps * step_bytes;
  const u8* weight = job.weight + (size_t(own.cta) * job.k_groups + own.group) * own.piece;
  const u8* x = job.x + size_t(blockIdx.x) * job.k_blocks * kInputBytes + own.group * kSlice;
  const int count = job.passes / TILES * job.steps, filled = min(job.stages, count);
  const auto weights = [&](int i, int stage) {
    const u8* from = weight + i / job.steps * TILES * pass_bytes + i % job.steps * step_bytes;
    expect(full + 8 * stage, own.stage);
#pragma unroll
    for (int t = 0; t < TILES; t++)
      copy(ring + stage * own.stage + t * own.piece, from + t * pass_bytes, own.piece, full + 8 * stage, once);
  };
  for (int i = 0; i < filled; i++) weights(i, i);
  wait_for_previous();
  int stage = 0, phase = 1, step = 0;
  for (int i = 0; i < count; i++) {
    if (i >= filled) {
      await(empty + 8 * stage, phase);
      weights(i, stage);
    }
    copy(ring + stage * own.stage + TILES * own.piece, x + size_t(step) * job.k_groups * kSlice, kSlice,
         full + 8 * stage, often);
    if (++step == job.steps) step = 0;
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
}

__device__ inline uint4 load(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

// Where a warp is in the ring.
struct Reader {
  u32 ring, full, stages, stage_bytes;
  u32 at, piece, inputs;  // in a stage: its first tile, from there to its second, and the inputs
  u32 stage, phase;

  __device__ u32 here() const { return ring + stage * stage_bytes; }
  __device__ void open() const { await(full + 8 * stage, phase); }
  __device__ void next() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ void free() const { arrive(full + 8 * (stages + stage)); }
  // Fragment i of a step: of block i / TILES.
  __device__ uint4 fragment(int i) const { return load(here() + at + i % TILES * piece + i / TILES * kTileBytes); }
};

typedef Sums All[TILES * kHalves];

// Fragment i of a step times its inputs.
__device__ inline void multiply_all(All& sums, uint4 w, u32 inputs, int i) {
#pragma unroll
  for (int h = 0; h < kHalves; h++)
    multiply(sums[i % TILES * kHalves + h], w, kApart | (inputs + i / TILES * (kInputBytes / 16) + h * kColumns));
}

// A step: DEPTH blocks of 32 inputs. One fragment after the other: sums leave registers for no more, and
// the other warpgroups keep the tensor cores busy meanwhile.
__device__ inline void walk(All& sums, Reader& reader, int lane) {
  reader.open();
  const u32 inputs = inputs_at(reader.here() + reader.inputs);
#pragma unroll
  for (int i = 0; i < TILES * DEPTH; i++) {
    uint4 w = reader.fragment(i);
    begin_mma();
    multiply_all(sums, w, inputs, i);
    commit_mma();
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)::"memory");
  }
  if (lane == 0) reader.free();
  reader.next();
}

// The scaled sum to floats, or the bare one to its group's part.
__device__ inline void finish_rows(const Job& job, const Share& own, const Sums& sum, int tile, int first, int lane) {
  const int n = tile * 16 + lane / 4, m = first + lane % 4 * 2;
  const bool part = job.epilogue == kPart;
  float* out = static_cast<float*>(job.out) + (size_t(part ? own.group * job.rows : 0) + m) * job.n + n;
  const float scales[2] = {part || n >= job.n ? 1.0f : job.scale[n], part || n + 8 >= job.n ? 1.0f : job.scale[n + 8]};
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const int j = i / 4, e = i / 2 % 2;
    if (m + j * 8 + e >= job.rows) continue;
    const float token = part ? 1.0f : job.x_scale[m + j * 8 + e];
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (n + half * 8 < job.n)
        out[size_t(j * 8 + e) * job.n + half * 8] = sum[j * 4 + half * 2 + e] * scales[half] * token;
  }
}

// Gate's rows are the first half of a tile, up's of the same features the second. Lanes of neighbouring
// features trade tokens, so that each stores a pair of features.
__device__ inline void finish_gated(const Job& job, const Sums& sum, int tile, int first, int lane) {
  const int odd = lane / 4 % 2, feature = tile * 8 + lane / 4, half = job.n / 2, m = first + lane % 4 * 2;
  const bool real = feature < half;
  const float gate_scale = real ? job.scale[feature] : 1.0f, up_scale = real ? job.scale[half + feature] : 1.0f;
  u16* out = static_cast<u16*>(job.out) + size_t(m + odd) * half + feature - odd;
#pragma unroll
  for (int j = 0; j < kColumns / 8; j++) {
    u32 value[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float token = m + j * 8 + e < job.rows ? job.x_scale[m + j * 8 + e] : 1.0f;
      value[e] = input_of_fp8(gelu_tanh(sum[j * 4 + e] * gate_scale * token) * (sum[j * 4 + 2 + e] * up_scale * token));
    }
    const u32 taken = __shfl_xor_sync(~0u, odd ? value[0] : value[1], 4);
    if (real && m + j * 8 + odd < job.rows)
      *reinterpret_cast<u32*>(out + size_t(j * 8) * half) = odd ? taken | value[1] << 16 : value[0] | taken << 16;
  }
}

__device__ inline void consume(const Job& job, const Share& own, u32 ring, u32 full, int warp, int lane) {
  // warps past the last tile only fill up their warpgroup: they multiply what is there, and drop it
  const int mine = min(warp, job.tiles - 1);
  Reader reader = {ring, full, u32(job.stages), u32(own.stage), u32(mine * DEPTH * kTileBytes + lane * 16),
                   u32(own.piece), u32(TILES * own.piece), 0, 0};
  wait_for_previous();
  for (int pass = 0; pass < job.passes; pass += TILES) {
    All sums;
#pragma unroll
    for (int i = 0; i < kAll; i++) sums[i / kSums][i % kSums] = 0.0f;
    for (int step = 0; step < job.steps; step++) walk(sums, reader, lane);
    // where sums go is found out only now: computed before the steps, it would take their registers
    asm volatile("" : "+r"(lane));
    if (warp >= job.tiles) continue;
#pragma unroll
    for (int i = 0; i < TILES * kHalves; i++) {
      const int tile = ((pass + i / kHalves) * job.ctas + own.cta) * job.tiles + warp;
      const int first = blockIdx.x * TOKENS + i % kHalves * kColumns;
      if (job.epilogue == kGated)
        finish_gated(job, sums[i], tile, first, lane);
      else
        finish_rows(job, own, sums[i], tile, first, lane);
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1) w8a8(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32 - kProducers;
  const Share own(job);
  const u32 ring = shared_address(memory), full = ring + job.stages * own.stage;
  const u32 empty = full + 8 * job.stages;
  if (threadIdx.x == 0) init_ring(full, empty, job.stages, warps);
  __syncthreads();
  let_next_start();
  if (warp < warps) {
    if (kProducers > 1) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    consume(job, own, ring, full, warp, lane);
  } else {
    if (kProducers > 1) asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
    if (warp == warps && lane == 0) produce(job, own, ring, full, empty);
  }
}
