// What surrounds a guess that the target's own sampler makes of a drafter's logits: whose words they are,
// and where the guess goes.
#include "common.cuh"

constexpr int kNoGuess = -1;

// Logits over draft ids as logits over the target's: -inf for what the head does not know.
// Grid: vocabulary, rows.
extern "C" __global__ void __launch_bounds__(256)
    spread(const float* logits, const int* draft_ids, float* out, int drafts, int vocab) {
  let_next_start();
  const int i = blockIdx.x * 256 + threadIdx.x;
  const int id = i < vocab ? draft_ids[i] : -1;
  wait_for_previous();
  if (i < vocab) out[size_t(blockIdx.y) * vocab + i] = id < 0 ? -INFINITY : logits[size_t(blockIdx.y) * drafts + id];
}

// Guess j of each row: what was chosen, if anything that the head knows may be said at all. It joins
// the verify's tokens, and the text, where the next guess's penalties look for it.
extern "C" __global__ void note(const int* chosen, const float* logits, const float* bias, const int* start,
                                const int* slot, int* tokens, int* history, int rows, int vocab, int width,
                                int stride, int j) {
  wait_for_previous();
  let_next_start();  // not before: who starts then may take all earlier kernels for ended
  const int b = blockIdx.x * blockDim.x + threadIdx.x;
  if (b >= rows) return;
  const int own = slot[b], id = chosen[b];
  const bool said = own >= 0 && logits[size_t(b) * vocab + id] + bias[size_t(own) * vocab + id] > -INFINITY;
  const int guess = said ? id : kNoGuess;
  tokens[b * width + 1 + j] = guess;
  if (own >= 0 && start[b] + 1 < stride) history[size_t(own) * stride + start[b] + 1] = guess;
}
