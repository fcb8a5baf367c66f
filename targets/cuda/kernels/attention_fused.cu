// Attention of rows that keep the machine busy: one CTA does all lanes of a KV head for a tile of its
// rows, from the projection's output to the next one's input. A producer warp keeps a ring of keys and
// values in flight with bulk copies (a chunk of either is contiguous in the cache), and stores the new
// ones before it comes to them.
#include "attention_chunk.cuh"
#include "ring.cuh"

// ---- The ring ----
constexpr int kOutputs = PADDED_HEAD_DIM / 2 + 4;  // floats per row, without bank conflicts
constexpr int kStageKeys = 64, kStagesPerChunk = kChunk / kStageKeys;  // keys per stage of the ring
constexpr u32 kStage = kStageKeys * PADDED_HEAD_DIM * sizeof(Cached);
static_assert(kStagesPerChunk * kStageKeys == kChunk, "A chunk is copied in whole stages.");

struct Ring {
  u32 at, full, empty;
  int stages, stage = 0, phase = 0;

  __device__ Ring(u8* memory, int stages) : stages(stages) {
    at = shared_address(memory), full = at + stages * kStage, empty = full + 8 * stages;
  }
  __device__ void init() { init_ring(full, empty, stages, kWarps); }
  __device__ void advance() {
    if (++stage == stages) stage = 0, phase ^= 1;
  }
  // One lane of the producer: keys begin .. end of a chunk, of `width` bytes each.
  __device__ void fill(const Cached* chunk, int begin, int end) {
    const u32 width = PADDED_HEAD_DIM * sizeof(Cached);
    for (int part = 0; part < kStagesPerChunk; part++, advance()) {
      const int from = max(begin - part * kStageKeys, 0), to = min(end - part * kStageKeys, kStageKeys);
      const u32 bytes = to > from ? (to - from) * width : 0;
      await(empty + 8 * stage, phase ^ 1);
      expect(full + 8 * stage, bytes);
      if (bytes)
        copy(at + stage * kStage + from * width, chunk + size_t(part * kStageKeys + from) * PADDED_HEAD_DIM, bytes,
             full + 8 * stage);
    }
  }
  __device__ u32 ready(int part) const {  // a consumer's stage
    const int s = stage + part, wraps = s >= stages;
    await(full + 8 * (s - wraps * stages), phase ^ wraps);
    return (s - wraps * stages) * kStage;
  }
  __device__ void release() {
    __syncwarp();
    for (int part = 0; part < kStagesPerChunk; part++, advance())
      if (threadIdx.x % 32 == 0) arrive(empty + 8 * stage);
  }
};

// ---- Producer ----
// The producer stores the new keys and values of its KV head, which other CTAs may do as well.
__device__ inline void store_new(const Job& job, const Work& work) {
#pragma unroll 1
  for (int i = 0; i < 2 * job.tokens; i++) {
    const Role role = i % 2 ? kValue : kKey;
    const int t = i / 2, position = work.start + t;
    const float* raw = raw_key(job, size_t(work.b) * job.tokens + t, work.head, role);
    Rotation rotation;
    Vector x;
    x.load(raw);
    rotation.load(job, role, position);
    rotate(job, role, x, rotation);
    store_key(job, work.slot, work.head, position, role, x);
  }
  asm volatile("fence.proxy.async.global;" ::: "memory");  // bulk copies read them
  __syncwarp();
}

// As much of each chunk as some row sees, values in blocks of 32 keys.
__device__ inline void produce(const Job& job, Work work, Ring& ring) {
  for (bool stored = false; work.chunk >= 0; work.advance()) {
    if (!stored && !work.settled()) {
      wait_for_previous();
      if (job.stores) store_new(job, work);
      stored = true;
    }
    const int key0 = work.chunk * kChunk, begin = max(0, work.oldest - key0);
    const int end = min(kChunk, work.newest + 1 - key0);
    if (threadIdx.x % 32 == 0) {
      ring.fill(job.k + work.entry(job) * PADDED_HEAD_DIM, begin, end);
      ring.fill(job.v + work.entry(job) * PADDED_HEAD_DIM, begin / 32 * 32, (end + 31) / 32 * 32);
    }
    __syncwarp();
  }
}

// ---- Consumers ----
// Row r's query, one warp each.
__device__ inline void prepare(const Job& job, const Work& work, u16* queries) {
  const int warp = threadIdx.x / 32;
  Rotation rotation;
  if (warp < work.rows) rotation.load(job, kQuery, work.position(job, warp));
  wait_for_previous();
  let_next_start();
#pragma unroll 1
  for (int r = warp; r < work.rows; r += kWarps) {
    const int row = work.first_row + r, head = work.head * job.group + row % job.group;
    const size_t m = size_t(work.b) * job.tokens + row / job.group;
    const float* raw = raw_query(job, m, head);
    Vector x;
    x.load(raw);
    if (r != warp) rotation.load(job, kQuery, work.position(job, r));
    rotate(job, kQuery, x, rotation);
    store_query(queries, r, x);
  }
}

// The merged outputs to the output projection's input: through shared memory, half of the columns at
// a time, where queries and scores were.
__device__ inline void give(const Job& job, const Work& work, const Shared& shared, const Outputs& all,
                            const Sums (&sums)[TILES_M]) {
  float* outputs = reinterpret_cast<float*>(shared.queries);
  const int warp = threadIdx.x / 32;
  consumers_sync(kWarps);
#pragma unroll
  for (int i = 0; i < TILES_M; i++)
    if (threadIdx.x % 32 == 0) shared.factors[warp + i * kWarps].x = sums[i].l;
#pragma unroll 1
  for (int first = 0; first < PADDED_HEAD_DIM; first += PADDED_HEAD_DIM / 2) {
    each_output([&](Pair pair, int row, int column) {
      if (row < work.rows && column >= first && column < first + PADDED_HEAD_DIM / 2)
        *reinterpret_cast<float2*>(outputs + row * kOutputs + column - first) = make_float2(pair.of(all)[0], pair.of(all)[1]);
    });
    consumers_sync(kWarps);
#pragma unroll 1
    for (int i = threadIdx.x; i < work.rows * PADDED_HEAD_DIM / 8; i += kWarps * 32) {
      const int row = i / (PADDED_HEAD_DIM / 8), column = i % (PADDED_HEAD_DIM / 8) * 4, r = work.first_row + row;
      const float4 o = *reinterpret_cast<const float4*>(outputs + row * kOutputs + column);
      emit(job, work.b * job.tokens + r / job.group, work.head * job.group + r % job.group, first + column,
           o, shared.factors[row].x);
    }
    consumers_sync(kWarps);
  }
}

constexpr int kCtasPerSm = TILES_M == 1 || PADDED_HEAD_DIM <= 256 && TILES_M == 2 ? 2 : 1;  // CTAs per multiprocessor

// The other warps.
__device__ inline void consume(const Job& job, Work work, const Shared& shared, Ring& ring) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, tg = lane % 4;
  prepare(job, work, shared.queries);
  consumers_sync(kWarps);
  Outputs o = {}, all = {};
  Sums lane_sums[TILES_M], all_sums[TILES_M];
#pragma unroll 1
  for (; work.chunk >= 0; work.advance()) {
    const int key = warp % kKeyGroups * 16;
    const Cached* keys = reinterpret_cast<const Cached*>(shared.rest + ring.ready(key / kStageKeys));
    keys += (key % kStageKeys + g) * PADDED_HEAD_DIM + warp / kKeyGroups * (PADDED_HEAD_DIM / kSlices) + tg * 8;
    score([&](int kb, int half) { return load8(keys + half * 8 * PADDED_HEAD_DIM + kb * 32); }, shared);
    ring.release();
    consumers_sync(kWarps);
    const bool last = work.last_of_lane();
    float keep[TILES_M];
    share(job, work, shared, lane_sums, keep);
#pragma unroll
    for (int i = 0; i < TILES_M; i++) {
      float2 factor = make_float2(1.0f, 0.0f);
      if (last) factor = merge(all_sums[i], lane_sums[i]), lane_sums[i] = Sums();
      if (lane == 0) shared.factors[warp + i * kWarps] = make_float4(keep[i], factor.x, factor.y, 0.0f);
    }
    consumers_sync(kWarps);
    const Cached* parts[kStagesPerChunk];
    for (int part = 0; part < kStagesPerChunk; part++)
      parts[part] = reinterpret_cast<const Cached*>(shared.rest + ring.ready(part)) +
                    (warp * kTiles * 16 + g) * 32 + tg * 8;
    const auto values = [&](int kb, int n, int half) {
      return load8(parts[kb * 32 / kStageKeys] + kb * 32 % kStageKeys * PADDED_HEAD_DIM + (n * 16 + half * 8) * 32);
    };
    if (warp < kColumnWarps) add_values(values, work, shared, o);
    loads_done();  // of the keys, the scores that were stored needed all
    ring.release();
    if (last)
      each_output([&](Pair pair, int row, int) {
        const float4 factor = shared.factors[row];
#pragma unroll
        for (int i = 0; i < 2; i++) {
          float& to = pair.of(all)[i];
          to = merged(to, pair.of(o)[i], make_float2(factor.y, factor.z));
          pair.of(o)[i] = 0.0f;
        }
      });
  }
  give(job, work, shared, all, all_sums);
}

// ---- Kernel ----
extern "C" __global__ void __launch_bounds__(288, kCtasPerSm) fused(const __grid_constant__ Job job) {
  extern __shared__ __align__(128) u8 memory[];
  const Shared shared(memory);
  const Work work(job, blockIdx.z, blockIdx.y, blockIdx.x, 0, 1);
  if (work.slot < 0) return wait_for_previous();
  Ring ring(shared.rest, job.stages);
  if (threadIdx.x == 0) ring.init();
  __syncthreads();
  if (threadIdx.x / 32 == kWarps)
    produce(job, work, ring);
  else
    consume(job, work, shared, ring);
}
