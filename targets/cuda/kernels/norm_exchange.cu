// The norm behind a branch of which several cards have a part each.
#include "exchange.cuh"
#include "norm.cuh"

// ---- The sum ----
// This card's part of a row, and the others' parts: all are sent before any is awaited.
__device__ inline void send_row(const AddNorm& job, const Exchange& branch, const float4 (&own)[kMax]) {
  if (branch.silent || branch.sent) return;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= job.hidden / 4) continue;
#pragma unroll
    for (int to = 0; to < RANKS; to++)
      if (to != branch.rank) send4(branch.place(to, branch.rank, blockIdx.x, i, job.hidden), own[j]);
  }
}
__device__ inline float load_branch(const AddNorm& job, const Exchange& branch, float4 (&added)[kMax]) {
  const int m = blockIdx.x, quads = job.hidden / 4;
#pragma unroll
  for (int j = 0; j < kMax; j++)
    added[j] = load4(branch.own + size_t(m) * job.hidden, min(int(threadIdx.x) + j * kThreads, quads - 1));
  send_row(job, branch, added);
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    float4 parts[kMostRanks];
#pragma unroll
    for (int from = 0; from < RANKS; from++) {
      parts[from] = added[j];
      if (from != branch.rank && !branch.silent)
        parts[from] = receive4(branch.place(branch.rank, from, m, i, job.hidden));
    }
    const float4 sum = tree_sum(parts, RANKS);
    const float4 s = branch.scale ? load4(branch.scale, i) : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
    added[j] = make_float4(sum.x * s.x, sum.y * s.y, sum.z * s.z, sum.w * s.w);
    squares += square4(added[j]);
  }
  return squares;
}

// ---- Kernels ----
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_exchange(const __grid_constant__ AddNorm job, const __grid_constant__ Exchange branch) {
  add_and_norm(job, branch);
}
// Sends all rows. `add_norm_exchange` may only do it itself where all its rows run at once: a row that waits would keep
// another one off the card, for which the other card waits.
extern "C" __global__ void __launch_bounds__(kThreads)
    send_rows(const __grid_constant__ AddNorm job, const __grid_constant__ Exchange branch) {
  let_next_start();
  wait_for_previous();
  float4 own[kMax];
#pragma unroll
  for (int j = 0; j < kMax; j++)
    own[j] = load4(branch.own + size_t(blockIdx.x) * job.hidden, min(int(threadIdx.x) + j * kThreads, job.hidden / 4 - 1));
  send_row(job, branch, own);
}
