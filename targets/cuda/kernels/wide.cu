// The sums of gemm.cu for 32 and more tokens, bit for bit, with warpgroup MMAs.
//
// A warp holds two tiles of 16 weight rows, for TOKENS tokens. A tile of each of the four warps of a
// warpgroup makes a 64 x 16 fragment of weights, which comes from registers and is what four
// mma.sync of those tiles would read. Inputs stay in shared memory, in core matrices of 8 tokens x
// 8 inputs (`x_offset`).
//
// From 32 tokens on, inputs cost as much traffic as weights. So CTA (group, g) takes the k group g
// of `k_groups` of gemm.cu's CTAs, and reads that part of the inputs alone. Its sums go to
// partial[g], which gather.cu adds in ascending order, as gemm.cu does in its one CTA.
//
// The grid is (token blocks, CTAs): blocks of the same weights run beside each other, so that the
// cache serves all but the first.
#include "linear.cuh"
#include "ring.cuh"

#ifndef TOKENS  // per CTA: 32, 64
#define TOKENS 64
#endif
#ifndef DEPTH  // the job's: 1 to 4
#define DEPTH 2
#endif

constexpr int kThreads = 32 * (12 + 1);  // two of skinny.py's most tiles each, and a producer
constexpr int kInputBytes = TOKENS * 64;  // 32 inputs of all tokens
constexpr int kSums = TOKENS / 2;         // per thread and tile: 16 x TOKENS of a warp
typedef float Sums[kSums];

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

__device__ inline void produce(const Job& job, const Share& own, u32 ring, u32 full, u32 empty, int lane) {
  const u64 once = read_once(), often = read_often();
  const u8* weight = job.weight + (size_t(own.first + lane) * job.k_groups + own.part) * own.piece;
  const size_t stride = size_t(job.ctas) * job.k_groups * own.piece;
  const u8* x = job.x + size_t(blockIdx.x) * job.k_blocks * kInputBytes + own.part * own.slice;
  const int count = job.passes * job.steps, filled = min(job.stages, count);
  const auto weights = [&](int i, int stage) {
    if (lane == 0) expect(full + 8 * stage, own.pieces * own.piece + own.slice);
    __syncwarp();
    if (lane < own.pieces)
      copy(ring + stage * own.stage + lane * own.piece, weight + i * stride, own.piece, full + 8 * stage, once);
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
      copy(ring + stage * own.stage + job.k_groups * own.piece,
           x + size_t(step) * job.k_groups * own.slice, own.slice, full + 8 * stage, often);
    if (++step == job.steps) step = 0;
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
}

// sum[16 x TOKENS of this warp's tile] += a (its 16 x 16 weights) x the 16 inputs x TOKENS of `b`.
__device__ inline void multiply(Sums& sum, const u32* a, u64 b) {
#if FP8
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#if TOKENS == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16." TYPES
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : F4(0), F4(4), F4(8), F4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16." TYPES
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

// Where the core matrices of 16 inputs begin, how far apart they are along the inputs (all tokens')
// and along the tokens (8 tokens'); not swizzled. In units of 16 bytes.
__device__ inline u64 inputs_at(u32 address) { return u64(8) << 32 | u32((address >> 4) + (TOKENS << 16)); }

// A tile of 16 rows x 32 inputs as it is stored, and as the A fragments of two MMAs.
constexpr int kParts = FP8 ? 1 : 2;
typedef uint4 Stored[kParts];
__device__ inline void load(Stored& tile, u32 from) {
#pragma unroll
  for (int i = 0; i < kParts; i++)
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(tile[i].x), "=r"(tile[i].y), "=r"(tile[i].z), "=r"(tile[i].w)
                 : "r"(from + i * 512));
}
__device__ inline void expand(u32 (&a)[8], const Stored& tile) {
#if FP8
  widen(tile[0].x, a[0], a[2]);
  widen(tile[0].y, a[1], a[3]);
  widen(tile[0].z, a[4], a[6]);
  widen(tile[0].w, a[5], a[7]);
#else
#pragma unroll
  for (int i = 0; i < 2; i++)
    a[4 * i] = tile[i].x, a[4 * i + 1] = tile[i].y, a[4 * i + 2] = tile[i].z, a[4 * i + 3] = tile[i].w;
#endif
}

// Where a warp is in the ring, and its two tiles of the block that comes next.
struct Reader {
  u32 ring, full, empty, here, bar;
  int stage, phase;
  u32 at[2], stride, inputs;  // of the two tiles, to their next block, and of the inputs in a stage
  Stored tile[2];

  __device__ void load_block(int d) {
#pragma unroll
    for (int t = 0; t < 2; t++) load(tile[t], here + at[t] + d * stride);
  }
  __device__ void open_stage() {
    await(bar, phase);
    load_block(0);
  }
  __device__ void next_stage(int stages, u32 bytes) {
    here += bytes, bar += 8;
    if (++stage == stages) stage = 0, phase ^= 1, here = ring, bar = full;
  }
  // For the MMAs; the tiles may be expanded only then.
  __device__ void wait() {
#define V4(v) "+r"((v).x), "+r"((v).y), "+r"((v).z), "+r"((v).w)
    asm volatile("wgmma.wait_group.sync.aligned 0;"
                 : V4(tile[0][0]), V4(tile[1][0]), V4(tile[0][kParts - 1]), V4(tile[1][kParts - 1])::"memory");
  }
};

// A step: DEPTH blocks of 32 inputs. What the next block needs is loaded while this one is
// multiplied; bf16 fragments are the tiles themselves, and must be read first.
__device__ inline void walk(Sums (&sums)[2], Reader& reader, const Job& job, u32 stage_bytes, bool last, int lane) {
  const u32 inputs = reader.here + reader.inputs, done = reader.bar + (reader.empty - reader.full);
#pragma unroll
  for (int d = 0; d < DEPTH; d++) {
    u32 a[2][8];
    expand(a[0], reader.tile[0]), expand(a[1], reader.tile[1]);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int i = 0; i < 4; i++)
      multiply(sums[i % 2], a[i % 2] + i / 2 * 4, inputs_at(inputs + (2 * d + i / 2) * (kInputBytes / 2)));
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
    if (d + 1 == DEPTH) reader.next_stage(job.stages, stage_bytes);
    if (!FP8) reader.wait();
    if (d + 1 < DEPTH)
      reader.load_block(d + 1);
    else if (!last)
      reader.open_stage();
    if (FP8) reader.wait();
  }
  if (lane == 0) arrive(done);
}

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

__device__ inline void finish(const Job& job, const Share& own, const Sums (&sums)[2], const Scales (&scales)[2],
                              int tile, int count, int lane) {
  if (job.partial) {
    finish_part(job, sums[0], own.part, tile, lane);
    if (count > 1) finish_part(job, sums[1], own.part, tile + 1, lane);
  } else if (job.epilogue == kGated) {
#pragma unroll
    for (int j = 0; j < kSums; j += 4)
      finish_gated(job, *reinterpret_cast<const Four*>(sums[0] + j), *reinterpret_cast<const Four*>(sums[1] + j),
                   scales[0], scales[1], tile, blockIdx.x * TOKENS + j * 2, TOKENS, lane);
  } else {
    finish_rows(job, sums, scales, tile, count, lane);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    wide(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32 - 1;
  const Share own(job);
  const u32 ring = shared_address(memory), full = ring + job.stages * own.stage;
  const u32 empty = full + 8 * job.stages;
  if (threadIdx.x == 0) init_ring(full, empty, job.stages, warps);
  __syncthreads();
  let_next_start();
  if (warp == warps) return produce(job, own, ring, full, empty, lane);
  const int each = job.tiles / job.row_groups;
  Reader reader = {ring, full, empty, ring, full, 0, 0, {}, u32(each) * kTileBytes, u32(job.k_groups * own.piece)};
  // a warp's tiles are neighbours: gate and up of the same features. Those past the end only fill
  // up the last warpgroup: they are multiplied by what is there, and dropped
  const int count = own.pieces * job.tiles - 2 * warp;
#pragma unroll
  for (int t = 0; t < 2; t++) {
    const int tile = t < count ? 2 * warp + t : 0, owner = tile / job.tiles, mine = tile % job.tiles;
    reader.at[t] = owner * own.piece + mine / each * DEPTH * reader.stride + mine % each * kTileBytes + lane * 16;
  }
  int tile = own.first * job.tiles + 2 * warp;
  Scales scales[2];  // weights too: here by the time that they are needed
  load_scales(job, scales[0], tile, lane), load_scales(job, scales[1], tile + 1, lane);
  wait_for_previous();
  for (int pass = 0; pass < job.passes; pass++) {
    Sums sums[2];
#pragma unroll
    for (int i = 0; i < 2 * kSums; i++) sums[i / kSums][i % kSums] = 0.0f;
    reader.open_stage();
    for (int step = 1; step <= job.steps; step++) walk(sums, reader, job, own.stage, step == job.steps, lane);
    if (count > 0) finish(job, own, sums, scales, tile, count, lane);
    tile += job.ctas * job.tiles;
    if (pass + 1 < job.passes) load_scales(job, scales[0], tile, lane), load_scales(job, scales[1], tile + 1, lane);
  }
}
