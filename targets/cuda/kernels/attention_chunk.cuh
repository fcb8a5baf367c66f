// One chunk of keys and values against a CTA's query rows, which share its KV head. Queries and shares of keys are
// the A operand of the tensor cores, sixteen rows of it (of eight rows half is left out), keys and values B: as they
// come from memory, 16 bytes a lane, they are B fragments, but no A ones.
#pragma once
#include "attention.cuh"

#ifndef TILES_M  // tiles of 8 query rows per CTA: 1, 2, 4
#define TILES_M 1
#endif

// ---- Shape of a CTA ----
constexpr int kWarps = 8, kRows = 8 * TILES_M;
constexpr int kTall = (TILES_M + 1) / 2, kPadded = 16 * kTall;  // tiles of 16 rows, and their rows
constexpr int kKeyGroups = kChunk / 16;          // groups of warps: each has 16 keys
constexpr int kSlices = kWarps / kKeyGroups;     // slices of head_dim, where there are more warps than key groups
constexpr int kKeyBlocks = PADDED_HEAD_DIM / 32 / kSlices;    // blocks of 32 inputs that a warp multiplies
constexpr int kKeysPerLane = kChunk / 32, kBlocks = kChunk / 32;
constexpr int kTiles = PADDED_HEAD_DIM < 128 ? 1 : PADDED_HEAD_DIM / 128;  // tiles of 16 output columns per warp
constexpr int kColumnWarps = PADDED_HEAD_DIM / 16 / kTiles;   // warps that have columns
constexpr int kScores = kChunk + 4;              // floats per row, without bank conflicts
static_assert(TILES_M == 1 || TILES_M == 2 || TILES_M == 4, "A CTA has 8, 16 or 32 query rows.");
static_assert(kWarps == kKeyGroups * kSlices, "Each group of 16 keys has the same number of warps.");
static_assert(32 * kKeyBlocks * kSlices == PADDED_HEAD_DIM, "Slices of head_dim are whole blocks of 32 elements.");
static_assert(kColumnWarps <= kWarps, "Each tile of 16 output columns has a warp.");

// ---- Work of a CTA, and its shared memory ----
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
    newest = job.newest(b, start, position(job, rows - 1));
    oldest = job.window ? max(0, position(job, 0) - job.window + 1) : 0;
    chunk = first();
  }
  __device__ int token(const Job& job, int row) const { return quotient(first_row + row, job.group); }
  __device__ int position(const Job& job, int row) const { return start + token(job, row); }
  __device__ int first() {
    const int begin = oldest / kChunk, end = newest / kChunk;
    if (kParts > 1) return lane < kLanes && first_chunk(lane) <= end ? first_chunk(lane) : -1;
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
  __device__ bool last_of_lane() const { return next_chunk(lane, chunk) > newest / kChunk; }
  __device__ void advance() {
    if (!last_of_lane()) {
      chunk = next_chunk(lane, chunk);
      return;
    }
    lane += step;
    chunk = first();
  }
};

struct Shared {
  u16* queries;     // fragments of kPadded rows, PADDED_HEAD_DIM columns
  float* scores;    // [kSlices][kRows][kScores]
  u16* shares;      // fragments of kPadded rows, kChunk columns
  float4* factors;  // [kRows]: of the lane's vector so far, of the merged one, of the lane's
  u8* rest;

  __device__ Shared(u8* memory) {
    queries = reinterpret_cast<u16*>(memory);
    scores = reinterpret_cast<float*>(queries + kPadded * PADDED_HEAD_DIM);
    shares = reinterpret_cast<u16*>(scores + kSlices * kRows * kScores);
    factors = reinterpret_cast<float4*>(shares + kPadded * kChunk);
    rest = reinterpret_cast<u8*>(factors + kRows);
  }
};

// ---- Scores, softmax ----
// A lane's part of a tile's fragments: step `step` of 16 columns.
__device__ inline uint4 load_fragment(const u16* from, int step) {
  return reinterpret_cast<const uint4*>(from)[step * 32 + threadIdx.x % 32];
}

// This warp's 16 keys against all rows, over its slice of head_dim. keys(kb, half): values of key
// lane / 4 (+ 8 for the second half) for 32 inputs.
template <typename Keys>
__device__ inline void score(const Keys& keys, const Shared& shared) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
  const int slice = warp / kKeyGroups;
  float s[kTall][2][4] = {};
#pragma unroll
  for (int kb = 0; kb < kKeyBlocks; kb++) {
    const uint4 key[2] = {wide(keys(kb, 0)), wide(keys(kb, 1))};
#pragma unroll
    for (int t = 0; t < kTall; t++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 q = load_fragment(shared.queries, t * (PADDED_HEAD_DIM / 16) + (slice * kKeyBlocks + kb) * 2 + half);
#pragma unroll
        for (int n = 0; n < 2; n++)
          MMA(s[t][n], q.x, q.y, q.z, q.w, half ? key[n].z : key[n].x, half ? key[n].w : key[n].y);
      }
  }
  float* out = shared.scores + (slice * kRows + g) * kScores + warp % kKeyGroups * 16 + tg * 2;
#pragma unroll
  for (int t = 0; t < TILES_M; t++)
#pragma unroll
    for (int n = 0; n < 2; n++) {
      const float* v = s[t / 2][n] + t % 2 * 2;
      *reinterpret_cast<float2*>(out + t * 8 * kScores + n * 8) = make_float2(v[0], v[1]);
    }
}

// Softmax weights of a chunk for this warp's rows (every kWarps-th), and the factors that rescale their sums so far.
// All rows are done at once, also those past the last one (their results are never read): the reductions are
// latency-bound chains that overlap.
__device__ inline void share(const Job& job, const Work& work, const Shared& shared, Sums (&sums)[TILES_M],
                             float (&keep)[TILES_M]) {
  const int warp = threadIdx.x / 32, first = threadIdx.x % 32 * kKeysPerLane;
  const int key0 = work.chunk * kChunk + first;
  float s[TILES_M][kKeysPerLane], top[TILES_M], total[TILES_M];
#pragma unroll
  for (int t = 0; t < TILES_M; t++) {
    const int r = warp + t * kWarps, query = work.position(job, r);
    const int oldest = job.window ? query - job.window + 1 : 0;
    const int newest = REACHING ? job.newest(work.b, work.start, query) : BOTH_WAYS ? work.newest : query;
    top[t] = -INFINITY;
#pragma unroll
    for (int i = 0; i < kKeysPerLane; i++) {
      const float* at = shared.scores + r * kScores + first + i;
      const float sum = kSlices == 1 ? at[0] : at[0] + at[kRows * kScores];
      s[t][i] = key0 + i <= newest && key0 + i >= oldest ? sum : -INFINITY;
      top[t] = fmaxf(top[t], s[t][i]);
    }
  }
  warp_max(top);
#pragma unroll
  for (int t = 0; t < TILES_M; t++) {
    const int r = warp + t * kWarps;
    const float m = fmaxf(sums[t].m, top[t]);
    const bool none = m == -INFINITY;
    keep[t] = none ? 1.0f : __expf(sums[t].m - m);
    sums[t].m = m, total[t] = 0.0f;
    u32* out = reinterpret_cast<u32*>(shared.shares) + fragment(r, first, kChunk);
#pragma unroll
    for (int i = 0; i < kKeysPerLane; i += 2) {
      const float p0 = none ? 0.0f : __expf(s[t][i] - m), p1 = none ? 0.0f : __expf(s[t][i + 1] - m);
      out[i] = to_math(p0) | u32(to_math(p1)) << 16;
      total[t] += p0 + p1;
    }
  }
  warp_sum(total);
#pragma unroll
  for (int t = 0; t < TILES_M; t++) sums[t].l = __fmaf_rn(sums[t].l, keep[t], total[t]);
}

// ---- Values ----
typedef float Outputs[kTiles][2][kTall][4];  // a warp's columns, tiles of eight, of all query rows

// Two columns of a row, which are next to each other.
struct Pair {
  int n, half, tall, first;

  __device__ float* of(Outputs& o) const { return o[n][half][tall] + first; }
  __device__ const float* of(const Outputs& o) const { return o[n][half][tall] + first; }
};
template <typename Each>
__device__ inline void each_output(const Each& each) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < TILES_M; t++)
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        each(Pair{n, half, t / 2, t % 2 * 2}, t * 8 + g, (warp * kTiles + n) * 16 + half * 8 + tg * 2);
}

// values(kb, n, half): of column lane / 4 (+ 8 for the second half) of tile n, for 32 keys. Blocks of
// keys that no row sees are left out: they would add zeros.
template <typename Values>
__device__ inline void add_values(const Values& values, const Work& work, const Shared& shared,
                                  Outputs& o) {
  each_output([&](Pair pair, int row, int) {
    const float factor = shared.factors[row].x;
    pair.of(o)[0] *= factor, pair.of(o)[1] *= factor;
  });
#pragma unroll
  for (int kb = 0; kb < kBlocks; kb++) {
    if (!work.sees_block(kb)) continue;
    uint4 share[kTall][2];
#pragma unroll
    for (int i = 0; i < kTall * 2; i++)
      share[i / 2][i % 2] = load_fragment(shared.shares, i / 2 * (kChunk / 16) + kb * 2 + i % 2);
#pragma unroll
    for (int n = 0; n < kTiles; n++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint4 v = wide(values(kb, n, half));
#pragma unroll
        for (int t = 0; t < kTall; t++) {
          const uint4 a = share[t][0], b = share[t][1];
          MMA(o[n][half][t], a.x, a.y, a.z, a.w, v.x, v.y);
          MMA(o[n][half][t], b.x, b.y, b.z, b.w, v.z, v.w);
        }
      }
  }
}
