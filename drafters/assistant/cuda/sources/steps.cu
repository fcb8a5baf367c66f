// What an assistant's steps need beside the target's kernels: where they stand, what each is fed, and what
// the next cycle begins with. States have a row per slot, and one to spare.
#include "hidden.cuh"

// The k steps of a cycle: all see the cache up to the position before the last token's; guess j follows
// position start + j, and sits out where it would lie at `longest` or beyond.
extern "C" __global__ void prepare_rows(const int* start, const int* slot, int* seen, int* starts, int* slots,
                                   int rows, int k, int longest) {
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < rows * k; i += blockDim.x) {
    const int at = start[i % rows] + i / rows;
    starts[i] = at;
    slots[i] = at + 1 < longest ? slot[i % rows] : -1;
  }
  for (int b = threadIdx.x; b < rows; b += blockDim.x) seen[b] = max(start[b] - 1, 0);
}

struct Beside {
  Embed table;        // h: the states [M, hidden], or of all slots [S + 1, hidden]
  const int* slot;    // [M]: the slot of the state; null: each row's own
  const float* norm;  // of the state; null: as it is
  void* x;
  int token_stride, spare;
  int k_blocks, block;
  float eps;
};

// x[m] = the token's scaled embedding, then the state. Two CTAs per row.
extern "C" __global__ void __launch_bounds__(kThreads) beside(const __grid_constant__ Beside job) {
  __shared__ float scratch[32];
  const Embed& table = job.table;
  const int m = blockIdx.x, quads = table.hidden / 4;
  let_next_start();
  wait_for_previous();
  const int token = table.tokens[m * job.token_stride], row = token >= 0 && token < table.vocab ? token : 0;
  const int own = job.slot ? (job.slot[m] < 0 ? job.spare : job.slot[m]) : m;
  const float* state = table.h + size_t(own) * table.hidden;
  float4 v[kMax];
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    if (blockIdx.y) {
      v[j] = load4(state, i);
    } else {
      const float2 low = pair_of(table, row, 2 * i), high = pair_of(table, row, 2 * i + 1);
      v[j] = make_float4(low.x * table.factor, low.y * table.factor, high.x * table.factor, high.y * table.factor);
    }
    squares += square4(v[j]);
  }
  const bool normed = blockIdx.y && job.norm;
  const float inverse = normed ? rsqrtf(block_sum(squares, scratch) / table.hidden + job.eps) : 1.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    if (normed) {
      const float4 w = load4(job.norm, i);
      v[j] = make_float4(v[j].x * inverse * w.x, v[j].y * inverse * w.y, v[j].z * inverse * w.z,
                         v[j].w * inverse * w.w);
    }
    store_input(job.x, m, blockIdx.y * quads + i, v[j], job.k_blocks, job.block);
  }
}

// The state from which each row's last accepted choice was made is where its slot goes on from.
extern "C" __global__ void __launch_bounds__(kThreads)
    keep(const float4* features, const int* accepted, const int* slot, float4* to, int width, int quads) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, own = slot[b];
  if (own < 0) return;
  const size_t from = size_t(b) * width + min(max(accepted[b], 0), width - 1);
  for (int i = threadIdx.x; i < quads; i += kThreads) to[own * size_t(quads) + i] = features[from * quads + i];
}
