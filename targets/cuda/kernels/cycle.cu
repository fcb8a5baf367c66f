// What surrounds a verify in the captured cycle: laying it out before it, the commit after it.
// The state of each slot lives on the device: its text, its length, whether it goes on.
#include "common.cuh"

constexpr int kStops = 16;
constexpr int kNoGuess = -1, kSatOut = -1;

// The verify of each slot's text: its last token, then no guesses. A row that does not run gets slot
// -1. One warp per row: k + 1 is 32 at most.
extern "C" __global__ void __launch_bounds__(32)
    lay_out(const int* history, const int* length, const int* live, const int* slots, int* tokens,
            int* start, int* slot_out, int stride, int k) {
  let_next_start();
  const int b = blockIdx.x, slot = slots[b], i = threadIdx.x;
  const bool runs = slot >= 0 && live[max(slot, 0)];
  const int end = runs ? length[slot] : 1;
  if (i <= k) tokens[b * (k + 1) + i] = i ? kNoGuess : runs ? history[size_t(slot) * stride + end - 1] : 0;
  if (i) return;
  start[b] = end - 1;
  slot_out[b] = runs ? slot : -1;
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
