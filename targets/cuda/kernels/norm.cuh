// The RMS norms of the residual stream, fused with the residual addition. One CTA per row.
#pragma once
#include "hidden.cuh"
#include "narrow.cuh"

#ifndef W8A8  // 1: the next linear layer's inputs are e4m3
#define W8A8 0
#endif

// ---- Branches that are added ----
// A linear layer's output as it is: what the norms read, except for Groups (narrow.cuh) and mixtures. Each has kernels
// of its own: chosen at run time, loads would wait for one another, which costs 1 us per norm.
struct Whole {
  const float* rows;  // may be null

  __device__ bool here() const { return rows; }
  __device__ float4 load(int m, int i, int, int width) const { return load4(rows + size_t(m) * width, i); }
};

// h = (h + rms(branch) * post) * scalar in place; x = rms(h) * pre. The branch, scalar and pre may be
// missing, and post: the branch is then added as it is.
struct AddNorm {
  float* h;
  const float *post, *scalar, *pre;
  void* x;
  float* scale;
  int hidden, k_blocks, block;
  float eps;
  int pdl_trigger_late;  // let the next kernel start after this one's wait: its memory requests would delay this one's reads
  float* kept;      // where h is copied to; null: nowhere
  int kept_stride;  // from a row to the next
};

__device__ inline float inverse_rms(float squares, int count, float eps) { return rsqrtf(__fadd_rn(squares / count, eps)); }

__device__ inline float close_one(float h, float added, float inverse, float weight, float factor) {
  return __fmul_rn(__fmaf_rn(__fmul_rn(added, inverse), weight, h), factor);
}
__device__ inline float4 close4(float4 h, float4 added, float inverse, float4 weight, float factor) {
  return make_float4(close_one(h.x, added.x, inverse, weight.x, factor), close_one(h.y, added.y, inverse, weight.y, factor),
                     close_one(h.z, added.z, inverse, weight.z, factor), close_one(h.w, added.w, inverse, weight.w, factor));
}
__device__ inline float4 open4(float4 v, float inverse, float4 weight) {
  return make_float4(__fmul_rn(v.x, __fmul_rn(inverse, weight.x)), __fmul_rn(v.y, __fmul_rn(inverse, weight.y)),
                     __fmul_rn(v.z, __fmul_rn(inverse, weight.z)), __fmul_rn(v.w, __fmul_rn(inverse, weight.w)));
}

// A thread's part of the branch, four values at a time; -> the sum of their squares.
template <class Branch>
__device__ inline float load_branch(const AddNorm& job, const Branch& branch, float4 (&added)[kMax]) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= job.hidden / 4) continue;
    added[j] = branch.load(blockIdx.x, i, gridDim.x, job.hidden);
    squares += square4(added[j]);
  }
  return squares;
}

constexpr int kKept = 1024;  // float4 of a norm's weight that are loaded before the branches arrive

// The two branches of a MoE layer, each with a norm of its own: the dense one, and the sum of the experts
// that a row picked, by rank.
struct Mixture {
  const float *dense_norm, *routed_norm;
  const float* parts;   // [M, top_k, width]; not written for a row that picked no expert
  const float* shares;  // [M, top_k]
  const int* numbers;   // [M, top_k], -1 for no expert
  int top_k;
};
template <class Dense>
struct Mixed {
  const Mixture& job;
  const Dense& dense;
  const float4* norms;  // [2][kKept] in shared memory, as far as rows are no longer

  __device__ bool here() const { return true; }
  __device__ float4 dense_norm(int i) const { return i < kKept ? norms[i] : load4(job.dense_norm, i); }
  __device__ float4 routed_norm(int i) const { return i < kKept ? norms[kKept + i] : load4(job.routed_norm, i); }
};

// rms(dense) * dense_norm + rms(routed) * routed_norm. Threads without values read the last ones.
template <class Dense>
__device__ inline float load_branch(const AddNorm& job, const Mixed<Dense>& branch, float4 (&added)[kMax]) {
  constexpr int kRanksAtOnce = kMax <= 2 ? 8 : 2;  // ranks on their way at once
  __shared__ float scratch[2][32];
  const Mixture& mixture = branch.job;
  const int m = blockIdx.x, quads = job.hidden / 4, top_k = mixture.top_k;
  const int* numbers = mixture.numbers + m * top_k;
  const float* shares = mixture.shares + m * top_k;
  const float* parts = mixture.parts + size_t(m) * top_k * job.hidden;
  const bool nobody = numbers[0] < 0;  // parts are read then too, and not used: no load waits for another
  float4 routed[kMax];
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = min(int(threadIdx.x) + j * kThreads, quads - 1);
    added[j] = branch.dense.load(m, i, gridDim.x, job.hidden);
    routed[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int first = 0; first < top_k; first += kRanksAtOnce) {
    float4 part[kRanksAtOnce][kMax];
    float share[kRanksAtOnce];
#pragma unroll
    for (int u = 0; u < kRanksAtOnce; u++) {
      const int r = min(first + u, top_k - 1);
      share[u] = shares[r];
#pragma unroll
      for (int j = 0; j < kMax; j++)
        part[u][j] = load4(parts + size_t(r) * job.hidden, min(int(threadIdx.x) + j * kThreads, quads - 1));
    }
#pragma unroll
    for (int u = 0; u < kRanksAtOnce; u++) {
      if (first + u >= top_k || nobody) continue;
#pragma unroll
      for (int j = 0; j < kMax; j++) {
        float4& sum = routed[j];
        const float4 v = part[u][j];
        sum.x += share[u] * v.x, sum.y += share[u] * v.y, sum.z += share[u] * v.z, sum.w += share[u] * v.w;
      }
    }
  }
  copies_done();  // of this thread's own part of the norms
  float squares[2] = {};
#pragma unroll
  for (int j = 0; j < kMax; j++)
    if (threadIdx.x + j * kThreads < quads) squares[0] += square4(added[j]), squares[1] += square4(routed[j]);
  const float p = inverse_rms(block_sum(squares[0], scratch[0]), job.hidden, job.eps);
  const float q = inverse_rms(block_sum(squares[1], scratch[1]), job.hidden, job.eps);
  float all = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    const float4 a = added[j], b = routed[j], u = branch.dense_norm(i), v = branch.routed_norm(i);
    added[j] = make_float4(a.x * p * u.x + b.x * q * v.x, a.y * p * u.y + b.y * q * v.y,
                           a.z * p * u.z + b.z * q * v.z, a.w * p * u.w + b.w * q * v.w);
    all += square4(added[j]);
  }
  return all;
}

// ---- Norm of the sum ----
// Further outputs of the same norm: the inputs of a MoE layer's router and experts, beside its dense branch's.
struct Others {
  const float *router_norm, *experts_norm;
  void *router, *experts;      // inputs, laid out as the first one is
  int narrow_router, narrow_experts;  // whether their weights are (tile.cuh)
};

__device__ inline void load_norm(float4 (&w)[kMax], const float* norm, int quads) {
#pragma unroll
  for (int j = 0; j < kMax; j++) w[j] = load4(norm, min(int(threadIdx.x) + j * kThreads, quads - 1));
}

__device__ inline void store_other(const AddNorm& job, const float4 (&stream)[kMax], float inverse, const float4 (&w)[kMax],
                                   void* x, bool narrow) {
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < job.hidden / 4) store_input(x, blockIdx.x, i, open4(stream[j], inverse, w[j]), job.k_blocks, job.block, narrow);
  }
}

// others: more inputs of the same rms(h), or null.
template <class Branch>
__device__ inline void add_and_norm(const AddNorm& job, const Branch& branch, const Others* others = nullptr) {
  __shared__ float scratch[3][32];
  if (!job.pdl_trigger_late) let_next_start();
  const int m = blockIdx.x, quads = job.hidden / 4;
  float4 weight[kMax], closing[kMax], stream[kMax], added[kMax], router[kMax], experts[kMax];
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (job.pre && i < quads) weight[j] = load4(job.pre, i);
    if (job.post && i < quads) closing[j] = load4(job.post, i);
  }
  if (others) load_norm(router, others->router_norm, quads), load_norm(experts, others->experts_norm, quads);
  const float factor = job.scalar ? *job.scalar : 1.0f;
  wait_for_previous();
  if (job.pdl_trigger_late) let_next_start();
  float* row = job.h + size_t(m) * job.hidden;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) stream[j] = load4(row, i);
  }
  if (branch.here()) {
    const float squares = load_branch(job, branch, added);
    const float inverse = job.post ? inverse_rms(block_sum(squares, scratch[0]), job.hidden, job.eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= quads) continue;
      const float4 w = job.post ? closing[j] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      reinterpret_cast<float4*>(row)[i] = stream[j] = close4(stream[j], added[j], inverse, w, factor);
      if (job.kept) reinterpret_cast<float4*>(job.kept + size_t(m) * job.kept_stride)[i] = stream[j];
    }
  }
  if (!job.x) return;
  float inverse = 1.0f;
  if (job.pre) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < kMax; j++)
      if (threadIdx.x + j * kThreads < quads) squares += square4(stream[j]);
    inverse = inverse_rms(block_sum(squares, scratch[1]), job.hidden, job.eps);
  }
  if (others) {
    store_other(job, stream, inverse, router, others->router, others->narrow_router);
    store_other(job, stream, inverse, experts, others->experts, others->narrow_experts);
  }
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    float4& v = stream[j];
    if (job.pre) v = open4(v, inverse, weight[j]);
    if (W8A8)
      largest = fmaxf(largest, fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w))));
    else
      store_input(job.x, m, i, v, job.k_blocks, job.block);
  }
#if W8A8
  largest = block_max(largest, scratch[2]);
  const float to_e4m3 = into_e4m3(largest);
  if (threadIdx.x == 0) job.scale[m] = from_e4m3(largest) * kActivationScale;
#pragma unroll
  for (int j = 0; j < kMax; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) store_four(static_cast<u8*>(job.x), m, 4 * i, stream[j], to_e4m3, job.k_blocks, job.block);
  }
#endif
}
