// What attention's kernels share: a call's place in the cache, the cache's number format, head vectors
// in a warp, sums of shares.
//
// Keys are cut into chunks of 128 (64 for wide heads and for short windows) at absolute positions, and
// chunk c belongs to lane c % 16 (`lane_of` where there are more lanes). A lane takes its chunks in ascending order with
// a running maximum; then the lanes' results are merged in ascending order. So a row's sums depend on absolute positions alone, not on the CTA that
// computes them. Chunks that a row can't see add exactly nothing to it.
// k [slots, kv_heads, S, PADDED_HEAD_DIM]; v [slots, kv_heads, S / 32, PADDED_HEAD_DIM, 32]: position p is entry
// p mod S.
#pragma once
#include "common.cuh"

#ifndef PADDED_HEAD_DIM  // head_dim, padded up to 64, 128, 256 or 512
#define PADDED_HEAD_DIM 256
#endif
#ifndef HEAD_DIM  // head_dim
#define HEAD_DIM PADDED_HEAD_DIM
#endif
#ifndef CHUNK_KEYS  // keys of a chunk: 128, or 64
#define CHUNK_KEYS 64
#endif
#ifndef LANES  // to which chunks are dealt: 16, 32, 64
#define LANES 16
#endif
#ifndef FP8_CACHE  // 1: e4m3 cache, arithmetic in f16; 0: bf16 both
#define FP8_CACHE 0
#endif
#ifndef LANES_PER_VECTOR  // lanes that share a head vector: 32, 16, 8
#define LANES_PER_VECTOR 32
#endif
#ifndef NORMED  // 0: queries are scaled, keys and values are taken as they are
#define NORMED 1
#endif
#ifndef RAW_VALUES  // 1: values are taken as they are, also where queries and keys are normed
#define RAW_VALUES 0
#endif
#ifndef BOTH_WAYS  // 1: all tokens of a call see each other, not those before them alone
#define BOTH_WAYS 0
#endif
#ifndef REACHING  // 1: job.reach says how far each token sees
#define REACHING 0
#endif

// ---- Number format of the cache ----
#if FP8_CACHE
typedef u8 Cached;
__device__ inline u16 to_math(float v) { return to_f16(v); }
__device__ inline Cached to_cache(float v) {
  unsigned short two;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(two) : "f"(0.0f), "f"(v));
  return u8(two & 0xff);
}
#define MMA mma_f16
typedef uint2 Eight;  // values of the cache as they are stored
__device__ inline Eight nothing() { return make_uint2(0, 0); }
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
__device__ inline Eight nothing() { return make_uint4(0, 0, 0, 0); }
__device__ inline uint4 wide(Eight raw) { return raw; }
#endif
__device__ inline Eight load8(const Cached* p) { return *reinterpret_cast<const Eight*>(p); }

// ---- The job ----
constexpr int kChunk = CHUNK_KEYS, kLanes = LANES, kDim = HEAD_DIM, kHalf = HEAD_DIM / 2;
static_assert(PADDED_HEAD_DIM == 64 || PADDED_HEAD_DIM == 128 || PADDED_HEAD_DIM == 256 || PADDED_HEAD_DIM == 512,
              "Heads are padded to 64, 128, 256 or 512 elements.");
static_assert(HEAD_DIM <= PADDED_HEAD_DIM, "A head fits into its padding.");
static_assert(CHUNK_KEYS == 64 || CHUNK_KEYS == 128, "A chunk of keys is 64 or 128: the order of sums depends on it.");
static_assert(LANES == 16 || LANES == 32 || LANES == 64, "A column of chunks has 1, 2 or 4 lanes.");
static_assert(!(BOTH_WAYS && REACHING), "How far a token sees has one source.");
static_assert(LANES_PER_VECTOR == 32 || LANES_PER_VECTOR == 16 || LANES_PER_VECTOR == 8,
              "A warp makes 1, 2 or 4 head vectors at once.");

// ---- Lanes ----
// Chunk c stands in column c % 16, round c / 16; lane `column + 16 part` belongs to a column. Sixteen lanes have one
// each. Global layers with few K/V heads have more, so that long texts keep the machine busy. The first rounds are all
// of part 0: shorter texts are summed and merged as by sixteen lanes, in as little time. Then further parts take rounds
// in turn until they have as many, so that no lane waits for a longer one, and from there on all parts do. Without
// windows: a lane's first chunk is the same for all rows.
enum {
  kColumns = 16,
  kParts = kLanes / kColumns,             // lanes of a column
  kFurther = kParts > 1 ? kParts - 1 : 1, // of these, all but the first
  kFirstRounds = 6,                       // 6,144 keys of wide heads: a text of 4,096 and a long answer
  kEvenRounds = kFirstRounds * kParts,
};

__device__ inline int lane_of(int chunk) {
  if (kParts == 1) return chunk & (kLanes - 1);
  const int round = chunk / kColumns;
  int part = round % kParts;
  if (round < kEvenRounds) part = round < kFirstRounds ? 0 : 1 + (round - kFirstRounds) % kFurther;
  return chunk % kColumns + part * kColumns;
}
// A lane's first chunk, where no window begins behind it.
__device__ inline int first_chunk(int lane) {
  return lane < kColumns ? lane : lane + (kFirstRounds - 1) * kColumns;
}
// A lane's next chunk.
__device__ inline int next_chunk(int lane, int chunk) {
  if (kParts == 1 || chunk >= kEvenRounds * kColumns) return chunk + kLanes;
  const bool first = lane < kColumns;
  const int next = chunk + (first ? kColumns : kLanes - kColumns);
  return next < (first ? kFirstRounds : kEvenRounds) * kColumns ? next : kEvenRounds * kColumns + lane;
}

struct Job {
  const float* qkv;
  const float* q_norm;
  const float* k_norm;
  const float* cosine;  // [positions, head_dim / 2]
  const float* sine;
  Cached* k;
  Cached* v;
  const int* start;
  const int* slot;
  void* x;        // the output projection's input
  u16* q;         // [B * kv_heads, shares, fragments of `rows` rows]; null: `split` and `fused` prepare queries themselves
  float* partial; // [lanes, B * kv_heads, T * G, PADDED_HEAD_DIM]: short contexts touch few pages
  float2* sums;   // [lanes, B * kv_heads, T * G]: (m, l)
  int stride;     // floats per row of qkv
  int batch, tokens, group, kv_heads;
  int entries, window;       // S; 0: global
  int own, k_eq_v;           // whether K/V are this layer's own; values are the raw keys
  int stores;                // whether `fused` stores them, not `prepare`
  int stages;                // of `fused`'s ring
  int rows;                  // query rows per CTA where q is read
  int fp8, k_blocks, block, k_groups;  // of the layer that reads x: FP8 weights or bf16 ones; x's layout, block 0: rows
  float eps;
#if REACHING              // else a kernel's parameters end before it
  const int* reach;       // [B, T]: the newest position that a token sees, which never falls within a sequence
#endif

  // The newest position that the query at a position of sequence b sees, whose call begins at `start`.
  __device__ int newest(int b, int start, int query) const {
#if REACHING
    return reach[b * tokens + min(query - start, tokens - 1)];
#else
    return BOTH_WAYS ? start + tokens - 1 : query;
#endif
  }
  // Fragments of a CTA's queries.
  __device__ u16* queries(int b, int head, int share) const {
    const int all = tokens * group, shares = (all + rows - 1) / rows;
    return q + (size_t(b * kv_heads + head) * shares + share) * PADDED_HEAD_DIM * ((rows + 15) / 16 * 16);
  }
  __device__ size_t part(int b, int head, int lane, int row) const {
    return (size_t(lane * batch + b) * kv_heads + head) * tokens * group + row;
  }
};

// The place of a call in the cache and in time. Written before the first kernel of a call, which
// no other one overtakes: it may be read before `wait_for_previous`, and so may `reach`.
struct Place {
  int slot, start;
  __device__ Place(const Job& job, int b) : slot(job.slot[b]), start(job.start[b]) {}
};

// ---- Head vectors: norm and rotary angles ----
enum Role { kQuery, kKey, kValue };
// head vectors that a warp processes at once
constexpr int kVectors = 32 / LANES_PER_VECTOR;
// a lane's groups of 4 elements of each half
constexpr int kQuads = PADDED_HEAD_DIM <= 8 * LANES_PER_VECTOR ? 1 : PADDED_HEAD_DIM / (8 * LANES_PER_VECTOR);

// Four elements of each half of a head vector. Rotary turns the halves in pairs.
struct Part {
  float low[4], high[4];

  __device__ void load(const float* lows, const float* highs) {
    const float4 a = *reinterpret_cast<const float4*>(lows), b = *reinterpret_cast<const float4*>(highs);
    low[0] = a.x, low[1] = a.y, low[2] = a.z, low[3] = a.w;
    high[0] = b.x, high[1] = b.y, high[2] = b.z, high[3] = b.w;
  }
};

// A head vector in LANES_PER_VECTOR lanes: each holds elements 4 lane + 4 LANES_PER_VECTOR j + 0..3 of each half.
struct Vector {
  Part at[kQuads];

  __device__ static int first(int j) { return 4 * (threadIdx.x % LANES_PER_VECTOR + LANES_PER_VECTOR * j); }

  __device__ void load(const float* raw) { load(raw, raw + kHalf); }
  __device__ void load(const float* lows, const float* highs) {
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      const int i = first(j);
      at[j] = {};
      if (i < kHalf) at[j].load(lows + i, highs + i);
    }
  }
  // The sum of squares, in the order of 32 lanes: with fewer, each adds the partial sums of two or four of those.
  __device__ float squares() const {
    float of_lane[kVectors] = {};
#pragma unroll
    for (int j = 0; j < kQuads; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float& sum = of_lane[j % kVectors];
        sum = __fmaf_rn(at[j].high[e], at[j].high[e], __fmaf_rn(at[j].low[e], at[j].low[e], sum));
      }
#pragma unroll
    for (int d = kVectors / 2; d; d /= 2)
#pragma unroll
      for (int i = 0; i < d; i++) of_lane[i] += of_lane[i + d];
    return warp_sum<LANES_PER_VECTOR>(of_lane[0]);
  }
};

// A raw head vector becomes a query, a key or a value. Several kernels do it: how products and sums are rounded is
// spelled out, not left to the compiler. by: the norm's weight and the position's angles, cosines in the low halves and
// sines in the high ones.
template <typename By>
__device__ inline void rotate(const Job& job, Role role, Vector& x, const By& by) {
#if NORMED
  const bool raw = RAW_VALUES && role == kValue;
  const float inverse = raw ? 1.0f : rsqrtf(__fadd_rn(__fmul_rn(x.squares(), 1.0f / kDim), job.eps));
#else
  const float inverse = role == kQuery ? rsqrtf(float(kDim)) : 1.0f;
#endif
#pragma unroll
  for (int j = 0; j < kQuads; j++) {
    Part weight, angle;
    if (role != kValue) weight = by.weight(j), angle = by.angle(j);
#pragma unroll
    for (int e = 0; e < 4; e++) {
      float& a = x.at[j].low[e];
      float& b = x.at[j].high[e];
      a = __fmul_rn(a, inverse), b = __fmul_rn(b, inverse);
      if (role == kValue) continue;
#if NORMED
      a = __fmul_rn(a, weight.low[e]), b = __fmul_rn(b, weight.high[e]);
#endif
      const float c = angle.low[e], s = angle.high[e];
      const float turned = __fmaf_rn(a, c, -__fmul_rn(b, s));
      b = __fmaf_rn(b, c, __fmul_rn(a, s)), a = turned;
    }
  }
}

// A vector's norm weights and rotary angles, in registers: loaded before the vector has arrived.
struct Rotation {
  Vector weights, angles;

  __device__ Part weight(int j) const { return weights.at[j]; }
  __device__ Part angle(int j) const { return angles.at[j]; }
  __device__ void load(const Job& job, Role role, int position) {
    if (role == kValue) return;
#if NORMED
    weights.load(role == kQuery ? job.q_norm : job.k_norm);
#endif
    load_angles(job, position);
  }
  __device__ void load_angles(const Job& job, int position) {
    angles.load(job.cosine + position * kHalf, job.sine + position * kHalf);
  }
};

// ---- Raw queries, keys and values ----
// A row's raw query of query head `head`.
__device__ inline const float* raw_query(const Job& job, size_t row, int head) {
  return job.qkv + row * job.stride + head * kDim;
}
// A row's raw key or value. Where values are the raw keys (k_eq_v), `qkv` has no values of its own.
__device__ inline const float* raw_key(const Job& job, size_t row, int head, Role role) {
  const int heads = job.kv_heads * (job.group + (role == kValue && !job.k_eq_v)) + head;
  return job.qkv + row * job.stride + heads * kDim;
}

// ---- Queries as fragments, keys and values in the cache ----
// Where columns c and c + 1 of row r are among A fragments of the tensor cores, in words: [r / 16][step of 16
// columns][lane][4]. The columns of a step are those that a lane's 16 bytes of a key have in its half of them.
__device__ inline u32 fragment(u32 r, u32 c, u32 columns) {
  const u32 step = r / 16 * (columns / 16) + c / 32 * 2 + c % 8 / 4;
  return ((step * 8 + r % 8) * 4 + c % 32 / 8) * 4 + c % 4 / 2 * 2 + r % 16 / 8;
}

// Stores row `row` of a CTA's queries as fragments, in global or shared memory.
__device__ inline void store_query(u16* queries, int row, const Vector& x) {
  u32* words = reinterpret_cast<u32*>(queries);
  const u32 first = Vector::first(0), at = fragment(row, first, PADDED_HEAD_DIM);
#pragma unroll
  for (int j = 0; j < kQuads; j++)
#pragma unroll
    for (int high = 0; high < 2; high++) {
      const float(&v)[4] = high ? x.at[j].high : x.at[j].low;
      if (Vector::first(j) >= kHalf) continue;
      const int behind = Vector::first(j) - first + high * kHalf;
      // 32 columns are 256 words
      u32* to = words + (behind % 32 ? fragment(row, first + behind, PADDED_HEAD_DIM) : at + behind * 8);
      to[0] = to_math(v[0]) | u32(to_math(v[1])) << 16, to[2] = to_math(v[2]) | u32(to_math(v[3])) << 16;
    }
#pragma unroll 1
  for (int d = kDim + threadIdx.x % LANES_PER_VECTOR * 2; d < PADDED_HEAD_DIM; d += LANES_PER_VECTOR * 2)
    words[fragment(row, d, PADDED_HEAD_DIM)] = 0;
}

// Four values next to each other.
__device__ inline void store4(Cached* to, const float (&v)[4]) {
#if FP8_CACHE
  *reinterpret_cast<u32*>(to) = to_cache(v[0]) | to_cache(v[1]) << 8 | to_cache(v[2]) << 16 | u32(to_cache(v[3])) << 24;
#else
  *reinterpret_cast<uint2*>(to) = make_uint2(to_cache(v[0]) | u32(to_cache(v[1])) << 16, to_cache(v[2]) | u32(to_cache(v[3])) << 16);
#endif
}

__device__ inline void store_key(const Job& job, int slot, int head, int position, Role role,
                                 const Vector& x) {
  const int entry = remainder(position, job.entries);
  const size_t row = (size_t(slot) * job.kv_heads + head) * job.entries;
  Cached* key = job.k + (row + entry) * PADDED_HEAD_DIM;
  Cached* column = job.v + (row + entry / 32 * 32) * PADDED_HEAD_DIM + entry % 32;
#pragma unroll
  for (int j = 0; j < kQuads; j++) {
    const int i = Vector::first(j);
    if (i >= kHalf) break;
    if (role == kKey) {
      store4(key + i, x.at[j].low), store4(key + kHalf + i, x.at[j].high);
      continue;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
      column[(i + e) * 32] = to_cache(x.at[j].low[e]), column[(kHalf + i + e) * 32] = to_cache(x.at[j].high[e]);
  }
}

// ---- Merging lanes, output ----
// Sums of shares, relative to their maximum.
struct Sums {
  float m = -INFINITY, l = 0.0f;
};

// Adds a lane's sums to `all`; -> the factors of the vectors so far and of the lane's.
__device__ inline float2 merge(Sums& all, Sums lane) {
  const float m = fmaxf(all.m, lane.m);
  const bool none = lane.m == -INFINITY;
  const float2 factor = make_float2(none ? 1.0f : __expf(all.m - m), none ? 0.0f : __expf(lane.m - m));
  all.l = __fmaf_rn(all.l, factor.x, __fmul_rn(lane.l, factor.y));
  all.m = m;
  return factor;
}
__device__ inline float merged(float all, float lane, float2 factor) {
  return __fmaf_rn(all, factor.x, __fmul_rn(lane, factor.y));
}

// Four outputs of query head `head` of call row m, for the output projection.
__device__ inline void emit(const Job& job, int m, int head, int column, float4 o, float l) {
  if (column >= kDim) return;
  const int f = head * kDim + column;
  const auto narrow = [&](float v) { return job.fp8 ? input_of_fp8(v) : to_bf16(v); };
  const u32 low = narrow(o.x / l) | u32(narrow(o.y / l)) << 16;
  const u32 high = narrow(o.z / l) | u32(narrow(o.w / l)) << 16;
  if (!job.block) {
    const size_t row = size_t(m) * job.kv_heads * job.group * kDim;
    *reinterpret_cast<uint2*>(static_cast<u32*>(job.x) + (row + f) / 2) = make_uint2(low, high);
    return;
  }
  store_inputs(job.x, m, f, low, high, job.k_blocks, job.block, job.k_groups);
}
