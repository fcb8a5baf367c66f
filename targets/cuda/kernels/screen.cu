// Which words a head's logits leave to be chosen, from logits within proven bounds (certified.py, whose
// `candidates` is the reference). Two kernels, since all of a row must be seen before any of it is judged:
// `bound` turns logits into what they may be at most, `screen` into -inf, and notes the candidates' numbers
// for rescore.cu, in no order.
//
// A lower bound that `wanted` words reach is found as the `wanted`-th largest of 256 CTAs' largest: no
// larger than the `wanted`-th largest of all words, and nearly as large.
#include "choice.cuh"

constexpr int kThreads = 256;
constexpr int kCtas = 256;  // of a row: four words a thread of the released vocabularies

struct Job {
  float* logits;       // [M, vocab]: of the head's copy, before the soft-cap
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
  float* reached;  // [M, kCtas]: the largest lower ends
  int* found;      // [M, room]: the candidates
  int* count;      // [M]: how many, may be more than there is room for; below 0: not certified
  int vocab;  // a multiple of 4
  int tokens, shaped, room;
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

__device__ inline float length(const Job& job, int m, float* scratch) {
  float squares = 0.0f;
  for (int i = threadIdx.x; i < job.k_blocks * 4; i += kThreads) {
    const uint4 v = *reinterpret_cast<const uint4*>(job.x + size_t(i / 4 * job.block + m) * 64 + i % 4 * 16);
    squares += square(v.x) + square(v.y) + square(v.z) + square(v.w);
  }
  return sqrtf(block_sum(squares, scratch)) * job.safety + job.more;
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

constexpr int kStride = kCtas * kThreads * 4;
__device__ inline int first_word() { return (blockIdx.x * kThreads + threadIdx.x) * 4; }

// grid: (kCtas, M)
extern "C" __global__ void __launch_bounds__(kThreads)
    bound(const __grid_constant__ Job job) {
  __shared__ float scratch[2][32];
  let_next_start();
  const int m = blockIdx.y, vocab = job.vocab;
  float4 e = {}, v = {}, b = {};
  if (first_word() < vocab) e = load_words(job.error, first_word());  // is never written
  wait_for_previous();
  const int slot = job.slot[m / job.tokens];
  float* logits = job.logits + size_t(m) * vocab;
  const float* bias = job.bias + size_t(max(slot, 0)) * vocab;
  if (first_word() < vocab) v = load_words(logits, first_word()), b = load_words(bias, first_word());
  const Rule rule = rule_of(job, max(slot, 0));
  const float unit = length(job, m, scratch[0]);
  const bool certified = slot >= 0 && rule.wanted >= 0 && unit < job.longest;
  if (blockIdx.x == 0 && threadIdx.x == 0) job.count[m] = slot < 0 || certified ? 0 : -1;
  if (!certified) return;
  const u32 k0 = u32(job.seed[2 * slot]), k1 = u32(job.seed[2 * slot + 1]);
  const u32 position = job.start[m / job.tokens] + m % job.tokens + 1;
  float largest = -INFINITY;
  for (int i = first_word(); i < vocab; i += kStride) {
    if (i != first_word())
      e = load_words(job.error, i), v = load_words(logits, i), b = load_words(bias, i);
    float noise[4] = {};
    if (rule.noisy) gumbel(k0, k1, i / 4, position, noise);
    const auto low = [&](float v, float e, float b, int c) {
      largest = fmaxf(largest, compared(job, rule, v - e * unit, -job.ties, b, noise[c]));
      return compared(job, rule, v + e * unit, job.ties, b, noise[c]);
    };
    const float4 high = {low(v.x, e.x, b.x, 0), low(v.y, e.y, b.y, 1), low(v.z, e.z, b.z, 2), low(v.w, e.w, b.w, 3)};
    store_words(logits, high, i);
  }
  largest = block_max(largest, scratch[1]);
  if (threadIdx.x == 0) job.reached[m * kCtas + blockIdx.x] = largest;
}

// What a word must be able to reach.
__device__ inline float least(const Rule& rule, float mine) {
  __shared__ __align__(16) float all[kCtas];
  __shared__ float kth, largest;
  all[threadIdx.x] = mine;
  __syncthreads();
  const int i = threadIdx.x;
  int above = 0;
#pragma unroll 8
  for (int j = 0; j < kCtas; j++) above += all[j] > mine || (all[j] == mine && j < i);
  if (above == 0) largest = mine;
  if (above == max(rule.wanted, 1) - 1) kth = mine;
  __syncthreads();
  const float least = rule.wanted > 0 ? kth : -INFINITY;
  return rule.floor > -INFINITY ? fmaxf(least, largest + rule.floor) : least;
}

// grid: (kCtas, M)
extern "C" __global__ void __launch_bounds__(kThreads)
    screen(const __grid_constant__ Job job) {
  static_assert(kThreads == kCtas, "a thread for each of the largest");
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.y, vocab = job.vocab, slot = job.slot[m / job.tokens];
  if (slot < 0 || job.count[m] < 0) return;  // whole, or of an idle row: anything
  float* logits = job.logits + size_t(m) * vocab;
  float4 v = {};
  if (first_word() < vocab) v = load_words(logits, first_word());
  const float must = least(rule_of(job, slot), job.reached[m * kCtas + threadIdx.x]);
  for (int i = first_word(); i < vocab; i += kStride) {
    if (i != first_word()) v = load_words(logits, i);
    const auto judge = [&](float v, int c) {
      if (v < must) return;  // what compares with nothing stays
      const int at = atomicAdd(job.count + m, 1);
      if (at < job.room) job.found[size_t(m) * job.room + at] = i + c;
    };
    judge(v.x, 0), judge(v.y, 1), judge(v.z, 2), judge(v.w, 3);
    store_words(logits, make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY), i);
  }
}
