// Attention of few rows: a CTA per lane and tile of rows; a column's lanes may share one, and follow one another. It
// runs after `prepare` (left out for very few rows) and before `combine`. Before the previous kernel has ended, it loads
// its first chunk, except new keys, and prefetches the next ones into L2.
#include "attention_chunk.cuh"

constexpr int kAhead = 2;  // chunks
// Whether there are registers for a chunk's values beside its keys; else they come where the keys were.
constexpr bool kBoth = kChunk * PADDED_HEAD_DIM * sizeof(Cached) <= 32 << 10;

// ---- New keys and values ----
// The new tokens with keys and values in this CTA's chunks. A call has fewer tokens than a chunk has keys, so these
// tokens are consecutive.
struct Tokens {
  int first, count;

  __device__ Tokens(const Job& job, const Work& work) {
    const int chunk = work.start / kChunk, before = min(job.tokens, (chunk + 1) * kChunk - work.start);
    const auto mine = [&](int c) { return (lane_of(c) & (work.step - 1)) == work.lane; };
    first = mine(chunk) ? 0 : before;
    count = mine(chunk) ? before : mine(chunk + 1) ? job.tokens - before : 0;
  }
};

// Where a warp makes several vectors at once, the CTA's new keys and values [token][PADDED_HEAD_DIM] are in shared
// memory too: its warps read the keys from there. In the cache, a value column's positions are contiguous, so each element of a value
// vector would be a store of its own, which delays all warps' loads: columns of all tokens are written at once.
struct NewRows {
  static constexpr int kPitch = PADDED_HEAD_DIM + 16 / sizeof(Cached);  // eight tokens' elements are in as many banks
  Cached *keys, *values;

  __device__ NewRows(const Job& job, const Shared& shared)
      : keys(reinterpret_cast<Cached*>(shared.rest + 4 * PADDED_HEAD_DIM * (2 + job.tokens))),
        values(keys + job.tokens * kPitch) {}

  __device__ void keep(Role role, int token, const Vector& x) const {
    Cached* to = (role == kKey ? keys : values) + token * kPitch;
#pragma unroll
    for (int j = 0; j < kQuads; j++) {
      const int i = Vector::first(j);
      if (i < kHalf) store4(to + i, x.at[j].low), store4(to + kHalf + i, x.at[j].high);
    }
#pragma unroll 1
    for (int i = kDim + threadIdx.x % LANES_PER_VECTOR; i < PADDED_HEAD_DIM; i += LANES_PER_VECTOR) to[i] = 0;
  }
  // Writes the values to the cache, by all threads: at a time some columns of eight tokens.
  __device__ void write_values(const Job& job, const Work& work, const Tokens& own) const {
    const size_t row = (size_t(work.slot) * job.kv_heads + work.head) * job.entries;
#pragma unroll 1
    for (int t = threadIdx.x % 8; t < own.count; t += 8) {
      const int entry = remainder(work.start + own.first + t, job.entries);
      Cached* column = job.v + (row + entry / 32 * 32) * PADDED_HEAD_DIM + entry % 32;
#pragma unroll
      for (int first = 0; first < PADDED_HEAD_DIM; first += kWarps * 4) {
        const int i = first + threadIdx.x / 8;
        if (i < kDim) column[i * 32] = values[t * kPitch + i];
      }
    }
  }
};

// ---- A chunk in registers ----
// A chunk's keys and values in registers, as a warp multiplies them; positions that no row sees are zero. load<true>
// loads only this call's, once they are written; load<false> all up to `newest`. rows: the chunk's keys, `pitch` apart.
struct Keys {
  Eight at[kKeyBlocks][2];

  __device__ Eight operator()(int kb, int half) const { return at[kb][half]; }

  template <bool kNew>
  __device__ void load(const Work& work, int newest, const Cached* rows, int pitch) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    const int key0 = work.chunk * kChunk, key = warp % kKeyGroups * 16 + g;
    const Cached* from = rows + key * pitch + warp / kKeyGroups * (PADDED_HEAD_DIM / kSlices) + tg * 8;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int position = key0 + key + half * 8;
      const bool seen = position >= (kNew ? work.start : work.oldest) && position <= newest;
#pragma unroll
      for (int kb = 0; kb < kKeyBlocks; kb++)
        if (seen || !kNew) at[kb][half] = seen ? load8(from + half * 8 * pitch + kb * 32) : nothing();
    }
  }
};
struct Values {
  Eight at[kBlocks][kTiles][2];

  __device__ Eight operator()(int kb, int n, int half) const { return at[kb][n][half]; }

  template <bool kNew>
  __device__ void load(const Job& job, const Work& work) {
    const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, tg = threadIdx.x % 4;
    const Cached* from = job.v + work.entry(job) * PADDED_HEAD_DIM + (warp * kTiles * 16 + g) * 32 + tg * 8;
#pragma unroll
    for (int kb = 0; kb < kBlocks; kb++) {
      const int position = work.chunk * kChunk + kb * 32 + tg * 8;
      const bool seen = warp < kColumnWarps && work.sees_block(kb);
      if (kNew && !(seen && position + 7 >= work.start && position <= work.newest)) continue;
#pragma unroll
      for (int n = 0; n < kTiles; n++)
#pragma unroll
        for (int half = 0; half < 2; half++)
          at[kb][n][half] = seen ? load8(from + kb * 32 * PADDED_HEAD_DIM + (n * 16 + half * 8) * 32) : nothing();
    }
  }
};

// ---- Queries, and vectors that are made here ----
// Loads this CTA's queries as the kernel `prepare` wrote them: all copies are issued before the first is awaited.
__device__ inline void fetch(const Job& job, const Work& work, u16* queries) {
  const u16* from = job.queries(work.b, work.head, blockIdx.x / kColumns);
  wait_for_previous();
  let_next_start();
#pragma unroll
  for (int i = threadIdx.x; i < kPadded * PADDED_HEAD_DIM / 8; i += kWarps * 32)
    copy16(shared_address(queries + 8 * i), from + 8 * i);
  copies_done();
}

#if LANES_PER_VECTOR == 32
// The rotation of a warp's next vector, loaded into registers while the previous vector is computed.
struct NextRotation : Rotation {
  __device__ void first(const Job& job, const Work& work, const Shared&, Role role, int token) {
    load(job, role, work.start + token);
  }
  __device__ void next(const Job& job, const Work& work, Role before, Role role, int token) {
    if (role != before)
      load(job, role, work.start + token);
    else if (role != kValue)
      load_angles(job, work.start + token);
  }
};
#else
// The same for several vectors at once, for which registers do not suffice: shared memory holds the weights of the
// queries' norm and of the keys', then all tokens' angles.
struct NextRotation {
  const float *rest, *weights, *angles;

  __device__ void first(const Job& job, const Work& work, const Shared& shared, Role role, int token) {
    constexpr int kEach = kDim / 4;
    rest = reinterpret_cast<const float*>(shared.rest);
#pragma unroll 1
    for (int i = threadIdx.x; i < (2 + job.tokens) * kEach; i += kWarps * 32) {
      const int which = u32(i) / kEach, at = (i - which * kEach) * 4, of_token = (work.start + which - 2) * kHalf;
      const float* of_angles = at < kHalf ? job.cosine + of_token : job.sine + of_token - kHalf;
      const float* from = which == 0 ? job.q_norm : which == 1 ? job.k_norm : of_angles;
      if (which > 1 || NORMED && (which == 0 || job.own)) copy16(shared_address(shared.rest + i * 16), from + at);
    }
    next(job, work, role, role, token);
    copies_done();
    __syncthreads();
  }
  __device__ void next(const Job& job, const Work&, Role, Role role, int token) {
    weights = rest + (role == kQuery ? 0 : kDim), angles = rest + (2 + token) * kDim;
  }
  __device__ Part weight(int j) const { return part(weights, j); }
  __device__ Part angle(int j) const { return part(angles, j); }
  __device__ Part part(const float* from, int j) const {
    Part part = {};
    const int i = Vector::first(j);
    if (i < kHalf) part.load(from + i, from + kHalf + i);
    return part;
  }
};
#endif

// The vectors that a CTA makes without the kernel `prepare`, kVectors of them in a warp's turn: new keys by even warps
// and values by odd ones, then queries. A last turn with too few computes one twice.
struct Maker {
  const Job& job;
  const Work& work;
  const Tokens own;
  const int part, stored, all;  // part: this lane's vector of a turn; turns that store, and all

  __device__ Maker(const Job& job, const Work& work)
      : job(job), work(work), own(job, work), part(threadIdx.x % 32 / LANES_PER_VECTOR),
        stored(job.own ? (own.count + kVectors - 1) / kVectors * 2 : 0),
        all(stored + (work.rows + kVectors - 1) / kVectors) {}

  __device__ Role role(int turn) const { return turn >= stored ? kQuery : turn % 2 ? kValue : kKey; }
  __device__ int token(int turn) const {
    return turn >= stored ? work.token(job, row(turn)) : own.first + mine(turn / 2, own.count);
  }
  __device__ int row(int turn) const { return mine(turn - stored, work.rows); }
  __device__ int mine(int turn, int count) const { return min(turn * kVectors + part, count - 1); }
  __device__ void store(Role role, int token, const NextRotation& by, const Shared& shared) const {
    Vector x;
    x.load(raw_key(job, work.b * job.tokens + token, work.head, role));
    rotate(job, role, x, by);
    if (kVectors > 1) NewRows(job, shared).keep(role, token - own.first, x);
    if (kVectors == 1 || role == kKey) store_key(job, work.slot, work.head, work.start + token, role, x);
  }
  __device__ void query(int row, int token, const NextRotation& by, u16* queries) const {
    const int head = work.head * job.group + work.first_row + row - token * job.group;
    Vector x;
    x.load(raw_query(job, work.b * job.tokens + token, head));
    rotate(job, kQuery, x, by);
    store_query(queries, row, x);
  }
};

// Writes new keys and values to the cache (with several vectors at once, values to shared memory instead), then queries
// to shared memory. In as few instructions as possible: warps wait for their scheduler's issue slots, not for memory.
__device__ inline void prepare(const Job& job, const Work& work, const Shared& shared) {
  const Maker maker(job, work);
  int turn = threadIdx.x / 32, token = maker.token(turn);
  Role role = maker.role(turn);
  NextRotation by;
  by.first(job, work, shared, role, token);
  wait_for_previous();
  let_next_start();
#pragma unroll 1
  while (turn < maker.all) {
    if (role == kQuery)
      maker.query(maker.row(turn), token, by, shared.queries);
    else
      maker.store(role, token, by, shared);
    turn += kWarps, token = maker.token(turn);
    const Role before = role;
    role = maker.role(turn);
    if (turn < maker.all) by.next(job, work, before, role, token);
  }
}

// ---- Kernel ----
// Prefetches a chunk's keys and values into the L2 cache, as far as some row sees them.
__device__ inline void prefetch_chunk(const Job& job, const Work& work) {
  const int key0 = work.chunk * kChunk, begin = max(0, work.oldest - key0), block = begin / 32;
  const int end = min(kChunk, work.newest + 1 - key0);
  const size_t row = work.entry(job);
  prefetch(job.k + (row + begin) * PADDED_HEAD_DIM, (end - begin) * PADDED_HEAD_DIM * sizeof(Cached));
  prefetch(job.v + (row + block * 32) * PADDED_HEAD_DIM, ((end + 31) / 32 - block) * 32 * PADDED_HEAD_DIM * sizeof(Cached));
}

extern "C" __global__ void __launch_bounds__(256, PADDED_HEAD_DIM <= 256 && TILES_M <= 2 ? 2 : 1)
    split(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const Shared shared(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // CTAs of a column, and which of them this one is: its first part
  const int sharing = kParts == 1 ? 1 : quotient(gridDim.y, job.kv_heads);
  const int part = kParts == 1 ? 0 : quotient(blockIdx.y, job.kv_heads);
  Work work(job, blockIdx.z, blockIdx.y - part * job.kv_heads, blockIdx.x / kColumns,
            blockIdx.x % kColumns + part * kColumns, sharing * kColumns);
  if (work.slot < 0) return wait_for_previous();
  if (work.chunk < 0) return;  // without waiting: other CTAs wait, among them that of the newest chunk
  const bool settled = work.settled();
  Keys keys;
  Values values;
  const auto load = [&](int newest) {
    keys.load<false>(work, newest, job.k + work.entry(job) * PADDED_HEAD_DIM, PADDED_HEAD_DIM);
    if (kBoth) values.load<false>(job, work);
  };
  load(min(work.start - 1, work.newest));
  if (threadIdx.x == 0) {
    Work ahead = work;
    for (int i = 0; i <= kAhead && ahead.chunk >= 0; i++, ahead.advance())
      if (i || !kBoth) prefetch_chunk(job, ahead);
  }
  if (kVectors == 1 && job.q)
    fetch(job, work, shared.queries);
  else
    prepare(job, work, shared);
  __syncthreads();
  if (kVectors > 1 && job.own) {
    const Tokens own(job, work);
    const NewRows made(job, shared);
    const int before = work.chunk * kChunk - work.start - own.first;
    if (!settled) keys.load<true>(work, work.newest, made.keys + before * made.kPitch, made.kPitch);
    if (own.count) {
      made.write_values(job, work, own);
      __syncthreads();
    }
  } else if (!settled) {
    keys.load<true>(work, work.newest, job.k + work.entry(job) * PADDED_HEAD_DIM, PADDED_HEAD_DIM);
  }
  if (!settled && kBoth) values.load<true>(job, work);

  while (true) {
    Outputs o = {};
    Sums sums[TILES_M];
    const size_t at = job.part(work.b, work.head, work.lane, work.first_row);
    while (true) {
      score(keys, shared);
      if (!kBoth) values.load<false>(job, work);
      __syncthreads();
      float keep[TILES_M];
      share(job, work, shared, sums, keep);
#pragma unroll
      for (int i = 0; i < TILES_M; i++)
        if (lane == 0) shared.factors[warp + i * kWarps].x = keep[i];
      __syncthreads();
      add_values(values, work, shared, o);
      if (work.last_of_lane()) break;
      work.advance();
      load(work.newest);
    }
    // all columns are there: to check each would take 70 registers, where lanes follow one another
    const bool all = kParts > 1 && kColumnWarps == kWarps;
    each_output([&](Pair pair, int row, int column) {
      if (row < work.rows && (all || column < PADDED_HEAD_DIM))
        *reinterpret_cast<float2*>(job.partial + (at + row) * PADDED_HEAD_DIM + column) =
            make_float2(pair.of(o)[0], pair.of(o)[1]);
    });
#pragma unroll
    for (int i = 0; i < TILES_M; i++)
      if (lane == 0 && warp + i * kWarps < work.rows)
        job.sums[at + warp + i * kWarps] = make_float2(sums[i].m, sums[i].l);
    if (kParts == 1) return;
    work.advance();
    if (work.chunk < 0) return;
    load(work.newest);
  }
}
