// One chunk of keys and values against a CTA's query rows, which share its KV head. They are columns
// of the tensor cores, up to 8 * NT of them; keys and values are the A operand.
#pragma once
#include "attention.cuh"

#ifndef NT  // tiles of 8 query rows per CTA: 1, 2, 4
#define NT 1
#endif

constexpr int kWarps = 8, kRows = 8 * NT;
constexpr int kKeyGroups = kChunk / 16;          // of warps: each has 16 keys
constexpr int kSlices = kWarps / kKeyGroups;     // of head_dim, where more warps than that share them
constexpr int kKeyBlocks = HD / 32 / kSlices;    // of 32 inputs that a warp multiplies
constexpr int kKeysPerLane = kChunk / 32, kBlocks = kChunk / 32;
constexpr int kTiles = HD < 128 ? 1 : HD / 128;  // of 16 output columns per warp
constexpr int kColumnWarps = HD / 16 / kTiles;   // warps that have columns
constexpr int kScores = kChunk + 4;              // floats per row, without bank conflicts

// A CTA's part of a call: rows, keys that they see, and where it stands among chunks.
struct Work {
  int b, head, first_row, rows, start, slot;
  int oldest, newest;  // positions that some row sees
  int step, lane, chunk;  // chunk < 0: no more

  __device__ Work(const Job& job, int b, int head, int tile, int lane, int step)
      : b(b), head(head), step(step), lane(lane) {
    first_row = tile * kRows, rows = min(kRows, job.tokens * job.group - first_row);
    const Place place(job, b);
    start = place.start, slot = place.slot;
    newest = position(job, rows - 1);
    oldest = job.window ? max(0, position(job, 0) - job.window + 1) : 0;
    chunk = first();
  }
  __device__ int position(const Job& job, int row) const {
    return start + quotient(first_row + row, job.group);
  }
  __device__ int first() {
    const int begin = oldest / kChunk, end = newest / kChunk;
    for (; lane < kLanes; lane += step) {
      const int c = begin + ((lane - begin) & (kLanes - 1));
      if (c <= end) return c;
    }
    return -1;
  }
  __device__ bool settled() const { return (chunk + 1) * kChunk <= start; }  // nothing is being written
  __device__ bool sees_block(int kb) const {
    const int at = chunk * kChunk + kb * 32;
    return at + 32 > oldest && at <= newest;
  }
  __device__ size_t entry(const Job& job) const {  // of the chunk's first key
    return (size_t(slot) * job.kv_heads + head) * job.entries + remainder(chunk * kChunk, job.entries);
  }
  __device__ bool last_of_lane() const { return chunk + kLanes > newest / kChunk; }
  __device__ void advance() {
    if (!last_of_lane()) {
      chunk += kLanes;
      return;
    }
    lane += step;
    chunk = first();
  }
};

struct Shared {
  u16* queries;     // [HD / 32][kRows][32]
  float* scores;    // [kSlices][kRows][kScores]
  u16* shares;      // [kBlocks][kRows][32]
  float4* factors;  // [kRows]: of the lane's vector so far, of the merged one, of the lane's
  u8* rest;

  __device__ Shared(u8* memory) {
    queries = reinterpret_cast<u16*>(memory);
    scores = reinterpret_cast<float*>(queries + kRows * HD);
    shares = reinterpret_cast<u16*>(scores + kSlices * kRows * kScores);
    factors = reinterpret_cast<float4*>(shares + kBlocks * kRows * 32);
    rest = reinterpret_cast<u8*>(factors + kRows);
  }
};

// This warp's 16 keys against all rows, over its slice of head_dim. keys(kb, half): values of key
// lane / 4 (+ 8 for the second half) for 32 inputs.
template <typename Keys>
__device__ inline void score(const Keys& keys, const Shared& shared) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
  const int slice = warp / kKeyGroups;
  const uint4* queries = reinterpret_cast<const uint4*>(shared.queries) + slice * kKeyBlocks * kRows * 4;
  float s[NT][4] = {};
#pragma unroll
  for (int kb = 0; kb < kKeyBlocks; kb++) {
    const uint4 lo = wide(keys(kb, 0)), hi = wide(keys(kb, 1));
#pragma unroll
    for (int t = 0; t < NT; t++) {
      const uint4 q = queries[(kb * kRows + t * 8 + g) * 4 + tg];
      MMA(s[t], lo.x, hi.x, lo.y, hi.y, q.x, q.y);
      MMA(s[t], lo.z, hi.z, lo.w, hi.w, q.z, q.w);
    }
  }
  float* out = shared.scores + (slice * kRows + tg * 2) * kScores + warp % kKeyGroups * 16 + g;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) out[(t * 8 + e % 2) * kScores + e / 2 * 8] = s[t][e];
}

// Shares of a chunk in this warp's rows (each kWarps-th), and the factors of what their lanes have so
// far. All rows at once, those beyond the last too: nobody reads them, and reductions are chains of
// latency that run beside one another.
__device__ inline void share(const Job& job, const Work& work, const Shared& shared, Sums (&sums)[NT],
                             float (&keep)[NT]) {
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kKeysPerLane;
  const int key0 = work.chunk * kChunk + first;
  float s[NT][kKeysPerLane], top[NT], total[NT];
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const int r = warp + t * kWarps, query = work.position(job, r);
    const int oldest = job.window ? query - job.window + 1 : 0;
    top[t] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; i++) {
      const float* at = shared.scores + r * kScores + first + i;
      const float sum = kSlices == 1 ? at[0] : at[0] + at[kRows * kScores];
      s[t][i] = key0 + i <= query && key0 + i >= oldest ? sum : -INFINITY;
      top[t] = fmaxf(top[t], s[t][i]);
    }
  }
  warp_max(top);
#pragma unroll
  for (int t = 0; t < NT; t++) {
    const int r = warp + t * kWarps;
    const float m = fmaxf(sums[t].m, top[t]);
    const bool none = m == -INFINITY;
    keep[t] = none ? 1.0f : __expf(sums[t].m - m);
    sums[t].m = m, total[t] = 0.0f;
    u32* out = reinterpret_cast<u32*>(shared.shares + (first / 32 * kRows + r) * 32 + first % 32);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; i += 2) {
      const float p0 = none ? 0.0f : __expf(s[t][i] - m), p1 = none ? 0.0f : __expf(s[t][i + 1] - m);
      out[i / 2] = to_math(p0) | u32(to_math(p1)) << 16;
      total[t] += p0 + p1;
    }
  }
  warp_sum(total);
#pragma unroll
  for (int t = 0; t < NT; t++) sums[t].l = __fmaf_rn(sums[t].l, keep[t], total[t]);
}

typedef float Outputs[kTiles][NT][4];  // a warp's columns (rows of the fragment) of all query rows

// Element e of a fragment: column lane / 4 (+ 8 for e >= 2) of a tile, query row 2 (lane % 4) (+ 1).
template <typename Each>
__device__ inline void each_output(const Each& each) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < NT; t++)
#pragma unroll
    for (int odd = 0; odd < 2; odd++)
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int high = 0; high < 2; high++)
          each(n, t, high * 2 + odd, t * 8 + tg * 2 + odd, (warp * kTiles + n) * 16 + high * 8 + g);
}

// values(kb, n, half): of column lane / 4 (+ 8 for the second half) of tile n, for 32 keys. Blocks of
// keys that no row sees are left out: they would add zeros.
template <typename Values>
__device__ inline void add_values(const Values& values, const Work& work, const Shared& shared,
                                  Outputs& o) {
  const int g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
  each_output([&](int n, int t, int e, int row, int) { o[n][t][e] *= shared.factors[row].x; });
  const uint4* shares = reinterpret_cast<const uint4*>(shared.shares);
#pragma unroll
  for (int kb = 0; kb < kBlocks; kb++) {
    if (!work.sees_block(kb)) continue;
#pragma unroll
    for (int n = 0; n < kTiles; n++) {
      const uint4 lo = wide(values(kb, n, 0)), hi = wide(values(kb, n, 1));
#pragma unroll
      for (int t = 0; t < NT; t++) {
        const uint4 p = shares[(kb * kRows + t * 8 + g) * 4 + tg];
        MMA(o[n][t], lo.x, hi.x, lo.y, hi.y, p.x, p.y);
        MMA(o[n][t], lo.z, hi.z, lo.w, hi.w, p.z, p.w);
      }
    }
  }
}
