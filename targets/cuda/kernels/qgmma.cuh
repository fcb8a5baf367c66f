// Warpgroup MMAs of e4m3: weights from registers, inputs from shared memory.
#pragma once
#include "common.cuh"

#ifndef TOKENS  // per CTA: 8, 16, 32, 64, 128, 256
#define TOKENS 64
#endif

// Registers for 256 tokens don't suffice for one MMA beside two other warpgroups: it is two.
constexpr int kColumns = TOKENS < 128 ? TOKENS : 128, kHalves = TOKENS / kColumns;
constexpr int kSums = kColumns / 2;  // per thread, tile and half: 16 x kColumns of a warp
typedef float Sums[kSums];

#define F4(i) "+f"(sum[i]), "+f"(sum[i + 1]), "+f"(sum[i + 2]), "+f"(sum[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define P16(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)                                        \
  "%" #a ",%" #b ",%" #c ",%" #d ",%" #e ",%" #f ",%" #g ",%" #h ",%" #i ",%" #j ",%" #k ",%" #l \
  ",%" #m ",%" #n ",%" #o ",%" #p
#define P32 P16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15) "," \
            P16(16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31)
#define P64 P32 "," P16(32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47) "," \
            P16(48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63)
#define QGMMA(n, sums, a, b, c, d, e, ...)                                                    \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" sums "}, {%" #a \
               ",%" #b ",%" #c ",%" #d "}, %" #e ", 1, 1, 1;"                                 \
               : __VA_ARGS__                                                                   \
               : "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "l"(x))

// sum[16 x kColumns of this warp's tile] += w (its 16 x 32 weights) x the 32 inputs x kColumns of `x`. A
// tile as it is stored (packing.py) is the fragment, if its inputs are counted as `narrow_offset` does.
__device__ inline void multiply(Sums& sum, uint4 w, u64 x) {
#if TOKENS == 8
  QGMMA(8, "%0,%1,%2,%3", 4, 5, 6, 7, 8, F4(0));
#elif TOKENS == 16
  QGMMA(16, "%0,%1,%2,%3,%4,%5,%6,%7", 8, 9, 10, 11, 12, F4(0), F4(4));
#elif TOKENS == 32
  QGMMA(32, P16(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15), 16, 17, 18, 19, 20, F16(0));
#elif TOKENS == 64
  QGMMA(64, P32, 32, 33, 34, 35, 36, F16(0), F16(16));
#else
  QGMMA(128, P64, 64, 65, 66, 67, 68, F16(0), F16(16), F16(32), F16(48));
#endif
}

// Where the core matrices (8 tokens x 16 bytes) of a stage's inputs begin, how far apart they are along
// the inputs (all tokens') and along the tokens (8 tokens'); not swizzled. In units of 16 bytes.
// Adding to it moves the beginning.
__device__ inline u32 inputs_at(u32 address) { return (address >> 4) + (TOKENS << 16); }
constexpr u64 kApart = u64(8) << 32;

__device__ inline void begin_mma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void commit_mma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
