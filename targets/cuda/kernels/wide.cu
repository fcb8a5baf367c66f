// The sums of gemm.cu for 32 and more tokens, bit for bit, with warpgroup MMAs.
//
// A warp holds two tiles of 16 weight rows, for TOKENS tokens. A tile of each of the four warps of a
// warpgroup makes a 64 x 16 fragment of weights, which comes from registers and is what four
// mma.sync of those tiles would read. Inputs stay in shared memory, in core matrices of 8 tokens x
// 8 inputs (`x_offset`).
//
// From 32 tokens on, inputs cost as much traffic as weights. So CTA (group, g) takes the k group g
// of `k_groups` of gemm.cu's CTAs, and reads that part of the inputs alone. Its sums go to
// partial[g], which gemm_reduce.cu adds as gemm.cu does in its one CTA.
//
// The grid is (token blocks, CTAs): blocks of the same weights run beside each other, so that the
// cache serves all but the first.
#include "linear.cuh"
#include "ring.cuh"
#include "wgmma.cuh"

#ifndef DEPTH  // the job's: 1 to 4
#define DEPTH 2
#endif

// ---- Shape of a CTA ----
// Up to twelve warps, with two tiles each (gemm.py), and a producer. For 128 tokens the producer
// is a warpgroup, which leaves its registers to the others.
constexpr int kProducers = TOKENS == 128 ? 4 : 1, kThreads = 32 * (12 + kProducers);
constexpr int kInputBytes = TOKENS * 64;  // 32 inputs of all tokens
static_assert(DEPTH >= 1 && DEPTH <= 4, "A step has one to four blocks of 32 inputs.");
static_assert(kThreads <= 1024, "A CTA has at most 1,024 threads.");

// ---- Producer ----
// What CTA blockIdx.y reads: `pieces` CTAs' k group `part`, of each step.
struct Share {
  int part, first, pieces, piece, slice, stage;  // the last three in bytes
  __device__ Share(const Job& job)
      : part(blockIdx.y % job.k_groups),
        first(blockIdx.y / job.k_groups * job.k_groups),
        pieces(min(job.k_groups, job.ctas - first)),
        piece(DEPTH * job.tiles * kTileBytes),
        slice(DEPTH * kInputBytes),
        stage(job.k_groups * piece + slice) {}
};

// A warp: lane i copies the i-th CTA's piece.
__device__ inline void produce(const Job& job, const Share& own, u32 ring, u32 full, u32 empty, int lane) {
  const u64 once = read_once(), often = read_often();
  const size_t apart = size_t(job.k_groups) * own.piece;  // CTAs' pieces of a step
  const u8* weight = job.weight + (own.first + lane) * apart + own.part * own.piece;
  const int first = job.k_stride > 1 ? own.part : own.part * job.steps * DEPTH, step_blocks = DEPTH * job.k_stride;
  const u8* x = job.x + (size_t(blockIdx.x) * job.k_blocks + first) * kInputBytes;
  const int count = job.passes * job.steps, filled = min(job.stages, count);
  const auto weights = [&](int i, int stage) {
    if (lane == 0) expect(full + 8 * stage, own.pieces * own.piece + own.slice);
    __syncwarp();
    if (lane < own.pieces)
      copy(ring + stage * own.stage + lane * own.piece, weight + i * job.ctas * apart, own.piece, full + 8 * stage, once);
  };
  for (int i = 0; i < filled; i++) weights(i, i);
  wait_for_previous();
  int stage = 0, phase = 1, step = 0;
  for (int i = 0; i < count; i++) {
    if (i >= filled) {
      await(empty + 8 * stage, phase);
      weights(i, stage);
    }
    if (lane == 0)
      copy_blocks<DEPTH>(ring + stage * own.stage + job.k_groups * own.piece, x + size_t(step) * step_blocks * kInputBytes,
                         job.k_stride, kInputBytes, full + 8 * stage, often);
    if (++step == job.steps) step = 0;
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
}

// ---- Consumers: multiply ----
// Where a warp is in the ring.
struct Reader {
  u32 ring, full, stages, stage_bytes;
  u32 at[2], stride, inputs;  // in a stage: of its two tiles, to their next block, and of the inputs
  u32 stage, phase;
  u32 fine[2], fine_stride;   // of its tiles' 256ths

  __device__ u32 here() const { return ring + stage * stage_bytes; }
  __device__ Stored load(int t, int d, int lane) const {
    Part part(here() + at[t] + d * stride, lane);
    part.fine = here() + fine[t] + d * fine_stride + lane * 16;
    return load_shared(part, 0);
  }
  __device__ void open() const { await(full + 8 * stage, phase); }
  __device__ void next() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ void free(u32 done) const { arrive(full + 8 * (stages + done)); }
};

// A step: DEPTH blocks of 32 inputs.
#if BITS < 16 && TOKENS < 128
// The next block's tiles are loaded while this one's are multiplied, and expanded after.
struct Tiles {
  Stored tile[2];
  __device__ void load_block(const Reader& reader, int d, int lane) {
#pragma unroll
    for (int t = 0; t < 2; t++) tile[t] = reader.load(t, d, lane);
  }
  __device__ void await_mma() {
#if BITS == 4
#define WORDS(v) "+r"((v).codes.x), "+r"((v).codes.y), "+r"((v).scales), "+r"((v).zeros)
#else
#define VALUES(v) "+r"((v).values[0].x), "+r"((v).values[0].y), "+r"((v).values[0].z), "+r"((v).values[0].w)
#if FINE
#define WORDS(v) VALUES(v), "+r"((v).fine.x), "+r"((v).fine.y), "+r"((v).fine.z), "+r"((v).fine.w), "+r"((v).scales)
#else
#define WORDS(v) VALUES(v)
#endif
#endif
    asm volatile("wgmma.wait_group.sync.aligned 0;" : WORDS(tile[0]), WORDS(tile[1])::"memory");
  }
};
__device__ inline void start(Tiles& tiles, const Reader& reader, int lane) {
  reader.open();
  tiles.load_block(reader, 0, lane);
}
__device__ inline void walk(Sums (&sums)[2], Tiles& tiles, Reader& reader, bool last, int lane) {
  const u32 inputs = inputs_at(reader.here() + reader.inputs), done = reader.stage;
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    u32 a[2][8];
#pragma unroll
    for (int t = 0; t < 2; t++) {
      expand(tiles.tile[t], 0, a[t]);
      expand(tiles.tile[t], 1, a[t] + 4);
    }
    begin_mma();
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply(sums[i % 2], a[i % 2] + i / 2 * 4, kApart | (inputs + (2 * d + i / 2) * (kInputBytes / 32)));
    commit_mma();
    if (d + 1 < DEPTH) {
      tiles.load_block(reader, d + 1, lane);
    } else {
      reader.next();
      if (!last) start(tiles, reader, lane);
    }
    tiles.await_mma();
  }
  if (lane == 0) reader.free(done);
}
#else
// One fragment after the other: of bf16 weights they are what was loaded, and the sums of 128 tokens
// leave registers for no more, but more time.
struct Tiles {};
// of a tile, what its second half is made of
#if BITS == 4
#define KEPT(v) "+r"((v).codes.x), "+r"((v).codes.y), "+r"((v).scales), "+r"((v).zeros)
#elif FINE
#define KEPT(v) "+r"((v).values[0].z), "+r"((v).values[0].w), "+r"((v).fine.z), "+r"((v).fine.w), "+r"((v).scales)
#elif BITS == 8
#define KEPT(v) "+r"((v).values[0].z), "+r"((v).values[0].w)
#else
#define KEPT(v) "+r"((v).values[1].x), "+r"((v).values[1].y), "+r"((v).values[1].z), "+r"((v).values[1].w)
#endif
__device__ inline void start(Tiles&, const Reader&, int) {}
__device__ inline void walk(Sums (&sums)[2], Tiles&, Reader& reader, bool, int lane) {
  reader.open();
  const u32 inputs = inputs_at(reader.here() + reader.inputs);
  Stored tile;
#pragma unroll
  for (int i = 0; i < 4 * DEPTH; i++) {
    const int d = i / 4, t = i / 2 % 2, half = i % 2;
    u32 a[4];
    if (half == 0) tile = reader.load(t, d, lane);
    expand(tile, half, a);
    begin_mma();
    multiply(sums[t], a, kApart | (inputs + (2 * d + half) * (kInputBytes / 32)));
    commit_mma();
    asm volatile("wgmma.wait_group.sync.aligned 0;" : KEPT(tile)::"memory");
  }
  if (lane == 0) reader.free(reader.stage);
  reader.next();
}
#endif

// ---- Consumers: finish ----
// To partial[k group][tile][token block], four sums at a time (linear.cuh).
__device__ inline void finish_part(const Job& job, const Sums& sums, int part, int tile, int lane) {
  const size_t at = (size_t(part) * job.passes * job.ctas * job.tiles + tile) * gridDim.x + blockIdx.x;
  float4* out = job.partial + at * (kSums / 4 * 32) + lane;
#pragma unroll
  for (int i = 0; i < kSums; i += 4) out[i * 8] = make_float4(sums[i], sums[i + 1], sums[i + 2], sums[i + 3]);
}

// To rows of floats. count: of the tiles that are to be stored.
__device__ inline void finish_rows(const Job& job, const Sums (&sums)[2], const Scales (&scales)[2], int tile, int count,
                                   int lane) {
  const int n = tile * 16 + lane / 4, m = blockIdx.x * TOKENS + lane % 4 * 2;
  float* out = static_cast<float*>(job.out) + size_t(m) * job.out_stride + n;
#pragma unroll
  for (int i = 0; i < 2 * kSums; i++) {
    const int t = i / 2 % 2, half = i / 4 % 2, j = i / 8, e = i % 2, k = j * 4 + half * 2 + e;
    if (t < count && n + t * 16 + half * 8 < job.n && m + j * 8 + e < job.rows)
      out[size_t(j * 8 + e) * job.out_stride + t * 16 + half * 8] = to_row(job, sums[t][k] * scales[t][half]);
  }
}

__device__ inline void finish(const Job& job, const Share& own, const Sums (&sums)[2], int tile, int count, int lane) {
  // where sums go is found out only now: computed before the steps, it would take their registers
  asm volatile("" : "+r"(lane));
  Scales scales[2];
  if (!job.partial) load_scales(job, scales[0], tile, lane), load_scales(job, scales[1], tile + 1, lane);
  if (job.partial) {
    finish_part(job, sums[0], own.part, tile, lane);
    if (count > 1) finish_part(job, sums[1], own.part, tile + 1, lane);
  } else if (job.epilogue == kGated) {
#pragma unroll
    for (int i = 0; i < 2 * kSums; i += 4)
      if (i / kSums < count)
        finish_gated(job, *reinterpret_cast<const Four*>(sums[i / kSums] + i % kSums), scales[i / kSums],
                     tile + i / kSums, blockIdx.x * TOKENS + i % kSums * 2, TOKENS, lane);
  } else {
    finish_rows(job, sums, scales, tile, count, lane);
  }
}

__device__ inline void consume(const Job& job, const Share& own, u32 ring, u32 full, int warp, int lane) {
  const int each = job.tiles / job.row_groups;
  Reader reader = {ring, full, u32(job.stages), u32(own.stage), {}, u32(each) * kCodeBytes, u32(job.k_groups * own.piece), 0, 0};
  reader.fine_stride = each * kFineBytes;
  // tiles past the end only fill up the last warpgroup: they are multiplied by what is there, and dropped
  const int count = own.pieces * job.tiles - 2 * warp;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const int tile = t < count ? 2 * warp + t : 0, owner = tile / job.tiles, mine = tile % job.tiles;
    reader.at[t] = owner * own.piece + mine / each * DEPTH * reader.stride + mine % each * kCodeBytes;
    reader.fine[t] = owner * own.piece + DEPTH * job.tiles * kCodeBytes + mine / each * DEPTH * reader.fine_stride +
                     mine % each * kFineBytes;
  }
  wait_for_previous();
  Tiles tiles;
  for (int pass = 0; pass < job.passes; pass++) {
    Sums sums[2];
#pragma unroll
    for (int i = 0; i < 2 * kSums; i++) sums[i / kSums][i % kSums] = 0.0f;
    start(tiles, reader, lane);
    for (int step = 1; step <= job.steps; step++) walk(sums, tiles, reader, step == job.steps, lane);
    const int tile = (pass * job.ctas + own.first) * job.tiles + 2 * warp;
    if (count > 0) finish(job, own, sums, tile, count, lane);
  }
}

// ---- Kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, 1)
    wide(const __grid_constant__ Job job) {
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
    if (warp == warps) produce(job, own, ring, full, empty, lane);
  }
}
