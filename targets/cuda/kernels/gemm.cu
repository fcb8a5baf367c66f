// Skinny GEMM: out[m, n] = sum_k w[n, k] x[m, k], for up to 16 rows m: bound by reading w once.
//
// Weights are the A operand of the tensor cores (tiles of 16 weight rows), tokens its columns, so
// that a call with 1 row and one with 16 do the same arithmetic for each row. Every CTA owns the
// same number of tiles and walks all of k, so nothing is ever added up between CTAs. Inside a CTA
// the warps form a grid: `row_groups` groups of TILES_PER_WARP tiles, times `k_groups` that share k and are added as a
// binary tree at the end. A group has every k_groups-th block of 32 inputs as they lie: in the order of k, or in
// one that makes a group's part of k contiguous (tiles.py). Sums depend on `k_groups` only, which is a
// function of the weight's shape alone (tiles.py); wide.cu does the same sums for more rows, bit for
// bit.
//
// Memory holds [pass][step][CTA]: at any time all CTAs read one contiguous stretch. A producer warp
// keeps a ring of steps in flight with bulk copies, and fills it before the previous kernel has
// ended: weights are never written. Until then it issues copies no faster than memory delivers them, because
// queued requests delay the previous kernel's own reads; once the ring is full, it prefetches the following
// steps into the L2 cache.
#include "linear.cuh"
#include "ring.cuh"

#ifndef TOKENS  // 1, 2, 4, 5, 8, 16
#define TOKENS 8
#endif
#ifndef TILES_PER_WARP  // 16-row tiles per warp: 1, 2, 3
#define TILES_PER_WARP 2
#endif

// ---- Registers and shape ----
// With 56 registers a thread there is room beside a projection for a CTA of attention, which then is ready before it
// ends.
#if TILES_PER_WARP == 1 && TOKENS <= 8
#define BOUNDS __maxnreg__(56)
#else
#define BOUNDS __launch_bounds__(kThreads, 1)
#endif

constexpr int kColumnTiles = TOKENS < 8 ? 1 : TOKENS / 8;  // MMAs' columns, of 8 tokens each
constexpr int kInputBytes = TOKENS * 64;         // 32 inputs of all tokens
// a producer, and tiles.py's
constexpr int kThreads = 32 * (1 + (TILES_PER_WARP == 3 ? 8 : TILES_PER_WARP == 2 ? 11 : 24));
constexpr int kEmpty = 8, kBarriers = 16;        // bytes: from a stage's first barrier to its other; both
constexpr int kStarted = 2, kMade = 3;           // numbers of the CTA's barriers: the first stage is made; the others are
static_assert(TOKENS <= 16, "From 32 tokens on, wide.cu multiplies.");
static_assert(TILES_PER_WARP >= 1 && TILES_PER_WARP <= 3, "Registers hold the sums of at most three tiles per warp.");
static_assert(kThreads <= 1024, "A CTA has at most 1,024 threads.");
static_assert(kBarriers == 2 * kEmpty, "A stage's two barriers are of the same size.");
typedef float Tile[TILES_PER_WARP][kColumnTiles][4];

// ---- Inputs ----
__device__ inline int step_bytes(const Job& job) {
  return job.row_groups * job.k_groups * job.depth * TILES_PER_WARP * kTileBytes;
}
__device__ inline int input_bytes(const Job& job) { return job.k_groups * job.depth * kInputBytes; }

// With few tokens, a step's inputs are less than two cache lines, which all CTAs would request at once. Inputs are
// then copied once per round of the ring, with the weights of its first stage, into two buffers in turn: a warp
// that frees that stage has read all inputs of the round before.
constexpr bool kRounds = TOKENS <= 4;
constexpr int kRoundsKept = kRounds ? 2 : 1;

// The next `count` steps' inputs, which every pass reads again.
__device__ inline void copy_inputs(const Job& job, u32 to, int& step, int count, int slice, u32 bar, u64 policy) {
#pragma unroll 1
  while (count) {
    const int here = min(count, job.steps - step);
    copy(to, job.x + size_t(step) * slice, here * slice, bar, policy);
    to += here * slice, count -= here;
    if ((step += here) == job.steps) step = 0;
  }
}

// Copies the inputs of the steps that fill the ring for the first time: every warp copies some, because the producer
// is busy with weights.
__device__ inline void first_inputs(const Job& job, u32 inputs, u32 full, int slice, int warp, int warps) {
  const u64 often = read_often();
  const int filled = min(job.stages, job.passes * job.steps);
  int step = kRounds ? 0 : warp;
  if (kRounds && warp == 0) copy_inputs(job, inputs, step, filled, slice, full, often);
#pragma unroll 1
  for (int i = warp; !kRounds && i < filled; i += warps, step += warps) {
    while (step >= job.steps) step -= job.steps;
    copy(inputs + i * slice, job.x + size_t(step) * slice, slice, full + kBarriers * i, often);
  }
}

// ---- Producer: the ring ----
// Waits for `pace` cycles since `last`, or until stage 0 is full (inputs too): then no pacing is needed. -> the latter
__device__ inline bool await_turn(u32& last, int pace, u32 full) {
  bool there;
  do there = arrived(full, 0);
  while (!there && u32(clock()) - last < u32(pace));
  last = clock();
  return there;
}

// The number of stages that get their inputs together with stage `stage` when it gets step i.
__device__ inline int slices(const Job& job, int stage, int i) {
  return !kRounds ? 1 : stage ? 0 : min(job.stages, job.passes * job.steps - i);
}

// Initialises the barriers of `count` stages from `first` on.
__device__ inline void make_stages(const Job& job, u32 full, int first, int count, int warps) {
  const u32 at = full + kBarriers * first;
  init_ring(at, at + kEmpty, count, warps, 1, kBarriers);
}

// Initialises the first stage and issues its copy, before anything else is done.
__device__ inline void start(const Job& job, u32 ring, u32 full, int bytes, int slice, int warps) {
  make_stages(job, full, 0, 1, warps);
  expect(full, bytes + slices(job, 0, 0) * slice);
  copy(ring, job.weight + size_t(blockIdx.x) * job.apart, bytes, full, read_once());
}

// Copies all other steps. started: the clock when the first one's copy was issued.
__device__ inline void produce(const Job& job, u32 ring, u32 inputs, u32 full, u32 started) {
  const u64 once = read_once(), often = read_often();
  const int bytes = step_bytes(job), slice = input_bytes(job);
  const u8* weight = job.weight + size_t(blockIdx.x) * job.apart;
  const size_t stride = size_t(job.ctas) * job.apart;
  const int count = job.passes * job.steps, filled = min(job.stages, count);
  u32 last = started;
#pragma unroll 1
  for (int i = 1; i < filled; i++) {
    await_turn(last, job.pace, full);
    expect(full + kBarriers * i, bytes + slices(job, i, i) * slice);
    copy(ring + i * bytes, weight + i * stride, bytes, full + kBarriers * i, once);
  }
  if (job.pdl_trigger == kTriggerAfterCopies && filled == count) let_next_start();
#pragma unroll 1
  for (int i = filled; i < min(count, filled + job.ahead); i++) {
    if (await_turn(last, job.pace, full)) break;
    prefetch(weight + i * stride, bytes);
  }
  if (!job.pdl_inputs_ready) wait_for_previous();
  int stage = 0, phase = 0, step = filled % job.steps;
  for (int i = filled; i < count; i++) {
    const u32 bar = full + kBarriers * stage;
    const int arriving = slices(job, stage, i);
    await(bar + kEmpty, phase);
    expect(bar, bytes + arriving * slice);
    copy(ring + stage * bytes, weight + i * stride, bytes, bar, once);
    const int round = kRounds ? phase ^ 1 : 0;
    copy_inputs(job, inputs + (round * job.stages + stage) * slice, step, arriving, slice, bar, often);
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
  if (job.pdl_trigger == kTriggerAfterCopies) let_next_start();
}

// ---- Consumers: multiply ----
__device__ inline void accumulate(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  if (kNarrow)
    mma_f16(sum, a[0], a[1], a[2], a[3], b0, b1);
  else
    mma_bf16(sum, a[0], a[1], a[2], a[3], b0, b1);
}

// What a warp reads of a stage of the ring: its barrier (full), its tiles, its inputs.
struct Place {
  u32 full;
  Part tiles;
  u32 inputs;
  u32 phase;
};
// How far apart stages are, where they begin, and where they end.
struct Ring {
  Place first;
  u32 end;           // of the barriers
  u32 bytes, slice;  // of a stage's weights and inputs
  u32 apart;         // from a block's inputs to the next one's
  u32 zero;          // for `free_stage`
};

// One warp: TILES_PER_WARP tiles times kDepth blocks of 32 inputs, for all tokens. Columns without a token read zeros,
// `apart` 0 from one another. -> words of all loads of the last block
template <int kDepth>
__device__ inline u32 multiply(Tile& sum, const Part& tiles, u32 input, u32 apart) {
  u32 loaded;
#pragma unroll
  for (int d = 0; d < kDepth; d++, input += apart) {
    u32 a[TILES_PER_WARP][2][4];  // [tile][k16 step][fragment]
    loaded = 0;
#pragma unroll
    for (int t = 0; t < TILES_PER_WARP; t++) {
      const Stored tile = load_shared(tiles, d * TILES_PER_WARP + t);
      loaded |= word_of(tile);
#pragma unroll
      for (int s = 0; s < 2; s++) expand(tile, s, a[t][s]);
    }
    uint4 b[kColumnTiles];
#pragma unroll
    for (int j = 0; j < kColumnTiles; j++) {
      const uint4 raw = load(input + j * 512);
      loaded |= raw.w, b[j] = as_weights(raw);
    }
    // all first halves before any second: an accumulator is not needed again right away
#pragma unroll
    for (int j = 0; j < kColumnTiles; j++)
#pragma unroll
      for (int t = 0; t < TILES_PER_WARP; t++) accumulate(sum[t][j], a[t][0], b[j].x, b[j].y);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j++)
#pragma unroll
      for (int t = 0; t < TILES_PER_WARP; t++) accumulate(sum[t][j], a[t][1], b[j].z, b[j].w);
  }
  return loaded;
}

__device__ inline void turn(Place& at, const Ring& ring) {
  at.full = ring.first.full, at.tiles = ring.first.tiles, at.phase ^= 1;
  if (!kRounds || !at.phase) at.inputs = ring.first.inputs;  // a second round's lie behind the first one's
}

// All steps of a pass. A loop for each depth (tiles.py), and one that goes around the ring inside it: what a
// warp does beside multiplying would be a third of its instructions at four bits.
template <int kDepth>
__device__ inline void multiply_all(Tile& sum, Place& at, const Ring& ring, int steps, int lane) {
  while (steps) {
    const u32 last = min(ring.end, at.full + steps * kBarriers);
    steps -= (last - at.full) / kBarriers;
#pragma unroll 1
    do {
      await(at.full, at.phase);
      const u32 loaded = multiply<kDepth>(sum, at.tiles, at.inputs, ring.apart);
      __syncwarp();
      if (lane == 0) free_stage(at.full + kEmpty, loaded, ring.zero);
      at.full += kBarriers, at.tiles += ring.bytes, at.inputs += ring.slice;
    } while (at.full != last);
    if (last == ring.end) turn(at, ring);
  }
}

__device__ inline void multiply_all(Tile& sum, Place& at, const Ring& ring, int steps, int depth, int lane) {
  if (depth == 4) return multiply_all<4>(sum, at, ring, steps, lane);
  if (depth == 3) return multiply_all<3>(sum, at, ring, steps, lane);
  if (depth == 2) return multiply_all<2>(sum, at, ring, steps, lane);
  multiply_all<1>(sum, at, ring, steps, lane);
}

__device__ inline void clear(Tile& sum) {
#pragma unroll
  for (int t = 0; t < TILES_PER_WARP; t++)
#pragma unroll
    for (int j = 0; j < kColumnTiles; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[t][j][e] = 0.0f;
}

// ---- Consumers: add the k groups, finish ----
// The other k groups' sums, `apart` from one another, added to group 0's. All loads first, and no branch
// between them.
template <int kGroups>
__device__ inline void add(Tile& sum, const float4* theirs, int apart) {
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * kColumnTiles; i++) {
    float* to = sum[i / kColumnTiles][i % kColumnTiles];
    float4 v[8] = {make_float4(to[0], to[1], to[2], to[3])};
#pragma unroll
    for (int g = 1; g < kGroups; g++) v[g] = theirs[(g - 1) * apart + i * 32];
    const float4 all = tree_sum(v, kGroups);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  }
}

// Adds the k groups; group 0 holds the sum. shared: room for those of all others.
__device__ inline void add_groups(const Job& job, Tile& sum, float4* shared, int row_group, int k_group, int lane) {
  const int warps = job.row_groups * job.k_groups, size = job.row_groups * TILES_PER_WARP * kColumnTiles * 32;
  float4* mine = shared + row_group * TILES_PER_WARP * kColumnTiles * 32 + lane;
  consumers_sync(warps);  // all warps have finished reading the shared buffer
  if (k_group)
#pragma unroll
    for (int i = 0; i < TILES_PER_WARP * kColumnTiles; i++) {
      const float* v = sum[i / kColumnTiles][i % kColumnTiles];
      mine[(k_group - 1) * size + i * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
  consumers_sync(warps);
  if (k_group) return;
  if (job.k_groups == 8) return add<8>(sum, mine, size);
  if (job.k_groups == 4) return add<4>(sum, mine, size);
  add<2>(sum, mine, size);
}

__device__ inline void load_scales(const Job& job, Scales (&scales)[TILES_PER_WARP], int first_tile, int lane) {
#pragma unroll
  for (int t = 0; t < TILES_PER_WARP; t++) load_scales(job, scales[t], first_tile + t, lane);
}

__device__ inline void finish(const Job& job, const Tile& sum, const Scales (&scales)[TILES_PER_WARP], int first_tile,
                              int lane) {
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * kColumnTiles; i++)
    finish(job, sum[i / kColumnTiles][i % kColumnTiles], scales[i / kColumnTiles], first_tile + i / kColumnTiles,
           i % kColumnTiles * 8, TOKENS, lane);
}

// ---- Kernel ----
// Whether a head's logits are there already (screen.cu): known when the kernels before have ended.
__device__ inline bool all_certified(const Job& job) {
  wait_for_previous();
  bool all = true;
#pragma unroll 1
  for (int m = 0; m < job.rows; m++) all &= job.certified[m] >= 0 && job.certified[m] <= job.room;
  return all;
}

extern "C" __global__ void BOUNDS
    gemm(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = job.row_groups * job.k_groups;
  const int bytes = step_bytes(job), slice = input_bytes(job);
  const u8* inputs = memory + job.stages * bytes;
  const int ring_bytes = job.stages * (bytes + kRoundsKept * slice);
  const u32 full = shared_address(memory + ring_bytes);
  __shared__ uint4 nothing;
  if (job.certified) {
    if (job.pdl_trigger == kTriggerAtOnce) let_next_start();
    if (all_certified(job)) return;
  }
  // Two warps initialise the ring while the others load what they need: many CTAs start when the last kernel ends, and
  // memory is idle until they issue copies.
  if (warp == warps) {
    const u32 started = clock();
    if (lane == 0) {
      start(job, shared_address(memory), full, bytes, slice, warps);
      if (job.alone) make_stages(job, full, 1, job.stages - 1, warps);
    }
    __syncwarp();
    pass<kStarted>(warps + 1);
    if (!job.alone) meet<kMade>(2);
    if (lane == 0) produce(job, shared_address(memory), shared_address(inputs), full, started);
    return;
  }
  if (warp == 0) {
    if (lane == 0) {
      nothing = make_uint4(0, 0, 0, 0);
      if (!job.alone) make_stages(job, full, 1, job.stages - 1, warps);
    }
    __syncwarp();
    if (!job.alone) pass<kMade>(2);
  }
  int k_group = quotient(warp, job.row_groups), row_group = warp - k_group * job.row_groups;
  int first_tile = blockIdx.x * job.tiles + row_group * TILES_PER_WARP;
  Scales scales[TILES_PER_WARP];  // weights too: here by the time that they are needed
  load_scales(job, scales, first_tile, lane);
  meet<kStarted>(warps + 1);
  if (job.pdl_trigger == kTriggerAtOnce) let_next_start();
  if (!job.pdl_inputs_ready) wait_for_previous();
  if (lane == 0) first_inputs(job, shared_address(inputs), full, slice, warp, warps);
  if (job.pdl_trigger == kTriggerInTurn) let_next_start();
  k_group = of_warp(k_group), row_group = of_warp(row_group), first_tile = of_warp(first_tile);  // no sooner: it takes time
  const int each = job.depth * TILES_PER_WARP, mine = (k_group * job.row_groups + row_group) * each;
  const bool fed = TOKENS >= 8 || lane < 4 * TOKENS;
  const u32 inputs_at = fed ? shared_address(inputs) + k_group * kInputBytes + lane * 16 : shared_address(&nothing);
  const Place first = {full, Part(shared_address(memory), warps * each, mine, lane), inputs_at, 0};
  const Ring ring = {first, full + job.stages * kBarriers, u32(bytes), u32(fed ? slice : 0),
                     u32(fed ? job.k_groups * kInputBytes : 0), u32(job.zero)};
  Place at = first;
  // with one pass the sums may overwrite the ring, to which no copy is pending; with more they have memory of their own
  float4* sums = reinterpret_cast<float4*>(memory + (job.passes > 1 ? ring_bytes + job.stages * kBarriers : 0));
  for (int pass = 0; pass < job.passes; pass++) {
    Tile sum;
    clear(sum);
    multiply_all(sum, at, ring, job.steps, job.depth, lane);
    if (job.k_groups > 1) add_groups(job, sum, sums, row_group, k_group, lane);
    if (k_group == 0) finish(job, sum, scales, first_tile, lane);
    first_tile += job.ctas * job.tiles;
    if (pass + 1 < job.passes) load_scales(job, scales, first_tile, lane);
  }
  if (job.pdl_inputs_ready) wait_for_previous();  // so that a kernel that waits for this one also waits for the one before
}
