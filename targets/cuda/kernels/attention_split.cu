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
  const u16* from = job.queries(work.b, work.head, blockIdx.x / kLanes);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int i = threadIdx.x; i < kPadded * HD / 8; i += kWarps * 32) copy16(shared_address(queries + 8 * i), from + 8 * i);
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

// The vectors that a CTA makes without the kernel `prepare`: `stored` new keys and values by turns, then its queries.
struct Maker {
  const Job& job;
  const Work& work;
  const Tokens own;
  const int half, stored, all;

  __device__ Maker(const Job& job, const Work& work)
      : job(job), work(work), own(job, work), half(job.head_dim / 2), stored(job.own ? 2 * own.count : 0),
        all(stored + work.rows) {}

  __device__ int token(int i) const { return i < stored ? own.first + i / 2 : work.token(job, i - stored); }
  __device__ void store(Role role, const Rotation& rotation, int t) const {
    Vector x;
    x.load(raw_key(job, work.b * job.tokens + t, work.head, role), half);
    rotation.apply(job, role, x);
    store_key(job, work.slot, work.head, work.start + t, role, x);
  }
  __device__ void query(const Rotation& rotation, u16* queries, int row, int t) const {
    const int head = work.head * job.group + work.first_row + row - t * job.group;
    Vector x;
    x.load(raw_query(job, work.b * job.tokens + t, head), half);
    rotation.apply(job, kQuery, x);
    store_query(queries, row, job.head_dim, x);
  }
};

// New keys and values to the cache, then queries to shared memory, a warp each: of what is stored even warps have keys,
// odd ones values. In as few instructions as can be: warps of a scheduler wait for each other's, not for memory.
__device__ inline void prepare(const Job& job, const Work& work, u16* queries) {
  const Maker maker(job, work);
  int i = threadIdx.x / 32, t = maker.token(i);
  const Role role = i >= maker.stored ? kQuery : i % 2 ? kValue : kKey;
  Rotation rotation;
  if (i < maker.all) rotation.load(job, role, work.start + t);
  wait_for_previous();
  let_next_start();
  if (role != kQuery) {
#pragma unroll 1
    while (true) {
      maker.store(role, rotation, t);
      i += kWarps;
      if (i >= maker.stored) break;
      t = maker.token(i);
      if (role == kKey) rotation.load_angle(job, work.start + t);
    }
    if (i >= maker.all) return;
    t = maker.token(i);
    rotation.load(job, kQuery, work.start + t);
  }
  int row = i - maker.stored;
#pragma unroll 1
  while (row < work.rows) {
    maker.query(rotation, queries, row, t);
    row += kWarps, t = work.token(job, row);
    if (row < work.rows) rotation.load_angle(job, work.start + t);
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
  each_output([&](Pair pair, int row, int column) {
    if (row < work.rows && column < HD)
      *reinterpret_cast<float2*>(job.partial + (part + row) * HD + column) = make_float2(pair.of(o)[0], pair.of(o)[1]);
  });
#pragma unroll
  for (int i = 0; i < NT; i++)
    if (lane == 0 && warp + i * kWarps < work.rows)
      job.sums[part + warp + i * kWarps] = make_float2(sums[i].m, sums[i].l);
}
