// Merges the lanes' results that `split` wrote, in ascending order.
#include "attention.cuh"

// Threads of the first warp: heads of 64 have half of one.
constexpr u32 kFirstWarp = PADDED_HEAD_DIM / 4 < 32 ? (1u << PADDED_HEAD_DIM / 4) - 1 : ~0u;

constexpr int kAtOnce = 16;  // lanes

// The largest `m` of these and of the lanes below this thread's lane.
__device__ inline float lanes_before(float m, float highest, int lane) {
#pragma unroll
  for (int d = 1; d < kAtOnce; d *= 2) {
    const float lower = __shfl_up_sync(kFirstWarp, m, d, kAtOnce);
    if (lane >= d) m = fmaxf(m, lower);
  }
  const float before = __shfl_up_sync(kFirstWarp, m, 1, kAtOnce);
  return lane ? fmaxf(highest, before) : highest;
}

// Grid: rows, query heads; a thread has four columns. All loads of sixteen lanes are issued before any is merged. One
// thread per lane computes its address and factors for the whole CTA: instruction caches are cold, so each instruction
// counts.
extern "C" __global__ void __launch_bounds__(PADDED_HEAD_DIM / 4) combine(const __grid_constant__ Job job) {
  __shared__ float4 factors[kLanes];
  __shared__ uint4 places[kLanes / 4];
  let_next_start();
  const int m = blockIdx.x, head = blockIdx.y, b = quotient(m, job.tokens), t = m - b * job.tokens;
  const Place place(job, b);
  const int kv_head = quotient(head, job.group), row = t * job.group + head - kv_head * job.group;
  const int query = place.start + t, begin = (job.window ? max(0, query - job.window + 1) : 0) / kChunk;
  const int lane = threadIdx.x % kAtOnce, apart = job.batch * job.kv_heads * job.tokens * job.group;
  const int newest = job.newest(b, place.start, t) / kChunk;
  // where there are more lanes than sixteen, no window begins behind the first chunk: lanes are seen from the first on
  const int used = kLanes == kAtOnce ? kLanes : min(kLanes, (newest / kAtOnce + 1) * kAtOnce);
  const auto seen = [&](int lane) { return begin + ((lane - begin) & (kLanes - 1)) <= newest; };
  const size_t first = job.part(b, kv_head, 0, row);
  // in bytes; a lane that this row does not see is replaced by one that it sees, with factor zero
#pragma unroll 1
  for (int own = lane; own < used; own += kAtOnce)
    reinterpret_cast<u32*>(places)[own] =
        ((seen(own) ? own : begin & (kLanes - 1)) * apart + u32(first)) * PADDED_HEAD_DIM * 4;
  const u8* partial = reinterpret_cast<const u8*>(job.partial);
  __syncthreads();
  wait_for_previous();
  if (place.slot < 0) return;
  float4 v[kAtOnce];
  const auto load = [&](int from) {
#pragma unroll
    for (int j = 0; j < kAtOnce / 4; j++) {
      const uint4 at = places[from / 4 + j];
      const u32 lanes[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
      for (int i = 0; i < 4; i++) v[4 * j + i] = *reinterpret_cast<const float4*>(partial + (lanes[i] + threadIdx.x * 16));
    }
  };
  load(0);
  if (threadIdx.x < 32) {
    float highest = -INFINITY;
#pragma unroll 1
    for (int own = lane; own < used; own += kAtOnce) {
      Sums mine, before;
      if (seen(own)) {
        const float2 sums = job.sums[first + size_t(own) * apart];
        mine.m = sums.x, mine.l = sums.y;
      }
      before.m = lanes_before(mine.m, highest, lane);
      const float2 factor = merge(before, mine);
      factors[own] = make_float4(factor.x, factor.y, __fmul_rn(mine.l, factor.y), 0.0f);
      highest = __shfl_sync(kFirstWarp, fmaxf(before.m, mine.m), kAtOnce - 1, kAtOnce);
    }
  }
  __syncthreads();
  float l = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int from = 0; from < used; from += kAtOnce) {
    if (from) load(from);
#pragma unroll
    for (int j = 0; j < kAtOnce; j++) {
      const float4 f = factors[from + j];
      const float2 factor = make_float2(f.x, f.y);
      l = __fmaf_rn(l, f.x, f.z);
      o.x = merged(o.x, v[j].x, factor), o.y = merged(o.y, v[j].y, factor);
      o.z = merged(o.z, v[j].z, factor), o.w = merged(o.w, v[j].w, factor);
    }
  }
  emit(job, m, head, 4 * threadIdx.x, o, l);
}
