// Merges the lanes' results that `split` wrote, in ascending order.
#include "attention.cuh"

// Threads of the first warp: heads of 64 have half of one.
constexpr u32 kFirstWarp = PADDED_HEAD_DIM / 4 < 32 ? (1u << PADDED_HEAD_DIM / 4) - 1 : ~0u;

// The largest `m` of all lanes of a part below this thread's lane.
__device__ inline float lanes_before(float m, int lane) {
#pragma unroll
  for (int d = 1; d < kColumns; d *= 2) {
    const float lower = __shfl_up_sync(kFirstWarp, m, d, kColumns);
    if (lane >= d) m = fmaxf(m, lower);
  }
  const float before = __shfl_up_sync(kFirstWarp, m, 1, kColumns);
  return lane ? before : -INFINITY;
}

// Grid: rows, query heads; a thread has four columns. Sixteen lanes, a part, are merged at a time, up to the last part
// that this row sees: all their loads are issued before any is merged. One thread per lane computes its address and
// factors for the whole CTA: instruction caches are cold, so each instruction counts.
extern "C" __global__ void __launch_bounds__(PADDED_HEAD_DIM / 4) combine(const __grid_constant__ Job job) {
  __shared__ float4 factors[kLanes];
  __shared__ uint4 places[kLanes / 4];
  let_next_start();
  const int m = blockIdx.x, head = blockIdx.y, b = quotient(m, job.tokens), t = m - b * job.tokens;
  const Place place(job, b);
  const int kv_head = quotient(head, job.group), row = t * job.group + head - kv_head * job.group;
  const int query = place.start + t, begin = (job.window ? max(0, query - job.window + 1) : 0) / kChunk;
  const int lane = threadIdx.x % kColumns, apart = job.batch * job.kv_heads * job.tokens * job.group;
  const int newest = job.newest(b, place.start, query) / kChunk;
  bool seen[kParts];
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int own = part * kColumns + lane;
    seen[part] = (kParts > 1 ? first_chunk(own) : begin + ((own - begin) & (kLanes - 1))) <= newest;
  }
  const auto ended = [&](int part) { return part > 0 && first_chunk(part * kColumns) > newest; };
  const size_t first = job.part(b, kv_head, 0, row);
  // in bytes; a lane that this row does not see is replaced by one that it sees, with factor zero
#pragma unroll
  for (int part = 0; part < kParts; part++) {
    const int own = part * kColumns + lane;
    reinterpret_cast<u32*>(places)[own] =
        ((seen[part] ? own : begin & (kLanes - 1)) * apart + u32(first)) * PADDED_HEAD_DIM * 4;
  }
  const float2* sums = job.sums + first + lane * apart;
  const u8* partial = reinterpret_cast<const u8*>(job.partial);
  __syncthreads();
  wait_for_previous();
  if (place.slot < 0) return;
  float4 v[kColumns];
  const auto load = [&](int part) {
#pragma unroll
    for (int j = 0; j < kColumns / 4; j++) {
      const uint4 at = places[part * (kColumns / 4) + j];
      const u32 lanes[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
      for (int i = 0; i < 4; i++) v[4 * j + i] = *reinterpret_cast<const float4*>(partial + (lanes[i] + threadIdx.x * 16));
    }
  };
  load(0);
  if (threadIdx.x < 32) {
    float highest = -INFINITY;
#pragma unroll
    for (int part = 0; part < kParts && !ended(part); part++) {
      Sums mine, before;
      const float2* own = sums + part * kColumns * apart;
      if (seen[part]) mine.m = own->x, mine.l = own->y;
      before.m = lanes_before(mine.m, lane);
      if (part) before.m = fmaxf(before.m, highest);
      const float2 factor = merge(before, mine);
      factors[part * kColumns + lane] = make_float4(factor.x, factor.y, __fmul_rn(mine.l, factor.y), 0.0f);
      if (kParts > 1) highest = __shfl_sync(kFirstWarp, before.m, kColumns - 1);
    }
  }
  __syncthreads();
  float l = 0.0f;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 1
  for (int part = 0; part < kParts && !ended(part); part++) {
    if (part) load(part);
#pragma unroll
    for (int j = 0; j < kColumns; j++) {
      const float4 f = factors[part * kColumns + j];
      const float2 factor = make_float2(f.x, f.y);
      l = __fmaf_rn(l, f.x, f.z);
      o.x = merged(o.x, v[j].x, factor), o.y = merged(o.y, v[j].y, factor);
      o.z = merged(o.z, v[j].z, factor), o.w = merged(o.w, v[j].w, factor);
    }
  }
  emit(job, m, head, 4 * threadIdx.x, o, l);
}
