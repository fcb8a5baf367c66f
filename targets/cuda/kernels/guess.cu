// A draft head's guess, as the target would choose among the words that the head knows: by the same
// rules (the target's sample.cu), with the same noise. A cluster of 8 CTAs owns one row; a draft vocabulary fits into
// its registers.
#include "choice.cuh"

constexpr int kCtas = 8, kThreads = 256, kWarps = kThreads / 32, kNoGuess = -1;
constexpr int kEach = 24;   // words per thread: 48 K words per row
constexpr int kTrials = 7;  // thresholds that are tried at once

struct Job {
  const float* logits;   // [B, drafts]
  const int* ids;        // [drafts]: the target's, ascending
  const int* draft_ids;  // [vocab]: below 0 for unknown words
  const float* bias;     // [slots, vocab]
  int* history;          // [slots, stride]
  const int* start;      // [B]: the position that the guess follows
  const int* slot;       // [B]; below 0: no guess
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const long long* seed;  // [slots, 2] words
  const int* prompt_len;
  u32* counts;  // [B, drafts] scratch: bit 31 seen anywhere, below: times in the output
  int* tokens;  // [B, width]: guess j comes at j + 1
  int drafts, vocab, stride, width, j, shaped;
};

// Scratch of a cluster's CTAs: two sets, used in turn, so that one barrier serves.
struct Room {
  float warps[kTrials][kWarps];
  Best bests[kWarps];
  float sums[2][kCtas][kTrials];  // of every CTA, sent by it
  Best best[2][kCtas];
};

struct Cluster {
  Room* room;
  int turn = 0;

  // Each thread's sums, added over the cluster in a fixed order: lane n of every warp has sum n.
  __device__ float add(const float (&mine)[kTrials]) {
    const int lane = threadIdx.x % 32;
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < kTrials; n++) {
      const float v = warp_sum(mine[n]);
      if (lane == 0) room->warps[n][threadIdx.x / 32] = v;
    }
    __syncthreads();
    if (threadIdx.x < kCtas * kTrials) {
      const int n = threadIdx.x % kTrials;
      float v = 0.0f;
      for (int w = 0; w < kWarps; w++) v += room->warps[n][w];
      send(&room->sums[turn][cluster_rank()][n], threadIdx.x / kTrials, __float_as_uint(v));
    }
    cluster_sync();
    float all = 0.0f;
    for (int c = 0; c < kCtas; c++) all += room->sums[turn][c][min(lane, kTrials - 1)];
    return all;
  }
  __device__ Best best(Best v) {
    turn ^= 1;
    v = warp_best(v);
    if (threadIdx.x % 32 == 0) room->bests[threadIdx.x / 32] = v;
    __syncthreads();
    if (threadIdx.x < kCtas) {
      v = room->bests[0];
      for (int w = 1; w < kWarps; w++) v = better(v, room->bests[w]);
      Best* to = &room->best[turn][cluster_rank()];
      send(&to->value, threadIdx.x, __float_as_uint(v.value));
      send(&to->id, threadIdx.x, v.id);
    }
    cluster_sync();
    v = room->best[turn][0];
    for (int c = 1; c < kCtas; c++) v = better(v, room->best[turn][c]);
    return v;
  }

  __device__ static void send(void* place, int rank, u32 word) {
    u32 at;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(place)), "r"(rank));
    asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(at), "r"(word) : "memory");
  }
};

// A thread's words: draft ids from + threadIdx.x + e kThreads, -INFINITY beyond the CTA's share.
typedef float Values[kEach];

// The largest threshold whose upper set still weighs `wanted`, three bits at a time; what lies below it
// is cut.
__device__ void cut(Cluster& cluster, Values& values, const Values& weight, float wanted) {
  u32 threshold = 0;
  for (int bit = 30; bit >= 0; bit -= 3) {
    float mine[kTrials] = {};
#pragma unroll
    for (int e = 0; e < kEach; e++) {
      const u32 key = ordered(values[e]), digit = key < threshold ? 0 : key - threshold >> bit;
#pragma unroll
      for (int n = 0; n < kTrials; n++) mine[n] += digit > n ? weight[e] : 0.0f;
    }
    const float total = cluster.add(mine);
    const u32 enough = __ballot_sync(~0u, total >= wanted && total > 0.0f) & ((1u << kTrials) - 1);
    // of the first pass, whose digits have two bits, those beyond 3 have no sum
    threshold |= u32(32 - __clz(enough)) << bit;
  }
#pragma unroll
  for (int e = 0; e < kEach; e++)
    if (ordered(values[e]) < threshold) values[e] = -INFINITY;
}

// What counts towards penalties: the text up to `last`, of the CTA's own words.
__device__ void count(const Job& job, int slot, int last, int from, int to, u32* counts) {
  for (int i = from + threadIdx.x; i < to; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int* history = job.history + size_t(slot) * job.stride;
  for (int p = threadIdx.x; p <= last; p += kThreads) {
    const int token = history[p], id = token >= 0 && token < job.vocab ? job.draft_ids[token] : -1;
    if (id < from || id >= to) continue;
    atomicOr(counts + id, 0x80000000u);
    if (p >= job.prompt_len[slot]) atomicAdd(counts + id, 1u);
  }
  __syncthreads();
}

// The words' logits, with penalties and temperature.
__device__ void shape(const Job& job, int b, int slot, int from, int to, Values& values) {
  const float repetition = job.repetition[slot], presence = job.presence[slot],
              frequency = job.frequency[slot], temperature = job.temperature[slot];
  const bool penalised = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  u32* counts = job.counts + size_t(b) * job.drafts;
  if (penalised) count(job, slot, job.start[b], from, to, counts);
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const int i = from + threadIdx.x + e * kThreads;
    if (penalised && i < to) {
      const float times = float(counts[i] & 0x7fffffffu);
      float& v = values[e];
      if (counts[i]) v = v > 0.0f ? v / repetition : v * repetition;
      v = v - frequency * times - (times > 0.0f ? presence : 0.0f);
    }
    if (temperature > 0.0f) values[e] /= temperature;
  }
}

// A draw from what the filters leave, where the likeliest word has the value `best`.
__device__ Best draw(const Job& job, int b, int slot, int from, float best, Values& values, Cluster& cluster) {
  const float min_p = job.min_p[slot];
  const float floor = min_p > 0.0f ? best + logf(fmaxf(min_p, 1e-30f)) : -INFINITY;
  Values weight;
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    if (!(values[e] >= floor)) values[e] = -INFINITY;
    weight[e] = 1.0f;
  }
  if (job.top_k[slot] > 0) cut(cluster, values, weight, float(job.top_k[slot]));
  if (job.top_p[slot] < 1.0f) {
    float mass[kTrials] = {};
#pragma unroll
    for (int e = 0; e < kEach; e++) mass[0] += weight[e] = expf(values[e] - best);
    const float all = __shfl_sync(~0u, cluster.add(mass), 0);
    cut(cluster, values, weight, job.top_p[slot] * all);
  }
  const u32 k0 = u32(job.seed[2 * slot]), k1 = u32(job.seed[2 * slot + 1]);
  Best drawn = {-INFINITY, 0x7fffffff};
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    if (values[e] == -INFINITY) continue;
    const int i = from + threadIdx.x + e * kThreads;
    const u32 id = job.ids[i];
    u32 words[4];
    random_words(k0, k1, id / 4, job.start[b] + 1, words);
    const u32 word = id % 4 < 2 ? (id % 2 ? words[1] : words[0]) : (id % 2 ? words[3] : words[2]);
    drawn = better(drawn, {values[e] + gumbel(word), i});
  }
  return cluster.best(drawn);
}

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    guess(const __grid_constant__ Job job) {
  __shared__ Room room;
  const int b = blockIdx.x / kCtas, rank = cluster_rank(), share = (job.drafts + kCtas - 1) / kCtas;
  const int from = rank * share, to = min(from + share, job.drafts);
  u32 ids[kEach];
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const int i = from + threadIdx.x + e * kThreads;
    ids[e] = i < to ? job.ids[i] : 0;
  }
  const int slot = job.slot[b];  // a place: laid out before the cycle's first call
  Values values;
  if (slot >= 0)
#pragma unroll
    for (int e = 0; e < kEach; e++) values[e] = job.bias[size_t(slot) * job.vocab + ids[e]];
  wait_for_previous();
  let_next_start();  // not before: who starts then may take all earlier kernels for ended
  int* token = job.tokens + b * job.width + job.j + 1;
  if (slot < 0) {
    if (rank == 0 && threadIdx.x == 0) *token = kNoGuess;
    return;
  }
  cluster_sync();  // all have started: others' memory may be written from now on
  Best top = {-INFINITY, 0x7fffffff};
#pragma unroll
  for (int e = 0; e < kEach; e++) {
    const int i = from + threadIdx.x + e * kThreads;
    values[e] = i < to ? values[e] + job.logits[size_t(b) * job.drafts + i] : -INFINITY;
  }
  if (job.shaped) shape(job, b, slot, from, to, values);
#pragma unroll
  for (int e = 0; e < kEach; e++) top = better(top, {values[e], from + int(threadIdx.x) + e * kThreads});
  Cluster cluster{&room};
  top = cluster.best(top);
  Best found = top;
  if (job.shaped && job.temperature[slot] > 0.0f && top.value > -INFINITY)
    found = draw(job, b, slot, from, top.value, values, cluster);
  if (rank == 0 && threadIdx.x == 0) {
    const int said = top.value > -INFINITY ? job.ids[found.id] : kNoGuess;
    *token = said;
    if (job.start[b] + 1 < job.stride) job.history[size_t(slot) * job.stride + job.start[b] + 1] = said;
  }
  cluster_sync();  // nobody leaves while others still write to its memory
}

// Of more words than that: logits over draft ids as logits over the target's, -inf for what the head does
// not know. The target's sampler chooses.
// Grid: vocabulary, rows.
extern "C" __global__ void __launch_bounds__(256)
    spread(const float* logits, const int* draft_ids, float* out, int drafts, int vocab) {
  let_next_start();
  const int i = blockIdx.x * 256 + threadIdx.x;
  const int id = i < vocab ? draft_ids[i] : -1;
  wait_for_previous();
  if (i < vocab) out[size_t(blockIdx.y) * vocab + i] = id < 0 ? -INFINITY : logits[size_t(blockIdx.y) * drafts + id];
}
