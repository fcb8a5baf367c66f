// What choosing and guessing share: clusters, the better of two, an order of floats, the keyed noise.
#pragma once
#include "common.cuh"

// ---- Clusters ----
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ inline u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same place in another CTA's shared memory. What is stored there can be read once both have passed `cluster_sync`.
__device__ inline u32 peer_address(const void* mine, int rank) {
  u32 at;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(shared_address(mine)), "r"(rank));
  return at;
}
__device__ inline void store_peer(const void* mine, int rank, u32 v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(peer_address(mine, rank)), "r"(v) : "memory");
}
__device__ inline void store_peer(const void* mine, int rank, u64 v) {
  asm volatile("st.shared::cluster.u64 [%0], %1;" ::"r"(peer_address(mine, rank)), "l"(v) : "memory");
}

// ---- The better of two ----
struct alignas(8) Best {
  float value;
  int id;
};
__device__ inline Best none() { return {-INFINITY, 0x7fffffff}; }
__device__ inline void store_peer(const void* mine, int rank, Best v) {
  store_peer(mine, rank, u64(u32(v.id)) << 32 | __float_as_uint(v.value));
}
__device__ inline Best better(Best a, Best b) {
  return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

__device__ inline Best warp_best(Best v) {
#pragma unroll
  for (int d = 16; d; d >>= 1)
    v = better(v, {__shfl_xor_sync(~0u, v.value, d), __shfl_xor_sync(~0u, v.id, d)});
  return v;
}

// Same order as the floats.
__device__ inline u32 ordered(float v) {
  const u32 bits = __float_as_uint(v);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ inline float of_ordered(u32 key) { return __uint_as_float(key >> 31 ? key & 0x7fffffffu : ~key); }

// ---- Keyed noise ----
// Philox words of four tokens (4 * block .. 4 * block + 3) at a position.
__device__ inline void random_words(u32 k0, u32 k1, u32 block, u32 position, u32 (&c)[4]) {
  c[0] = block, c[1] = position, c[2] = 0, c[3] = 0;
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const u32 high0 = __umulhi(0xD2511F53u, c[0]), low0 = 0xD2511F53u * c[0];
    const u32 high1 = __umulhi(0xCD9E8D57u, c[2]), low1 = 0xCD9E8D57u * c[2];
    c[0] = high1 ^ c[1] ^ k0, c[1] = low1, c[2] = high0 ^ c[3] ^ k1, c[3] = low0;
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
}

// Standard Gumbel noise.
__device__ inline float gumbel(u32 word) {
  const float u = fminf((__uint2float_rn(word) + 0.5f) * 2.3283064365386963e-10f, 1.0f - 5.9604644775390625e-08f);
  return -logf(-log1pf(-u));
}
__device__ inline void gumbel(u32 k0, u32 k1, u32 block, u32 position, float (&out)[4]) {
  u32 words[4];
  random_words(k0, k1, block, position, words);
#pragma unroll
  for (int i = 0; i < 4; i++) out[i] = gumbel(words[i]);
}
