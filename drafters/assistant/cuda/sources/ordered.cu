// The head of E2B's and E4B's assistants: words are grouped in clusters, and only words of the clusters with the
// best-fitting centroids are scored. `fit` scores all centroids; each CTA of `score` finds its own cluster by itself.
// A row's sums have one order, independent of the other rows.
#include "choice.cuh"

constexpr int kThreads = 256;
constexpr int kLanes = 8;                      // that share a product of two rows
constexpr int kRowsPerCta = kThreads / kLanes;  // products of a CTA at once

struct Job {
  const float* h;        // [M, width], not normed yet
  const float* norm;     // [width]
  const u16* centroids;  // [clusters, width], bf16
  const u16* rows;       // [clusters, words, width], bf16
  const int* ids;        // [clusters, words]: which word each is; from `vocab` on, none
  float* fits;           // [M, clusters]
  float* logits;         // [M, vocab]
  int width;             // a multiple of 8
  int clusters, words, read, vocab;
  float eps, softcap;  // softcap 0: none
};

// y = rms(h) * norm, to shared memory.
__device__ inline void keep_normed(const Job& job, int m, float* y) {
  __shared__ float scratch[32];
  const float* h = job.h + size_t(m) * job.width;
  float squares = 0.0f;
  for (int i = threadIdx.x; i < job.width; i += kThreads) squares += h[i] * h[i];
  const float inverse = rsqrtf(block_sum(squares, scratch) / job.width + job.eps);
  for (int i = threadIdx.x; i < job.width; i += kThreads) y[i] = h[i] * inverse * job.norm[i];
  __syncthreads();
}

__device__ inline float add_pair(float sum, u32 pair, float low, float high) {
  sum = __fmaf_rn(__uint_as_float(pair << 16), low, sum);
  return __fmaf_rn(__uint_as_float(pair & 0xffff0000u), high, sum);
}

// A row of a weight times y, by eight lanes; all of a warp take part.
__device__ inline float product(const u16* row, const float* y, int width) {
  float sum = 0.0f;
#pragma unroll 4
  for (int i = threadIdx.x % kLanes; i < width / 8; i += kLanes) {
    const uint4 w = reinterpret_cast<const uint4*>(row)[i];
    const float4 low = reinterpret_cast<const float4*>(y)[2 * i], high = reinterpret_cast<const float4*>(y)[2 * i + 1];
    sum = add_pair(add_pair(sum, w.x, low.x, low.y), w.y, low.z, low.w);
    sum = add_pair(add_pair(sum, w.z, high.x, high.y), w.w, high.z, high.w);
  }
  return warp_sum<kLanes>(sum);
}

// grid: clusters by kRowsPerCta, M. No word is scored yet, either.
extern "C" __global__ void __launch_bounds__(kThreads) fit(const __grid_constant__ Job job) {
  extern __shared__ float4 memory[];
  float* y = reinterpret_cast<float*>(memory);
  const int m = blockIdx.y, first = blockIdx.x * kRowsPerCta, own = first + threadIdx.x / kLanes;
  let_next_start();
  if (threadIdx.x == 0) {
    const int count = min(kRowsPerCta, job.clusters - first);
    prefetch(job.centroids + size_t(first) * job.width, count * job.width * 2);
  }
  wait_for_previous();
  float* logits = job.logits + size_t(m) * job.vocab;
  for (int i = blockIdx.x * kThreads + threadIdx.x; i < job.vocab; i += gridDim.x * kThreads) logits[i] = -INFINITY;
  keep_normed(job, m, y);
  const float v = product(job.centroids + size_t(min(own, job.clusters - 1)) * job.width, y, job.width);
  if (threadIdx.x % kLanes == 0 && own < job.clusters) job.fits[size_t(m) * job.clusters + own] = v;
}

struct Shared {
  alignas(16) u32 most[kThreads];  // each thread's best fit (`ordered`)
  u32 bound;                       // `read` clusters or more fit as well as this
  int count, cluster;
};

// Which cluster fits `rank`-th best, from 0; of equals the first. found: room for all clusters.
__device__ inline int cluster_of(const Job& job, const float* fits, int rank, Shared& shared, u64* found) {
  u32 most = 0;
  for (int i = threadIdx.x; i < job.clusters; i += kThreads) most = max(most, ordered(fits[i]));
  shared.most[threadIdx.x] = most;
  if (threadIdx.x == 0) shared.bound = 0, shared.count = 0;
  __syncthreads();
  int reach = 0;
#pragma unroll 4
  for (int j = 0; j < kThreads / 4; j++) {
    const uint4 others = reinterpret_cast<const uint4*>(shared.most)[j];
    reach += (others.x >= most) + (others.y >= most) + (others.z >= most) + (others.w >= most);
  }
  if (reach >= job.read) atomicMax(&shared.bound, most);
  __syncthreads();
  for (int i = threadIdx.x; i < job.clusters; i += kThreads) {
    const u32 key = ordered(fits[i]);
    if (key >= shared.bound) found[atomicAdd(&shared.count, 1)] = u64(key) << 32 | ~u32(i);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < shared.count; i += kThreads) {
    int above = 0;
    for (int j = 0; j < shared.count; j++) above += found[j] > found[i];
    if (above == rank) shared.cluster = ~u32(found[i]);
  }
  __syncthreads();
  return shared.cluster;
}

// grid: read, M, words of a cluster by kRowsPerCta
extern "C" __global__ void __launch_bounds__(kThreads) score(const __grid_constant__ Job job) {
  extern __shared__ float4 memory[];
  __shared__ Shared shared;
  float* y = reinterpret_cast<float*>(memory);
  u64* found = reinterpret_cast<u64*>(y + job.width);
  const int m = blockIdx.y, word = blockIdx.z * kRowsPerCta + threadIdx.x / kLanes;
  let_next_start();
  wait_for_previous();
  keep_normed(job, m, y);
  const int cluster = cluster_of(job, job.fits + size_t(m) * job.clusters, blockIdx.x, shared, found);
  const size_t at = size_t(cluster) * job.words + min(word, job.words - 1);
  const int id = job.ids[at];  // on its way beside the row
  const float v = product(job.rows + at * job.width, y, job.width);
  if (threadIdx.x % kLanes || word >= job.words || id >= job.vocab) return;
  job.logits[size_t(m) * job.vocab + id] = job.softcap > 0.0f ? soft_cap(v, job.softcap) : v;
}
