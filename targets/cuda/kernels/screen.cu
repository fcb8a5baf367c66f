// Which words a head's logits leave to be chosen, from logits within proven bounds (certified.py, whose
// `candidates` is the reference). Leaves -inf for all words, and the candidates' numbers for rescore.cu.
//
// As in sample.cu a cluster of 8 CTAs owns one row, each an eighth of the vocabulary. A lower bound that
// `wanted` words reach is found as the `wanted`-th largest of the 256 warps' largest: no larger than the
// `wanted`-th largest of all words, and nearly as large.
#include "choice.cuh"

constexpr int kCtas = 8;
constexpr int kThreads = 1024;
constexpr int kWarps = kCtas * kThreads / 32;

struct Job {
  float* logits;       // [M, vocab]: of the head's copy, before the soft-cap; -inf afterwards
  const float* error;  // [vocab]: what those of a word err by at most, per unit of an input's length
  const u16* x;        // blocked input, bf16
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
  int* found;  // [M, room]: the candidates
  int* count;  // [M]: how many; -1: not certified
  int vocab, tokens, shaped, room;
  int k, k_blocks, block;  // of x
  float softcap;           // 0: none
  float ties;              // what the soft-cap errs by
  float safety, more;      // an input's length is |x| * safety + more
  float longest;           // of an input that is certified
};

// How a row chooses.
struct Rule {
  int wanted;         // the largest so many bounds decide; 0: floor alone does; below 0: not certified
  float temperature;  // 0: greedy
  float floor;        // added to the largest bound: what min-p leaves
  bool noisy;
  u32 k0, k1;
};

__device__ inline Rule rule_of(const Job& job, int slot) {
  Rule rule = {1, 0.0f, -INFINITY, false, 0, 0};
  if (!job.shaped) return rule;
  if (job.repetition[slot] != 1.0f || job.presence[slot] != 0.0f || job.frequency[slot] != 0.0f) rule.wanted = -1;
  const float temperature = job.temperature[slot], min_p = job.min_p[slot];
  if (temperature <= 0.0f || rule.wanted < 0) return rule;
  const int top_k = job.top_k[slot];
  rule.temperature = temperature;
  if (min_p > 0.0f) rule.floor = logf(fmaxf(min_p, 1e-30f));
  rule.noisy = top_k <= 0 && !(min_p > 0.0f);  // noise comes after what cuts
  rule.k0 = u32(job.seed[2 * slot]), rule.k1 = u32(job.seed[2 * slot + 1]);
  if (top_k > kWarps || (top_k <= 0 && job.top_p[slot] < 1.0f)) rule.wanted = -1;
  else rule.wanted = top_k > 0 ? top_k : rule.noisy ? 1 : 0;
  return rule;
}

__device__ inline float length(const Job& job, int m, float* scratch) {
  float squares = 0.0f;
  for (int i = threadIdx.x; i < job.k; i += kThreads) {
    const float v = from_bf16(job.x[x_offset(m, i, job.k_blocks, job.block)]);
    squares += v * v;
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

__device__ inline float peer(const float* mine, int rank) {
  u32 at;
  float v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

struct Room {
  float squares[32], warps[32], all[kWarps];
  float least, largest;
  int counts[32];
  float total;  // candidates of this CTA, for the others
};

// This CTA's words: the larger ends of their bounds into `upper`; -> the largest of the thread's lower ends.
__device__ inline float bounds(const Job& job, const Rule& rule, int m, int slot, int from, int to, float unit,
                               float* upper) {
  const float* logits = job.logits + size_t(m) * job.vocab;
  const float* bias = job.bias + size_t(slot) * job.vocab;
  const u32 position = job.start[m / job.tokens] + m % job.tokens + 1;
  const bool whole = job.vocab % 4 == 0;
  float largest = -INFINITY;
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < to - from; i += kThreads * 4) {
    float v[4], e[4], b[4], noise[4] = {};
    if (whole) {
      *reinterpret_cast<float4*>(v) = *reinterpret_cast<const float4*>(logits + from + i);
      *reinterpret_cast<float4*>(e) = *reinterpret_cast<const float4*>(job.error + from + i);
      *reinterpret_cast<float4*>(b) = *reinterpret_cast<const float4*>(bias + from + i);
    } else {
#pragma unroll
      for (int c = 0; c < 4; c++) {
        const int at = min(from + i + c, job.vocab - 1);
        v[c] = logits[at], e[c] = job.error[at], b[c] = bias[at];
      }
    }
    if (rule.noisy) gumbel(rule.k0, rule.k1, (from + i) / 4, position, noise);
#pragma unroll
    for (int c = 0; c < 4; c++) {
      const float apart = e[c] * unit;
      upper[i + c] = compared(job, rule, v[c] + apart, job.ties, b[c], noise[c]);
      if (from + i + c < to) largest = fmaxf(largest, compared(job, rule, v[c] - apart, -job.ties, b[c], noise[c]));
    }
  }
  return largest;
}

// What a word's upper end must reach, from each thread's largest lower end.
__device__ inline float least(const Rule& rule, float largest, Room& room) {
  largest = warp_max(largest);
  if (threadIdx.x % 32 == 0) room.warps[threadIdx.x / 32] = largest;
  cluster_sync();
  const int mine = threadIdx.x;
  if (mine < kWarps) room.all[mine] = peer(room.warps + mine % 32, mine / 32);
  __syncthreads();
  if (mine < kWarps) {
    const float v = room.all[mine];
    int above = 0;
    for (int j = 0; j < kWarps; j++) above += room.all[j] > v || (room.all[j] == v && j < mine);
    if (above == 0) room.largest = v;
    if (above == max(rule.wanted, 1) - 1) room.least = v;
  }
  __syncthreads();
  const float reached = rule.wanted > 0 ? room.least : -INFINITY;
  return rule.floor > -INFINITY ? fmaxf(reached, room.largest + rule.floor) : reached;
}

// How many candidates come before this thread's, and in `all` how many there are.
__device__ inline int place(int mine, int& all, Room& room) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int before = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, before, d);
    if (lane >= d) before += other;
  }
  if (lane == 31) room.counts[warp] = before;
  __syncthreads();
  int total = 0, at = before - mine;
  for (int w = 0; w < 32; w++) {
    if (w == warp) at += total;
    total += room.counts[w];
  }
  if (threadIdx.x == 0) room.total = float(total);
  cluster_sync();
  all = 0;
  for (int c = 0; c < kCtas; c++) {
    if (c == int(cluster_rank())) at += all;
    all += int(peer(&room.total, c));
  }
  return at;
}

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    screen(const __grid_constant__ Job job) {
  extern __shared__ __align__(16) float upper[];
  __shared__ Room room;
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x / kCtas, slot = job.slot[m / job.tokens];
  if (slot < 0) {  // an idle row may hold anything
    if (threadIdx.x == 0) job.count[m] = 0;
    return;
  }
  const Rule rule = rule_of(job, slot);
  const float unit = length(job, m, room.squares);
  if (rule.wanted < 0 || !(unit < job.longest)) {
    if (threadIdx.x == 0) job.count[m] = -1;
    return;
  }
  const int share = (job.vocab + 4 * kCtas - 1) / (4 * kCtas) * 4;
  const int from = min(int(cluster_rank()) * share, job.vocab), to = min(from + share, job.vocab);
  const float must = least(rule, bounds(job, rule, m, slot, from, to, unit, upper), room);
  int mine = 0, all;
  for (int i = threadIdx.x; i < to - from; i += kThreads) mine += !(upper[i] < must);
  int at = place(mine, all, room);
  float* logits = job.logits + size_t(m) * job.vocab;
  for (int i = threadIdx.x; i < to - from; i += kThreads) {
    logits[from + i] = -INFINITY;
    if (!(upper[i] < must) && at < job.room) job.found[size_t(m) * job.room + at++] = from + i;
  }
  if (cluster_rank() == 0 && threadIdx.x == 0) job.count[m] = all <= job.room ? all : -1;
  cluster_sync();  // nobody leaves while others still read its memory
}
