// Around a draft head's steps in a cycle: `prepare_rows` computes their positions, `keep` stores the target's features and
// choices for the next cycle. Pending arrays have a row per slot, and a spare one for padding.
#include "common.cuh"

// The entries that are pending, as a call of `width` tokens per row, and the k steps after them. Step
// j follows position start + j and sits out where its guess would lie at `longest` or beyond.
extern "C" __global__ void prepare_rows(const int* start, const int* slot, const int* pending, const int* count,
                                   int* tokens, int* first, long long* last, int* starts, int* slots,
                                   int rows, int width, int k, int spare, int longest) {
  let_next_start();
  wait_for_previous();
  for (int i = threadIdx.x; i < rows * width; i += blockDim.x) {
    const int own = slot[i / width];
    tokens[i] = pending[(own < 0 ? spare : own) * width + i % width];
  }
  for (int i = threadIdx.x; i < rows * k; i += blockDim.x) {
    const int at = start[i % rows] + i / rows;
    starts[i] = at;
    slots[i] = at + 1 < longest ? slot[i % rows] : -1;
  }
  for (int b = threadIdx.x; b < rows; b += blockDim.x) {
    const int real = count[slot[b] < 0 ? spare : slot[b]];
    first[b] = start[b] - real;
    last[b] = b * width + real - 1;
  }
}

// Stores the target's features and the tokens chosen from them as pending, in the first of a slot's `places`. Grid:
// rows and tokens of the call.
extern "C" __global__ void __launch_bounds__(256)
    keep(const float4* features, const int* chosen, const int* accepted, const int* slot, float4* to,
         int* pending, int* count, int width, int places, int quads) {
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x, b = m / width, own = slot[b];
  if (own < 0) return;
  const size_t at = size_t(own) * places + m % width;
  for (int i = threadIdx.x; i < quads; i += 256) to[at * quads + i] = features[size_t(m) * quads + i];
  if (threadIdx.x == 0) pending[at] = chosen[m];
  if (threadIdx.x == 0 && m % width == 0) count[own] = accepted[b] + 1;
}

// Rows `last` of h, then those of mixed, to `to` [2, B, quads].
extern "C" __global__ void __launch_bounds__(256)
    ends(const float4* h, const float4* mixed, const long long* last, float4* to, int quads) {
  let_next_start();
  wait_for_previous();
  const float4* from = (blockIdx.y ? mixed : h) + last[blockIdx.x] * quads;
  to += (size_t(blockIdx.y) * gridDim.x + blockIdx.x) * quads;
  for (int i = threadIdx.x; i < quads; i += 256) to[i] = from[i];
}
