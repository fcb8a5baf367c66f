// The target chooses: bias, penalties, temperature, min-p, top-k, top-p, then Gumbel-max with
// Philox noise keyed on (seed, position, token id); greedy rows take the argmax. Ties go to the
// lowest id. Semantics: targets/cuda/sampling.py, the reference.
//
// A cluster of 8 CTAs owns one row, each an eighth of the vocabulary. Sums run in a fixed order:
// a thread's tokens, the warp, the block, the cluster's ranks; nothing depends on other rows.
#include "choice.cuh"

constexpr int kCtas = 8;
constexpr int kThreads = 1024;

struct Job {
  const float* logits;  // [M, vocab]
  const float* bias;    // [slots, vocab]
  const int* history;   // [slots, stride]
  const int* start;     // [B]
  const int* slot;      // [B]; below 0: idle
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const long long* seed;  // [slots, 2] words
  const int* prompt_len;
  u32* counts;  // [M, vocab] scratch: bit 31 seen anywhere, below: times in the output
  int* chosen;  // [M]
  const u32* masks;  // [M, ceil(vocab / 32)]: a bit for each token that may come; null: all may
  int vocab, stride, tokens, shaped;
};

__device__ inline bool allowed(const Job& job, int m, int id) {
  if (!job.masks) return true;
  return job.masks[size_t(m) * ((job.vocab + 31) / 32) + id / 32] >> (id % 32) & 1u;
}

__device__ inline float peer(const float* mine, int rank) {
  u32 at;
  float v;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(at) : "memory");
  return v;
}

// Scratch for reductions over the cluster; two sets, used in turn, so that one barrier serves.
struct Room {
  float warps[2][32];
  int ids[2][32];
  float total[2];
  float id[2];
};

struct Cluster {
  Room* room;
  int turn = 0;

  __device__ float sum(float v) {
    Room& r = *room;
    turn ^= 1;
    v = block_sum(v, r.warps[turn]);
    if (threadIdx.x == 0) r.total[turn] = v;
    cluster_sync();
    float all = 0.0f;
    for (int c = 0; c < kCtas; c++) all += peer(&r.total[turn], c);
    return all;
  }
  __device__ Best best(Best v) {
    Room& r = *room;
    turn ^= 1;
    v = warp_best(v);
    if (threadIdx.x % 32 == 0) r.warps[turn][threadIdx.x / 32] = v.value, r.ids[turn][threadIdx.x / 32] = v.id;
    __syncthreads();
    v = {r.warps[turn][threadIdx.x % 32], r.ids[turn][threadIdx.x % 32]};
    v = warp_best(v);
    if (threadIdx.x == 0) r.total[turn] = v.value, r.id[turn] = __int_as_float(v.id);
    cluster_sync();
    v = {peer(&r.total[turn], 0), __float_as_int(peer(&r.id[turn], 0))};
    for (int c = 1; c < kCtas; c++)
      v = better(v, {peer(&r.total[turn], c), __float_as_int(peer(&r.id[turn], c))});
    return v;
  }
};

// What counts towards penalties: this row's history up to its own position.
__device__ void count(const Job& job, int slot, int last, int from, int to, u32* counts) {
  for (int i = from + threadIdx.x; i < to; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int* history = job.history + size_t(slot) * job.stride;
  const int prompt = job.prompt_len[slot];
  for (int p = threadIdx.x; p <= last; p += kThreads) {
    const int token = history[p];
    if (token < from || token >= to) continue;
    atomicOr(counts + token, 0x80000000u);
    if (p >= prompt) atomicAdd(counts + token, 1u);
  }
  __syncthreads();
}

// The largest threshold whose upper set still weighs `wanted`; keys below it are cut.
template <typename Weight>
__device__ float cut(Cluster& cluster, float* values, int size, float wanted, Weight weight) {
  u32 threshold = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const u32 trial = threshold | 1u << bit;
    float mine = 0.0f;
    for (int i = threadIdx.x; i < size; i += kThreads)
      if (ordered(values[i]) >= trial) mine += weight(values[i]);
    const float total = cluster.sum(mine);
    if (total >= wanted && total > 0.0f) threshold = trial;
  }
  for (int i = threadIdx.x; i < size; i += kThreads)
    if (ordered(values[i]) < threshold) values[i] = -INFINITY;
  return 0.0f;
}

__device__ int choose_shaped(const Job& job, int m, int slot, int position, int from, int to,
                             float* values, Cluster& cluster) {
  const int size = to - from;
  const float* logits = job.logits + size_t(m) * job.vocab;
  const float* bias = job.bias + size_t(slot) * job.vocab;
  const float repetition = job.repetition[slot], presence = job.presence[slot],
              frequency = job.frequency[slot], temperature = job.temperature[slot];
  const bool penalised = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  u32* counts = job.counts + size_t(m) * job.vocab;
  if (penalised) count(job, slot, position, from, to, counts);
  Best top = {-INFINITY, 0x7fffffff};
  for (int i = threadIdx.x; i < size; i += kThreads) {
    float v = allowed(job, m, from + i) ? logits[from + i] + bias[from + i] : -INFINITY;
    if (penalised) {
      const u32 seen = counts[from + i];
      const float times = float(seen & 0x7fffffffu);
      if (seen) v = v > 0.0f ? v / repetition : v * repetition;
      v = v - frequency * times - (times > 0.0f ? presence : 0.0f);
    }
    if (temperature > 0.0f) v /= temperature;
    values[i] = v;
    top = better(top, {v, from + i});
  }
  top = cluster.best(top);
  if (temperature <= 0.0f) return top.id;
  const float best = top.value, min_p = job.min_p[slot];
  const float floor = min_p > 0.0f ? best + logf(fmaxf(min_p, 1e-30f)) : -INFINITY;
  for (int i = threadIdx.x; i < size; i += kThreads)
    if (!(values[i] >= floor)) values[i] = -INFINITY;
  if (job.top_k[slot] > 0)
    cut(cluster, values, size, float(job.top_k[slot]), [](float) { return 1.0f; });
  if (job.top_p[slot] < 1.0f) {
    float mass = 0.0f;
    for (int i = threadIdx.x; i < size; i += kThreads) mass += expf(values[i] - best);
    const float wanted = job.top_p[slot] * cluster.sum(mass);
    cut(cluster, values, size, wanted, [best](float v) { return expf(v - best); });
  }
  __syncthreads();  // noise comes four tokens at a time
  const u32 k0 = u32(job.seed[2 * slot]), k1 = u32(job.seed[2 * slot + 1]);
  Best drawn = {-INFINITY, 0x7fffffff};
  for (int q = threadIdx.x; q * 4 < size; q += kThreads) {
    bool any = false;
    for (int i = 0; i < 4; i++) any |= q * 4 + i < size && values[q * 4 + i] > -INFINITY;
    if (!any) continue;
    float noise[4];
    gumbel(k0, k1, from / 4 + q, position + 1, noise);
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (q * 4 + i < size) drawn = better(drawn, {values[q * 4 + i] + noise[i], from + q * 4 + i});
  }
  return cluster.best(drawn).id;
}

// This thread's part of a greedy row: four tokens at a time where rows begin at whole 16 bytes.
__device__ Best largest(const Job& job, int m, int slot, int from, int to) {
  const float* logits = job.logits + size_t(m) * job.vocab;
  const float* bias = job.bias + size_t(slot) * job.vocab;
  Best top = {-INFINITY, 0x7fffffff};
  if (job.masks || job.vocab % 4) {
    for (int i = from + threadIdx.x; i < to; i += kThreads)
      if (allowed(job, m, i)) top = better(top, {logits[i] + bias[i], i});
    return top;
  }
#pragma unroll 4
  for (int i = from + threadIdx.x * 4; i < to; i += kThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(logits + i), b = *reinterpret_cast<const float4*>(bias + i);
    top = better(top, {v.x + b.x, i});
    top = better(top, {v.y + b.y, i + 1});
    top = better(top, {v.z + b.z, i + 2});
    top = better(top, {v.w + b.w, i + 3});
  }
  return top;
}

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    choose(const __grid_constant__ Job job) {
  extern __shared__ float values[];
  __shared__ Room room;
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x / kCtas, b = m / job.tokens, slot = max(job.slot[b], 0);
  const int share = (job.vocab + 4 * kCtas - 1) / (4 * kCtas) * 4;
  const int from = min(int(cluster_rank()) * share, job.vocab), to = min(from + share, job.vocab);
  Cluster cluster{&room};
  int id;
  if (job.shaped) {
    id = choose_shaped(job, m, slot, job.start[b] + m % job.tokens, from, to, values, cluster);
  } else {
    id = cluster.best(largest(job, m, slot, from, to)).id;
  }
  // idle rows hold anything, and nothing compares with NaN: a valid id all the same
  if (cluster_rank() == 0 && threadIdx.x == 0) job.chosen[m] = min(id, job.vocab - 1);
  cluster_sync();  // nobody leaves while others still read its memory
}
