// Split-KV attention for a few query rows.
//
// `prepare` norms and rotates q and k and stores K/V. Keys are cut into chunks of 128 at absolute
// positions: one CTA of `attend` takes one chunk of one KV head for all T * G query rows that share
// it (up to 16 * MT of them), and writes a partial result (m, l, o) in float32; `combine` adds a
// row's partials in ascending order of chunks. Nothing depends on T, on the batch, or on where the
// context ends. Keys from earlier calls are loaded before the previous kernel has ended.
// k [slots, kv_heads, S, D]; v [slots, kv_heads, S / 32, D, 32]: position p is entry p mod S.
#include "common.cuh"

#ifndef HD  // head_dim, padded up to 64, 128, 256 or 512
#define HD 256
#endif
#ifndef MT  // 16-row tiles of query rows per CTA: 1, 2
#define MT 1
#endif
#ifndef KV8  // 1: e4m3 cache, arithmetic in f16; 0: bf16 both
#define KV8 0
#endif
#ifndef FP8  // what the output projection's weights are
#define FP8 1
#endif

constexpr int kChunk = 128;
constexpr int kRows = 16 * MT;
constexpr int kTiles = HD / 64;  // 8-column tiles of the output per warp
constexpr int kScores = kChunk + 4;

#if KV8
typedef u8 Cached;
__device__ inline u16 to_math(float v) { return to_f16(v); }
__device__ inline Cached to_cache(float v) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
  return u8(two & 0xff);
}
#define MMA mma_f16
typedef uint2 Eight;  // values of the cache as they are stored
__device__ inline uint4 wide(Eight raw) {
  uint4 v;
  widen(raw.x, v.x, v.y);
  widen(raw.y, v.z, v.w);
  return v;
}
#else
typedef u16 Cached;
__device__ inline u16 to_math(float v) { return to_bf16(v); }
__device__ inline Cached to_cache(float v) { return to_bf16(v); }
#define MMA mma_bf16
typedef uint4 Eight;  // values of the cache as they are stored
__device__ inline uint4 wide(Eight raw) { return raw; }
#endif
__device__ inline Eight load8(const Cached* p) { return *reinterpret_cast<const Eight*>(p); }

struct Job {
  const float* qkv;
  const float* q_norm;
  const float* k_norm;
  const float* cosine;  // [positions, head_dim / 2]
  const float* sine;
  Cached* k;
  Cached* v;
  u16* q;  // [B * kv_heads, HD / 32, T * G, 32]
  const int* start;
  const int* slot;
  float* partial;  // [B * kv_heads, chunks, T * G, HD]
  float2* weight;  // [B * kv_heads, chunks, T * G]: (m, l)
  int stride;      // floats per row of qkv
  int tokens, group, kv_heads, head_dim;
  int entries, window;  // S; 0: global
  int chunks;           // of a call at most
  int own, k_eq_v;      // whether this layer stores K/V of its own; values are the raw keys
  float eps;
};

// The place of a call in the cache and in time. Written before the first kernel of a call, which
// no other one overtakes: it may be read before `wait_for_previous`.
struct Place {
  int slot, start;
  __device__ Place(const Job& job, int b) : slot(job.slot[b]), start(job.start[b]) {}
};

// One warp per head vector of a row (grid: rows, heads / 8): lane's elements are lane + 32 i.
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ Job job) {
  __shared__ float scratch[8][HD];
  let_next_start();
  const int lane = threadIdx.x % 32, index = blockIdx.y * 8 + threadIdx.x / 32, m = blockIdx.x;
  const int heads = job.kv_heads * job.group, b = m / job.tokens, t = m % job.tokens;
  const int dim = job.head_dim, half = dim / 2;
  const Place place(job, b);
  const bool query = index < heads;
  if (place.slot < 0 || index >= heads + (job.own ? job.kv_heads : 0)) return wait_for_previous();
  const int position = place.start + t;
  const float* norm = query ? job.q_norm : job.k_norm;
  float weight[HD / 32], cosine[HD / 32], sine[HD / 32];
#pragma unroll
  for (int i = 0; i < HD / 32; i++) {
    const int d = lane + 32 * i;
    if (d >= dim) continue;
    const size_t at = size_t(position) * half + (d < half ? d : d - half);
    weight[i] = norm[d], cosine[i] = job.cosine[at], sine[i] = job.sine[at];
  }
  wait_for_previous();
  const float* raw = job.qkv + size_t(m) * job.stride + index * dim;
  float x[HD / 32], value[HD / 32], squares = 0.0f, value_squares = 0.0f;
#pragma unroll
  for (int i = 0; i < HD / 32; i++) {
    const int d = lane + 32 * i;
    x[i] = d < dim ? raw[d] : 0.0f;
    value[i] = query || d >= dim ? 0.0f : job.k_eq_v ? x[i] : raw[job.kv_heads * dim + d];
    squares += x[i] * x[i];
    value_squares += value[i] * value[i];
  }
  const float inverse = rsqrtf(warp_sum(squares) / dim + job.eps);
  const float value_inverse = rsqrtf(warp_sum(value_squares) / dim + job.eps);
  float* mine = scratch[threadIdx.x / 32];
#pragma unroll
  for (int i = 0; i < HD / 32; i++) {
    const int d = lane + 32 * i;
    x[i] = d < dim ? x[i] * inverse * weight[i] : 0.0f;
    mine[d] = x[i];
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < HD / 32; i++) {
    const int d = lane + 32 * i;
    if (d < dim) x[i] = x[i] * cosine[i] + (d < half ? -mine[d + half] : mine[d - half]) * sine[i];
  }
  if (query) {
    const int rows = job.tokens * job.group, head = index / job.group;
    u16* out = job.q + (size_t(b * job.kv_heads + head) * (HD / 32) * rows + t * job.group +
                        index % job.group) * 32 + lane;
#pragma unroll
    for (int i = 0; i < HD / 32; i++) out[size_t(i) * rows * 32] = to_math(x[i]);
    return;
  }
  const int entry = position % job.entries;
  const size_t row = (size_t(place.slot) * job.kv_heads + index - heads) * job.entries;
  Cached* key = job.k + (row + entry) * HD + lane;
  Cached* column = job.v + (row + entry / 32 * 32) * HD + entry % 32 + lane * 32;
#pragma unroll
  for (int i = 0; i < HD / 32; i++) {
    key[32 * i] = to_cache(x[i]);
    column[32 * i * 32] = to_cache(value[i] * value_inverse);
  }
}

// Few rows leave registers for all of a warp's keys, and then for its values: at once with the
// keys where both are small, else where the keys were.
constexpr int kKeyLoads = MT == 1 ? HD / 32 : 1;
constexpr bool kHold = MT == 1 && (HD <= 256 || KV8), kEarlyValues = kHold && KV8 && HD <= 256;
constexpr int kHeld = kHold ? 4 : 1, kHeldTiles = kHold ? kTiles : 1;
constexpr int kKeyUnroll = MT == 1 || HD < 256 ? HD / 32 : 8;

extern "C" __global__ void __launch_bounds__(256, MT == 1 && HD <= 256 ? 2 : 1)
    attend(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  u16* queries = reinterpret_cast<u16*>(memory);                   // [HD / 32][kRows][32]
  float* scores = reinterpret_cast<float*>(queries + kRows * HD);  // [kRows][kScores]
  u16* shares = reinterpret_cast<u16*>(scores + kRows * kScores);  // [4][kRows][32]
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tg = lane % 4;
  const int all_rows = job.tokens * job.group, blocks = (all_rows + kRows - 1) / kRows;
  const int b = blockIdx.z / blocks, first_row = (blockIdx.z % blocks) * kRows;
  const int head = blockIdx.y, rows = min(kRows, all_rows - first_row);
  const Place place(job, b);
  const int start = place.start;
  const int first_seen = job.window ? max(0, start - job.window + 1) : 0;
  const int chunk = first_seen / kChunk + blockIdx.x, key0 = chunk * kChunk;
  const int oldest = start + first_row / job.group;
  const int newest = start + (first_row + rows - 1) / job.group;
  if (place.slot < 0 || key0 > newest || (job.window && key0 + kChunk <= oldest - job.window + 1))
    return wait_for_previous();
  const size_t cache_row = (size_t(place.slot) * job.kv_heads + head) * job.entries;
  const Cached* keys = job.k + (cache_row + key0 % job.entries) * HD;
  const Cached* values = job.v + (cache_row + key0 % job.entries) * HD;
  const Cached* mine = keys + size_t(warp * 16 + g) * HD + tg * 8;
  const bool settled = key0 + kChunk <= start;  // nothing in this chunk is being written
  Eight early[kKeyLoads][2];
  const auto load_keys = [&] {
#pragma unroll
    for (int kb = 0; kb < kKeyLoads; kb++)
      early[kb][0] = load8(mine + kb * 32), early[kb][1] = load8(mine + 8 * HD + kb * 32);
  };
  const int column0 = warp * (HD / 8);
  const auto load_value = [&](int kb, int n) {
    return load8(values + size_t(kb * HD + column0 + n * 8 + g) * 32 + tg * 8);
  };
  Eight held[kHeld][kHeldTiles];
  const auto load_values = [&] {
#pragma unroll
    for (int kb = 0; kb < kHeld; kb++)
#pragma unroll
      for (int n = 0; n < kHeldTiles; n++) held[kb][n] = load_value(kb, n);
  };
  const auto load_early = [&] {
    load_keys();
    if (kEarlyValues) load_values();
  };
  if (threadIdx.x == 0) {
    if (!kEarlyValues) prefetch(values, kChunk * HD * sizeof(Cached));
    if (MT > 1) prefetch(keys, kChunk * HD * sizeof(Cached));
  }
  if (MT == 1 && settled) load_early();
  wait_for_previous();
  let_next_start();
  if (MT == 1 && !settled) load_early();
  {
    const uint4* from = reinterpret_cast<const uint4*>(job.q) +
                        size_t(b * job.kv_heads + head) * (HD / 32) * all_rows * 4;
    for (int i = threadIdx.x; i < kRows * HD / 8; i += 256) {
      const int kb = i / (kRows * 4), r = i / 4 % kRows;
      reinterpret_cast<uint4*>(queries)[i] =
          r < rows ? from[(size_t(kb) * all_rows + first_row + r) * 4 + i % 4] : make_uint4(0, 0, 0, 0);
    }
  }
  __syncthreads();

  {  // scores: this warp's 16 keys against all rows
    float s[MT][2][4] = {};
#pragma unroll kKeyUnroll
    for (int kb = 0; kb < HD / 32; kb++) {
      const uint4 k0 = wide(MT == 1 ? early[kb % kKeyLoads][0] : load8(mine + kb * 32));
      const uint4 k1 = wide(MT == 1 ? early[kb % kKeyLoads][1] : load8(mine + 8 * HD + kb * 32));
#pragma unroll
      for (int t = 0; t < MT; t++) {
        const uint4* q = reinterpret_cast<const uint4*>(queries + (kb * kRows + t * 16) * 32);
        const uint4 lo = q[g * 4 + tg], hi = q[(g + 8) * 4 + tg];
        MMA(s[t][0], lo.x, hi.x, lo.y, hi.y, k0.x, k0.y);
        MMA(s[t][0], lo.z, hi.z, lo.w, hi.w, k0.z, k0.w);
        MMA(s[t][1], lo.x, hi.x, lo.y, hi.y, k1.x, k1.y);
        MMA(s[t][1], lo.z, hi.z, lo.w, hi.w, k1.z, k1.w);
      }
    }
#pragma unroll
    for (int t = 0; t < MT; t++)
#pragma unroll
      for (int n = 0; n < 2; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int r = t * 16 + g + (e / 2) * 8, key = warp * 16 + n * 8 + tg * 2 + e % 2;
          const int at = key0 + key, query = start + (first_row + r) / job.group;
          const bool seen = at <= query && (!job.window || at > query - job.window);
          scores[r * kScores + key] = seen ? s[t][n][e] : -INFINITY;
        }
  }
  __syncthreads();

  if (kHold && !kEarlyValues) load_values();
  const size_t part = (size_t(b * job.kv_heads + head) * job.chunks + blockIdx.x) * all_rows + first_row;
  for (int r = warp; r < kRows; r += 8) {
    const float4 s = *reinterpret_cast<const float4*>(scores + r * kScores + lane * 4);
    const float m = warp_max(fmaxf(fmaxf(s.x, s.y), fmaxf(s.z, s.w)));
    float p[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    if (m > -INFINITY)
      p[0] = __expf(s.x - m), p[1] = __expf(s.y - m), p[2] = __expf(s.z - m), p[3] = __expf(s.w - m);
    const float l = warp_sum((p[0] + p[1]) + (p[2] + p[3]));
    *reinterpret_cast<uint2*>(shares + ((lane / 8) * kRows + r) * 32 + (lane % 8) * 4) = make_uint2(
        to_math(p[0]) | u32(to_math(p[1])) << 16, to_math(p[2]) | u32(to_math(p[3])) << 16);
    if (lane == 0 && r < rows) job.weight[part + r] = make_float2(m, l);
  }
  __syncthreads();

  float o[MT][kTiles][4] = {};  // this warp's columns for all rows
#pragma unroll
  for (int kb = 0; kb < kChunk / 32; kb++)
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const uint4 v = wide(kHold ? held[kb % kHeld][n % kHeldTiles] : load_value(kb, n));
#pragma unroll
      for (int t = 0; t < MT; t++) {
        const uint4* p = reinterpret_cast<const uint4*>(shares + (kb * kRows + t * 16) * 32);
        const uint4 lo = p[g * 4 + tg], hi = p[(g + 8) * 4 + tg];
        MMA(o[t][n], lo.x, hi.x, lo.y, hi.y, v.x, v.y);
        MMA(o[t][n], lo.z, hi.z, lo.w, hi.w, v.z, v.w);
      }
    }
#pragma unroll
  for (int t = 0; t < MT; t++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int e = 0; e < 4; e += 2) {
        const int r = t * 16 + g + (e / 2) * 8;
        if (r < rows)
          *reinterpret_cast<float2*>(job.partial + (part + r) * HD + column0 + n * 8 + tg * 2) =
              make_float2(o[t][n][e], o[t][n][e + 1]);
      }
}

// One CTA per (row, query head): its partials in ascending order of chunks. `first`: where the
// call's rows begin in x.
extern "C" __global__ void __launch_bounds__(HD)
    combine(const float* partial, const float2* weight, const int* start, const int* slot, void* x,
            int tokens, int group, int kv_heads, int head_dim, int window, int chunks, int k_blocks,
            int block, int first) {
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x, q = blockIdx.y, b = m / tokens, t = m % tokens, d = threadIdx.x;
  if (slot[b] < 0) return;
  const int query = start[b] + t;
  const int base = (window ? max(0, start[b] - window + 1) : 0) / kChunk;
  const int from = (window ? max(0, query - window + 1) : 0) / kChunk - base;
  const int to = query / kChunk - base, rows = tokens * group;
  const size_t row = size_t(b * kv_heads + q / group) * chunks * rows + t * group + q % group;
  float m_all = -INFINITY;
  for (int c = from; c <= to; c++) m_all = fmaxf(m_all, weight[row + size_t(c) * rows].x);
  float l = 0.0f, o = 0.0f;
#pragma unroll 4
  for (int c = from; c <= to; c++) {
    const float2 w = weight[row + size_t(c) * rows];
    const float share = __expf(w.x - m_all);
    l += share * w.y;
    o += share * partial[(row + size_t(c) * rows) * HD + d];
  }
  if (d >= head_dim) return;
  const size_t at = x_offset(first + m, q * head_dim + d, k_blocks, block);
  static_cast<u16*>(x)[at] = FP8 ? input_of_fp8(o / l) : to_bf16(o / l);
}
