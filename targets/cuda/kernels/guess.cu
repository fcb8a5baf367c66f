// A draft head's guess, as the target would choose among the words that the head knows: by the same
// rules (choose.cu), with the same noise. One CTA per row: a draft vocabulary fits into its memory.
#include "choice.cuh"

constexpr int kThreads = 1024, kNoGuess = -1;

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

// Two sets of scratch, used in turn, so that one barrier serves.
struct Block {
  float sums[2][3][32];
  float values[2][32];
  int ids[2][32];
};

struct Together {
  Block* room;
  int turn = 0;

  __device__ void sum(float (&v)[3]) {
    turn ^= 1;
#pragma unroll
    for (int n = 0; n < 3; n++) {
      v[n] = warp_sum(v[n]);
      if (threadIdx.x % 32 == 0) room->sums[turn][n][threadIdx.x / 32] = v[n];
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 3; n++) v[n] = warp_sum(room->sums[turn][n][threadIdx.x % 32]);
  }
  __device__ Best best(Best v) {
    turn ^= 1;
    v = warp_best(v);
    if (threadIdx.x % 32 == 0) room->values[turn][threadIdx.x / 32] = v.value, room->ids[turn][threadIdx.x / 32] = v.id;
    __syncthreads();
    return warp_best({room->values[turn][threadIdx.x % 32], room->ids[turn][threadIdx.x % 32]});
  }
};

// The largest threshold whose upper set still weighs `wanted`, two bits at a time; keys below it are cut.
template <typename Weight>
__device__ void cut(Together& block, float* values, int size, float wanted, Weight weight) {
  u32 threshold = 0;
  for (int bit = 30; bit >= 0; bit -= 2) {
    float total[3] = {};
    for (int i = threadIdx.x; i < size; i += kThreads) {
      const u32 key = ordered(values[i]);
      if (key < (threshold | 1u << bit)) continue;
      const float w = weight(values[i]);
      total[0] += w;
      total[1] += key >= (threshold | 2u << bit) ? w : 0.0f;
      total[2] += key >= (threshold | 3u << bit) ? w : 0.0f;
    }
    block.sum(total);
    u32 digit = 0;
#pragma unroll
    for (int n = 0; n < 3; n++)
      if (total[n] >= wanted && total[n] > 0.0f) digit = n + 1;
    threshold |= digit << bit;
  }
  for (int i = threadIdx.x; i < size; i += kThreads)
    if (ordered(values[i]) < threshold) values[i] = -INFINITY;
}

// What counts towards penalties: the text up to `last`.
__device__ void count(const Job& job, int slot, int last, u32* counts) {
  for (int i = threadIdx.x; i < job.drafts; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int* history = job.history + size_t(slot) * job.stride;
  for (int p = threadIdx.x; p <= last; p += kThreads) {
    const int token = history[p], id = token >= 0 && token < job.vocab ? job.draft_ids[token] : -1;
    if (id < 0) continue;
    atomicOr(counts + id, 0x80000000u);
    if (p >= job.prompt_len[slot]) atomicAdd(counts + id, 1u);
  }
  __syncthreads();
}

// -> the draft id, and a value that is -INFINITY where no word may be said.
__device__ Best sample(const Job& job, int b, int slot, float* values, Together& block) {
  const float* logits = job.logits + size_t(b) * job.drafts;
  const float* bias = job.bias + size_t(slot) * job.vocab;
  const float repetition = job.repetition[slot], presence = job.presence[slot],
              frequency = job.frequency[slot], temperature = job.temperature[slot];
  const bool penalised = repetition != 1.0f || presence != 0.0f || frequency != 0.0f;
  u32* counts = job.counts + size_t(b) * job.drafts;
  if (penalised) count(job, slot, job.start[b], counts);
  Best top = {-INFINITY, 0x7fffffff};
  for (int i = threadIdx.x; i < job.drafts; i += kThreads) {
    float v = logits[i] + bias[job.ids[i]];
    if (penalised) {
      const float times = float(counts[i] & 0x7fffffffu);
      if (counts[i]) v = v > 0.0f ? v / repetition : v * repetition;
      v = v - frequency * times - (times > 0.0f ? presence : 0.0f);
    }
    if (temperature > 0.0f) v /= temperature;
    values[i] = v;
    top = better(top, {v, i});
  }
  top = block.best(top);
  if (temperature <= 0.0f || top.value == -INFINITY) return top;
  const float best = top.value, min_p = job.min_p[slot];
  if (min_p > 0.0f)
    for (int i = threadIdx.x; i < job.drafts; i += kThreads)
      if (!(values[i] >= best + logf(fmaxf(min_p, 1e-30f)))) values[i] = -INFINITY;
  if (job.top_k[slot] > 0)
    cut(block, values, job.drafts, float(job.top_k[slot]), [](float) { return 1.0f; });
  if (job.top_p[slot] < 1.0f) {
    float mass[3] = {};
    for (int i = threadIdx.x; i < job.drafts; i += kThreads) mass[0] += expf(values[i] - best);
    block.sum(mass);
    cut(block, values, job.drafts, job.top_p[slot] * mass[0], [best](float v) { return expf(v - best); });
  }
  const u32 k0 = u32(job.seed[2 * slot]), k1 = u32(job.seed[2 * slot + 1]);
  Best drawn = {-INFINITY, 0x7fffffff};
  for (int i = threadIdx.x; i < job.drafts; i += kThreads) {
    if (values[i] == -INFINITY) continue;
    const u32 id = job.ids[i];
    u32 words[4];
    random_words(k0, k1, id / 4, job.start[b] + 1, words);
    const u32 word = id % 4 < 2 ? (id % 2 ? words[1] : words[0]) : (id % 2 ? words[3] : words[2]);
    drawn = better(drawn, {values[i] + gumbel(word), i});
  }
  return block.best(drawn);
}

extern "C" __global__ void __launch_bounds__(kThreads) guess(const __grid_constant__ Job job) {
  extern __shared__ float values[];
  __shared__ Block room;
  wait_for_previous();
  let_next_start();  // not before: who starts then may take all earlier kernels for ended
  const int b = blockIdx.x, slot = job.slot[b];
  int* token = job.tokens + b * job.width + job.j + 1;
  if (slot < 0) {
    if (threadIdx.x == 0) *token = kNoGuess;
    return;
  }
  Together block{&room};
  Best found = {-INFINITY, 0x7fffffff};
  if (job.shaped) {
    found = sample(job, b, slot, values, block);
  } else {
    const float* logits = job.logits + size_t(b) * job.drafts;
    const float* bias = job.bias + size_t(slot) * job.vocab;
#pragma unroll 8
    for (int i = threadIdx.x; i < job.drafts; i += kThreads)
      found = better(found, {logits[i] + bias[job.ids[i]], i});
    found = block.best(found);
  }
  if (threadIdx.x) return;
  const int said = found.value > -INFINITY ? job.ids[found.id] : kNoGuess;
  *token = said;
  if (job.start[b] + 1 < job.stride) job.history[size_t(slot) * job.stride + job.start[b] + 1] = said;
}
