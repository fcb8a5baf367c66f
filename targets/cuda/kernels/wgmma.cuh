// Warpgroup MMAs with weights from registers and inputs from shared memory.
#pragma once
#include "tile.cuh"

#ifndef TOKENS  // per CTA: 32, 64, 128
#define TOKENS 64
#endif

constexpr int kSums = TOKENS / 2;  // per thread and tile: 16 x TOKENS of a warp
typedef float Sums[kSums];

// sum[16 x TOKENS of this warp's tile] += a (its 16 x 16 weights) x the 16 inputs x TOKENS of `b`.
__device__ inline void multiply(Sums& sum, const u32* a, u64 b) {
#if BITS < 16 && !FINE
#define TYPES "f32.f16.f16"
#else
#define TYPES "f32.bf16.bf16"
#endif
#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#if TOKENS == 32
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k16." TYPES
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, 1, 1, 1, 0;"
      : F4(0), F4(4), F4(8), F4(12)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#elif TOKENS == 128
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n128k16." TYPES " {"
      "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,"
      "%24,%25,%26,%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,"
      "%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
      "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 0;"
      : F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28),
        F4(32), F4(36), F4(40), F4(44), F4(48), F4(52), F4(56), F4(60)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#else
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n64k16." TYPES
      " {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,"
      "%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, 1, 1, 1, 0;"
      : F4(0), F4(4), F4(8), F4(12), F4(16), F4(20), F4(24), F4(28)
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}

// Where the core matrices of a stage's inputs begin, how far apart they are along the inputs (all
// tokens') and along the tokens (8 tokens'); not swizzled. In units of 16 bytes. Adding to it moves
// the beginning.
__device__ inline u32 inputs_at(u32 address) { return (address >> 4) + (TOKENS << 16); }
constexpr u64 kApart = u64(8) << 32;

__device__ inline void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
