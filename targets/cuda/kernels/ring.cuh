// A ring of stages in shared memory, filled by bulk copies that report to mbarriers.
#pragma once
#include "common.cuh"

// ---- Barriers in shared memory ----
__device__ inline void barrier_init(u32 bar, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ inline void arrive(u32 bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}
__device__ inline void expect(u32 bar, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
}
__device__ inline void await(u32 bar, u32 parity) {
  asm volatile(
      "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; "
      "bra again; done: }" ::"r"(bar),
      "r"(parity)
      : "memory");
}
__device__ inline bool arrived(u32 bar, u32 parity) {
  u32 done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done)
               : "r"(bar), "r"(parity)
               : "memory");
  return done;
}

// ---- Bulk copies ----
__device__ inline void copy(u32 to, const void* from, u32 bytes, u32 bar, u64 policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], "
      "%2, [%3], %4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar), "l"(policy)
      : "memory");
}

__device__ inline void copy(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
      "l"(from), "r"(bytes), "r"(bar)
      : "memory");
}

// N blocks of so many bytes, each `stride` blocks after the last.
template <int N>
__device__ inline void copy_blocks(u32 to, const u8* from, int stride, u32 bytes, u32 bar, u64 policy) {
  if (stride == 1) return copy(to, from, N * bytes, bar, policy);
#pragma unroll
  for (int i = 0; i < N; i++) copy(to + i * bytes, from + size_t(i) * stride * bytes, bytes, bar, policy);
}

// ---- The ring ----
// A barrier of the producers' arrivals when a stage is full, one of the consumers' when it is free.
__device__ inline void init_ring(u32 full, u32 empty, int stages, int consumers, int producers = 1, int apart = 8) {
#pragma unroll 1
  for (int i = 0; i < stages; i++) {
    barrier_init(full + apart * i, producers);
    barrier_init(empty + apart * i, consumers);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// ---- Freeing a stage ----
// An arrival passes loads from shared memory that still wait for their turn, and so may the copy that it lets the
// producer issue: a warp then reads what belongs to a later step (seen on an H200 beside attention, in up to 3 % of steps). So
// the arrival depends on `loaded`, words of what was loaded last. `zero` is 0, passed at run time: a constant would be
// folded, and the dependence with it.
__device__ inline void free_stage(u32 empty, u32 loaded, u32 zero) { arrive(empty + (loaded & zero)); }
// Before `arrive`, where loads are many: waits for all of this thread's. That takes 17 ns, `free_stage` almost nothing.
__device__ inline void loads_done() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Weights pass through the L2 cache once, activations are needed by every CTA.
__device__ inline u64 read_once() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline u64 read_often() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// ---- Barriers of warps ----
// The CTA's barrier kNumber, for `warps` warps: 0 is that of __syncthreads, 1 the consumers'. `meet` arrives and waits,
// `pass` arrives without waiting.
template <int kNumber>
__device__ inline void meet(int warps) {
  asm volatile("bar.sync %0, %1;" ::"n"(kNumber), "r"(warps * 32) : "memory");
}
template <int kNumber>
__device__ inline void pass(int warps) {
  asm volatile("bar.arrive %0, %1;" ::"n"(kNumber), "r"(warps * 32) : "memory");
}

__device__ inline void consumers_sync(int warps) { meet<1>(warps); }
