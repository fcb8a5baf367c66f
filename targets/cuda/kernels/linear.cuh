// Shared by the kernels of a linear layer: the job, where a weight's rows are, how sums are finished.
#pragma once
#include "tile.cuh"

// ---- The job ----
enum Epilogue { kPlain = 0, kGated = 1, kLogits = 2, kPerLayer = 3 };
// When gemm.cu lets the next kernel start: at once; when all kernels before this one have ended; when the copies of
// all weights have been issued.
enum PdlTrigger { kTriggerAtOnce = 0, kTriggerInTurn = 1, kTriggerAfterCopies = 2 };

struct Job {
  const u8* weight;
  const float* scale;   // [n] of narrow weights
  const u8* x;          // blocked input
  void* out;
  const float* inputs;  // kPerLayer: [M, inputs_stride]
  float4* partial;      // of wide.cu, where gemm_reduce.cu does the rest
  const int* certified; // of gemm.cu, [rows] or null: nothing to do if all are 0 to `room`
  int inputs_stride;
  int n, ctas, tiles;   // rows of the weight; CTAs that work; tiles per CTA and pass
  int passes, steps;    // steps along k per pass
  int row_groups, k_groups, depth;  // depth: 32-input blocks per warp and step
  int k_blocks;         // 32-input blocks of x
  int k_stride;         // of a k group's blocks: k_groups, or 1 where groups are contiguous
  int stages;           // of the ring
  int ahead, pace;      // of gemm.cu, until x has arrived: steps after the ring's to prefetch into L2; cycles per step
  int rows;             // M
  int out_stride;       // floats per row, or 32-feature blocks of the next input
  int out_groups;       // k groups that are contiguous in the next weight
  int epilogue;
  float softcap;
  int silu;             // what gates: 1 SiLU, 0 tanh GELU
  int f16;              // kGated: the next weight takes f16 inputs, else bf16
  int room;             // for candidates of a row
  int pdl_trigger;      // of gemm.cu: when the next kernel starts
  int pdl_inputs_ready;  // of gemm.cu: x was complete before this kernel could start
  int apart;            // of gemm.cu: bytes from a CTA's step to the next one's, which may be more than it reads
  int alone;            // of gemm.cu: the producer makes the ring by itself, before others go on
  int zero;             // of gemm.cu: 0, for `free_stage`
};

// ---- Rows of a weight ----
// The weight's row n that is `row` of a tile, or past its end. The first half of a gated tile are gate's
// rows, the second up's of the same features.
__device__ inline int row_of(const Job& job, int tile, int row) {
  if (job.epilogue != kGated) return tile * 16 + row;
  const int feature = tile * 8 + row % 8;
  return feature < job.n / 2 ? feature + row / 8 * (job.n / 2) : job.n;
}

// The number that is stored in a row of floats.
__device__ inline float to_row(const Job& job, float v) {
  return job.epilogue == kLogits ? soft_cap(v, job.softcap) : v;
}

// The scaled sum v of weight row n and token m. `block`: tokens per block of the output's layout.
__device__ inline void store(const Job& job, float v, int m, int n, int block) {
  if (job.epilogue != kPerLayer) {
    static_cast<float*>(job.out)[size_t(m) * job.out_stride + n] = to_row(job, v);
    return;
  }
  v = gelu_tanh(v) * job.inputs[size_t(m) * job.inputs_stride + n];
  static_cast<u16*>(job.out)[x_offset(m, n, job.out_stride, block)] = to_bf16(v);
}

// ---- Epilogues ----
// Four sums as MMAs leave them: element e is of weight row lane / 4 (+ 8 for e >= 2) of a tile and of
// token 2 (lane % 4) (+ 1 for odd e) of eight. Scales: of the two rows.
typedef float Four[4];
typedef float Scales[2];

__device__ inline void load_scales(const Job& job, Scales& scales, int tile, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int n = row_of(job, tile, lane / 4 + half * 8);
    scales[half] = kScaled && n < job.n ? job.scale[n] : 1.0f;
  }
}

// Gate and up: lanes of neighbouring features trade tokens, so that each stores a pair of features.
__device__ inline void finish_gated(const Job& job, const Four& sum, const Scales& scales, int tile,
                                    int first_token, int block, int lane) {
  u32 value[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float g = sum[e] * scales[0], v = (job.silu ? silu(g) : gelu_tanh(g)) * (sum[e + 2] * scales[1]);
    value[e] = job.f16 ? input_of_fp8(v) : to_bf16(v);
  }
  const int odd = lane / 4 % 2, feature = tile * 8 + lane / 8 * 2;
  const u32 taken = __shfl_xor_sync(~0u, odd ? value[0] : value[1], 4);
  const int m = first_token + lane % 4 * 2 + odd;
  // features past the weight's end have weights of zero, and pad the next layer's inputs
  if (m < job.rows && feature < job.n / 2)
    static_cast<u32*>(job.out)[x_offset(m, feature, job.out_stride, block, job.out_groups) / 2] =
        odd ? taken | value[1] << 16 : value[0] | taken << 16;
}

// Nothing but the sums: most layers end so, and the next kernel waits for it.
__device__ inline void finish_plain(const Job& job, const Four& sum, const Scales& scales, int tile, int first_token,
                                    int lane) {
  const int n = tile * 16 + lane / 4, m = first_token + lane % 4 * 2;
  float* out = static_cast<float*>(job.out) + size_t(m) * job.out_stride + n;
#pragma unroll
  for (int e = 0; e < 4; e++)
    if (n + e / 2 * 8 < job.n && m + e % 2 < job.rows) out[e % 2 * job.out_stride + e / 2 * 8] = sum[e] * scales[e / 2];
}

__device__ inline void finish(const Job& job, const Four& sum, const Scales& scales, int tile,
                              int first_token, int block, int lane) {
  if (job.epilogue == kPlain) return finish_plain(job, sum, scales, tile, first_token, lane);
  if (job.epilogue == kGated) return finish_gated(job, sum, scales, tile, first_token, block, lane);
#pragma unroll
  for (int e = 0; e < 4; e++) {
    const int n = row_of(job, tile, lane / 4 + e / 2 * 8), m = first_token + lane % 4 * 2 + e % 2;
    if (n < job.n && m < job.rows) store(job, sum[e] * scales[e / 2], m, n, block);
  }
}
