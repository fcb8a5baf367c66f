// Mixture of experts for few rows: bound by reading the experts that the rows picked, and no other.
//
// Weights are the A operand as in gemm.cu, the tokens that picked an expert its columns, so that a
// token's result depends on nothing beside it. A unit is two tiles of 16 weight rows (gate's and
// up's of the same features) with all of their inputs, contiguous in memory. A CTA takes
// `row_groups` units of one expert; `k_groups` warps share the eighths of k of each, which are added as a
// binary tree.
// The CTAs of one index find their expert themselves in what the router picked: the host needs to
// know nothing, and the ones beyond the last picked expert leave.
#include "tile.cuh"

constexpr int kThreads = 256;
constexpr int kUnit = 2 * kTileBytes;         // per 32 inputs
constexpr int kAhead = kNarrow ? 4 : 2;       // 32-input blocks that a warp has in flight
constexpr int kMost = 2;                      // blocks of 8 tokens at once
constexpr int kMaxExperts = 256;

struct Job {
  const u8* weight;    // [experts, units, blocks, 2 tiles]
  const float* scale;  // [experts, n] of narrow weights
  const u16* x;        // blocked input: of rows for gate_up, of pairs for down
  void* out;           // gate_up: next input [pairs, out_stride]; down: float [pairs, out_stride]
  const int* numbers;  // [pairs] experts, -1 for none; pair = row * top_k + rank
  int n, units, blocks;       // rows of an expert; its units; 32-input blocks
  int experts, pairs, top_k;
  int k_blocks, block;        // of x
  int row_groups, k_groups, parts;  // parts: of k, one or two a warp
  int out_stride;
  int f16;                    // gate_up: `down` takes f16 inputs, else bf16
  int ready;                  // gate_up: x and numbers were complete before it could start
  const u8* next;             // gate_up: the weight of `down` where it fits into L2, or null
  int next_bytes;             // of an expert of it
};

__device__ inline Stored load_weight(const u8* tile, int lane) {
  Stored to;
#if BITS == 4
  asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
      : "=r"(to.codes.x), "=r"(to.codes.y)
      : "l"(tile + lane * 8));
  if (E2M1)
    asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=r"(to.scales) : "l"(tile + scales_at(lane)));
  else
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to.scales) : "l"(tile + scales_at(lane)));
  to.zeros = 0;
  if (ZEROS) asm("ld.global.nc.L1::no_allocate.u16 %0, [%1];" : "=r"(to.zeros) : "l"(tile + kZerosAt + lane / 4 * 2));
#else
#pragma unroll
  for (int i = 0; i < BITS / 8; i++) {
    uint4& v = to.values[i];
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(tile + i * 512 + lane * 16));
  }
#endif
  return to;
}
// What a kernel before the previous one wrote: from L2, which no early start makes stale.
__device__ inline int load_number(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// The expert of this CTA: the blockIdx.y-th picked one, by rising number; -1 beyond the last.
__device__ inline int find_expert(const Job& job, int first) {
  __shared__ u32 picked[kMaxExperts / 32];
  __shared__ int mine;
  if (threadIdx.x < kMaxExperts / 32) picked[threadIdx.x] = 0;
  if (threadIdx.x == 0) mine = -1;
  __syncthreads();
  for (int i = threadIdx.x; i < job.pairs; i += kThreads) {
    const int e = i < kThreads ? first : load_number(job.numbers + i);
    if (e >= 0) atomicOr(&picked[e / 32], 1u << (e % 32));
  }
  __syncthreads();
  for (int e = threadIdx.x; e < job.experts; e += kThreads) {
    const u32 word = picked[e / 32], bit = 1u << (e % 32);
    if (!(word & bit)) continue;
    int before = __popc(word & (bit - 1));
    for (int w = 0; w < e / 32; w++) before += __popc(picked[w]);
    if (before == blockIdx.y) mine = e;
  }
  __syncthreads();
  return mine;
}

// Puts the pairs that picked the expert into `list`, in any order; -> how many.
__device__ inline int list_pairs(const Job& job, int expert, int first, int* list) {
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < job.pairs; i += kThreads)
    if ((i < kThreads ? first : load_number(job.numbers + i)) == expert) list[atomicAdd(&count, 1)] = i;
  __syncthreads();
  return count;
}

template <int NB>
struct Sum {
  float of[2][NB][4];  // [tile][8 tokens][fragment]
};

__device__ inline void multiply_tile(float (&sum)[4], const Stored& w, uint4 x) {
  u32 a[2][4];
#pragma unroll
  for (int s = 0; s < 2; s++) {
    expand(w, s, a[s]);
    const u32 first = s ? x.z : x.x, second = s ? x.w : x.y;
    if (kNarrow)
      mma_f16(sum, a[s][0], a[s][1], a[s][2], a[s][3], first, second);
    else
      mma_bf16(sum, a[s][0], a[s][1], a[s][2], a[s][3], first, second);
  }
}

// One warp: a unit's two tiles times `blocks` blocks of 32 inputs, for up to 8 NB tokens. x: each
// lane's token in each block of 8, null where there is none.
template <int NB>
__device__ inline void multiply(Sum<NB>& sum, const u8* w, const u32* const (&x)[NB],
                                int block, int blocks, int live, int lane) {
  const int stride = block * 16;
  for (int first = 0; first < blocks; first += kAhead) {
    Stored a[kAhead][2];
    uint4 early[kAhead];
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (first + u >= blocks) continue;
#pragma unroll
      for (int t = 0; t < 2; t++) a[u][t] = load_weight(w + (first + u) * kUnit + t * kTileBytes, lane);
    }
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      early[u] = make_uint4(0, 0, 0, 0);
      if (x[0] && first + u < blocks) early[u] = load_inputs(x[0] + (first + u) * stride, block);
    }
#pragma unroll
    for (int u = 0; u < kAhead; u++) {
      if (first + u >= blocks) continue;
#pragma unroll
      for (int j = 0; j < NB; j++) {
        if (j >= live) continue;
        uint4 b = early[u];
        if (j) b = x[j] ? load_inputs(x[j] + (first + u) * stride, block) : make_uint4(0, 0, 0, 0);
        multiply_tile(sum.of[0][j], a[u][0], b);
        multiply_tile(sum.of[1][j], a[u][1], b);
      }
    }
  }
}

// Adds the warps' parts of k; the first holds the sum.
template <int NB>
__device__ inline void add_groups(const Job& job, Sum<NB>& sum, float4* shared, int row_group,
                                  int k_group, int lane) {
  float4* mine = shared + row_group * 2 * NB * 32 + lane;
  const int size = job.row_groups * 2 * NB * 32;
  __syncthreads();  // everyone has read the last tokens' sums
  if (k_group)
#pragma unroll
    for (int i = 0; i < 2 * NB; i++) {
      const float* v = sum.of[i / NB][i % NB];
      mine[(k_group - 1) * size + i * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
  __syncthreads();
  if (k_group) return;
#pragma unroll
  for (int i = 0; i < 2 * NB; i++) {
    float* to = sum.of[i / NB][i % NB];
    float4 v[8] = {make_float4(to[0], to[1], to[2], to[3])};
#pragma unroll
    for (int g = 1; g < 8; g++)
      if (g < job.k_groups) v[g] = mine[(g - 1) * size + i * 32];
    const float4 all = tree_sum(v, job.k_groups);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  }
}

// Element e of a fragment: weight row lane / 4 (+ 8 for e >= 2), token 2 (lane % 4) (+ 1 for odd e).
template <int NB, bool kGate>
__device__ inline void finish(const Job& job, const Sum<NB>& sum, int expert, int unit,
                              const int* list, int count, int lane) {
  const float* scale = job.scale + size_t(expert) * job.n;
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int t = 0; t < (kGate ? 1 : 2); t++) {
      const int n = (kGate ? unit : 2 * unit + t) * 16 + lane / 4 + half * 8;
      if (n >= (kGate ? job.n / 2 : job.n)) continue;
      const float own = kNarrow ? scale[n] : 1.0f, up = kNarrow && kGate ? scale[job.n / 2 + n] : 1.0f;
#pragma unroll
      for (int j = 0; j < NB; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int token = j * 8 + (lane % 4) * 2 + e;
          if (token >= count) continue;
          const size_t at = size_t(list[token]) * job.out_stride + n;
          const float v = sum.of[t][j][half * 2 + e] * own;
          if (kGate) {
            const float gated = gelu_tanh(v) * (sum.of[1][j][half * 2 + e] * up);
            static_cast<u16*>(job.out)[at] = job.f16 ? input_of_fp8(gated) : to_bf16(gated);
          } else {
            static_cast<float*>(job.out)[at] = v;
          }
        }
    }
}

// The weights of a CTA's first units on their way to the L2 cache: known before the inputs are.
__device__ inline void fetch_ahead(const Job& job, int expert) {
  const int first = blockIdx.x * job.row_groups, units = min(job.row_groups, job.units - first);
  if (threadIdx.x == 0 && units > 0)
    prefetch(job.weight + (size_t(expert) * job.units + first) * job.blocks * kUnit, units * job.blocks * kUnit);
}

// A CTA's share of what `down` reads of this expert: it follows what is being read now, without a pause.
__device__ inline void fetch_next(const Job& job, int expert) {
  const int share = (job.next_bytes / 16 + gridDim.x - 1) / gridDim.x * 16, from = blockIdx.x * share;
  if (threadIdx.x == 0 && job.next && from < job.next_bytes)
    prefetch(job.next + size_t(expert) * job.next_bytes + from, min(share, job.next_bytes - from));
}

// Up to 8 NB of an expert's tokens.
template <int NB, bool kGate>
__device__ inline void compute(const Job& job, int expert, int group, const int* list, int count,
                               float4* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row_group = warp % job.row_groups, k_group = warp / job.row_groups;
  const int unit = group * job.row_groups + row_group;
  Sum<NB> sum = {};
  const int each = (job.blocks + job.parts - 1) / job.parts, share = job.parts / job.k_groups;
  for (int e = 0; e < share; e++) {
    const int first = (k_group * share + e) * each;
    const int blocks = unit < job.units ? max(0, min(each, job.blocks - first)) : 0;
    const u32* x[NB];
#pragma unroll
    for (int j = 0; j < NB; j++) {
      const int token = j * 8 + lane / 4;
      x[j] = nullptr;
      if (token >= count) continue;
      const int m = kGate ? list[token] / job.top_k : list[token];
      x[j] = reinterpret_cast<const u32*>(
          job.x + x_offset(m, first * 32 + lane % 4 * 8, job.k_blocks, job.block));
    }
    const u8* weight = job.weight + ((size_t(expert) * job.units + unit) * job.blocks + first) * kUnit;
    Sum<NB> part = {};
    multiply(part, weight, x, job.block, blocks, (count + 7) / 8, lane);
#pragma unroll
    for (int i = 0; i < 2 * NB * 4; i++) {
      float& to = sum.of[i / 4 / NB][i / 4 % NB][i % 4];
      const float v = part.of[i / 4 / NB][i / 4 % NB][i % 4];
      to = e ? to + v : v;
    }
  }
  if (kGate && group + gridDim.x >= (job.units + job.row_groups - 1) / job.row_groups) fetch_next(job, expert);
  add_groups(job, sum, shared, row_group, k_group, lane);
  if (kGate) wait_for_previous();  // until here only what was ready is read, and nothing written
  if (k_group == 0 && unit < job.units)
    finish<NB, kGate>(job, sum, expert, unit, list, count, lane);
}

template <bool kGate>
__device__ inline void run(const Job& job) {
  extern __shared__ __align__(128) u8 memory[];
  int* list = reinterpret_cast<int*>(memory);
  float4* shared = reinterpret_cast<float4*>(memory + (job.pairs + 3) / 4 * 16);
  // the numbers are needed twice, but loaded once where they are few
  const int first = threadIdx.x < job.pairs ? load_number(job.numbers + threadIdx.x) : -1;
  const int groups = (job.units + job.row_groups - 1) / job.row_groups;
  // what one row picked is as many experts: nothing is to be found or listed
  const bool lone = job.pairs == job.top_k;
  const int expert = lone ? load_number(job.numbers + blockIdx.y) : find_expert(job, first);
  if (expert < 0) return wait_for_previous();
  const int count = lone ? 1 : list_pairs(job, expert, first, list);
  if (lone) {
    if (threadIdx.x == 0) list[0] = blockIdx.y;
    __syncthreads();
  }
  if (!kGate) {
    fetch_ahead(job, expert);
    wait_for_previous();
  }
  for (int group = blockIdx.x; group < groups; group += gridDim.x) {
    if (count <= 8) {
      compute<1, kGate>(job, expert, group, list, count, shared);
      continue;
    }
    for (int i = 0; i < count; i += 8 * kMost)
      compute<kMost, kGate>(job, expert, group, list + i, min(8 * kMost, count - i), shared);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) gate_up(const __grid_constant__ Job job) {
  if (!job.ready) wait_for_previous();
  let_next_start();  // only now: `down` may then read what the router wrote before it waits
  run<true>(job);
}

extern "C" __global__ void __launch_bounds__(kThreads, 3) down(const __grid_constant__ Job job) {
  let_next_start();
  run<false>(job);
}
