// Finds the words that can still be chosen, from a head's approximate logits with proven error bounds (reference:
// `candidates` of certified.py). Sets all logits to -inf and lists the candidates for rescore.cu, in no order.
//
// A row's words are judged only once all of them have been bounded: in between CTAs wait for each other, which all
// run at once. Each has the same words of every row, and reads their bounds and biases once. A CTA publishes its bound
// and the number of this turn in one 64-bit word: one trip through L2 carries both.
//
// A lower bound that k words reach (k: `Rule`) is found as the k-th largest of 256 CTAs' largest lower ends: no
// larger than the k-th largest of all words, and nearly as large.
#include "choice.cuh"

// ---- Shape, and the job ----
constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kCtas = 256;    // four words a thread of the released vocabularies
constexpr int kResident = 4;  // on a multiprocessor
constexpr int kMostRows = 16;
constexpr int kStride = kCtas * kThreads * 4;
static_assert(kCtas % 32 == 0, "Each lane of a warp reads the bounds of equally many CTAs.");

struct Job {
  float* logits;       // [M, vocab]: of the head's codes, before the soft-cap
  const float* error;  // [vocab]: a word's largest error, per unit of an input's length
  const u8* x;         // blocked input, bf16
  const float* bias;   // [slots, vocab]
  const int* start;    // [B]
  const int* slot;     // [B]; below 0: idle
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const long long* seed;  // [slots, 2] words
  u64* reached;  // [kMostRows, kCtas]: the turn, and below it the largest lower end (`ordered`)
  int* found;    // [M, room]: the candidates
  int* count;    // [M]: how many, may be more than there is room for; below 0: not certified
  u32* turns;    // how many turns (launches) there have been
  int vocab;     // a multiple of 4
  int rows;      // M
  int tokens, shaped, room;
  int batch;            // rows that shared memory holds at once
  int k_blocks, block;  // of x
  float softcap;        // 0: none
  float ties;           // error of the soft-cap
  float safety, more;   // an input's length is |x| * safety + more
  float longest;        // of an input that is certified
};

// ---- Rules and bounds ----
// How a row chooses.
struct Rule {
  int wanted;         // k: the k-th largest bound decides; 0: floor alone does; below 0: not certified
  float temperature;  // 0: greedy
  float floor;        // added to the largest bound: what min-p leaves
  bool noisy;
};

struct Row {
  Rule rule;
  int slot;  // below 0: idle
  u32 k0, k1, position;
  float unit;  // the input's length

  __device__ bool judged() const { return (slot | rule.wanted) >= 0; }  // neither is below 0
};

struct Shared {
  Row rows[kMostRows];
  u32 low[kMostRows][kWarps], high[kMostRows][kWarps];  // the largest ends of a warp's words (`ordered`)
};

__device__ inline Rule rule_of(const Job& job, int slot) {
  Rule rule = {1, 0.0f, -INFINITY, false};
  if (!job.shaped) return rule;
  if (job.repetition[slot] != 1.0f || job.presence[slot] != 0.0f || job.frequency[slot] != 0.0f) rule.wanted = -1;
  const float temperature = job.temperature[slot], min_p = job.min_p[slot];
  if (temperature <= 0.0f || rule.wanted < 0) return rule;
  const int top_k = job.top_k[slot];
  rule.temperature = temperature;
  if (min_p > 0.0f) rule.floor = logf(fmaxf(min_p, 1e-30f));
  rule.noisy = top_k <= 0 && !(min_p > 0.0f);  // noise comes after what cuts
  if (top_k > kCtas || (top_k <= 0 && job.top_p[slot] < 1.0f))
    rule.wanted = -1;
  else
    rule.wanted = top_k > 0 ? top_k : rule.noisy ? 1 : 0;
  return rule;
}

__device__ inline float square(u32 pair) {
  const float low = __uint_as_float(pair << 16), high = __uint_as_float(pair & 0xffff0000);
  return low * low + high * high;
}

// The length of row m's input, by a warp.
__device__ inline float length(const Job& job, int m, int lane) {
  float squares = 0.0f;
#pragma unroll 8
  for (int i = lane; i < job.k_blocks * 4; i += 32) {
    const uint4 v = *reinterpret_cast<const uint4*>(job.x + size_t(i / 4 * job.block + m) * 64 + i % 4 * 16);
    squares += square(v.x) + square(v.y) + square(v.z) + square(v.w);
  }
  return sqrtf(warp_sum(squares)) * job.safety + job.more;
}

__device__ inline Row row_of(const Job& job, int m, int lane) {
  const int b = quotient(m, job.tokens), slot = job.slot[b], own = max(slot, 0);
  Row row = {rule_of(job, own), slot};
  row.k0 = u32(job.seed[2 * own]), row.k1 = u32(job.seed[2 * own + 1]);
  row.position = job.start[b] + m - b * job.tokens + 1;
  row.unit = length(job, m, lane);
  if (!(row.unit < job.longest)) row.rule.wanted = -1;
  return row;
}

// The number that choosing compares, for one end of a bound: every step is monotonic.
__device__ inline float compared(const Job& job, const Rule& rule, float v, float ties, float bias, float noise) {
  if (job.softcap > 0.0f) v = soft_cap(v, job.softcap) + ties;
  v = v + bias;
  if (rule.temperature > 0.0f) v /= rule.temperature;
  return rule.noisy ? v + noise : v;
}

__device__ inline float4 load_words(const float* from, int at) { return *reinterpret_cast<const float4*>(from + at); }
__device__ inline float4 all_of(float v) { return {v, v, v, v}; }
__device__ inline void store_words(float* to, float4 v, int at) { *reinterpret_cast<float4*>(to + at) = v; }

// The same of four words; noise: of each.
__device__ inline float4 compared(const Job& job, const Rule& rule, float4 v, float ties, float4 b, float4 noise) {
  return {compared(job, rule, v.x, ties, b.x, noise.x), compared(job, rule, v.y, ties, b.y, noise.y),
          compared(job, rule, v.z, ties, b.z, noise.z), compared(job, rule, v.w, ties, b.w, noise.w)};
}
__device__ inline float4 noise_of(const Row& row, int i) {
  float noise[4] = {};
  if (row.rule.noisy) gumbel(row.k0, row.k1, i / 4, row.position, noise);
  return {noise[0], noise[1], noise[2], noise[3]};
}

// One end of the bounds of four logits with errors `e` per unit (unit below 0: the lower end).
__device__ inline float4 ends(float4 v, float4 e, float unit) {
  return {v.x + e.x * unit, v.y + e.y * unit, v.z + e.z * unit, v.w + e.w * unit};
}
__device__ inline float largest(float4 v) { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)); }
// NaN if any is: as `ordered` no number is larger, so it stays.
__device__ inline float largest_or_nan(float a, float b) {
  float v;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(v) : "f"(a), "f"(b));
  return v;
}
__device__ inline float largest_or_nan(float4 v) {
  return largest_or_nan(largest_or_nan(v.x, v.y), largest_or_nan(v.z, v.w));
}
__device__ inline bool some(float4 v) { return v.x != 0.0f || v.y != 0.0f || v.z != 0.0f || v.w != 0.0f; }

// ---- Bounds of all CTAs ----
// This thread's four words of a batch of rows, and their sequences' biases: copied to shared memory.
struct Batch {
  int from, to;
  float4 *logits, *biases;

  __device__ int sequence(const Job& job, int m) const {
    return quotient(m, job.tokens) - quotient(from, job.tokens);
  }
  __device__ void fetch_biases(const Job& job, const Row* rows, int i) const {
#pragma unroll 1
    for (int m = from, at = 0; m < to; m += job.tokens - remainder(m, job.tokens), at++)
      copy16(shared_address(biases + at * kThreads), job.bias + size_t(max(rows[m].slot, 0)) * job.vocab + i);
  }
  __device__ void fetch_logits(const Job& job, int i) const {
#pragma unroll 1
    for (int m = from; m < to; m++)
      copy16(shared_address(logits + (m - from) * kThreads), job.logits + size_t(m) * job.vocab + i);
  }
};

// By a warp: the bounds of CTAs lane, lane + 32, ... in a row, once all CTAs have published theirs in this turn.
__device__ inline void await_all(u32 (&keys)[kCtas / 32], const u64* reached, u32 turn, int lane) {
  u64 said[kCtas / 32];
  bool missing = true;
  for (bool first = true; __any_sync(~0u, missing); first = false) {
    missing = false;
#pragma unroll
    for (int j = 0; j < kCtas / 32; j++)
      if (first || u32(said[j] >> 32) != turn)
        asm volatile("ld.relaxed.gpu.u64 %0, [%1];" : "=l"(said[j]) : "l"(reached + j * 32 + lane));
#pragma unroll
    for (int j = 0; j < kCtas / 32; j++) missing |= u32(said[j] >> 32) != turn, keys[j] = u32(said[j]);
  }
}

// The k-th largest of a warp's keys, by bisection over its bits.
__device__ inline u32 reached_by(const u32 (&keys)[kCtas / 32], int wanted) {
  u32 key = 0;
#pragma unroll 1
  for (u32 bit = 1u << 31; bit; bit >>= 1) {
    int count = 0;
#pragma unroll
    for (u32 k : keys) count += k >= (key | bit);
    if (__reduce_add_sync(~0u, count) >= wanted) key |= bit;
  }
  return key;
}

// The bound that a candidate's upper end must reach, by a warp.
__device__ inline float least(const Rule& rule, const u32 (&keys)[kCtas / 32]) {
  u32 largest = 0;
#pragma unroll
  for (u32 k : keys) largest = max(largest, k);
  largest = __reduce_max_sync(~0u, largest);
  const u32 kth = rule.wanted > 1 ? reached_by(keys, rule.wanted) : largest;
  const float least = rule.wanted > 0 ? of_ordered(kth) : -INFINITY;
  return rule.floor > -INFINITY ? fmaxf(least, of_ordered(largest) + rule.floor) : least;
}

// Notes which of words i to i + 3 are candidates.
__device__ inline void judge(const Job& job, int m, float4 high, float least, int i) {
  const bool in[4] = {!(high.x < least), !(high.y < least), !(high.z < least), !(high.w < least)};
  const int count = in[0] + in[1] + in[2] + in[3];
  if (!count) return;
  int at = atomicAdd(job.count + m, count);
#pragma unroll
  for (int c = 0; c < 4; c++)
    if (in[c] && at < job.room) job.found[size_t(m) * job.room + at++] = i + c;
}

// ---- Words ----
// A CTA's words: the same of every row, four a thread.
struct Words {
  const Job& job;
  Shared& shared;
  float4* staged;  // [batch, kThreads] logits, then biases of as many sequences
  int first, mine;
  bool kept;  // whether all that was fetched is still in shared memory when words are judged

  __device__ Words(const Job& job, Shared& shared, float4* staged)
      : job(job), shared(shared), staged(staged), first(blockIdx.x * kThreads * 4), mine(threadIdx.x * 4),
        kept(job.rows <= job.batch && job.vocab <= kStride) {}

  // Bounds words i to i + 3, with errors e, in a batch's rows. Upper ends with noise replace the logits. Without bias
  // or noise the order of words stays: `compared` is then applied to the warp's largest ends only, once, by lane m.
  __device__ void bound(const Batch& batch, float4 e, int i) {
    const bool there = i < job.vocab;
    const int lane = threadIdx.x % 32;
    u32 most = ordered(-INFINITY), bare = 0;  // lane m: of row m, from below; lane kMostRows + m: from above
#pragma unroll 1
    for (int m = batch.from; m < batch.to; m++) {
      const Row& row = shared.rows[m];
      if (!row.judged()) continue;
      float4* at = batch.logits + (m - batch.from) * kThreads;
      const float4 v = there ? *at : all_of(-INFINITY), b = there ? batch.biases[batch.sequence(job, m) * kThreads] : all_of(0.0f);
      float4 low = ends(v, e, -row.unit), high = ends(v, e, row.unit);
      if (row.rule.noisy || __any_sync(~0u, some(b))) {
        const float4 noise = noise_of(row, i);
        low = compared(job, row.rule, low, -job.ties, b, noise), high = compared(job, row.rule, high, job.ties, b, noise);
        if (row.rule.noisy && there) keep(at, m, high, i);
      } else {
        bare |= 1u << m;
      }
      const u32 lowest = __reduce_max_sync(~0u, ordered(largest(low))), highest = __reduce_max_sync(~0u, ordered(largest_or_nan(high)));
      if (lane % kMostRows == m) most = lane == m ? lowest : highest;
    }
    const bool below = lane < kMostRows;
    const int m = lane % kMostRows;
    if (bare >> m & 1u) most = ordered(compared(job, shared.rows[m].rule, of_ordered(most), below ? -job.ties : job.ties, 0.0f, 0.0f));
    u32& so_far = (below ? shared.low : shared.high)[m][threadIdx.x / 32];
    so_far = max(so_far, most);
  }
  __device__ void keep(float4* at, int m, float4 upper, int i) {
    if (kept) *at = upper;
    else store_words(job.logits + size_t(m) * job.vocab, upper, i);
  }
  // Bounds all words. batch: the first one, with its biases already being copied; e: errors of the first words.
  __device__ void bound_all(Batch batch, float4 e) {
#pragma unroll 1
    for (int base = first; base < job.vocab; base += kStride) {
      const int i = base + mine;
      const bool there = i < job.vocab;
      if (base != first) e = there ? load_words(job.error, i) : all_of(0.0f);
#pragma unroll 1
      for (batch.from = 0; batch.from < job.rows; batch.from = batch.to) {
        batch.to = min(batch.from + job.batch, job.rows);
        if (there && (base != first || batch.from)) batch.fetch_biases(job, shared.rows, i);
        if (there) batch.fetch_logits(job, i);
        copies_done();
        bound(batch, e, i);
      }
    }
  }
  // The upper ends of words i to i + 3, which belong to `thread`.
  __device__ float4 upper(int m, int i, int thread) const {
    const Row& row = shared.rows[m];
    const float4 v = kept ? staged[m * kThreads + thread] : load_words(job.logits + size_t(m) * job.vocab, i);
    if (row.rule.noisy) return v;
    const float4 b = kept ? staged[(job.batch + quotient(m, job.tokens)) * kThreads + thread]
                          : load_words(job.bias + size_t(row.slot) * job.vocab, i);
    return compared(job, row.rule, ends(v, load_words(job.error, i), row.unit), job.ties, b, all_of(0.0f));
  }
  // Publishes this CTA's bound of each row to all CTAs; of unused rows too, so that no older turn's number is left.
  __device__ void say(u32 turn, int lane) const {
    u32 most = 0;
    if (lane >= kMostRows) return;
#pragma unroll
    for (u32 low : shared.low[lane]) most = max(most, low);
    asm volatile("st.relaxed.gpu.u64 [%0], %1;" ::"l"(job.reached + lane * kCtas + blockIdx.x), "l"(u64(turn) << 32 | most) : "memory");
  }
  // Lists row m's candidates, by a warp: rows don't wait for each other's atomics. Few warps' words have any.
  __device__ void judge_row(int m, float must, int lane) const {
    const u32 most = lane < kWarps ? shared.high[m][lane] : 0;
#pragma unroll 1
    for (u32 left = __ballot_sync(~0u, lane < kWarps && !(of_ordered(most) < must)); left; left &= left - 1) {
      const int thread = (__ffs(left) - 1) * 32 + lane;
#pragma unroll 1
      for (int i = first + thread * 4; i < job.vocab; i += kStride) judge(job, m, upper(m, i, thread), must, i);
    }
  }
  // Sets all logits to -inf, except in rows that are not certified (computed in full) or idle.
  __device__ void clear() const {
#pragma unroll 1
    for (int m = 0; m < job.rows; m++)
      if (shared.rows[m].judged())
#pragma unroll 1
        for (int i = first + mine; i < job.vocab; i += kStride)
          store_words(job.logits + size_t(m) * job.vocab, all_of(-INFINITY), i);
  }
};

// ---- Kernel ----
// A relaxed load at GPU scope: it bypasses this multiprocessor's L1.
__device__ inline u32 turns_so_far(const Job& job) {
  u32 turns;
  asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(turns) : "l"(job.turns));
  return turns;
}

// Initialises the counts of candidates, before any CTA adds to them.
__device__ inline void begin_counts(const Job& job, const Row* rows) {
  const int m = threadIdx.x;
  if (m < job.rows) job.count[m] = rows[m].slot < 0 || rows[m].judged() ? 0 : -1;
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// grid: kCtas
extern "C" __global__ void __launch_bounds__(kThreads, kResident)
    screen(const __grid_constant__ Job job) {
  extern __shared__ float4 staged[];
  __shared__ Shared shared;
  let_next_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = job.rows;
  Words words(job, shared, staged);
  const int i = words.first + words.mine;
  const Batch batch = {0, min(job.batch, rows), staged + threadIdx.x, staged + job.batch * kThreads + threadIdx.x};
  float4 e = {};
  // the head's codes let this kernel start when all before it have ended: its logits alone are waited for
  if (i < job.vocab) e = load_words(job.error, i);
  const u32 turn = turns_so_far(job) + 1;
#pragma unroll 1
  for (int m = warp; m < rows; m += kWarps) {
    const Row row = row_of(job, m, lane);
    if (lane == 0) shared.rows[m] = row;
  }
  if (lane < kMostRows) shared.low[lane][warp] = shared.high[lane][warp] = ordered(-INFINITY);
  __syncthreads();
  if (i < job.vocab) batch.fetch_biases(job, shared.rows, i);
  if (blockIdx.x == 0 && warp == 0) begin_counts(job, shared.rows);
  wait_for_previous();
  words.bound_all(batch, e);
  __syncthreads();
  if (warp == 0) words.say(turn, lane);
  if (words.kept) words.clear();
#pragma unroll 1
  for (int m = warp; m < rows; m += kWarps) {
    u32 keys[kCtas / 32];
    await_all(keys, job.reached + m * kCtas, turn, lane);
    if (shared.rows[m].judged()) words.judge_row(m, least(shared.rows[m].rule, keys), lane);
  }
  if (blockIdx.x == 0 && threadIdx.x == 0) *job.turns = turn;  // all CTAs have read it: their bounds of row 0 have come
  if (words.kept) return;
  __syncthreads();
  words.clear();
}
