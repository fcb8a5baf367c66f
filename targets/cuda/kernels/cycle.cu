// What surrounds a verify in the captured cycle: laying it out before it, the commit after it.
// The state of each slot lives on the device: its text, its length, whether it goes on.
#include "common.cuh"

// ---- Records ----
constexpr int kStops = 16;
constexpr int kNoGuess = -1, kSatOut = -1;
constexpr int kTurns = 2;  // of the records: the host reads one while the next cycle writes the other
static_assert(kNoGuess < 0 && kSatOut < 0, "Neither is a token or a count.");

// One row of a cycle's results for the host, as int32 words side by side: k guesses, the k + 1 chosen tokens, the number
// of accepted guesses (kSatOut: the row did not run), and the drafter of the guesses (0 where there is one drafter).
// `CycleRecord` of sampler.py reads it.
struct CycleRecord {
  int k;
  __device__ int chosen() const { return k; }
  __device__ int accepted() const { return 2 * k + 1; }
  __device__ int source() const { return 2 * k + 2; }
  __device__ int words() const { return 2 * k + 3; }
};

// ---- Kernels ----
// The verify of each slot's text: its last token, then no guesses. A row that does not run gets slot
// -1. One warp per row: k + 1 is 32 at most. A cycle begins, and with it the next turn.
extern "C" __global__ void __launch_bounds__(32)
    prepare_rows(const int* history, const int* length, const int* live, const int* slots, int* tokens,
            int* start, int* slot_out, int* turn, int stride, int k) {
  let_next_start();
  const int b = blockIdx.x, slot = slots[b], i = threadIdx.x;
  if (b == 0 && i == 0) *turn = (*turn + 1) % kTurns;
  const bool runs = slot >= 0 && live[max(slot, 0)];
  const int end = runs ? length[slot] : 1;
  if (i <= k) tokens[b * (k + 1) + i] = i ? kNoGuess : runs ? history[size_t(slot) * stride + end - 1] : 0;
  if (i) return;
  start[b] = end - 1;
  slot_out[b] = runs ? slot : -1;
}

// How many of each row's guesses are what was chosen, up to the first one that is not. tokens [B, k + 1]: the
// last token, then the guesses. One thread per row.
extern "C" __global__ void accept(const int* tokens, const int* chosen, int* accepted, int rows, int k) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= rows) return;
  const int *guesses = tokens + b * (k + 1) + 1, *said = chosen + b * (k + 1);
  int n = 0;
  while (n < k && guesses[n] == said[n]) n++;
  accepted[b] = n;
}

// Appends chosen[: accepted + 1] to each live row's text, ends rows at a stop id or their limit, and writes each row's
// record into the host's memory, so that the next cycle waits for no copy. One warp per row.
extern "C" __global__ void __launch_bounds__(32)
    commit(int* history, int* length, int* live, const int* slot, const int* guesses, const int* chosen,
           const int* accepted, const int* source, const int* stops, const int* limit, int* records, const int* turn,
           int stride, int k) {
  let_next_start();
  wait_for_previous();
  const int b = blockIdx.x, own = slot[b], tokens = k + 1;
  const int count = own < 0 ? kSatOut : accepted[b];
  const CycleRecord record = {k};
  int* out = records + (size_t(*turn) * gridDim.x + b) * record.words();
  for (int i = threadIdx.x; i < record.words(); i += 32)
    out[i] = i < record.chosen()     ? guesses[b * tokens + 1 + i]
             : i < record.accepted() ? chosen[b * tokens + i - record.chosen()]
             : i < record.source()   ? count
             : source                ? source[b]
                                     : 0;
  if (threadIdx.x || own < 0) return;
  const int from = length[own], emitted = count + 1;
  bool goes_on = true;
  for (int j = 0; j < emitted; j++) {
    const int token = chosen[b * tokens + j];
    if (from + j < stride) history[size_t(own) * stride + from + j] = token;
    for (int i = 0; i < kStops; i++) goes_on &= token != stops[own * kStops + i];
  }
  length[own] = from + emitted;
  live[own] = goes_on && from + emitted < limit[own];
}
