// The residual stream: embedding, RMS norms fused with the residual addition. One CTA per row.
#include "hidden.cuh"
#include "narrow.cuh"

#ifndef W8A8  // 1: the next linear layer's inputs are e4m3
#define W8A8 0
#endif

// What a norm closes: it says how a row's values come, thread by thread, four at a time (Q times).
// A linear layer's output as it is; Groups (narrow.cuh) are what the norms read of k groups. Kernels of
// each, since loads that may be of groups would wait for one another: 1 us more a norm.
struct Whole {
  const float* rows;  // may be null

  __device__ bool here() const { return rows; }
  __device__ float4 load(int m, int i, int, int width) const { return load4(rows + size_t(m) * width, i); }
};

struct AddNorm {
  float* h;
  const float *post, *scalar, *pre;
  void* x;
  float* scale;
  int hidden, k_blocks, block;
  float eps;
};

template <int Q, class Branch>
__device__ inline float load_branch(const AddNorm& job, const Branch& branch, float4 (&added)[Q]) {
  float squares = 0.0f;
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= job.hidden / 4) continue;
    added[j] = branch.load(blockIdx.x, i, gridDim.x, job.hidden);
    squares += square4(added[j]);
  }
  return squares;
}

// The two branches of a MoE layer, each with a norm of its own: the dense one, and the sum of the experts
// that a row picked, by rank.
struct Mixture {
  const float *dense_norm, *routed_norm;
  const float* parts;   // [M, top_k, width]; nobody wrote those of a row that picked nobody
  const float* shares;  // [M, top_k]
  const int* numbers;   // [M, top_k], -1 for nobody
  int top_k;
};
template <class Dense>
struct Mixed {
  const Mixture& job;
  const Dense& dense;

  __device__ bool here() const { return true; }
};

// rms(dense) * dense_norm + rms(routed) * routed_norm. Threads without values read the last ones.
template <int Q, class Dense>
__device__ inline float load_branch(const AddNorm& job, const Mixed<Dense>& branch, float4 (&added)[Q]) {
  constexpr int kTogether = Q <= 2 ? 8 : 2;  // ranks on their way at once
  __shared__ float scratch[2][32];
  const Mixture& mixture = branch.job;
  const int m = blockIdx.x, quads = job.hidden / 4, top_k = mixture.top_k;
  const int* numbers = mixture.numbers + m * top_k;
  const float* shares = mixture.shares + m * top_k;
  const float* parts = mixture.parts + size_t(m) * top_k * job.hidden;
  const int ranks = numbers[0] < 0 ? 0 : top_k;
  float4 routed[Q];
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = min(int(threadIdx.x) + j * kThreads, quads - 1);
    added[j] = branch.dense.load(m, i, gridDim.x, job.hidden);
    routed[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  for (int first = 0; first < ranks; first += kTogether) {
    float4 part[kTogether][Q];
    float share[kTogether];
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      const int r = min(first + u, ranks - 1);
      share[u] = shares[r];
#pragma unroll
      for (int j = 0; j < Q; j++)
        part[u][j] = load4(parts + size_t(r) * job.hidden, min(int(threadIdx.x) + j * kThreads, quads - 1));
    }
#pragma unroll
    for (int u = 0; u < kTogether; u++) {
      if (first + u >= ranks) continue;
#pragma unroll
      for (int j = 0; j < Q; j++) {
        float4& sum = routed[j];
        const float4 v = part[u][j];
        sum.x += share[u] * v.x, sum.y += share[u] * v.y, sum.z += share[u] * v.z, sum.w += share[u] * v.w;
      }
    }
  }
  float squares[2] = {};
#pragma unroll
  for (int j = 0; j < Q; j++)
    if (threadIdx.x + j * kThreads < quads) squares[0] += square4(added[j]), squares[1] += square4(routed[j]);
  const float p = rsqrtf(block_sum(squares[0], scratch[0]) / job.hidden + job.eps);
  const float q = rsqrtf(block_sum(squares[1], scratch[1]) / job.hidden + job.eps);
  float all = 0.0f;
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    const float4 a = added[j], b = routed[j], u = load4(mixture.dense_norm, i), v = load4(mixture.routed_norm, i);
    added[j] = make_float4(a.x * p * u.x + b.x * q * v.x, a.y * p * u.y + b.y * q * v.y,
                           a.z * p * u.z + b.z * q * v.z, a.w * p * u.w + b.w * q * v.w);
    all += square4(added[j]);
  }
  return all;
}

// What else a stream is normed for: a MoE layer's router and its experts, beside its dense branch.
struct Others {
  const float *router_norm, *experts_norm;
  void *router, *experts;      // inputs, laid out as the first one is
  int narrow_router, narrow_experts;  // whether their weights are (tile.cuh)
};

template <int Q>
__device__ inline void store_other(const AddNorm& job, const float4 (&stream)[Q], float inverse, const float* weight,
                                   void* x, bool narrow) {
  float4 w[Q];
#pragma unroll
  for (int j = 0; j < Q; j++) w[j] = load4(weight, min(int(threadIdx.x) + j * kThreads, job.hidden / 4 - 1));
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= job.hidden / 4) continue;
    const float4 v = make_float4(stream[j].x * (inverse * w[j].x), stream[j].y * (inverse * w[j].y),
                                 stream[j].z * (inverse * w[j].z), stream[j].w * (inverse * w[j].w));
    store_input(x, blockIdx.x, i, v, job.k_blocks, job.block, narrow);
  }
}

// h = (h + rms(branch) * post) * scalar; x = rms(h) * pre. The branch, scalar, pre may be missing, and
// post: the branch is then added as it is. others: more inputs of the same rms(h), or null.
template <int Q, class Branch>
__device__ inline void add_and_norm(const AddNorm& job, const Branch& branch, const Others* others = nullptr) {
  __shared__ float scratch[3][32];
  let_next_start();
  const int m = blockIdx.x, quads = job.hidden / 4;
  float4 weight[Q], closing[Q], stream[Q], added[Q];
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (job.pre && i < quads) weight[j] = load4(job.pre, i);
    if (job.post && i < quads) closing[j] = load4(job.post, i);
  }
  const float factor = job.scalar ? *job.scalar : 1.0f;
  wait_for_previous();
  float* row = job.h + size_t(m) * job.hidden;
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) stream[j] = load4(row, i);
  }
  if (branch.here()) {
    const float squares = load_branch(job, branch, added);
    const float inverse = job.post ? rsqrtf(block_sum(squares, scratch[0]) / job.hidden + job.eps) : 1.0f;
#pragma unroll
    for (int j = 0; j < Q; j++) {
      const int i = threadIdx.x + j * kThreads;
      if (i >= quads) continue;
      const float4 w = job.post ? closing[j] : make_float4(1.0f, 1.0f, 1.0f, 1.0f);
      float4 v = stream[j];
      v.x = (v.x + added[j].x * inverse * w.x) * factor;
      v.y = (v.y + added[j].y * inverse * w.y) * factor;
      v.z = (v.z + added[j].z * inverse * w.z) * factor;
      v.w = (v.w + added[j].w * inverse * w.w) * factor;
      stream[j] = v;
      reinterpret_cast<float4*>(row)[i] = v;
    }
  }
  if (!job.x) return;
  float inverse = 1.0f;
  if (job.pre) {
    float squares = 0.0f;
#pragma unroll
    for (int j = 0; j < Q; j++)
      if (threadIdx.x + j * kThreads < quads) squares += square4(stream[j]);
    inverse = rsqrtf(block_sum(squares, scratch[1]) / job.hidden + job.eps);
  }
  if (others) {
    store_other(job, stream, inverse, others->router_norm, others->router, others->narrow_router);
    store_other(job, stream, inverse, others->experts_norm, others->experts, others->narrow_experts);
  }
  float largest = 0.0f;
#pragma unroll
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i >= quads) continue;
    float4& v = stream[j];
    if (job.pre) {
      v.x *= inverse * weight[j].x, v.y *= inverse * weight[j].y;
      v.z *= inverse * weight[j].z, v.w *= inverse * weight[j].w;
    }
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
  for (int j = 0; j < Q; j++) {
    const int i = threadIdx.x + j * kThreads;
    if (i < quads) store_four(static_cast<u8*>(job.x), m, 4 * i, stream[j], to_e4m3, job.k_blocks, job.block);
  }
#endif
}

extern "C" __global__ void __launch_bounds__(kThreads) add_norm(const __grid_constant__ AddNorm job, const float* branch) {
  add_and_norm<kMax>(job, Whole{branch});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_groups(const __grid_constant__ AddNorm job, const __grid_constant__ Groups branch) {
  add_and_norm<kMax>(job, branch);
}

// What has more to load asks for no more values than there are: registers are few.
template <class Branch>
__device__ inline void add_and_norm_more(const AddNorm& job, const Branch& branch, const Others* others = nullptr) {
  if (job.hidden <= 8 * kThreads) return add_and_norm<2>(job, branch, others);
  add_and_norm<kMax>(job, branch, others);
}

extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_thrice(const __grid_constant__ AddNorm job, const float* branch, const __grid_constant__ Others others) {
  if (threadIdx.x == 0) {
    prefetch(others.router_norm, job.hidden * sizeof(float));
    prefetch(others.experts_norm, job.hidden * sizeof(float));
  }
  add_and_norm_more(job, Whole{branch}, &others);
}

__device__ inline void prefetch_norms(const AddNorm& job, const Mixture& mixture) {
  if (threadIdx.x) return;
  prefetch(mixture.dense_norm, job.hidden * sizeof(float));
  prefetch(mixture.routed_norm, job.hidden * sizeof(float));
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_mixture(const __grid_constant__ AddNorm job, const float* dense, const __grid_constant__ Mixture mixture) {
  prefetch_norms(job, mixture);
  add_and_norm_more(job, Mixed<Whole>{mixture, Whole{dense}});
}
extern "C" __global__ void __launch_bounds__(kThreads)
    add_norm_mixture_groups(const __grid_constant__ AddNorm job, const __grid_constant__ Groups dense,
                            const __grid_constant__ Mixture mixture) {
  prefetch_norms(job, mixture);
  add_and_norm_more(job, Mixed<Groups>{mixture, dense});
}

// h[m] = table[token] * factor.
extern "C" __global__ void __launch_bounds__(kThreads) embed(const __grid_constant__ Embed job) {
  const int token = job.tokens[blockIdx.x], row = token >= 0 && token < job.vocab ? token : 0;
  float2* h = reinterpret_cast<float2*>(job.h + size_t(blockIdx.x) * job.hidden);
  for (int i = threadIdx.x; i < job.hidden / 2; i += kThreads) {
    const u32 both = job.table[pair_at(job, row, i)];
    h[i] = make_float2(from_bf16(u16(both)) * job.factor, from_bf16(both >> 16) * job.factor);
  }
}

// Per-layer inputs of E2B and E4B: (rms(mixed * hidden^-1/2) * weight + table row) / sqrt(2).
// One warp per layer of a row; width is at most 1024.
extern "C" __global__ void __launch_bounds__(256)
    per_layer_inputs(const float* mixed, const u16* table, const float* weight,
                     const int* tokens, float* out, int layers, int width, int vocab, float eps,
                     float mixed_factor, float table_factor) {
  let_next_start();
  wait_for_previous();
  const int lane = threadIdx.x % 32, layer = blockIdx.y * 8 + threadIdx.x / 32, m = blockIdx.x;
  if (layer >= layers) return;
  const int token = tokens[m];
  const size_t at = size_t(m) * layers * width + size_t(layer) * width;
  const u16* row =
      table + size_t(token >= 0 && token < vocab ? token : 0) * layers * width + size_t(layer) * width;
  float squares = 0.0f;
  for (int i = lane; i < width; i += 32) {
    const float v = mixed[at + i] * mixed_factor;
    squares += v * v;
  }
  const float inverse = rsqrtf(warp_sum(squares) / width + eps);
  for (int i = lane; i < width; i += 32) {
    const float v = mixed[at + i] * mixed_factor * inverse * weight[i];
    const float own = from_bf16(row[i]) * table_factor;
    out[at + i] = (v + own) * 0.70710678118654752f;
  }
}
