// Which words a head's logits leave to be chosen, from logits within proven bounds (certified.py, whose
// `candidates` is the reference): -inf for all words, and the candidates' numbers for rescore.cu, in no order.
//
// All of a row must be seen before any of it is judged: in between CTAs wait for each other, for all of them run
// at once. Each has the same words of every row, and reads their bounds and biases once.
//
// A lower bound that `wanted` words reach is found as the `wanted`-th largest of 256 CTAs' largest: no
// larger than the `wanted`-th largest of all words, and nearly as large.
#include "choice.cuh"

constexpr int kThreads = 256;
constexpr int kCtas = 256;    // four words a thread of the released vocabularies
constexpr int kResident = 4;  // on a multiprocessor
constexpr int kMostRows = 16;
constexpr int kStride = kCtas * kThreads * 4;

struct Job {
  float* logits;       // [M, vocab]: of the head's codes, before the soft-cap
  const float* error;  // [vocab]: what those of a word err by at most, per unit of an input's length
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
  u32* reached;  // [M, kCtas]: the largest lower ends (`ordered`)
  int* found;    // [M, room]: the candidates
  int* count;    // [M]: how many, may be more than there is room for; below 0: not certified
  u32* arrived;  // CTAs that have been through here, ever
  int vocab;     // a multiple of 4
  int rows;      // M
  int tokens, shaped, room;
  int batch;            // rows that shared memory holds at once
  int k_blocks, block;  // of x
  float softcap;        // 0: none
  float ties;           // what the soft-cap errs by
  float safety, more;   // an input's length is |x| * safety + more
  float longest;        // of an input that is certified
};

// How a row chooses.
struct Rule {
  int wanted;         // the largest so many bounds decide; 0: floor alone does; below 0: not certified
  float temperature;  // 0: greedy
  float floor;        // added to the largest bound: what min-p leaves
  bool noisy;
};

struct Row {
  Rule rule;
  int slot;  // below 0: idle
  u32 k0, k1, position;
  float unit;  // the input's length

  __device__ bool judged() const { return slot >= 0 && rule.wanted >= 0; }
};

struct Shared {
  Row rows[kMostRows];
  u32 low[kMostRows], high[kMostRows];  // the largest ends of this CTA's words (`ordered`)
  float least[kMostRows];               // what a word must be able to reach
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

// By a warp.
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

// What choosing compares, of one end of a bound: every step keeps the order of numbers.
__device__ inline float compared(const Job& job, const Rule& rule, float v, float ties, float bias, float noise) {
  if (job.softcap > 0.0f) v = soft_cap(v, job.softcap) + ties;
  v = v + bias;
  if (rule.temperature > 0.0f) v /= rule.temperature;
  return rule.noisy ? v + noise : v;
}

__device__ inline float4 load_words(const float* from, int at) { return *reinterpret_cast<const float4*>(from + at); }
__device__ inline void store_words(float* to, float4 v, int at) { *reinterpret_cast<float4*>(to + at) = v; }

// The upper ends of words i to i + 3, whose logits are v and biases b; low: the largest lower one.
__device__ inline float4 ends(const Job& job, const Row& row, float4 v, float4 e, float4 b, int i, float& low) {
  float noise[4] = {};
  if (row.rule.noisy) gumbel(row.k0, row.k1, i / 4, row.position, noise);
  low = -INFINITY;
  const auto high = [&](float v, float e, float b, int c) {
    low = fmaxf(low, compared(job, row.rule, v - e * row.unit, -job.ties, b, noise[c]));
    return compared(job, row.rule, v + e * row.unit, job.ties, b, noise[c]);
  };
  return {high(v.x, e.x, b.x, 0), high(v.y, e.y, b.y, 1), high(v.z, e.z, b.z, 2), high(v.w, e.w, b.w, 3)};
}

// No number is larger than what compares with nothing, which stays.
__device__ inline u32 largest_of(float4 v) {
  const float all = (v.x + v.y) + (v.z + v.w);
  return all == all ? ordered(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w))) : ~0u;
}

// This thread's four words of a batch of rows, and their sequences' biases, on their way to it.
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

// Waits until all CTAs are here: what each has written is seen by all.
__device__ inline void meet(u32* arrived) {
  __syncthreads();
  if (threadIdx.x == 0) {
    u32 mine, now;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(mine) : "l"(arrived) : "memory");
    const u32 all = (mine / kCtas + 1) * kCtas;
    do asm volatile("ld.acquire.gpu.u32 %0, [%1];" : "=r"(now) : "l"(arrived) : "memory");
    while (int(now - all) < 0);
  }
  __syncthreads();
}

// The largest number that `wanted` of a warp's keys reach.
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

// What a word must be able to reach, by a warp.
__device__ inline float least(const Rule& rule, const u32* reached, int lane) {
  u32 keys[kCtas / 32], largest = 0;
#pragma unroll
  for (int j = 0; j < kCtas / 32; j++)
    asm volatile("ld.relaxed.gpu.u32 %0, [%1];" : "=r"(keys[j]) : "l"(reached + j * 32 + lane));
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

// A CTA's words: the same of every row, four a thread.
struct Words {
  const Job& job;
  Shared& shared;
  float4* staged;  // [batch, kThreads] logits, then biases of as many sequences
  int first, mine;
  bool kept;  // whether upper ends stay in shared memory, else they are where logits were

  __device__ Words(const Job& job, Shared& shared, float4* staged)
      : job(job), shared(shared), staged(staged), first(blockIdx.x * kThreads * 4), mine(threadIdx.x * 4),
        kept(job.rows <= job.batch && job.vocab <= kStride) {}

  // Of a batch's row m, words i to i + 3, whose errors are e.
  __device__ void bound(const Batch& batch, int m, float4 e, int i) {
    const Row& row = shared.rows[m];
    if (!row.judged()) return;
    float4* at = batch.logits + (m - batch.from) * kThreads;
    float low = -INFINITY;
    u32 high = 0;
    if (i < job.vocab) {
      const float4 v = ends(job, row, *at, e, batch.biases[batch.sequence(job, m) * kThreads], i, low);
      if (kept) *at = v;
      else store_words(job.logits + size_t(m) * job.vocab, v, i);
      high = largest_of(v);
    }
    const u32 most = __reduce_max_sync(~0u, ordered(low)), all = __reduce_max_sync(~0u, high);
    if (threadIdx.x % 32 == 0) atomicMax(shared.low + m, most), atomicMax(shared.high + m, all);
  }
  // All of them. batch: the first, whose biases are on their way; e: of the first words.
  __device__ void bound_all(Batch batch, float4 e) {
#pragma unroll 1
    for (int base = first; base < job.vocab; base += kStride) {
      const int i = base + mine;
      const bool there = i < job.vocab;
      if (there && base != first) e = load_words(job.error, i);
#pragma unroll 1
      for (batch.from = 0; batch.from < job.rows; batch.from = batch.to) {
        batch.to = min(batch.from + job.batch, job.rows);
        if (there && (base != first || batch.from)) batch.fetch_biases(job, shared.rows, i);
        if (there) batch.fetch_logits(job, i);
        copies_done();
#pragma unroll 1
        for (int m = batch.from; m < batch.to; m++) bound(batch, m, e, i);
      }
    }
  }
  __device__ void judge_all() const {
#pragma unroll 1
    for (int m = 0; m < job.rows; m++) {
      if (!shared.rows[m].judged()) continue;  // whole, or of an idle row: anything
      const float must = shared.least[m];
      const bool some = !(of_ordered(shared.high[m]) < must);
      float* logits = job.logits + size_t(m) * job.vocab;
#pragma unroll 1
      for (int i = first + mine; i < job.vocab; i += kStride) {
        if (some) judge(job, m, kept ? staged[m * kThreads + threadIdx.x] : load_words(logits, i), must, i);
        store_words(logits, make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY), i);
      }
    }
  }
};

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
#pragma unroll 1
  for (int m = warp; m < rows; m += kThreads / 32) {
    const Row row = row_of(job, m, lane);
    if (lane == 0) shared.rows[m] = row, shared.low[m] = shared.high[m] = ordered(-INFINITY);
  }
  __syncthreads();
  if (i < job.vocab) batch.fetch_biases(job, shared.rows, i);
  wait_for_previous();
  words.bound_all(batch, e);
  __syncthreads();
  const int m = threadIdx.x;
  if (m < rows) {
    job.reached[m * kCtas + blockIdx.x] = shared.low[m];
    if (blockIdx.x == 0) job.count[m] = shared.rows[m].slot < 0 || shared.rows[m].judged() ? 0 : -1;
  }
  meet(job.arrived);
#pragma unroll 1
  for (int m = warp; m < rows; m += kThreads / 32) {
    const float must = least(shared.rows[m].rule, job.reached + m * kCtas, lane);
    if (lane == 0) shared.least[m] = must;
  }
  __syncthreads();
  words.judge_all();
}
