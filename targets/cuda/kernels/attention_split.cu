// Attention of few rows: a CTA per lane and tile of rows, behind `prepare` or, of very few, without it, and
// before `combine`. Its first chunk is loaded, and the next ones are on their way to L2, before the previous
// kernel has ended.
#include "attention_chunk.cuh"

constexpr int kAhead = 2;  // chunks
// Whether there are registers for a chunk's values beside its keys; else they come where the keys were.
constexpr bool kBoth = kChunk * HD * sizeof(Cached) <= 32 << 10;

// A chunk's keys and values as a warp multiplies them, in registers. What no row sees is zero.
struct Keys {
  Eight at[kKeyBlocks][2];

  __device__ Eight operator()(int kb, int half) const { return at[kb][half]; }

  __device__ void load(const Job& job, const Work& work) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    const int key0 = work.chunk * kChunk, key = warp % kKeyGroups * 16 + g;
    const Cached* from = job.k + (work.entry(job) + key) * HD + warp / kKeyGroups * (HD / kSlices) + tg * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = key0 + key + half * 8;
      const bool seen = position >= work.oldest && position <= work.newest;
#pragma unroll
      for (int kb = 0; kb < kKeyBlocks; kb++)
        at[kb][half] = seen ? load8(from + half * 8 * HD + kb * 32) : nothing();
    }
  }
};
struct Values {
  Eight at[kBlocks][kTiles][2];

  __device__ Eight operator()(int kb, int n, int half) const { return at[kb][n][half]; }

  __device__ void load(const Job& job, const Work& work) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    const Cached* from = job.v + work.entry(job) * HD + (warp * kTiles * 16 + g) * 32 + tg * 8;
#pragma unroll
    for (int kb = 0; kb < kBlocks; kb++) {
      const bool seen = warp < kColumnWarps && work.sees_block(kb);
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          at[kb][n][half] = seen ? load8(from + kb * 32 * HD + (n * 16 + half * 8) * 32) : nothing();
    }
  }
};

// This CTA's queries, as the kernel `prepare` left them: all on their way before any is waited for.
__device__ inline void fetch(const Job& job, const Work& work, u16* queries) {
  constexpr int kStep = kWarps * 8 / kRows;  // blocks of 32 that all threads copy at once
  const int all = job.tokens * job.group, kb = threadIdx.x / (kRows * 4), r = threadIdx.x / 4 % kRows;
  const size_t head = size_t(work.b) * job.kv_heads + work.head;
  const uint4* from = reinterpret_cast<const uint4*>(job.q) + (head * (HD / 32) + kb) * all * 4 +
                      (work.first_row + r) * 4 + threadIdx.x % 4;
  const u32 to = shared_address(queries) + threadIdx.x * 16;
  wait_for_previous();
  let_next_start();
  if (r >= work.rows) return;
#pragma unroll
  for (int i = 0; i < HD / 32; i += kStep)
    if (HD / 32 % kStep == 0 || i + kb < HD / 32) copy16(to + i * kRows * 64, from + i * all * 4);
  copies_done();
}

// New tokens whose keys and values are of this CTA's chunks. There are fewer than a chunk has keys, so that they
// are next to each other.
struct Tokens {
  int first, count;

  __device__ Tokens(const Job& job, const Work& work) {
    const int chunk = work.start / kChunk, before = min(job.tokens, (chunk + 1) * kChunk - work.start);
    const auto mine = [&](int c) { return (c & (kLanes - 1)) == work.lane; };
    first = mine(chunk) ? 0 : before;
    count = mine(chunk) ? before : mine(chunk + 1) ? job.tokens - before : 0;
  }
};

// A vector that this CTA makes: of its new tokens keys and values by turns, then its queries.
struct Made {
  Role role;
  int token, row, position;
  const float* raw;

  __device__ Made(const Job& job, const Work& work, const Tokens& own, int stored, int i) {
    row = i - stored;
    role = row >= 0 ? kQuery : i % 2 ? kValue : kKey;
    token = row >= 0 ? (work.first_row + row) / job.group : own.first + i / 2;
    position = work.start + token;
    const size_t m = size_t(work.b) * job.tokens + token;
    raw = role == kQuery ? raw_query(job, m, work.head * job.group + (work.first_row + row) % job.group)
                         : raw_key(job, m, work.head, role);
  }
};

// Without the kernel `prepare`: new keys and values to the cache, queries to shared memory, a warp each.
__device__ inline void prepare(const Job& job, const Work& work, u16* queries) {
  const int half = job.head_dim / 2, warp = threadIdx.x / 32;
  const Tokens own(job, work);
  const int stored = job.own ? 2 * own.count : 0, all = stored + work.rows;
  Rotation rotation;
  if (warp < all) {
    const Made made(job, work, own, stored, warp);
    rotation.load(job, made.role, made.position);
  }
  wait_for_previous();
  let_next_start();
#pragma unroll 1
  for (int i = warp; i < all; i += kWarps) {
    const Made made(job, work, own, stored, i);
    Vector x;
    x.load(made.raw, made.raw + half, half);
    if (i != warp) rotation.load(job, made.role, made.position);
    rotation.apply(job, made.role, x);
    if (made.role == kQuery)
      store_query(queries, kRows, made.row, job.head_dim, x);
    else
      store_key(job, work.slot, work.head, made.position, made.role, x);
  }
}

// A chunk's keys and values on their way to the L2 cache, as far as some row sees them.
__device__ inline void prefetch_chunk(const Job& job, const Work& work) {
  const int key0 = work.chunk * kChunk, begin = max(0, work.oldest - key0), block = begin / 32;
  const int end = min(kChunk, work.newest + 1 - key0);
  const size_t row = work.entry(job);
  prefetch(job.k + (row + begin) * HD, (end - begin) * HD * sizeof(Cached));
  prefetch(job.v + (row + block * 32) * HD, ((end + 31) / 32 - block) * 32 * HD * sizeof(Cached));
}

extern "C" __global__ void __launch_bounds__(256, HD <= 256 && NT <= 2 ? 2 : 1)
    split(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const Shared shared(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  Work work(job, blockIdx.z, blockIdx.y, blockIdx.x / kLanes, blockIdx.x % kLanes, kLanes);
  if (work.slot < 0 || work.chunk < 0) return wait_for_previous();
  const bool settled = work.settled();
  Keys keys;
  Values values;
  const auto load = [&] {
    keys.load(job, work);
    if (kBoth) values.load(job, work);
  };
  if (settled) load();
  if (threadIdx.x == 0) {
    Work ahead = work;
    for (int i = 0; i <= kAhead && ahead.chunk >= 0; i++, ahead.advance())
      if (i || !settled || !kBoth) prefetch_chunk(job, ahead);
  }
  if (job.q)
    fetch(job, work, shared.queries);
  else
    prepare(job, work, shared.queries);
  __syncthreads();
  if (!settled) load();

  Outputs o = {};
  Sums sums[NT];
  const size_t part = job.part(work.b, work.head, work.lane, work.first_row);
  while (true) {
    score(keys, shared);
    if (!kBoth) values.load(job, work);
    __syncthreads();
    float keep[NT];
    share(job, work, shared, sums, keep);
#pragma unroll
    for (int i = 0; i < NT; i++)
      if (lane == 0) shared.factors[warp + i * kWarps].x = keep[i];
    __syncthreads();
    add_values(values, work, shared, o);
    if (work.last_of_lane()) break;
    work.advance();
    load();
  }
  each_output([&](int n, int t, int e, int row, int column) {
    if (row < work.rows && column < HD) job.partial[(part + row) * HD + column] = o[n][t][e];
  });
#pragma unroll
  for (int i = 0; i < NT; i++)
    if (lane == 0 && warp + i * kWarps < work.rows)
      job.sums[part + warp + i * kWarps] = make_float2(sums[i].m, sums[i].l);
}
