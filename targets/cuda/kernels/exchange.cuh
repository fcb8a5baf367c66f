// The sums of a layer's branch that several cards have in parts: each card sends its own to all others, and adds all
// of them in the order of the cards, so that every card has the same bits.
//
// A card's inbox has a place for each other card's rows. Words of an empty place are kEmpty, which no sum is: a
// word that is anything else has arrived. What has been read is emptied at once. Two inboxes in turn suffice: a card
// sends the next but one row only when it has read the next one, which this card sent after it had emptied its own.
#pragma once
#include "common.cuh"

#ifndef RANKS  // cards that share each layer
#define RANKS 2
#endif

constexpr int kMostRanks = 8;
static_assert(RANKS >= 2 && RANKS <= kMostRanks, "Two to eight cards share each layer.");
constexpr u32 kEmpty = 0xffffffffu;
constexpr u64 kMostNanoseconds = 2000000000ull;  // that a card waits for another one's sums before it gives up
constexpr int kPolls = 4096;                     // between two looks at the clock

struct Exchange {
  const float* own;         // [M, width]: this card's sums
  const float* scale;       // [width], or null
  u32* inbox[kMostRanks];   // of each card: [RANKS][rows][width]
  int rank, rows;           // this card; rows that an inbox holds
  int silent;               // nothing is sent or awaited: the other cards don't run this kernel
  int sent;                 // another kernel has sent this card's sums

  __device__ bool here() const { return true; }
  // Where values 4 i to 4 i + 3 of row m that `from` sends lie in the inbox of `to`.
  __device__ u32* place(int to, int from, int m, int i, int width) const {
    return inbox[to] + (size_t(from) * rows + m) * width + 4 * i;
  }
};

__device__ inline u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__device__ inline void send4(u32* to, float4 v) {
  asm volatile("st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
               : "memory");
}

__device__ inline uint4 look4(const u32* at) {
  uint4 v;
  asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(at)
               : "memory");
  return v;
}

__device__ inline bool arrived(uint4 v) { return v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty; }

// Four values, once all of them have arrived; their place is then empty again. A card that waits in vain ends the
// process: its launches fail from then on.
__device__ inline float4 receive4(u32* at) {
  uint4 v = look4(at);
  for (u64 since = 0; !arrived(v);) {
    for (int i = 0; i < kPolls && !arrived(v); i++) v = look4(at);
    if (arrived(v)) break;
    const u64 now = nanoseconds();
    if (!since) since = now;
    if (now - since > kMostNanoseconds) __trap();
  }
  *reinterpret_cast<uint4*>(at) = make_uint4(kEmpty, kEmpty, kEmpty, kEmpty);
  return make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
}
