// GEMM of e4m3 weights and e4m3 inputs: out[m, n] = scale[n] sum_k w[n, k] x[m, k] x_scale[m].
//
// Any number of rows m takes the same warpgroup MMAs: 64 weight rows from registers, a tile of 16 from
// each warp, by TOKENS tokens in shared memory. No sum depends on which rows share a CTA or an MMA.
// A row of a weight is multiplied with its inputs in ascending order; where the inputs have a scale per k group
// (kPart), each group's sum is kept apart and scaled, and groups are added as a binary tree: two neighbours
// here, the rest by the kernel that reads them (narrow.cuh).
//
// Weights lie as for gemm.cu (packing.py). An item of work is `take` row groups of a weight, whichever CTAs they were
// dealt to, with its own `share` k groups of each step, one after the other, for one block of tokens. CTAs
// take items in turn, and the ring does not stop between them; items of the same weights run beside each
// other. A warp holds TILES_PER_WARP tiles.
#include "qgmma.cuh"
#include "ring.cuh"

#ifndef DEPTH  // the deal's: blocks of 32 inputs of a step
#define DEPTH 4
#endif
#ifndef TILES_PER_WARP  // per warp: 1, 2
#define TILES_PER_WARP 1
#endif

// ---- The job ----
enum Epilogue { kPlain = 0, kGated = 1, kPart = 2 };

// Twelve warps and a warpgroup of producers, which leaves its registers to the others.
constexpr int kAll = TILES_PER_WARP * kHalves * kSums;
constexpr int kProducers = 4, kThreads = 32 * (12 + kProducers);
constexpr bool kTwice = TILES_PER_WARP == 1 && kAll <= 64;  // registers have room for another k group's sums
constexpr int kTileBytes = 512, kInputBytes = TOKENS * 32, kSlice = DEPTH * kInputBytes;
static_assert(DEPTH >= 1 && DEPTH <= 4, "A step has one to four blocks of 32 inputs.");
static_assert(TILES_PER_WARP == 1 || TILES_PER_WARP == 2, "Registers hold the sums of at most two tiles per warp.");

struct Job {
  const u8* weight;
  const float* scale;    // [n]
  const u8* x;           // blocked (`narrow_offset`)
  const float* x_scale;  // [rows]; kPart: [k_groups, rows]
  void* out;             // floats [rows, n]; kGated: f16 of value / 32 [rows, n / 2]; kPart: [parts, rows, n]
  int n, ctas, steps;    // rows of the weight; CTAs that it was dealt to; steps along a k group
  int row_groups, k_groups, wide;  // of the deal
  int runs, run, take;   // row groups in `runs` pieces of `run`, of which a CTA takes up to `take`
  int share;             // k groups of a CTA
  int k_blocks;          // 32-input blocks of x
  int k_stride;          // of a k group's blocks: k_groups, or 1 where groups are contiguous
  int stages, rows, epilogue;
  int blocks, items;     // of tokens; of work
};

// ---- Producers ----
// An item of work: `count` row groups from `first`, k groups from part x share, a block of tokens.
struct Share {
  int block, part, first, count, chunk, stage;  // the last two in bytes: of a row group's step, of all of a step
  __device__ Share(const Job& job, int item) {
    const int parts = job.k_groups / job.share, unit = item / job.blocks / parts, begin = unit / job.runs * job.take;
    block = item % job.blocks;
    part = item / job.blocks % parts;
    first = unit % job.runs * job.run + begin;
    count = min(job.take, job.run - begin);
    chunk = DEPTH * job.wide * kTileBytes;
    stage = job.take * chunk + kSlice;
  }
};

// Weights that a producer copies of each step and k group: of one CTA of the deal, contiguous.
struct Piece {
  const u8* from;
  u32 to, bytes;  // from the stage's beginning; 0 where there is none
};

__device__ inline Piece piece_of(const Job& job, const Share& own, int i) {
  const size_t owner_bytes = size_t(job.k_groups) * job.row_groups * own.chunk;
  const int skipped = own.first % job.row_groups, at = i ? 0 : skipped;
  const int begin = i ? i * job.row_groups - skipped : 0, owner = own.first / job.row_groups + i;
  const int many = max(0, min(job.row_groups - at, own.count - begin));
  return {job.weight + (size_t(owner / job.ctas) * job.steps * job.ctas + owner % job.ctas) * owner_bytes + at * own.chunk,
          u32(begin * own.chunk), u32(many * own.chunk)};
}

// Four producers share the copies: one alone would take longer to issue small copies than memory to deliver them.
// Each reports to every stage, also where it has nothing to copy: else the others could lap it, and it would
// wait for a phase that has passed.
struct Producer {
  const Job& job;
  const int mine;
  const u64 once = read_once(), often = read_often();

  // inputs: bytes of them that it copies, later.
  __device__ void weights(const Piece (&pieces)[3], u32 inputs, u32 to, u32 bar, size_t at) const {
    expect(bar, pieces[0].bytes + pieces[1].bytes + pieces[2].bytes + inputs);
#pragma unroll
    for (int i = 0; i < 3; i++)
      if (pieces[i].bytes) copy(to + pieces[i].to, pieces[i].from + at, pieces[i].bytes, bar, once);
  }
};

__device__ inline void find_pieces(const Job& job, const Share& own, int mine, Piece (&pieces)[3]) {
#pragma unroll
  for (int i = 0; i < 3; i++) pieces[i] = piece_of(job, own, mine + i * kProducers);
}

// Where the weights of a step are: steps of a k group, then the next group's.
struct Place {
  size_t group_bytes, step_bytes, at;
  int steps, group, step;

  __device__ Place(const Job& job, const Share& own)
      : group_bytes(size_t(job.row_groups) * own.chunk), step_bytes(job.ctas * job.k_groups * group_bytes),
        at(own.part * job.share * group_bytes), steps(job.steps), group(own.part * job.share), step(0) {}
  __device__ void next() {
    at += step_bytes;
    if (++step == steps) step = 0, at = ++group * group_bytes;
  }
};

__device__ inline void produce(const Job& job, u32 ring, u32 full, int mine) {
  const Producer all = {job, mine};
  const u32 empty = full + 8 * job.stages;
  const int count = job.share * job.steps;
  u32 stage = 0, phase = 1;
  int ahead = 0;  // stages that have their weights
  for (int item = blockIdx.x; item < job.items; item += gridDim.x) {
    const Share own(job, item);
    Piece pieces[3];
    find_pieces(job, own, mine, pieces);
    Place place(job, own);
    // blocks of 32 inputs: a step's are contiguous where groups are contiguous
    const bool contiguous = job.k_stride == 1;
    const u32 inputs = contiguous ? (mine ? 0 : kSlice) : mine < DEPTH ? kInputBytes : 0;
    if (item == blockIdx.x) {
      for (; ahead < min(job.stages, count); ahead++, place.next())
        all.weights(pieces, inputs, ring + ahead * own.stage, full + 8 * ahead, place.at);
      wait_for_previous();
    }
    const int block = contiguous ? own.part * job.share * job.steps * DEPTH : own.part * job.share + mine * job.k_stride;
    const u8* x = job.x + (size_t(own.block) * job.k_blocks + block) * kInputBytes;
    const u32 to = job.take * own.chunk + (contiguous ? 0 : mine * kInputBytes);
    int step = 0;
    for (int i = 0; i < count; i++) {
      const u32 here = ring + stage * own.stage, bar = full + 8 * stage;
      if (ahead) {
        ahead--;
      } else {
        await(empty + 8 * stage, phase);
        all.weights(pieces, inputs, here, bar, place.at);
        place.next();
      }
      if (inputs) copy(here + to, x, inputs, bar, all.often);
      x += job.k_stride * kSlice;
      if (++step == job.steps) {
        step = 0;
        if (!contiguous) x -= size_t(job.steps) * job.k_stride * kSlice - kInputBytes;
      }
      if (++stage == job.stages) stage = 0, phase ^= 1;
    }
  }
}

// ---- Consumers: multiply ----
__device__ inline uint4 load(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}

// Where a warp is in the ring.
struct Reader {
  u32 ring, full, stages, stage_bytes;
  u32 at[TILES_PER_WARP], stride, inputs;  // in a stage: its tiles, from there to their next block, and the inputs
  u32 stage, phase;

  __device__ u32 here() const { return ring + stage * stage_bytes; }
  __device__ void open() const { await(full + 8 * stage, phase); }
  __device__ void next() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  __device__ void free() const { arrive(full + 8 * (stages + stage)); }
  // Fragment i of a step: of block i / TILES_PER_WARP.
  __device__ uint4 fragment(int i) const { return load(here() + at[i % TILES_PER_WARP] + i / TILES_PER_WARP * stride); }
};

typedef Sums All[TILES_PER_WARP * kHalves];

// Fragment i of a step times its inputs.
__device__ inline void multiply_all(All& sums, uint4 w, u32 inputs, int i) {
#pragma unroll
  for (int h = 0; h < kHalves; h++)
    multiply(sums[i % TILES_PER_WARP * kHalves + h], w,
             kApart | (inputs + i / TILES_PER_WARP * (kInputBytes / 16) + h * kColumns));
}

// A step: DEPTH blocks of 32 inputs. One fragment after the other: sums leave registers for no more, and
// the other warpgroups keep the tensor cores busy meanwhile.
__device__ inline void walk(All& sums, Reader& reader, int lane) {
  reader.open();
  const u32 inputs = inputs_at(reader.here() + reader.inputs);
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * DEPTH; i++) {
    uint4 w = reader.fragment(i);
    begin_mma();
    multiply_all(sums, w, inputs, i);
    commit_mma();
    asm volatile("wgmma.wait_group.sync.aligned 0;" : "+r"(w.x), "+r"(w.y), "+r"(w.z), "+r"(w.w)::"memory");
  }
  if (lane == 0) reader.free();
  reader.next();
}

// ---- Consumers: scale, finish ----
// The inputs' scales of a CTA's tokens, in shared memory: of all k, or of its k groups, one after the other.
__device__ inline void load_tokens(const Job& job, const Share& own, float* tokens) {
  const int groups = job.epilogue == kPart ? job.share : 1, first = own.block * TOKENS;
  consumers_sync(blockDim.x / 32 - kProducers);  // the last item's scales have been read
  for (int i = threadIdx.x; i < groups * TOKENS; i += blockDim.x - 32 * kProducers) {
    const int m = first + i % TOKENS;
    tokens[i] = m < job.rows ? job.x_scale[size_t(own.part * groups + i / TOKENS) * job.rows + m] : 0.0f;
  }
  consumers_sync(blockDim.x / 32 - kProducers);
}

// Multiplies by those scales. Products are rounded before any addition, so that all adders of parts get the same.
__device__ inline void scale_tokens(All& sums, u32 tokens, int lane) {
#pragma unroll
  for (int i = 0; i < kAll; i += 4) {
    float low, high;  // of two tokens; one load after the other, for which registers suffice
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(low), "=f"(high)
                 : "r"(tokens + 4 * (i / kSums % kHalves * kColumns + i % kSums * 2 + lane % 4 * 2)));
    float* to = &sums[i / kSums][i % kSums];
    to[0] = __fmul_rn(to[0], low), to[1] = __fmul_rn(to[1], high);
    to[2] = __fmul_rn(to[2], low), to[3] = __fmul_rn(to[3], high);
  }
}

// Stores rows of floats: scaled, or unscaled where parts are added by a later kernel.
__device__ inline void finish_rows(const Job& job, const Share& own, const Sums& sum, int tile, int first, int lane) {
  const int n = tile * 16 + lane / 4, m = first + lane % 4 * 2;
  const bool part = job.epilogue == kPart;
  float* out = static_cast<float*>(job.out) + (size_t(part ? own.part * job.rows : 0) + m) * job.n + n;
  const float scales[2] = {part || n >= job.n ? 1.0f : job.scale[n], part || n + 8 >= job.n ? 1.0f : job.scale[n + 8]};
#pragma unroll
  for (int i = 0; i < kSums; i += 2) {
    const int j = i / 4, e = i / 2 % 2;
    if (m + j * 8 + e >= job.rows) continue;
#pragma unroll
    for (int half = 0; half < 2; half++)
      if (n + half * 8 < job.n) out[size_t(j * 8 + e) * job.n + half * 8] = sum[j * 4 + half * 2 + e] * scales[half];
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
    for (int e = 0; e < 2; e++)
      value[e] = input_of_fp8(gelu_tanh(sum[j * 4 + e] * gate_scale) * (sum[j * 4 + 2 + e] * up_scale));
    const u32 taken = __shfl_xor_sync(~0u, odd ? value[0] : value[1], 4);
    if (real && m + j * 8 + odd < job.rows)
      *reinterpret_cast<u32*>(out + size_t(j * 8) * half) = odd ? taken | value[1] << 16 : value[0] | taken << 16;
  }
}

__device__ inline void finish(const Job& job, const Share& own, const All& sums, int warp, int lane) {
#pragma unroll
  for (int i = 0; i < TILES_PER_WARP * kHalves; i++) {
    const int mine = warp * TILES_PER_WARP + i / kHalves, first = own.block * TOKENS + i % kHalves * kColumns;
    if (mine >= own.count * job.wide) continue;
    if (job.epilogue == kGated)
      finish_gated(job, sums[i], own.first * job.wide + mine, first, lane);
    else
      finish_rows(job, own, sums[i], own.first * job.wide + mine, first, lane);
  }
}

__device__ inline void clear(All& sums) {
#pragma unroll
  for (int i = 0; i < kAll; i++) sums[i / kSums][i % kSums] = 0.0f;
}

__device__ inline void work(const Job& job, const Share& own, Reader& reader, float* tokens, int warp, int lane) {
#pragma unroll
  for (int t = 0; t < TILES_PER_WARP; t++) {
    // tiles past the last only fill up their warpgroup: they are multiplied, and dropped
    const int mine = min(warp * TILES_PER_WARP + t, own.count * job.wide - 1);
    reader.at[t] = mine / job.wide * own.chunk + mine % job.wide * kTileBytes + lane * 16;
  }
  load_tokens(job, own, tokens);
  const u32 scales = shared_address(tokens);
  All sums;
  clear(sums);
  const bool apart = job.epilogue == kPart;
  const int steps = apart ? job.steps : job.share * job.steps;
  for (int step = 0; step < steps; step++) walk(sums, reader, lane);
  // where sums go is found out only now: computed before the steps, it would take their registers
  asm volatile("" : "+r"(lane));
  scale_tokens(sums, scales, lane);
  if (kTwice && apart && job.share == 2) {
    All first;
#pragma unroll
    for (int i = 0; i < kAll; i++) first[i / kSums][i % kSums] = sums[i / kSums][i % kSums];
    clear(sums);
    for (int step = 0; step < steps; step++) walk(sums, reader, lane);
    asm volatile("" : "+r"(lane));
    scale_tokens(sums, scales + 4 * TOKENS, lane);
#pragma unroll
    for (int i = 0; i < kAll; i++) sums[i / kSums][i % kSums] += first[i / kSums][i % kSums];
  }
  finish(job, own, sums, warp, lane);
}

// ---- Kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, 1) w8a8(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32 - kProducers;
  const u32 stage_bytes = DEPTH * (job.take * job.wide * kTileBytes + kInputBytes);
  const u32 ring = shared_address(memory), full = ring + job.stages * stage_bytes;
  float* tokens = reinterpret_cast<float*>(memory + job.stages * (stage_bytes + 16));
  if (threadIdx.x == 0) init_ring(full, full + 8 * job.stages, job.stages, warps, kProducers);
  __syncthreads();
  let_next_start();
  if (warp < warps) {
    if (kAll >= 64) asm volatile("setmaxnreg.inc.sync.aligned.u32 160;");
    Reader reader = {ring, full, u32(job.stages), stage_bytes, {}, u32(job.wide * kTileBytes), stage_bytes - kSlice, 0, 0};
    wait_for_previous();
    for (int item = blockIdx.x; item < job.items; item += gridDim.x)
      work(job, Share(job, item), reader, tokens, warp, lane);
  } else {
    if (kAll >= 64) asm volatile("setmaxnreg.dec.sync.aligned.u32 32;");
    if (lane == 0) produce(job, ring, full, warp - warps);
  }
}
