// What every kernel needs: programmatic dependent launch, fragments, conversions, layouts.
// No CUDA headers: NVRTC then needs nothing but itself.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// ---- Programmatic dependent launch ----
// Kernels start before their predecessor has ended (programmatic dependent launch). Nothing that
// an earlier kernel of the same cycle writes may be touched before `wait_for_previous`.
__device__ inline void wait_for_previous() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ inline void let_next_start() { asm volatile("griddepcontrol.launch_dependents;"); }

// ---- Copies ----
// Starts bytes (a multiple of 16) on their way to the L2 cache.
__device__ inline void prefetch(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes));
}

__device__ inline u32 shared_address(const void* p) {
  return static_cast<u32>(__cvta_generic_to_shared(p));
}

// Starts 16 bytes on their way to shared memory; `copies_done` waits for all of this thread's.
__device__ inline void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
// Commits a thread's copies since its last call as one group; `await_asked` waits for all but the last kGroups groups.
__device__ inline void asked() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kGroups>
__device__ inline void await_asked() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}
__device__ inline void copies_done() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---- Conversions ----
// Activations of fp8 weights travel as f16 of value / 32: f16 then reaches 2 million and still
// carries 11 bits (bf16: 8). The weight's scale is multiplied by 32 when it is packed.
constexpr float kActivationScale = 1.0f / 32.0f;

#undef INFINITY
#define INFINITY __int_as_float(0x7f800000)

__device__ inline u16 to_f16(float v) {  // saturates
  u16 bits;
  v = fminf(fmaxf(v, -65504.0f), 65504.0f);
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
__device__ inline u16 to_bf16(float v) {
  u16 bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(v));
  return bits;
}
__device__ inline float from_bf16(u16 bits) { return __uint_as_float(u32(bits) << 16); }
__device__ inline u16 input_of_fp8(float v) { return to_f16(v * kActivationScale); }

// ---- Integers ----
// v / by and v % by, exact for v below 2^20 (load.py sees to it). In floats: three divisions of integers take 0.2 us
// of every kernel.
__device__ inline int quotient(int v, int by) { return int(__fdividef(v + 0.5f, by)); }
__device__ inline int remainder(int v, int by) { return v - quotient(v, by) * by; }

// Broadcasts a value that is the same in all lanes: the compiler then needs one register per warp, not per lane.
__device__ inline int of_warp(int v) { return __shfl_sync(~0u, v, 0); }

// The place of block `at` of a weight's k where all k groups' first blocks come first, then their second ones.
__device__ inline int interleaved(int at, int k_blocks, int k_groups) {
  const int each = quotient(k_blocks, k_groups), group = quotient(at, each);
  return (at - group * each) * k_groups + group;
}

// ---- Inputs of a linear layer ----
// Where element f of row m of a linear layer's input lies, in blocks of [m / block][f / 32].
// Up to 16 tokens, 1, 2, 4, 8 or 16 of them: [token][f % 32], so that a warp reads the B fragments of 32
// inputs with one 16-byte load per lane. From 32 tokens on: as core matrices, [16-byte part][token]
// [8 inputs], with the inputs in the order in which those fragments give them to the two MMAs.
//
// Blocks of 32 inputs lie in order, except for up to 16 tokens and a weight with contiguous k groups (`k_groups` of
// them, else 1): then the groups' blocks are interleaved.
__device__ inline size_t x_offset(int m, int f, int k_blocks, int block, int k_groups = 1) {
  const int at = k_groups > 1 && block < 32 ? interleaved(f / 32, k_blocks, k_groups) : f / 32;
  const size_t start = (size_t(m / block) * k_blocks + at) * block * 32;
  const int token = m % block, quad = f % 32 / 8, pair = f % 8 / 2;
  if (block < 32) return start + token * 32 + f % 32;
  return start + (pair * block + token) * 8 + quad * 2 + f % 2;
}

// Stores inputs f to f + 3 (f a multiple of 4) of row m, two per word, at `x_offset`. One address for all four:
// kernels of few CTAs run from cold instruction caches, where every instruction counts.
__device__ inline void store_inputs(void* x, int m, int f, u32 low, u32 high, int k_blocks, int block, int k_groups = 1) {
  const int at = k_groups > 1 && block < 32 ? interleaved(f / 32, k_blocks, k_groups) : f / 32;
  const int group = quotient(m, block), token = m - group * block;
  u32* to = static_cast<u32*>(x) + (size_t(group) * k_blocks + at) * block * 16;
  if (block < 32) {
    *reinterpret_cast<uint2*>(to + token * 16 + f % 32 / 2) = make_uint2(low, high);
    return;
  }
  to += (f % 8 / 2 * block + token) * 4 + f % 32 / 8;
  to[0] = low, to[block * 4] = high;
}

// Eight of a token's inputs, 8 i to 8 i + 7 of a block: together, or a pair from each part.
__device__ inline uint4 load_inputs(const u32* x, int block) {
  if (block < 32) return *reinterpret_cast<const uint4*>(x);
  return make_uint4(x[0], x[block * 4], x[block * 8], x[block * 12]);
}

// Four e4m3 -> two f16x2, exact.
__device__ inline void widen(u32 four, u32& low, u32& high) {
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.rn.f16x2.e4m3x2 %0, a; cvt.rn.f16x2.e4m3x2 %1, b; }"
      : "=r"(low), "=r"(high)
      : "r"(four));
}

// ---- Tensor cores ----
// D[16 x 8] += A[16 x 16] B[16 x 8]; a column of D depends on its own column of B alone.
__device__ inline void mma_f16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ inline void mma_bf16(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- Functions ----
// x (1 + tanh(inner)) / 2 = x / (1 + exp(-2 inner)): one exponential.
__device__ inline float gelu_tanh(float x) {
  const float inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.0f + __expf(-2.0f * inner));
}

__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// cap * tanh(v / cap). The error of this tanh is absolute, and no larger than that of a sum.
__device__ inline float soft_cap(float v, float cap) {
  return cap - __fdividef(2.0f * cap, 1.0f + __expf(v * (2.0f / cap)));
}

// ---- Sums and maxima in a fixed order ----
// The sum over a warp, or over each group of kLanes lanes.
template <int kLanes = 32>
__device__ inline float warp_sum(float v) {
#pragma unroll
  for (int d = kLanes / 2; d; d >>= 1) v += __shfl_xor_sync(~0u, v, d);
  return v;
}
__device__ inline float warp_max(float v) {
#pragma unroll
  for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

// The sum of a warp's lanes up to this one.
template <typename T>
__device__ inline T sum_so_far(T v, int lane) {
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const T before = __shfl_up_sync(~0u, v, d);
    if (lane >= d) v += before;
  }
  return v;
}

// Sums of up to eight contiguous parts of k, which every linear layer adds as this binary tree:
// ((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7)). It does not depend on which warp holds which parts.
__device__ inline float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ inline float4 tree_sum(float4 (&v)[8], int parts) {
#pragma unroll
  for (int d = 1; d < 8; d *= 2)
    if (d < parts)
#pragma unroll
      for (int i = 0; i < 8; i += 2 * d) v[i] = plus(v[i], v[i + d]);
  return v[0];
}

// Several values at once, each as above: one shuffle step of all values comes before the next step of any.
template <int N>
__device__ inline void warp_sum(float (&v)[N]) {
#pragma unroll
  for (int d = 16; d; d >>= 1)
#pragma unroll
    for (int i = 0; i < N; i++) v[i] += __shfl_xor_sync(~0u, v[i], d);
}
template <int N>
__device__ inline void warp_max(float (&v)[N]) {
#pragma unroll
  for (int d = 16; d; d >>= 1)
#pragma unroll
    for (int i = 0; i < N; i++) v[i] = fmaxf(v[i], __shfl_xor_sync(~0u, v[i], d));
}

// Sum over the block in a fixed order: warps by shuffles, then the warps' sums, by every warp. Each
// use of a kernel needs its own `scratch` [32].
__device__ inline float block_sum(float v, float* scratch) {
  const int lane = threadIdx.x % 32;
  v = warp_sum(v);
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_sum(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
}

// The block's largest; as `block_sum`.
__device__ inline float block_max(float v, float* scratch) {
  const int lane = threadIdx.x % 32;
  v = warp_max(v);
  if (lane == 0) scratch[threadIdx.x / 32] = v;
  __syncthreads();
  return warp_max(lane < blockDim.x / 32 ? scratch[lane] : 0.0f);
}
