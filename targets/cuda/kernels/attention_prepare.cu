// Queries, keys and values before attention; of keys and values alone where job.q is null.
#include "attention.cuh"

// One warp per head vector of a row (grid: rows, vectors / 8).
extern "C" __global__ void __launch_bounds__(256) prepare(const __grid_constant__ Job job) {
  let_next_start();
  const int heads = job.kv_heads * job.group, m = blockIdx.x, b = m / job.tokens, t = m % job.tokens;
  const int index = blockIdx.y * 8 + threadIdx.x / 32 + (job.q ? 0 : heads);
  const Place place(job, b);
  if (place.slot < 0 || index >= heads + (job.own ? 2 * job.kv_heads : 0)) return wait_for_previous();
  const Role role = index < heads ? kQuery : index < heads + job.kv_heads ? kKey : kValue;
  const int head = role == kQuery ? index : (index - heads) % job.kv_heads;
  const int position = place.start + t;
  const float* raw = role == kQuery ? raw_query(job, m, head) : raw_key(job, m, head, role);
  Rotation rotation;
  rotation.load(job, role, position);
  wait_for_previous();
  Vector x;
  x.load(raw);
  rotate(job, role, x, rotation);
  if (role != kQuery) return store_key(job, place.slot, head, position, role, x);
  const int row = t * job.group + head % job.group, share = row / job.rows;
  store_query(job.queries(b, head / job.group, share), row - share * job.rows, x);
}
