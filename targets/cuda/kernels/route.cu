// The router of a MoE layer, and what it picks.
#include "choice.cuh"

constexpr int kMaxShares = 8;  // experts per lane: up to 256
constexpr int kNoGuess = -1, kNobody = -1;

struct Pick {
  const float* per_expert;
  const int *tokens, *slot;  // of the call
  int* numbers;              // [M, top_k]
  float* shares;             // [M, top_k]
  int experts, top_k, width; // width: tokens of a sequence
  float factor;
};

// One warp: softmax of row m's logits * factor, the best top_k (at most 32) by falling share, ties to
// the lower number; their shares are made to sum to 1, then weighted per expert. Rows that sit out and
// drafts that don't exist pick nobody: no expert is read for them.
__device__ inline void pick_experts(const Pick& job, int m, const float* logits) {
  const int lane = threadIdx.x % 32, top_k = job.top_k;
  int* numbers = job.numbers + m * top_k;
  float* shares = job.shares + m * top_k;
  if (job.slot[m / job.width] < 0 || job.tokens[m] == kNoGuess) {
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
  u64 key[kMaxShares];  // larger is better; 0: taken, or no expert
#pragma unroll
  for (int i = 0; i < kMaxShares; i++) {
    const int e = lane + 32 * i;
    key[i] = e < job.experts ? u64(__float_as_uint(share[i] / sum)) << 32 | ~u32(e) : 0;
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
  numbers[lane] = number;
  shares[lane] = mine / total * job.per_expert[number];
}

// One warp per row, of logits [M, experts].
extern "C" __global__ void __launch_bounds__(32) pick(const __grid_constant__ Pick job, const float* logits) {
  let_next_start();
  wait_for_previous();
  pick_experts(job, blockIdx.x, logits + size_t(blockIdx.x) * job.experts);
}

// The router's weight and up to 16 rows of its input, as gemm.cu has them: 16 experts a CTA, whose warps
// are the k groups. The same MMAs in the same order, so the same logits.
struct Router {
  const u8* weight;  // bf16
  const u16* x;      // blocked input
  int steps, depth, tiles;  // tiles: CTAs that have one
  int k_blocks, block, rows;
};
constexpr int kCtas = 8, kGroups = 8, kThreads = 32 * kGroups, kMostRows = 16;
constexpr int kAhead = 12;     // blocks of 32 inputs that a warp has in flight
constexpr int kTile = 1024;    // bytes: 16 experts x 32 inputs

// A warp's k group of this CTA's tile, for 16 rows as two blocks of 8.
__device__ inline void multiply(const Router& job, int tile, int group, float (&sum)[2][4]) {
  const int lane = threadIdx.x % 32, count = job.steps * job.depth, token = lane / 4;
  const uint4* weight = reinterpret_cast<const uint4*>(job.weight) + lane;
  for (int first = 0; first < count; first += kAhead) {
    uint4 w[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      const int at = first + i, step = at / job.depth;
      if (at >= count) continue;
      const size_t place = (size_t(step) * job.tiles + tile) * kGroups * job.depth + group * job.depth + at % job.depth;
      w[i][0] = weight[place * (kTile / 16)], w[i][1] = weight[place * (kTile / 16) + 32];
    }
    if (!first) wait_for_previous();
    uint4 b[kAhead][2];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        b[i][j] = make_uint4(0, 0, 0, 0);
        if (first + i < count && token + 8 * j < job.rows)
          b[i][j] = *reinterpret_cast<const uint4*>(
              job.x + x_offset(token + 8 * j, ((first + i) * kGroups + group) * 32 + lane % 4 * 8, job.k_blocks, job.block));
      }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i >= count) continue;
#pragma unroll
      for (int j = 0; j < 2; j++) {
        mma_bf16(sum[j], w[i][0].x, w[i][0].y, w[i][0].z, w[i][0].w, b[i][j].x, b[i][j].y);
        mma_bf16(sum[j], w[i][1].x, w[i][1].y, w[i][1].z, w[i][1].w, b[i][j].z, b[i][j].w);
      }
    }
  }
}

// Writes a float into the same place of another CTA of the cluster.
__device__ inline void send(const float* place, u32 rank, float v) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(place)), "r"(rank));
  asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(at), "f"(v) : "memory");
}

// The router and its choice at once: each CTA of the cluster has its experts' logits of all rows, and
// then chooses for the rows m with m % 8 of its own number.
extern "C" __global__ void __cluster_dims__(kCtas, 1, 1) __launch_bounds__(kThreads)
    route(const __grid_constant__ Pick job, const __grid_constant__ Router router) {
  __shared__ float4 parts[kGroups][2][32];
  __shared__ float logits[kMostRows / kCtas][kCtas * 16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  let_next_start();
  float sum[2][4] = {};
  if (tile < router.tiles) multiply(router, tile, warp, sum);
  wait_for_previous();
#pragma unroll
  for (int j = 0; j < 2; j++) parts[warp][j][lane] = make_float4(sum[j][0], sum[j][1], sum[j][2], sum[j][3]);
  cluster_sync();  // all have started: others' memory may be written from now on
  if (warp < 2 && tile < router.tiles) {
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
  const int m = warp * kCtas + tile;
  if (warp < kMostRows / kCtas && m < router.rows) pick_experts(job, m, logits[warp]);
}
