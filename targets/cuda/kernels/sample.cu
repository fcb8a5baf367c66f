// Chooses a token: bias, penalties, temperature, min-p, top-k, top-p, then Gumbel-max with Philox
// noise keyed on (seed, position, token id); greedy rows take the argmax. Ties go to the lowest id.
// Semantics: targets/cuda/sampling.py, the reference. It serves the target's choices, and drafters' guesses out
// of the words that they score.
//
// A cluster of 8 CTAs owns one row, each an eighth of the words. Probabilities are added as integers, so a sum
// depends neither on the order nor on how many excluded tokens are among them: a head leaves all logits, or only
// a few candidates' (screen.cu). Where few tokens are left, one CTA takes them all. Eight CTAs run from cold
// instruction caches: loops are unrolled only where loads would wait for each other.
#include "choice.cuh"

// ---- Shape, and the job ----
constexpr int kCtas = 8;
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr int kFew = 4096;  // tokens that one CTA takes
constexpr int kRanked = 512;  // tokens of which each is compared with all others
constexpr int kGroups = kCtas * kWarps;  // warps of a cluster
static_assert(kWarps == 32, "One warp has a lane for each warp of the CTA.");
static_assert(kCtas <= 8, "A cluster of more CTAs is not portable.");
constexpr int kNoGuess = -1;
constexpr float kOne = 1099511627776.0f;  // the largest probability as a whole number: 2^40

struct Job {
  const float* logits;   // [M, words]
  const int* ids;        // [words]: the tokens that a drafter scores, ascending; null: all
  const int* draft_ids;  // [vocab]: the inverse, below 0 for the rest
  const float* bias;     // [slots, vocab]
  int* history;          // [slots, stride]
  const int* start;      // [B]
  const int* slot;       // [B]; below 0: idle
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const float* repetition;
  const float* presence;
  const float* frequency;
  const long long* seed;  // [slots, 2] words
  const int* prompt_len;
  u32* counts;  // [M, words] scratch: bit 31 seen anywhere, below: times in the output
  int* chosen;  // [M]
  const u32* masks;  // [M, ceil(vocab / 32)]: a bit for each token that may be chosen; null: all
  int* guesses;      // [B, width]: a drafter's guess j goes to j + 1 and the history; null: use `chosen`
  int words, vocab, stride, tokens, shaped;
  int width, j;
  int most;  // top-k of rows that have top-p alone; 0: none

  __device__ int token(int word) const { return ids ? ids[word] : word; }
  __device__ int likeliest(int slot) const {
    const int k = top_k[slot];
    return k > 0 ? k : top_p[slot] < 1.0f ? most : 0;
  }
};

// What a token is chosen from: row m, of a request in `slot`, and this CTA's words from `from` to `to`.
struct Row {
  int m, slot, position, from, to;
};

// ---- Sums and maxima of a CTA and a cluster ----
__device__ inline u64 warp_sum(u64 v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

struct Room {
  u64 groups[2][kGroups];  // of all warps of the cluster; two sets, used in turn, so that one barrier serves
  u64 warps[2][kWarps];    // of the first CTA's
  float value[kFew];       // of the first CTA: tokens of all
  int word[kFew];
  alignas(16) u32 keys[kRanked];
  alignas(16) u64 masses[kRanked];
  u32 kth;
};

// Sums and maxima of one CTA.
struct Block {
  Room* room;
  int turn = 0;

  template <class T>
  __device__ T of_warps(T v) {
    turn ^= 1;
    T* warps = reinterpret_cast<T*>(room->warps[turn]);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = v;
    __syncthreads();
    return warps[threadIdx.x % 32];
  }
  __device__ u64 sum(u64 v) { return warp_sum(of_warps(warp_sum(v))); }
  __device__ Best best(Best v) { return warp_best(of_warps(warp_best(v))); }
};

// Sums and maxima of all CTAs of the cluster.
struct Cluster {
  Room* room;
  int turn = 0;

  // Gives every CTA the values of all the cluster's warps.
  template <class T>
  __device__ const T* of_warps(T v) {
    turn ^= 1;
    T* groups = reinterpret_cast<T*>(room->groups[turn]);
    const int lane = threadIdx.x % 32;
    if (lane < kCtas) store_peer(groups + cluster_rank() * kWarps + threadIdx.x / 32, lane, v);
    cluster_sync();
    return groups;
  }
  __device__ u64 sum(u64 v) {
    const u64* all = of_warps(warp_sum(v)) + threadIdx.x % 32;
    v = 0;
#pragma unroll
    for (int c = 0; c < kCtas; c++) v += all[c * 32];
    return warp_sum(v);
  }
  __device__ Best best(Best v) {
    const Best* all = of_warps(warp_best(v)) + threadIdx.x % 32;
    v = all[0];
#pragma unroll
    for (int c = 1; c < kCtas; c++) v = better(v, all[c * 32]);
    return warp_best(v);
  }
};

// ---- Logits: bias, masks, penalties ----
// What counts towards penalties: this row's history up to its own position.
__device__ void count(const Job& job, const Row& row, u32* counts) {
  for (int i = row.from + threadIdx.x; i < row.to; i += kThreads) counts[i] = 0;
  __syncthreads();
  const int* history = job.history + size_t(row.slot) * job.stride;
  const int prompt = job.prompt_len[row.slot];
#pragma unroll 1
  for (int p = threadIdx.x; p <= row.position; p += kThreads) {
    int word = history[p];
    if (word < 0 || word >= job.vocab) continue;
    if (job.ids) word = job.draft_ids[word];
    if (word < row.from || word >= row.to) continue;
    atomicOr(counts + word, 0x80000000u);
    if (p >= prompt) atomicAdd(counts + word, 1u);
  }
  __syncthreads();
}

// The CTA's words with bias, masks and penalties, but before any temperature: into `values`, if there are
// any, and this thread's largest.
__device__ Best read_each(const Job& job, const Row& row, float* values) {
  const float* logits = job.logits + size_t(row.m) * job.words;
  const float* bias = job.bias + size_t(row.slot) * job.vocab;
  const u32* masks = job.masks ? job.masks + size_t(row.m) * ((job.vocab + 31) / 32) : nullptr;
  const float repetition = job.repetition[row.slot], presence = job.presence[row.slot],
              frequency = job.frequency[row.slot];
  const bool penalised = values && (repetition != 1.0f || presence != 0.0f || frequency != 0.0f);
  u32* counts = job.counts + size_t(row.m) * job.words;
  if (penalised) count(job, row, counts);
  Best top = none();
#pragma unroll 1
  for (int i = row.from + threadIdx.x; i < row.to; i += kThreads) {
    float v = !masks || masks[i / 32] >> (i % 32) & 1u ? logits[i] + bias[job.token(i)] : -INFINITY;
    if (penalised) {
      const u32 seen = counts[i];
      const float times = float(seen & 0x7fffffffu);
      if (seen) v = v > 0.0f ? v / repetition : v * repetition;
      v = v - frequency * times - (times > 0.0f ? presence : 0.0f);
    }
    if (values) values[i - row.from] = v;
    top = better(top, {v, i});
  }
  return top;
}

// Biases of four words. kIds: the drafter's own.
template <bool kIds>
__device__ inline float4 biases(const Job& job, int slot, int i) {
  const float* bias = job.bias + size_t(slot) * job.vocab;
  if (!kIds) return *reinterpret_cast<const float4*>(bias + i);
  const int4 id = *reinterpret_cast<const int4*>(job.ids + i);
  return make_float4(bias[id.x], bias[id.y], bias[id.z], bias[id.w]);
}

// The same, four words at a time, where there is neither mask nor penalty. ahead: of the first four, where
// they are a drafter's own.
template <bool kIds, bool kKept>
__device__ Best read_quads(const Job& job, const Row& row, float4 ahead, float* values) {
  const float* logits = job.logits + size_t(row.m) * job.words;
  Best top = {-INFINITY, row.from + int(threadIdx.x) * 4};
#pragma unroll 4
  for (int i = top.id; i < row.to; i += kThreads * 4) {
    float4 v = *reinterpret_cast<const float4*>(logits + i);
    if (!kKept && !(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) > -INFINITY)) continue;  // as a head leaves most words
    const float4 b = kIds && i == row.from + int(threadIdx.x) * 4 ? ahead : biases<kIds>(job, row.slot, i);
    v = make_float4(v.x + b.x, v.y + b.y, v.z + b.z, v.w + b.w);
    if (kKept) *reinterpret_cast<float4*>(values + i - row.from) = v;
    if (v.x > top.value) top = {v.x, i};
    if (v.y > top.value) top = {v.y, i + 1};
    if (v.z > top.value) top = {v.z, i + 2};
    if (v.w > top.value) top = {v.w, i + 3};
  }
  return top;
}

__device__ Best read(const Job& job, const Row& row, float4 ahead, float* values) {
  const bool penalised = job.shaped && (job.repetition[row.slot] != 1.0f || job.presence[row.slot] != 0.0f ||
                                        job.frequency[row.slot] != 0.0f);
  if (penalised || job.masks || job.words % 4) return read_each(job, row, job.shaped ? values : nullptr);
  if (job.ids)
    return job.shaped ? read_quads<true, true>(job, row, ahead, values) : read_quads<true, false>(job, row, ahead, values);
  return job.shaped ? read_quads<false, true>(job, row, ahead, values) : read_quads<false, false>(job, row, ahead, values);
}

// ---- Filters: top-k, top-p ----
__device__ inline u64 mass(float v, float best) { return __float2ull_rz(expf(v - best) * kOne); }

// Replaces values by -inf below the largest threshold at which the values not below it still have the given total
// weight. group: the CTA or cluster that holds them; value i of this thread is values[i * kThreads].
template <class Group, typename Weight>
__device__ void cut(Group& group, float* values, int count, u64 wanted, Weight weight) {
  u32 threshold = 0;
#pragma unroll 1
  for (int bit = 31; bit >= 0; bit--) {
    const u32 trial = threshold | 1u << bit;
    u64 mine = 0;
#pragma unroll 2
    for (int i = 0; i < count; i++)
      if (ordered(values[i * kThreads]) >= trial) mine += weight(values[i * kThreads]);
    const u64 total = group.sum(mine);
    if (total >= wanted && total > 0) threshold = trial;
  }
#pragma unroll 1
  for (int i = 0; i < count; i++)
    if (ordered(values[i * kThreads]) < threshold) values[i * kThreads] = -INFINITY;
}

// Top-k, then top-p, of `size` values, of which this thread has each kThreads-th.
template <class Group>
__device__ void filter(const Job& job, int slot, float best, Group& group, float* values, int size) {
  values += threadIdx.x;
  const int top_k = job.likeliest(slot), count = max((size - int(threadIdx.x) + kThreads - 1) / kThreads, 0);
  if (top_k > 0) cut(group, values, count, top_k, [](float) { return u64(1); });
  if (job.top_p[slot] >= 1.0f) return;
  u64 all = 0;
#pragma unroll 1
  for (int i = 0; i < count; i++) all += mass(values[i * kThreads], best);
  const u64 wanted = double(job.top_p[slot]) * double(group.sum(all));
  cut(group, values, count, wanted, [best](float v) { return mass(v, best); });
}

// ---- Few that are left ----
// -> the k-th largest of the warps' largest values: nothing that top-k keeps is smaller. Called right after
// `cluster.best` of all values, because it reads the warps' results that are still in `room.groups`.
__device__ float least_of(Cluster& cluster, int top_k) {
  Room& room = *cluster.room;
  const int i = threadIdx.x;
  const u32 key = i < kGroups ? ordered(reinterpret_cast<const Best*>(room.groups[cluster.turn])[i].value) : 0;
  if (i < kGroups) room.keys[i] = key;
  if (i == 0) room.kth = 0;
  __syncthreads();
  if (i < kGroups) {
    const uint4* keys = reinterpret_cast<const uint4*>(room.keys);
    int reach = 0;
#pragma unroll 4
    for (int j = 0; j < kGroups / 4; j++)
      reach += (keys[j].x >= key) + (keys[j].y >= key) + (keys[j].z >= key) + (keys[j].w >= key);
    const u32 largest = __reduce_max_sync(~0u, reach >= top_k ? key : 0);
    if (i % 32 == 0) atomicMax(&room.kth, largest);
  }
  __syncthreads();
  return of_ordered(room.kth);
}

// Which values go on to the filters: those that are at least `floor` once they are divided by the temperature.
// Values below `loose` are out without a division.
struct Sieve {
  float temperature, floor, loose;

  __device__ bool holds_some(float4 v) const { return fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) >= loose; }
  __device__ float operator()(float v) const {
    if (!(v >= loose)) return -INFINITY;
    v /= temperature;
    return v >= floor ? v : -INFINITY;
  }
};

// Moves what passes the sieve to the first CTA. -> how many; if that is more than kFew, nothing is moved.
__device__ int gather(Cluster& cluster, const Sieve& sieve, const float* values, int size, int from) {
  int mine = 0;
#pragma unroll 2
  for (int i = threadIdx.x * 4; i < size; i += kThreads * 4) {
    const float4 v = *reinterpret_cast<const float4*>(values + i);
    if (!sieve.holds_some(v)) continue;
#pragma unroll 1
    for (int n = i; n < min(i + 4, size); n++) mine += sieve(values[n]) > -INFINITY;
  }
  const int lane = threadIdx.x % 32, own = cluster_rank() * kWarps + threadIdx.x / 32;
  int at = sum_so_far(mine, lane);
  const u64* counts = cluster.of_warps(u64(__shfl_sync(~0u, at, 31)));
  at -= mine;
  int before = 0, all = 0;
#pragma unroll
  for (int g = lane; g < kGroups; g += 32) {
    const int there = counts[g];
    all += there;
    if (g < own) before += there;
  }
  all = __reduce_add_sync(~0u, all), before = __reduce_add_sync(~0u, before);
  if (all > kFew) return all;
  at += before;
  Room& room = *cluster.room;
#pragma unroll 1
  for (int i = threadIdx.x * 4; mine && i < size; i += kThreads * 4) {
    if (!sieve.holds_some(*reinterpret_cast<const float4*>(values + i))) continue;
#pragma unroll 1
    for (int n = i; n < min(i + 4, size); n++) {
      const float v = sieve(values[n]);
      if (!(v > -INFINITY)) continue;
      store_peer(room.value + at, 0, __float_as_uint(v)), store_peer(room.word + at, 0, u32(from + n));
      at++;
    }
  }
  cluster_sync();
  return all;
}

// Top-k, then top-p, of so few that each thread has one: a token stays where those above it are fewer than
// k, and weigh less than p. What `filter` leaves, without its 64 rounds.
__device__ bool stays(const Job& job, int slot, float best, float value, int count, Block& block) {
  Room& room = *block.room;
  const int i = threadIdx.x, top_k = job.likeliest(slot);
  const u32 key = ordered(value);
  if (i < kRanked) room.keys[i] = i < count ? key : 0;
  __syncthreads();
  const uint4* keys = reinterpret_cast<const uint4*>(room.keys);
  bool in = i < count;
  if (top_k > 0 && in) {
    int above = 0;
#pragma unroll 2
    for (int j = 0; j < count; j += 4)
      above += (keys[j / 4].x > key) + (keys[j / 4].y > key) + (keys[j / 4].z > key) + (keys[j / 4].w > key);
    in = above < top_k;
  }
  if (job.top_p[slot] >= 1.0f) return in;
  const u64 own = in ? mass(value, best) : 0;
  if (i < kRanked) room.masses[i] = own;
  const u64 all = block.sum(own), wanted = max(u64(double(job.top_p[slot]) * double(all)), u64(1));
  if (!in) return false;
  const ulonglong2* masses = reinterpret_cast<const ulonglong2*>(room.masses);
  u64 above = 0;
#pragma unroll 1
  for (int j = 0; j < count; j += 4) {
    const uint4 k = keys[j / 4];
    const ulonglong2 low = masses[j / 2], high = masses[j / 2 + 1];
    above += (k.x > key ? low.x : 0) + (k.y > key ? low.y : 0) + (k.z > key ? high.x : 0) + (k.w > key ? high.y : 0);
  }
  return above < wanted;
}

// ---- Draw ----
__device__ Best with_noise(const Job& job, const Row& row, float value, int word) {
  const u32 id = job.token(word);
  u32 words[4];
  random_words(u32(job.seed[2 * row.slot]), u32(job.seed[2 * row.slot + 1]), id / 4, row.position + 1, words);
  return {value + gumbel(id % 4 < 2 ? (id % 2 ? words[1] : words[0]) : (id % 2 ? words[3] : words[2])), word};
}

// The first CTA draws one of few.
__device__ int draw_few(const Job& job, const Row& row, float best, int count, Block& block) {
  Room& room = *block.room;
  if (count <= kRanked) {
    const int i = threadIdx.x;
    const float value = i < count ? room.value[i] : -INFINITY;
    if (!stays(job, row.slot, best, value, count, block) && i < count) room.value[i] = -INFINITY;
  } else {
    filter(job, row.slot, best, block, room.value, count);
  }
  Best drawn = none();
#pragma unroll 1
  for (int i = threadIdx.x; i < count; i += kThreads)
    if (room.value[i] > -INFINITY) drawn = better(drawn, with_noise(job, row, room.value[i], room.word[i]));
  return block.best(drawn).id;
}

// All CTAs draw one of many. Noise comes four tokens at a time where they lie together.
__device__ int draw_many(const Job& job, const Row& row, const float* values, Cluster& cluster) {
  const u32 k0 = u32(job.seed[2 * row.slot]), k1 = u32(job.seed[2 * row.slot + 1]);
  Best drawn = none();
#pragma unroll 1
  for (int i = threadIdx.x * 4; i < row.to - row.from; i += kThreads * 4) {
    float4 v = *reinterpret_cast<const float4*>(values + i);
    if (!(fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) > -INFINITY)) continue;
    float noise[4];
    const int word = row.from + i;
    if (job.ids) {
#pragma unroll 1
      for (int n = word; n < word + 4; n++)
        if (n < row.to) drawn = better(drawn, with_noise(job, row, values[n - row.from], n));
      continue;
    }
    gumbel(k0, k1, word / 4, row.position + 1, noise);
    drawn = better(drawn, {v.x + noise[0], word});
    if (word + 1 < row.to) drawn = better(drawn, {v.y + noise[1], word + 1});
    if (word + 2 < row.to) drawn = better(drawn, {v.z + noise[2], word + 2});
    if (word + 3 < row.to) drawn = better(drawn, {v.w + noise[3], word + 3});
  }
  return cluster.best(drawn).id;
}

// Draws one of `values`; `top` is the largest of them. Only the first CTA's result counts.
__device__ int draw(const Job& job, const Row& row, float top, float* values, Cluster& cluster) {
  const int size = row.to - row.from, top_k = job.likeliest(row.slot);
  const float temperature = job.temperature[row.slot], min_p = job.min_p[row.slot], best = top / temperature;
  Sieve sieve{temperature, -INFINITY, -INFINITY};
  if (top_k > 0 && top_k <= kGroups) {
    const float least = least_of(cluster, top_k);
    sieve.floor = least / temperature;
    sieve.loose = least - fabsf(least) * 9.5367431640625e-07f - 1e-30f;  // smaller values may have the same quotient
  }
  if (min_p > 0.0f) sieve.floor = fmaxf(sieve.floor, best + logf(fmaxf(min_p, 1e-30f)));
  const bool cuts = top_k > 0 || job.top_p[row.slot] < 1.0f;
  if (cuts || min_p > 0.0f) {
    const int few = gather(cluster, sieve, values, size, row.from);
    Block block{cluster.room};
    if (few <= kFew) return cluster_rank() == 0 ? draw_few(job, row, best, few, block) : 0;
  }
#pragma unroll 1
  for (int i = threadIdx.x; i < size; i += kThreads) values[i] = sieve(values[i]);
  if (cuts) filter(job, row.slot, best, cluster, values, size);
  __syncthreads();
  return draw_many(job, row, values, cluster);
}

// ---- Kernel ----
// Stores the chosen word as a guess; kNoGuess where every word that the drafter scores is barred. It goes into the
// verify's tokens and into the history, from which the next guess's penalties are counted.
__device__ void note(const Job& job, int b, int word) {
  const int own = job.slot[b], id = job.token(word);
  const bool said =
      own >= 0 && job.logits[size_t(b) * job.words + word] + job.bias[size_t(own) * job.vocab + id] > -INFINITY;
  const int guess = said ? id : kNoGuess, position = job.start[b] + 1;
  job.guesses[b * job.width + 1 + job.j] = guess;
  if (own >= 0 && position < job.stride) job.history[size_t(own) * job.stride + position] = guess;
}

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    choose(const __grid_constant__ Job job) {
  extern __shared__ float4 quads[];
  float* values = reinterpret_cast<float*>(quads);
  __shared__ Room room;
  if (!job.guesses) let_next_start();
  const int m = blockIdx.x / kCtas, b = m / job.tokens, share = (job.words + 4 * kCtas - 1) / (4 * kCtas) * 4;
  const int from = min(int(cluster_rank()) * share, job.words), to = min(from + share, job.words);
  const int first = from + threadIdx.x * 4;
  float4 ahead;
  // a guess's slot was laid out before the cycle's first call
  if (job.ids && first + 4 <= to) ahead = biases<true>(job, max(job.slot[b], 0), first);
  cluster_sync();  // all have started: others' memory may be written from now on
  wait_for_previous();
  if (job.guesses) let_next_start();  // a kernel that starts after a guess may assume that all earlier ones have ended
  const Row row{m, max(job.slot[b], 0), job.start[b] + m % job.tokens, from, to};
  Cluster cluster{&room};
  const Best top = cluster.best(read(job, row, ahead, values));
  int word = top.id;
  if (job.shaped && job.temperature[row.slot] > 0.0f) word = draw(job, row, top.value, values, cluster);
  if (cluster_rank() != 0 || threadIdx.x != 0) return;
  // idle rows hold any bits, and NaN is never the better value: keep the id valid all the same
  word = min(word, job.words - 1);
  if (job.guesses)
    note(job, m, word);
  else
    job.chosen[m] = job.token(word);
}
