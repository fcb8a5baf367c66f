// Before attention in a long prefill chunk: queries, keys and values from the projection, the cache
// written and read.
//
// Cache: k [slots, kv_heads, S, D'], v [slots, kv_heads, S / 32, D', 32], position p in entry
// p mod S. A chunk's keys and values, older ones included, lie in [positions, kv_heads, D] bf16.
#include "common.cuh"

#ifndef FP8_CACHE  // 1: e4m3 cache; 0: bf16
#define FP8_CACHE 0
#endif

#ifndef MAX_HEAD_DIM  // widest head: 256 or 512
#define MAX_HEAD_DIM 256
#endif

constexpr int kPasses = MAX_HEAD_DIM / 2 / 128;  // a lane's groups of 4 pairs
constexpr int kLanes = 32;             // positions per CTA of `keys` and `recall`: a block of v

// ---- Number format of the cache ----
#if FP8_CACHE
typedef u8 Cached;
__device__ inline Cached to_cache(float v) {
  u16 two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
  return u8(two & 0xff);
}
__device__ inline u16 wide(Cached v) {  // exact: e4m3 -> f16 -> bf16
  u32 low, high;
  widen(v, low, high);
  float f;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %1; cvt.f32.f16 %0, a; }" : "=f"(f) : "r"(low));
  return to_bf16(f);
}
#else
typedef u16 Cached;
__device__ inline Cached to_cache(float v) { return to_bf16(v); }
__device__ inline u16 wide(Cached v) { return v; }
#endif

// ---- Head vectors ----
struct Place {  // of a chunk in one layer's cache
  Cached* k;
  Cached* v;
  u16* keys;    // [padded positions, kv_heads, D]
  u16* values;
  int entries, padded, dim, kv_heads;  // S, D', D
  int slot, start, tokens, oldest;     // oldest: position of keys[0]
};

__device__ inline float4 four(const u16* p) {
  const uint2 raw = *reinterpret_cast<const uint2*>(p);
  return make_float4(from_bf16(u16(raw.x)), from_bf16(u16(raw.x >> 16)), from_bf16(u16(raw.y)),
                     from_bf16(u16(raw.y >> 16)));
}
__device__ inline void store_four(u16* p, const u16 (&v)[4]) {
  *reinterpret_cast<uint2*>(p) = make_uint2(v[0] | u32(v[1]) << 16, v[2] | u32(v[3]) << 16);
}

// A norm's weight [dim] and a position's angles [dim / 2], as `Vector` holds its elements.
struct Rotation {
  float low[kPasses][4], high[kPasses][4], cosine[kPasses][4], sine[kPasses][4];

  __device__ Rotation(const float* weight, const float* cosines, const float* sines, int dim) {
    const int lane = threadIdx.x % 32, half = dim / 2;
#pragma unroll
    for (int j = 0; j < kPasses; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const int i = 4 * lane + 128 * j + e;
        if (i >= half) continue;
        low[j][e] = weight[i], high[j][e] = weight[half + i];
        cosine[j][e] = cosines[i], sine[j][e] = sines[i];
      }
  }
};

// A head vector in a warp: lane holds elements 4 lane + 128 j + 0..3 of each half.
struct Vector {
  float low[kPasses][4], high[kPasses][4];

  __device__ void load(const u16* from, int dim) {
    const int lane = threadIdx.x % 32, half = dim / 2;
#pragma unroll
    for (int j = 0; j < kPasses; j++) {
      const int i = 4 * lane + 128 * j;
      const bool inside = i < half;
      const float4 a = inside ? four(from + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      const float4 b = inside ? four(from + half + i) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      low[j][0] = a.x, low[j][1] = a.y, low[j][2] = a.z, low[j][3] = a.w;
      high[j][0] = b.x, high[j][1] = b.y, high[j][2] = b.z, high[j][3] = b.w;
    }
  }

  // To mean square 1: lane by lane, then over the warp.
  __device__ void norm(int dim, float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kPasses; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) squares += low[j][e] * low[j][e] + high[j][e] * high[j][e];
    const float inverse = rsqrtf(warp_sum(squares) / dim + eps);
#pragma unroll
    for (int j = 0; j < kPasses; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) low[j][e] *= inverse, high[j][e] *= inverse;
  }

  __device__ void rotate(const Rotation& by) {
#pragma unroll
    for (int j = 0; j < kPasses; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float a = low[j][e] * by.low[j][e], b = high[j][e] * by.high[j][e];
        low[j][e] = a * by.cosine[j][e] - b * by.sine[j][e];
        high[j][e] = b * by.cosine[j][e] + a * by.sine[j][e];
      }
  }
};

// ---- Queries ----
// One CTA per token. Its warps take the query heads in turn, two at a time.
// q [runs, tokens, heads / runs, D].
extern "C" __global__ void __launch_bounds__(256)
    queries(const u16* qkv, const float* weight, const float* cosine, const float* sine, u16* q,
            int stride, int heads, int runs, int dim, float eps) {
  const int lane = threadIdx.x % 32, t = blockIdx.x, half = dim / 2, run = heads / runs;
  const Rotation rotation(weight, cosine + size_t(t) * half, sine + size_t(t) * half, dim);
  const u16* from = qkv + size_t(t) * stride;
  const auto put = [&](Vector& x, int head) {
    x.norm(dim, eps);
    x.rotate(rotation);
    u16* to = q + ((size_t(head / run) * gridDim.x + t) * run + head % run) * dim;
#pragma unroll
    for (int j = 0; j < kPasses; j++) {
      const int i = 4 * lane + 128 * j;
      if (i >= half) continue;
      u16 a[4], b[4];
#pragma unroll
      for (int e = 0; e < 4; e++) a[e] = to_bf16(x.low[j][e]), b[e] = to_bf16(x.high[j][e]);
      store_four(to + i, a);
      store_four(to + half + i, b);
    }
  };
  for (int head = threadIdx.x / 32; head < heads; head += 16) {
    Vector x, y;
    const bool second = head + 8 < heads;
    x.load(from + head * dim, dim);
    if (second) y.load(from + (head + 8) * dim, dim);
    put(x, head);
    if (second) put(y, head + 8);
  }
}

// ---- Keys and values ----
// Rounds a vector as the cache does; writes it to `flat`, and to every `step`-th of `cached`.
__device__ inline void store(const Vector& x, int dim, u16* flat, Cached* cached, int step) {
  const int lane = threadIdx.x % 32, half = dim / 2;
#pragma unroll
  for (int j = 0; j < kPasses; j++) {
    const int i = 4 * lane + 128 * j;
    if (i >= half) continue;
    u16 a[4], b[4];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const Cached low = to_cache(x.low[j][e]), high = to_cache(x.high[j][e]);
      a[e] = wide(low), b[e] = wide(high);
      if (cached) cached[(i + e) * step] = low, cached[(half + i + e) * step] = high;
    }
    store_four(flat + i, a);
    store_four(flat + half + i, b);
  }
}

// New keys and values: one CTA per 32 positions (at absolute multiples) and KV head. v is
// transposed in shared memory. raw: the KV part of qkv.
extern "C" __global__ void __launch_bounds__(512)
    keys(const __grid_constant__ Place at, const u16* raw, const float* weight, const float* cosine,
         const float* sine, int stride, int k_eq_v, float eps) {
  __shared__ Cached turned[MAX_HEAD_DIM * (kLanes + 1)];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y, dim = at.dim;
  const int base = (at.start / kLanes + blockIdx.x) * kLanes, stop = at.start + at.tokens;
  const int kept = max(at.start, stop - at.entries);  // older ones have no place in a ring
  const size_t row = size_t(at.slot) * at.kv_heads + head;
  for (int i = warp; i < kLanes; i += 16) {
    const int p = base + i, t = p - at.start;
    if (t < 0 || p >= stop) continue;
    const u16* from = raw + size_t(t) * stride + head * dim;
    const size_t flat = (size_t(p - at.oldest) * at.kv_heads + head) * dim;
    Vector x, value;
    x.load(from, dim);
    if (!k_eq_v) value.load(from + at.kv_heads * dim, dim);
    const Rotation rotation(weight, cosine + size_t(t) * (dim / 2), sine + size_t(t) * (dim / 2), dim);
    x.norm(dim, eps);
    if (k_eq_v)
      value = x;
    else
      value.norm(dim, eps);
    store(value, dim, at.values + flat, turned + i, kLanes + 1);
    x.rotate(rotation);
    Cached* k = at.k + (row * at.entries + p % at.entries) * at.padded;
    store(x, dim, at.keys + flat, p >= kept ? k : nullptr, 1);
  }
  __syncthreads();
  const int p = base + lane;
  if (p < kept || p >= stop) return;
  Cached* block = at.v + (row * at.entries + base % at.entries) * at.padded;
  for (int d = warp; d < dim; d += 16) block[d * kLanes + lane] = turned[d * (kLanes + 1) + lane];
}

// What the cache holds of positions `oldest` .. start - 1, in plain order. Grid as for `keys`.
extern "C" __global__ void __launch_bounds__(256) recall(const __grid_constant__ Place at) {
  __shared__ u16 turned[kLanes * (MAX_HEAD_DIM + 2)];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head = blockIdx.y, dim = at.dim;
  const int base = (at.oldest / kLanes + blockIdx.x) * kLanes;
  const size_t row = size_t(at.slot) * at.kv_heads + head;
  const Cached* block = at.v + (row * at.entries + base % at.entries) * at.padded;
  for (int d = warp; d < dim; d += 8) turned[lane * (dim + 2) + d] = wide(block[d * kLanes + lane]);
  __syncthreads();
  for (int i = warp; i < kLanes; i += 8) {
    const int p = base + i;
    if (p < at.oldest || p >= at.start) continue;
    const size_t flat = (size_t(p - at.oldest) * at.kv_heads + head) * dim;
    const Cached* k = at.k + (row * at.entries + p % at.entries) * at.padded;
    for (int d = 2 * lane; d < dim; d += 64) {
      const u32 v = *reinterpret_cast<const u32*>(turned + i * (dim + 2) + d);
      *reinterpret_cast<u32*>(at.values + flat + d) = v;
      *reinterpret_cast<u32*>(at.keys + flat + d) = wide(k[d]) | u32(wide(k[d + 1])) << 16;
    }
  }
}
