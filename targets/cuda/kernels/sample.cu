// The target chooses: bias, penalties, temperature, min-p, top-k, top-p, then Gumbel-max with
// Philox noise keyed on (seed, position, token id); greedy rows take the argmax. Ties go to the
// lowest id. Semantics: targets/cuda/sampling.py, the reference.
//
// A cluster of 8 CTAs owns one row, each an eighth of the vocabulary. Probabilities are added as whole
// numbers, so that in which order, and beside how many tokens that are out, is nothing to a sum: a head
// leaves all logits, or a few candidates' (screen.cu). Where few are left, one CTA takes them all.
//
// A drafter's guess is chosen here as well, where it scores more words than guess.cu holds.
#include "choice.cuh"

constexpr int kCtas = 8;
constexpr int kThreads = 1024;
constexpr int kFew = 4096;  // tokens that one CTA takes
constexpr int kRanked = 512;  // tokens of which each is compared with all others
constexpr int kGroups = kCtas * 32;  // warps of a cluster
constexpr int kNoGuess = -1;
constexpr float kOne = 1099511627776.0f;  // the largest probability as a whole number: 2^40

struct Job {
  const float* logits;  // [M, vocab]
  const float* bias;    // [slots, vocab]
  int* history;         // [slots, stride]
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
  int* guesses;      // [B, width]: of a drafter, guess j comes at j + 1 and into the history; null: chosen
  int vocab, stride, tokens, shaped;
  int width, j;
  int most;  // top-k of rows that have top-p alone; 0: none

  __device__ int likeliest(int slot) const {
    const int k = top_k[slot];
    return k > 0 ? k : top_p[slot] < 1.0f ? most : 0;
  }
};

__device__ inline bool allowed(const Job& job, int m, int id) {
  if (!job.masks) return true;
  return job.masks[size_t(m) * ((job.vocab + 31) / 32) + id / 32] >> (id % 32) & 1u;
}

__device__ inline u32 peer_address(const void* mine, int rank) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  return at;
}
__device__ inline float peer(const float* mine, int rank) {
  float v;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(v) : "r"(peer_address(mine, rank)) : "memory");
  return v;
}
__device__ inline u64 peer(const u64* mine, int rank) {
  u64 v;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(v) : "r"(peer_address(mine, rank)) : "memory");
  return v;
}
__device__ inline void store_peer(void* mine, int rank, u32 v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_address(mine, rank)), "r"(v) : "memory");
}

__device__ inline u64 warp_sum(u64 v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}

// Scratch for reductions over the cluster; two sets, used in turn, so that one barrier serves.
struct Room {
  float warps[2][32];
  int ids[2][32];
  u64 sums[2][32];
  float best[2], id[2];
  u64 total[2];
  float value[kFew];  // of the first CTA: tokens of all
  int token[kFew];
  float groups[kGroups], kth;
  u32 keys[kRanked];
  u64 masses[kRanked];
};

// Sums and maxima of one CTA.
struct Block {
  Room* room;
  int turn = 0;

  __device__ u64 sum(u64 v) {
    turn ^= 1;
    v = warp_sum(v);
    if (threadIdx.x % 32 == 0) room->sums[turn][threadIdx.x / 32] = v;
    __syncthreads();
    return warp_sum(room->sums[turn][threadIdx.x % 32]);
  }
  __device__ Best best(Best v) {
    turn ^= 1;
    v = warp_best(v);
    if (threadIdx.x % 32 == 0) room->warps[turn][threadIdx.x / 32] = v.value, room->ids[turn][threadIdx.x / 32] = v.id;
    __syncthreads();
    return warp_best({room->warps[turn][threadIdx.x % 32], room->ids[turn][threadIdx.x % 32]});
  }
};

// Of all of them.
struct Cluster {
  Block block;

  __device__ u64 sum(u64 v) {
    v = block.sum(v);
    u64& mine = block.room->total[block.turn];
    if (threadIdx.x == 0) mine = v;
    cluster_sync();
    u64 all = 0;
    for (int c = 0; c < kCtas; c++) all += peer(&mine, c);
    return all;
  }
  __device__ Best best(Best v) {
    v = block.best(v);
    float &value = block.room->best[block.turn], &id = block.room->id[block.turn];
    if (threadIdx.x == 0) value = v.value, id = __int_as_float(v.id);
    cluster_sync();
    v = {peer(&value, 0), __float_as_int(peer(&id, 0))};
    for (int c = 1; c < kCtas; c++) v = better(v, {peer(&value, c), __float_as_int(peer(&id, c))});
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

__device__ inline u64 mass(float v, float best) { return __float2ull_rz(expf(v - best) * kOne); }

// -inf for values below the largest threshold whose upper set still weighs `wanted`. group: who shares them;
// value i of this thread is values[i * stride].
template <class Group, typename Weight>
__device__ void cut(Group& group, float* values, int count, int stride, u64 wanted, Weight weight) {
  u32 threshold = 0;
  for (int bit = 31; bit >= 0; bit--) {
    const u32 trial = threshold | 1u << bit;
    u64 mine = 0;
    for (int i = 0; i < count; i++)
      if (ordered(values[i * stride]) >= trial) mine += weight(values[i * stride]);
    const u64 total = group.sum(mine);
    if (total >= wanted && total > 0) threshold = trial;
  }
  for (int i = 0; i < count; i++)
    if (ordered(values[i * stride]) < threshold) values[i * stride] = -INFINITY;
}

// Top-k, then top-p.
template <class Group>
__device__ void filter(const Job& job, int slot, float best, Group& group, float* values, int count, int stride) {
  const int top_k = job.likeliest(slot);
  if (top_k > 0) cut(group, values, count, stride, top_k, [](float) { return u64(1); });
  if (job.top_p[slot] >= 1.0f) return;
  u64 all = 0;
  for (int i = 0; i < count; i++) all += mass(values[i * stride], best);
  const u64 wanted = double(job.top_p[slot]) * double(group.sum(all));
  cut(group, values, count, stride, wanted, [best](float v) { return mass(v, best); });
}

// All tokens that are not out to the first CTA: -> how many, or more than kFew, and nothing is moved.
__device__ int gather(Cluster& cluster, const float* values, int size, int from) {
  __shared__ int warps[32];
  __shared__ u64 total;
  int mine = 0;
  for (int i = threadIdx.x; i < size; i += kThreads) mine += values[i] > -INFINITY;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int at = mine;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int other = __shfl_up_sync(~0u, at, d);
    if (lane >= d) at += other;
  }
  if (lane == 31) warps[warp] = at;
  at -= mine;
  __syncthreads();
  const int before = warp_sum(lane < warp ? float(warps[lane]) : 0.0f), all_mine = warp_sum(float(warps[lane]));
  if (threadIdx.x == 0) total = all_mine;
  cluster_sync();
  int all = 0;
  at += before;
  for (int c = 0; c < kCtas; c++) {
    if (c == int(cluster_rank())) at += all;
    all += int(peer(&total, c));
  }
  if (all > kFew) return all;
  Room& room = *cluster.block.room;
  for (int i = threadIdx.x; mine && i < size; i += kThreads) {
    if (!(values[i] > -INFINITY)) continue;
    store_peer(room.value + at, 0, __float_as_uint(values[i])), store_peer(room.token + at, 0, from + i);
    at++;
  }
  cluster_sync();
  return all;
}

// At most what top-k leaves is as large as the k-th largest of all warps' largest, which is returned.
// Called right after `cluster.best` of all values, whose warps' largest are still there.
__device__ float least_of(Cluster& cluster, int top_k) {
  Room& room = *cluster.block.room;
  const int i = threadIdx.x;
  if (i == 0) room.kth = -INFINITY;
  if (i < kGroups) room.groups[i] = peer(&room.warps[cluster.block.turn][i % 32], i / 32);
  __syncthreads();
  if (i < kGroups) {
    const float mine = room.groups[i];
    int above = 0;
#pragma unroll 8
    for (int j = 0; j < kGroups; j++) above += room.groups[j] > mine || (room.groups[j] == mine && j < i);
    if (above == top_k - 1) room.kth = mine;
  }
  __syncthreads();
  return room.kth;
}

// Top-k, then top-p, of so few that each thread has one: a token stays where those above it are fewer than
// k, and weigh less than p. What `filter` leaves, without its 64 rounds.
__device__ float ranked(const Job& job, int slot, float best, int count, Block& block) {
  Room& room = *block.room;
  const int i = threadIdx.x, top_k = job.likeliest(slot);
  const float value = i < count ? room.value[i] : -INFINITY;
  const u32 key = ordered(value);
  if (i < kRanked) room.keys[i] = i < count ? key : 0;
  __syncthreads();
  bool stays = value > -INFINITY;
  if (top_k > 0 && stays) {
    int above = 0;
#pragma unroll 8
    for (int j = 0; j < count; j++) above += room.keys[j] > key;
    stays = above < top_k;
  }
  if (job.top_p[slot] >= 1.0f) return stays ? value : -INFINITY;
  const u64 own = stays ? mass(value, best) : 0;
  if (i < kRanked) room.masses[i] = own;
  const u64 all = block.sum(own), wanted = max(u64(double(job.top_p[slot]) * double(all)), u64(1));
  if (!stays) return -INFINITY;
  u64 above = 0;
#pragma unroll 8
  for (int j = 0; j < count; j++) above += room.keys[j] > key ? room.masses[j] : 0;
  return above < wanted ? value : -INFINITY;
}

// The first CTA draws one of few.
__device__ int draw_few(const Job& job, int slot, int position, float best, int count, Block& block) {
  Room& room = *block.room;
  constexpr int kEach = kFew / kThreads;
  float value[kEach];
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    const int i = threadIdx.x + j * kThreads;
    value[j] = i < count ? room.value[i] : -INFINITY;
  }
  if (count <= kRanked)
    value[0] = ranked(job, slot, best, count, block);
  else
    filter(job, slot, best, block, value, kEach, 1);
  const u32 k0 = u32(job.seed[2 * slot]), k1 = u32(job.seed[2 * slot + 1]);
  Best drawn = {-INFINITY, 0x7fffffff};
#pragma unroll
  for (int j = 0; j < kEach; j++) {
    if (!(value[j] > -INFINITY)) continue;
    const int id = room.token[threadIdx.x + j * kThreads];
    u32 words[4];
    random_words(k0, k1, id / 4, position + 1, words);
    const u32 word = id % 4 == 0 ? words[0] : id % 4 == 1 ? words[1] : id % 4 == 2 ? words[2] : words[3];
    drawn = better(drawn, {value[j] + gumbel(word), id});
  }
  return block.best(drawn).id;
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
  float floor = min_p > 0.0f ? best + logf(fmaxf(min_p, 1e-30f)) : -INFINITY;
  const int top_k = job.likeliest(slot);
  if (top_k > 0 && top_k <= kGroups) floor = fmaxf(floor, least_of(cluster, top_k));
  for (int i = threadIdx.x; i < size; i += kThreads)
    if (!(values[i] >= floor)) values[i] = -INFINITY;
  const bool cuts = top_k > 0 || job.top_p[slot] < 1.0f;
  if (cuts || min_p > 0.0f) {
    const int few = gather(cluster, values, size, from);
    if (few <= kFew)
      return cluster_rank() == 0 ? draw_few(job, slot, position, best, few, cluster.block) : 0;
    const int count = (size - int(threadIdx.x) + kThreads - 1) / kThreads;
    filter(job, slot, best, cluster, values + threadIdx.x, max(count, 0), kThreads);
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

// What was chosen as a guess, if anything that the drafter scores may be said at all. It joins the
// verify's tokens, and the text, where the next guess's penalties look for it.
__device__ void note(const Job& job, int b, int id) {
  const int own = job.slot[b];
  const bool said =
      own >= 0 && job.logits[size_t(b) * job.vocab + id] + job.bias[size_t(own) * job.vocab + id] > -INFINITY;
  const int guess = said ? id : kNoGuess, position = job.start[b] + 1;
  job.guesses[b * job.width + 1 + job.j] = guess;
  if (own >= 0 && position < job.stride) job.history[size_t(own) * job.stride + position] = guess;
}

extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    choose(const __grid_constant__ Job job) {
  extern __shared__ float values[];
  __shared__ Room room;
  if (!job.guesses) let_next_start();
  wait_for_previous();
  if (job.guesses) let_next_start();  // who starts after a guess may take all earlier kernels for ended
  const int m = blockIdx.x / kCtas, b = m / job.tokens, slot = max(job.slot[b], 0);
  const int share = (job.vocab + 4 * kCtas - 1) / (4 * kCtas) * 4;
  const int from = min(int(cluster_rank()) * share, job.vocab), to = min(from + share, job.vocab);
  Cluster cluster{{&room}};
  int id;
  if (job.shaped) {
    id = choose_shaped(job, m, slot, job.start[b] + m % job.tokens, from, to, values, cluster);
  } else {
    id = cluster.best(largest(job, m, slot, from, to)).id;
  }
  // idle rows hold anything, and nothing compares with NaN: a valid id all the same
  id = min(id, job.vocab - 1);
  if (cluster_rank() == 0 && threadIdx.x == 0) {
    if (job.guesses)
      note(job, m, id);
    else
      job.chosen[m] = id;
  }
  cluster_sync();  // nobody leaves while others still read its memory
}
