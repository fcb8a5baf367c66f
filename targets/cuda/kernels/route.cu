// What surrounds the experts: the router's choice before them, the weighted sum after.
#include "common.cuh"

constexpr int kThreads = 256;
constexpr int kMaxShares = 8;  // experts per lane: up to 256
constexpr int kNoGuess = -1, kNobody = -1;

// One warp per row: softmax of logits * factor, the best top_k (at most 32) by falling share, ties
// to the lower number; their shares are made to sum to 1, then weighted per expert. Rows that sit
// out and drafts that don't exist pick nobody: no expert is read for them.
extern "C" __global__ void __launch_bounds__(32)
    pick(const float* logits, const float* per_expert, const int* tokens, const int* slot,
         int* numbers, float* shares, int experts, int top_k, int width, float factor) {
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x, lane = threadIdx.x;
  if (slot[m / width] < 0 || tokens[m] == kNoGuess) {
    if (lane < top_k) numbers[m * top_k + lane] = kNobody, shares[m * top_k + lane] = 0.0f;
    return;
  }
  float share[kMaxShares];
  float best = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    const int e = lane + 32 * i;
    share[i] = e < experts ? logits[size_t(m) * experts + e] * factor : -INFINITY;
    best = fmaxf(best, share[i]);
  }
  best = warp_max(best);
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    share[i] = lane + 32 * i < experts ? expf(share[i] - best) : 0.0f;
    sum += share[i];
  }
  sum = warp_sum(sum);
  u64 key[kMaxShares];  // larger is better; 0: taken, or no expert
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    const int e = lane + 32 * i;
    key[i] = e < experts ? u64(__float_as_uint(share[i] / sum)) << 32 | ~u32(e) : 0;
  }
  float mine = 0.0f, total = 0.0f;
  int number = 0;
  for (int r = 0; r < top_k; r++) {
    u64 top = 0;
#pragma unroll
    for (int i = 0; i < kMaxShares; i++) top = key[i] > top ? key[i] : top;
#pragma unroll
    for (int d = 16; d; d >>= 1) {
      const u64 other = __shfl_xor_sync(~0u, top, d);
      top = other > top ? other : top;
    }
#pragma unroll
    for (int i = 0; i < kMaxShares; i++) key[i] = key[i] == top ? 0 : key[i];
    const float v = __uint_as_float(u32(top >> 32));
    total += v;
    if (lane == r) mine = v, number = int(~u32(top));
  }
  if (lane >= top_k) return;
  numbers[m * top_k + lane] = number;
  shares[m * top_k + lane] = mine / total * per_expert[number];
}

// out[m] = sum over ranks, in their order, of share * part; 0 for a row that picked nobody, whose
// parts nobody wrote. Grid: rows, 1024 features each.
extern "C" __global__ void __launch_bounds__(kThreads)
    combine(const float* parts, const float* shares, const int* numbers, float* out, int width,
            int top_k) {
  let_next_start();
  wait_for_previous();
  const int m = blockIdx.x, quads = width / 4, i = blockIdx.y * kThreads + threadIdx.x;
  if (i >= quads) return;
  const float4* part = reinterpret_cast<const float4*>(parts) + size_t(m) * top_k * quads + i;
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const int ranks = numbers[m * top_k] == kNobody ? 0 : top_k;
  for (int r = 0; r < ranks; r++) {
    const float share = shares[m * top_k + r];
    const float4 v = part[size_t(r) * quads];
    sum.x += share * v.x, sum.y += share * v.y, sum.z += share * v.z, sum.w += share * v.w;
  }
  reinterpret_cast<float4*>(out)[size_t(m) * quads + i] = sum;
}
