// The router of a MoE layer, and what it picks.
#include "choice.cuh"
#include "tile.cuh"

#ifndef EXPERTS_PER_LANE  // experts per lane: up to 8
#define EXPERTS_PER_LANE 4
#endif

#ifndef MAX_ROWS  // the most that `route` takes: 8 or 16
#define MAX_ROWS 16
#endif

// ---- The choice of experts ----
constexpr int kMaxShares = EXPERTS_PER_LANE;
constexpr int kNoGuess = -1, kNobody = -1;

struct Pick {
  const float* per_expert;
  const int *tokens, *slot;  // of the call
  int* numbers;              // [M, top_k]
  float* shares;             // [M, top_k]
  int experts, top_k, width; // width: tokens of a sequence
  float factor;
};

// What a warp loads before the router has ended: whether row m picks experts, and its lanes' experts' weights.
struct Known {
  bool picks;
  float weight[kMaxShares];

  __device__ Known(const Pick& job, int m) : picks(job.slot[m / job.width] >= 0 && job.tokens[m] != kNoGuess) {
#pragma unroll
    for (int i = 0; i < kMaxShares; i++) {
      const int e = threadIdx.x % 32 + 32 * i;
      weight[i] = e < job.experts ? job.per_expert[e] : 0.0f;
    }
  }
};

// One warp: softmax of row m's logits * factor, the best top_k (at most 32) by falling share, ties to
// the lower number; their shares are made to sum to 1, then weighted per expert. Idle rows and
// draft positions without a guess pick no expert, so none is read for them.
__device__ inline void pick_experts(const Pick& job, int m, const Known& known, const float* logits) {
  const int lane = threadIdx.x % 32, top_k = job.top_k;
  int* numbers = job.numbers + m * top_k;
  float* shares = job.shares + m * top_k;
  if (!known.picks) {
    if (lane < top_k) numbers[lane] = kNobody, shares[lane] = 0.0f;
    return;
  }
  float share[kMaxShares];
  float best = -INFINITY, sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    const int e = lane + 32 * i;
    share[i] = e < job.experts ? logits[e] * job.factor : -INFINITY;
    best = fmaxf(best, share[i]);
  }
  best = warp_max(best);
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    share[i] = lane + 32 * i < job.experts ? expf(share[i] - best) : 0.0f;
    sum += share[i];
  }
  sum = warp_sum(sum);
  u32 key[kMaxShares];  // a share's bits, which rise with it, and one; 0: taken, or no expert
#pragma unroll
  for (int i = 0; i < kMaxShares; i++)
    key[i] = lane + 32 * i < job.experts ? __float_as_uint(share[i] / sum) + 1 : 0;
  float mine = 0.0f, total = 0.0f, weight = 0.0f;
  int number = 0;
  for (int r = 0; r < top_k; r++) {
    u32 top = 0, where = ~0u;
#pragma unroll
    for (int i = 0; i < kMaxShares; i++) top = max(top, key[i]);
    top = __reduce_max_sync(~0u, top);
#pragma unroll
    for (int i = kMaxShares - 1; i >= 0; i--)
      if (key[i] == top) where = lane + 32 * i;
    where = __reduce_min_sync(~0u, where);
    float taken = 0.0f;
#pragma unroll
    for (int i = 0; i < kMaxShares; i++)
      if (where == lane + 32 * i) key[i] = 0, taken = known.weight[i];
    taken = __shfl_sync(~0u, taken, where % 32);
    const float v = __uint_as_float(top - 1);
    total += v;
    if (lane == r) mine = v, number = where, weight = taken;
  }
  if (lane >= top_k) return;
  numbers[lane] = number;
  shares[lane] = mine / total * weight;
}

// One warp per row, of logits [M, experts].
extern "C" __global__ void __launch_bounds__(32) pick(const __grid_constant__ Pick job, const float* logits) {
  let_next_start();
  const Known known(job, blockIdx.x);
  wait_for_previous();
  pick_experts(job, blockIdx.x, known, logits + size_t(blockIdx.x) * job.experts);
}

// ---- The router ----
// The router's weight and up to kMostRows rows of its input, laid out as for gemm.cu: 16 experts per CTA, a warp
// per k group. The same MMAs in the same order as there, so the same logits.
struct Router {
  const u8* weight;  // bf16
  const u16* x;      // blocked input
  int steps, depth, tiles;  // tiles: CTAs that have one
  int k_blocks, block, rows;
};
constexpr int kCtas = 8, kGroups = 8, kThreads = 32 * kGroups, kMostRows = MAX_ROWS, kBlocks = MAX_ROWS / 8;
constexpr int kTile = 1024, kRow = 64;  // bytes: 16 experts x 32 inputs; a row's 32 inputs
static_assert(kGroups == 8, "The router's sums are made of eight parts, as a weight's are.");
static_assert(EXPERTS_PER_LANE >= 1 && EXPERTS_PER_LANE <= 8, "A warp chooses among at most 256 experts.");
static_assert(MAX_ROWS == 8 || MAX_ROWS == 16, "Columns of an MMA are eight.");

// A warp's k group of this CTA's tile, for all rows in blocks of 8: all copies are issued before any is
// waited for. Loops stay loops: a kernel of few CTAs runs from cold instruction caches.
__device__ inline void multiply(const Router& job, int tile, int group, u8* room, float (&sum)[kBlocks][4]) {
  const int lane = threadIdx.x % 32, count = job.steps * job.depth, token = lane / 4;
  const int each = kTile + job.rows * kRow;
  const u32 mine = shared_address(room) + group * count * each;
  const u32 weights = mine + lane * 16, inputs = mine + kTile + token * kRow + lane % 4 * 16;
  const u8* from = job.weight + (size_t(tile) * kGroups + group) * job.depth * kTile + lane * 16;
#pragma unroll 1
  for (int i = 0, d = 0; i < count; i++) {
    copy16(weights + i * each, from), copy16(weights + i * each + 512, from + 512);
    from += kTile;
    if (++d == job.depth) d = 0, from += (size_t(job.tiles) * kGroups - 1) * job.depth * kTile;
  }
  wait_for_previous();
  let_next_start();  // only now: the next kernel's input is complete then
  const u16* x = job.x + (group * job.block + token) * 32 + lane % 4 * 8;
#pragma unroll 1
  for (int i = 0; i < count; i++, x += kGroups * job.block * 32) {
#pragma unroll
    for (int j = 0; j < kBlocks; j++)
      if (token + 8 * j < job.rows) copy16(inputs + i * each + j * 8 * kRow, x + j * 8 * 32);
  }
  copies_done();
  __syncwarp();
#pragma unroll 2
  for (int i = 0; i < count; i++) {
    const uint4 low = load(weights + i * each), high = load(weights + i * each + 512);
#pragma unroll
    for (int j = 0; j < kBlocks; j++) {
      const uint4 b = token + 8 * j < job.rows ? load(inputs + i * each + j * 8 * kRow) : make_uint4(0, 0, 0, 0);
      mma_bf16(sum[j], low.x, low.y, low.z, low.w, b.x, b.y);
      mma_bf16(sum[j], high.x, high.y, high.z, high.w, b.z, b.w);
    }
  }
}

// Writes a float into the same place of another CTA of the cluster.
__device__ inline void send(const float* place, u32 rank, float v) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// ---- Kernel ----
// The router and its choice at once: each CTA of the cluster has its experts' logits of all rows, and
// then chooses for the rows m with m % 8 of its own number.
extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    route(const __grid_constant__ Pick job, const __grid_constant__ Router router) {
  extern __shared__ __align__(128) u8 room[];
  __shared__ float4 parts[kGroups][kBlocks][32];
  __shared__ float logits[kMostRows / kCtas][kCtas * 16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  const int m = warp * kCtas + tile;
  const bool chooses = warp < kMostRows / kCtas && m < router.rows;
  const Known known(job, chooses ? m : 0);
  float sum[kBlocks][4] = {};
  if (tile < router.tiles) multiply(router, tile, warp, room, sum);
  wait_for_previous(), let_next_start();
#pragma unroll
  for (int j = 0; j < kBlocks; j++) parts[warp][j][lane] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
  __syncthreads();
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");  // all have started: others' memory may be written
  if (warp < kBlocks && tile < router.tiles) {
    float4 v[8];
#pragma unroll
    for (int g = 0; g < kGroups; g++) v[g] = parts[g][warp][lane];
    const float4 all = tree_sum(v, kGroups);
    const float of[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const int m = warp * 8 + lane % 4 * 2 + e % 2, expert = tile * 16 + lane / 4 + e / 2 * 8;
      if (m < router.rows) send(&logits[m / kCtas][expert], m % kCtas, of[e]);
    }
  }
  cluster_sync();
  if (chooses) pick_experts(job, m, known, logits[warp]);
}
