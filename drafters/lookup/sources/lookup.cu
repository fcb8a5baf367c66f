// Lookup in the captured cycle; ../host.py is its reference.
#include "common.cuh"

constexpr int kThreads = 1024;

// Guesses what followed the longest suffix of n_max down to n_min tokens that occurred before, at its latest
// occurrence; past the end of the text the match repeats. Rows without a match keep the NO_GUESS that `prepare_rows`
// wrote. One CTA per row; the text ends with token `start`.
extern "C" __global__ void __launch_bounds__(kThreads)
    lookup(const int* history, const int* start, const int* slots, int* tokens, int stride, int k,
           int n_min, int n_max) {
  __shared__ long long best[32];
  wait_for_previous();
  const int b = blockIdx.x, slot = slots[b];
  if (slot < 0) return;
  const int* text = history + size_t(slot) * stride;
  const int end = start[b] + 1;
  long long found = 0;  // matched tokens << 32 | position of what follows
  for (int follow = 1 + threadIdx.x; follow < end; follow += kThreads) {
    int n = 0;
    while (n < n_max && n < follow && text[follow - 1 - n] == text[end - 1 - n]) n++;
    if (n >= n_min) found = max(found, (long long)n << 32 | follow);
  }
#pragma unroll
  for (int d = 16; d; d >>= 1) found = max(found, __shfl_xor_sync(~0u, found, d));
  if (threadIdx.x % 32 == 0) best[threadIdx.x / 32] = found;
  __syncthreads();
  for (int w = 0; w < 32; w++) found = max(found, best[w]);
  const int follow = int(found), period = end - follow;
  if (found && threadIdx.x < k) tokens[b * (k + 1) + 1 + threadIdx.x] = text[follow + threadIdx.x % period];
}
