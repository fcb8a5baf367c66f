// What surrounds a verify in the captured cycle: the n-gram draft before it, the commit after it.
// The state of each slot lives on the device: its text, its length, whether it goes on.
#include "common.cuh"

constexpr int kThreads = 1024;
constexpr int kStops = 16;
constexpr int kNoGuess = -1, kSatOut = -1;

// Prompt lookup, as drafters/ngram.py: the longest suffix of n_max down to n_min tokens that
// occurred before, its latest occurrence, and what followed; past the end the match repeats. One
// CTA per row. n_max 0: no guesses. Also lays out the verify: the last token, then the draft.
extern "C" __global__ void __launch_bounds__(kThreads)
    draft(const int* history, const int* length, const int* live, const int* slots,
          int* tokens, int* start, int* slot_out, int stride, int k, int n_min, int n_max) {
  __shared__ int best[32];
  const int b = blockIdx.x, slot = slots[b];
  const bool runs = slot >= 0 && live[max(slot, 0)];
  const int* text = history + size_t(max(slot, 0)) * stride;
  const int end = runs ? length[slot] : 1;
  int found = 0;  // matched tokens << 24 | position of what follows
  if (runs)
    for (int follow = 1 + threadIdx.x; follow < end; follow += kThreads) {
      int n = 0;
      while (n < n_max && n < follow && text[follow - 1 - n] == text[end - 1 - n]) n++;
      if (n >= n_min && n_max) found = max(found, n << 24 | follow);
    }
#pragma unroll
  for (int d = 16; d; d >>= 1) found = max(found, __shfl_xor_sync(~0u, found, d));
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = found;
  __syncthreads();
  for (int w = 0; w < 32; w++) found = max(found, best[w]);
  const int follow = found & 0xffffff, period = end - follow;
  if (threadIdx.x < k)
    tokens[b * (k + 1) + 1 + threadIdx.x] = found ? text[follow + threadIdx.x % period] : kNoGuess;
  if (threadIdx.x == 0) {
    tokens[b * (k + 1)] = runs ? text[end - 1] : 0;
    start[b] = end - 1;
    slot_out[b] = runs ? slot : -1;
  }
}

// Appends chosen[: accepted + 1] to each live row's text and sees who has come to an end. accepted
// [B] becomes kSatOut for rows that did not run. One thread per row.
extern "C" __global__ void commit(int* history, int* length, int* live, const int* slot,
                                  const int* chosen, int* accepted, const int* stops,
                                  const int* limit, int rows, int stride, int tokens) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= rows) return;
  const int own = slot[b];
  if (own < 0) {
    accepted[b] = kSatOut;
    return;
  }
  const int from = length[own], emitted = accepted[b] + 1;
  bool goes_on = true;
  for (int j = 0; j < emitted; j++) {
    const int token = chosen[b * tokens + j];
    if (from + j < stride) history[size_t(own) * stride + from + j] = token;
    for (int i = 0; i < kStops; i++) goes_on &= token != stops[own * kStops + i];
  }
  length[own] = from + emitted;
  live[own] = goes_on && from + emitted < limit[own];
}
