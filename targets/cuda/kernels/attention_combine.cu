// What `split` left, merged in ascending order of lanes.
#include "attention.cuh"

// Grid: rows, query heads; a thread has four columns. All lanes are on their way before any is merged.
extern "C" __global__ void __launch_bounds__(HD / 4) combine(const __grid_constant__ Job job) {
  let_next_start();
  const int m = blockIdx.x, head = blockIdx.y, b = m / job.tokens, t = m % job.tokens;
  const Place place(job, b);
  const int query = place.start + t, row = t * job.group + head % job.group;
  const int end = query / kChunk;
  const int begin = (job.window ? max(0, query - job.window + 1) : 0) / kChunk;
  wait_for_previous();
  if (place.slot < 0) return;
  const size_t first = job.part(b, head / job.group, 0, row), step = job.part(0, 0, 1, 0);
  const float2* sums = job.sums + first;
  const float* partial = job.partial + first * HD + 4 * threadIdx.x;
  Sums lane[kLanes];
  float4 v[kLanes];
#pragma unroll
  for (int j = 0; j < kLanes; j++) {
    v[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (begin + ((j - begin) & (kLanes - 1)) > end) continue;  // it has no chunk of this row
    const float2 raw = sums[j * step];
    lane[j].m = raw.x, lane[j].l = raw.y;
    v[j] = *reinterpret_cast<const float4*>(partial + j * step * HD);
  }
  Sums all;
  float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int j = 0; j < kLanes; j++) {
    const float2 factor = merge(all, lane[j]);
    o.x = merged(o.x, v[j].x, factor), o.y = merged(o.y, v[j].y, factor);
    o.z = merged(o.z, v[j].z, factor), o.w = merged(o.w, v[j].w, factor);
  }
  emit(job, m, head, 4 * threadIdx.x, o, all.l);
}
