// Skinny GEMM: out[m, n] = sum_k w[n, k] x[m, k], for few rows m: bound by reading w once.
//
// Weights are the A operand of the tensor cores (tiles of 16 weight rows), tokens its columns, so
// that a call with 1 row and one with 64 do the same arithmetic for each row. Every CTA owns the
// same number of tiles and walks all of k, so nothing is ever added up between CTAs. Inside a CTA
// the warps form a grid: `row_groups` groups of TW tiles, times `k_groups` that take every
// k_groups-th part of k and are added in ascending order at the end. All of that is a function of
// the weight's shape and of the machine (tiles.py), never of M.
//
// The grid is (token blocks, CTAs): blocks of the same weights run beside each other, so that the
// cache serves all but the first. Memory holds [pass][step][CTA]: at any time all CTAs read one
// contiguous stretch. A producer warp
// keeps a ring of steps in flight with bulk copies. It fills the ring, and starts the next steps
// on their way to the L2 cache, before the previous kernel has ended: weights are never written.
#include "common.cuh"

#ifndef NT  // 8-token tiles per warp: 1, 2, 4, 8
#define NT 1
#endif
#ifndef CG  // groups of warps, each with tokens of its own: 1, 2. Tensor cores need many warps.
#define CG 1
#endif
#ifndef TW  // 16-row tiles per warp: 1, 2, 3
#define TW 2
#endif
#ifndef FP8  // 1: e4m3 weights and f16 inputs; 0: bf16 both
#define FP8 1
#endif

enum Epilogue { kPlain = 0, kGated = 1, kLogits = 2, kPerLayer = 3 };

constexpr int kBlock = 8 * NT * CG;  // tokens of this CTA
constexpr int kTileBytes = FP8 ? 512 : 1024;  // 16 rows x 32 inputs
constexpr int kInputBytes = kBlock * 64;      // 32 inputs of all tokens
constexpr int kThreads = 32 * (1 + (CG == 2 ? 16 : TW == 3 ? 8 : 11));  // a producer, and skinny.py's
constexpr int kTogether = NT < 4 ? NT : NT * TW < 24 ? 4 : 2;  // token tiles whose inputs are held at once
typedef float Tile[TW][NT][4];

struct Job {
  const u8* weight;
  const float* scale;   // [n] of fp8 weights
  const u8* x;          // blocked input
  void* out;
  const float* inputs;  // kPerLayer: [M, inputs_stride]
  int inputs_stride;
  int n, ctas, tiles;   // rows of the weight; CTAs that work; tiles per CTA and pass
  int passes, steps;    // steps along k per pass
  int row_groups, k_groups, depth;  // depth: 32-input blocks per warp and step
  int k_blocks;         // 32-input blocks of x
  int stages, ahead;    // of the ring; steps to prefetch into L2
  int rows;             // M
  int out_stride;       // floats per row, or 32-feature blocks of the next input
  int epilogue;
  float softcap;
};

__device__ inline void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ inline void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ inline void await(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; "
      "bra again; done: }" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ inline void copy(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

__device__ inline int step_bytes(const Job& job) {
  return job.row_groups * job.k_groups * job.depth * TW * kTileBytes;
}
__device__ inline int input_bytes(const Job& job) { return job.k_groups * job.depth * kInputBytes; }

__device__ inline void produce(const Job& job, u32 ring, u32 full, u32 empty) {
  u64 stream, keep;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  const int bytes = step_bytes(job), slice = input_bytes(job), stage_bytes = bytes + slice;
  const u8* weight = job.weight + size_t(blockIdx.y) * bytes;
  const size_t stride = size_t(job.ctas) * bytes;
  const u8* x = job.x + size_t(blockIdx.x) * job.k_blocks * kInputBytes;
  const int count = job.passes * job.steps, filled = min(job.stages, count);
  for (int i = 0; i < filled; i++) {
    expect(full + 8 * i, stage_bytes);
    copy(ring + i * stage_bytes, weight + i * stride, bytes, full + 8 * i, stream);
  }
  for (int i = filled; i < min(count, filled + job.ahead); i++) prefetch(weight + i * stride, bytes);
  wait_for_previous();
  int stage = 0, phase = 1, step = 0;
  for (int i = 0; i < count; i++) {
    const u32 bar = full + 8 * stage, to = ring + stage * stage_bytes;
    if (i >= filled) {
      await(empty + 8 * stage, phase);
      expect(bar, stage_bytes);
      copy(to, weight + i * stride, bytes, bar, stream);
    }
    copy(to + bytes, x + size_t(step) * slice, slice, bar, keep);
    if (++step == job.steps) step = 0;
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
}

__device__ inline void accumulate(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if FP8
  mma_f16(sum, a[0], a[1], a[2], a[3], b0, b1);
#else
  mma_bf16(sum, a[0], a[1], a[2], a[3], b0, b1);
#endif
}

// One warp: TW tiles times `depth` blocks of 32 inputs, for all tokens.
__device__ inline void multiply(Tile& sum, const uint4* w, const uint4* input, int depth) {
#pragma unroll 2
  for (int d = 0; d < depth; d++, w += TW * kTileBytes / 16, input += CG * NT * 32) {
    u32 a[TW][2][4];  // [tile][k16 step][fragment]
#pragma unroll
    for (int t = 0; t < TW; t++) {
#if FP8
      const uint4 raw = w[t * 32];
      widen(raw.x, a[t][0][0], a[t][0][2]);
      widen(raw.y, a[t][0][1], a[t][0][3]);
      widen(raw.z, a[t][1][0], a[t][1][2]);
      widen(raw.w, a[t][1][1], a[t][1][3]);
#else
#pragma unroll
      for (int s = 0; s < 2; s++) {
        const uint4 raw = w[(t * 2 + s) * 32];
        a[t][s][0] = raw.x, a[t][s][1] = raw.y, a[t][s][2] = raw.z, a[t][s][3] = raw.w;
      }
#endif
    }
#pragma unroll
    for (int first = 0; first < NT; first += kTogether) {
      uint4 b[kTogether];
#pragma unroll
      for (int j = 0; j < kTogether; j++) b[j] = input[(first + j) * 32];
      // all first halves before any second: an accumulator is not needed again right away
#pragma unroll
      for (int j = 0; j < kTogether; j++)
#pragma unroll
        for (int t = 0; t < TW; t++) accumulate(sum[t][first + j], a[t][0], b[j].x, b[j].y);
#pragma unroll
      for (int j = 0; j < kTogether; j++)
#pragma unroll
        for (int t = 0; t < TW; t++) accumulate(sum[t][first + j], a[t][1], b[j].z, b[j].w);
    }
  }
}

__device__ inline void clear(Tile& sum) {
#pragma unroll
  for (int t = 0; t < TW; t++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) sum[t][j][e] = 0.0f;
}

__device__ inline void consumers_sync(int warps) {
  asm volatile("bar.sync 1, %0;" ::"r"(warps * 32) : "memory");
}

// Adds the k groups in ascending order; group 0 holds the sum. `room`: float4 of shared memory.
// `row_group` counts those of all column groups.
__device__ inline void add_groups(const Job& job, Tile& sum, float4* shared, int room, int row_group,
                                  int k_group, int lane) {
  const int warps = job.row_groups * CG * job.k_groups, size = job.row_groups * CG * TW * NT * 32;
  const int at_once = max(1, room / size);
  for (int first = 1; first < job.k_groups; first += at_once) {
    consumers_sync(warps);
    const int index = k_group - first;
    if (index >= 0 && index < at_once) {
      float4* mine = shared + index * size + row_group * TW * NT * 32 + lane;
#pragma unroll
      for (int t = 0; t < TW; t++)
#pragma unroll
        for (int j = 0; j < NT; j++)
          mine[(t * NT + j) * 32] =
              make_float4(sum[t][j][0], sum[t][j][1], sum[t][j][2], sum[t][j][3]);
    }
    consumers_sync(warps);
    if (k_group) continue;
    for (int i = 0; i < min(at_once, job.k_groups - first); i++) {
      const float4* theirs = shared + i * size + row_group * TW * NT * 32 + lane;
#pragma unroll
      for (int t = 0; t < TW; t++)
#pragma unroll
        for (int j = 0; j < NT; j++) {
          const float4 v = theirs[(t * NT + j) * 32];
          sum[t][j][0] += v.x, sum[t][j][1] += v.y, sum[t][j][2] += v.z, sum[t][j][3] += v.w;
        }
    }
  }
}

// Element e of a fragment: weight row lane / 4 (+ 8 for e >= 2), token 2 (lane % 4) (+ 1 for odd e).
// Tile t's row of a lane: the weight's row n, or past its end. Gated weights alternate tiles of
// gate and up rows of the same features.
__device__ inline int row_of(const Job& job, int tile, int lane, int half) {
  const int row = lane / 4 + half * 8;
  if (job.epilogue != kGated) return tile * 16 + row;
  const int feature = tile / 2 * 16 + row;
  return feature < job.n / 2 ? feature + tile % 2 * (job.n / 2) : job.n;
}

typedef float Scales[TW][2];

__device__ inline void load_scales(const Job& job, Scales& scales, int first_tile, int lane) {
#pragma unroll
  for (int t = 0; t < TW; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int n = row_of(job, first_tile + t, lane, half);
      scales[t][half] = FP8 && n < job.n ? job.scale[n] : 1.0f;
    }
}

__device__ inline void finish(const Job& job, Tile& sum, const Scales& scales, int first_tile,
                              int column_group, int lane) {
  const int first_token = blockIdx.x * kBlock + column_group * 8 * NT + (lane % 4) * 2;
#pragma unroll
  for (int half = 0; half < 2; half++) {
#if TW == 2
    if (job.epilogue == kGated) {
      const int feature = row_of(job, first_tile, lane, half);
      if (feature >= job.n) continue;
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int m = first_token + j * 8 + e;
          if (m >= job.rows) continue;
          const float v = gelu_tanh(sum[0][j][half * 2 + e] * scales[0][half]) *
                          (sum[1][j][half * 2 + e] * scales[1][half]);
          static_cast<u16*>(job.out)[x_offset(m, feature, job.out_stride, kBlock)] =
              FP8 ? input_of_fp8(v) : to_bf16(v);
        }
      continue;
    }
#endif
#pragma unroll
    for (int t = 0; t < TW; t++) {
      const int n = row_of(job, first_tile + t, lane, half);
      if (n >= job.n) continue;
#pragma unroll
      for (int j = 0; j < NT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int m = first_token + j * 8 + e;
          if (m >= job.rows) continue;
          float v = sum[t][j][half * 2 + e] * scales[t][half];
          if (job.epilogue == kPerLayer) {
            v = gelu_tanh(v) * job.inputs[size_t(m) * job.inputs_stride + n];
            static_cast<u16*>(job.out)[x_offset(m, n, job.out_stride, kBlock)] = to_bf16(v);
          } else {
            if (job.epilogue == kLogits) v = job.softcap * tanhf(v / job.softcap);
            static_cast<float*>(job.out)[size_t(m) * job.out_stride + n] = v;
          }
        }
    }
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 1)
    gemm(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warps = job.row_groups * job.k_groups * CG;
  const int bytes = step_bytes(job), stage_bytes = bytes + input_bytes(job);
  const u32 full = shared_address(memory + job.stages * stage_bytes), empty = full + 8 * job.stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < job.stages; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, warps);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  if (warp == warps) {
    if (lane == 0) produce(job, shared_address(memory), full, empty);
    return;
  }
  const int row_group = warp % job.row_groups, k_group = warp / job.row_groups % job.k_groups;
  const int column_group = CG == 1 ? 0 : warp / job.row_groups / job.k_groups;
  int first_tile = blockIdx.y * job.tiles + row_group * TW;
  Scales scales;  // weights too: here by the time that they are needed
  load_scales(job, scales, first_tile, lane);
  wait_for_previous();
  const int at = (k_group * job.row_groups + row_group) * job.depth * TW * kTileBytes + lane * 16;
  const int input_at =
      bytes + k_group * job.depth * kInputBytes + column_group * NT * 512 + lane * 16;
  int stage = 0, phase = 0;
  for (int pass = 0; pass < job.passes; pass++) {
    Tile sum;
    clear(sum);
    for (int step = 0; step < job.steps; step++) {
      await(full + 8 * stage, phase);
      const u8* here = memory + stage * stage_bytes;
      multiply(sum, reinterpret_cast<const uint4*>(here + at),
               reinterpret_cast<const uint4*>(here + input_at), job.depth);
      __syncwarp();
      if (lane == 0) arrive(empty + 8 * stage);
      if (++stage == job.stages) stage = 0, phase ^= 1;
    }
    // several k groups: one pass only, the ring is empty now and free for their sums
    if (job.k_groups > 1)
      add_groups(job, sum, reinterpret_cast<float4*>(memory), job.stages * stage_bytes / 16,
                 column_group * job.row_groups + row_group, k_group, lane);
    if (k_group == 0) finish(job, sum, scales, first_tile, column_group, lane);
    first_tile += job.ctas * job.tiles;
    if (pass + 1 < job.passes) load_scales(job, scales, first_tile, lane);
  }
}

// The same sums for more tokens, where inputs rather than weights are what a CTA waits for: CTA
// (group, g) takes the k group g of eight of `gemm`'s CTAs, so that it reads an eighth of the
// inputs. Only for 8 k groups and one row group. A warp's sum is bitwise the one of warp g there;
// they go to partial[g, m, n], and `gather` adds them in the same order.
constexpr int kParts = 8;

__device__ inline void produce_spread(const Job& job, u32 ring, u32 full, u32 empty, int lane) {
  u64 stream, keep;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(stream));
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(keep));
  const int part = blockIdx.y % kParts, first = blockIdx.y / kParts * kParts;
  const int piece = job.depth * TW * kTileBytes, slice = job.depth * kInputBytes;
  const int pieces = min(kParts, job.ctas - first), stage_bytes = kParts * piece + slice;
  const u8* weight = job.weight + size_t(first + lane) * kParts * piece + part * piece;
  const size_t stride = size_t(job.ctas) * kParts * piece;
  const u8* x = job.x + (size_t(blockIdx.x) * job.k_blocks + part * job.depth) * kInputBytes;
  const auto weights = [&](int i, int stage) {
    if (lane == 0) expect(full + 8 * stage, pieces * piece + slice);
    __syncwarp();
    if (lane < pieces)
      copy(ring + stage * stage_bytes + lane * piece, weight + i * stride, piece, full + 8 * stage, stream);
  };
  const int filled = min(job.stages, job.steps);
  for (int i = 0; i < filled; i++) weights(i, i);
  wait_for_previous();
  int stage = 0, phase = 1;
  for (int i = 0; i < job.steps; i++) {
    if (i >= filled) {
      await(empty + 8 * stage, phase);
      weights(i, stage);
    }
    if (lane == 0)
      copy(ring + stage * stage_bytes + kParts * piece, x + size_t(i) * kParts * slice, slice,
           full + 8 * stage, keep);
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(32 * (1 + 8 * CG), 1) gemm_spread(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int piece = job.depth * TW * kTileBytes, bytes = kParts * piece;
  const int stage_bytes = bytes + job.depth * kInputBytes;
  const u32 full = shared_address(memory + job.stages * stage_bytes), empty = full + 8 * job.stages;
  if (threadIdx.x == 0) {
    for (int i = 0; i < job.stages; i++) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, kParts * CG);
    }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  let_next_start();
  if (warp == kParts * CG) return produce_spread(job, shared_address(memory), full, empty, lane);
  wait_for_previous();
  const int part = warp % kParts, column_group = CG == 1 ? 0 : warp / kParts;
  Tile sum;
  clear(sum);
  int stage = 0, phase = 0;
  for (int step = 0; step < job.steps; step++) {
    await(full + 8 * stage, phase);
    const u8* here = memory + stage * stage_bytes;
    multiply(sum, reinterpret_cast<const uint4*>(here + part * piece + lane * 16),
             reinterpret_cast<const uint4*>(here + bytes + column_group * NT * 512 + lane * 16),
             job.depth);
    __syncwarp();
    if (lane == 0) arrive(empty + 8 * stage);
    if (++stage == job.stages) stage = 0, phase ^= 1;
  }
  const int cta = blockIdx.y / kParts * kParts + part;
  if (cta >= job.ctas) return;
  float* out = static_cast<float*>(job.out) + size_t(blockIdx.y % kParts) * job.rows * job.n;
  const int first_token = blockIdx.x * kBlock + column_group * 8 * NT + (lane % 4) * 2;
#pragma unroll
  for (int t = 0; t < TW; t++)
#pragma unroll
    for (int j = 0; j < NT; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int n = row_of(job, cta * job.tiles + t, lane, e / 2), m = first_token + j * 8 + e % 2;
        if (n < job.n && m < job.rows) out[size_t(m) * job.n + n] = sum[t][j][e];
      }
}

// out[m, n] = scale[n] * the sum of partial[g, m, n] in ascending order of g. n is a multiple of 4.
extern "C" __global__ void __launch_bounds__(256)
    gather(const float* partial, const float* scale, float* out, int rows, int n) {
  let_next_start();
  const int i = (blockIdx.x * 256 + threadIdx.x) * 4;
  float4 s = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
  if (FP8 && i < n) s = *reinterpret_cast<const float4*>(scale + i);
  wait_for_previous();
  if (i >= n) return;
  const size_t at = size_t(blockIdx.y) * n + i, part = size_t(rows) * n;
  float4 v[kParts];
#pragma unroll
  for (int g = 0; g < kParts; g++) v[g] = *reinterpret_cast<const float4*>(partial + g * part + at);
  float4 sum = v[0];
#pragma unroll
  for (int g = 1; g < kParts; g++) sum.x += v[g].x, sum.y += v[g].y, sum.z += v[g].z, sum.w += v[g].w;
  *reinterpret_cast<float4*>(out + at) = make_float4(sum.x * s.x, sum.y * s.y, sum.z * s.z, sum.w * s.w);
}
