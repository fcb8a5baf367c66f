// A weight's tiles of 16 rows x 32 inputs, as they lie in memory (packing.py), and as fragments of MMAs.
//
// With e4m3 and bf16 weights a tile is stored as its fragments. With 4-bit ones it is 64 words of eight codes (by
// lane, its two rows), then an f16 scale for each row's 32 inputs, then, with zero points, a byte for
// each. A code c means (c - zero) * scale / 2^20 as an f16, rounded once (exceptions: int4.py).
// With NVFP4 there are as many words, mixed (`decode`), then for each row two e4m3 scales, of 16 inputs each:
// an e2m1 code means value * scale / 2^14, never rounded (nvfp4.py).
// A head's codes lie as e4m3 values do, then their scales: (c - 128) * scale, rounded once (int8.py). Behind all codes
// of a CTA's step lie, alike, 256ths of a code that make them the head itself: ((c - 128) + (f - 128) / 256) * scale
// rounded to a bf16.
#pragma once
#include "common.cuh"

#ifndef BITS  // of a weight: 16 (bf16), 8 (e4m3), 4
#define BITS 8
#endif
#ifndef E2M1  // 1: 4-bit codes are e2m1, in groups of 16 (NVFP4); 0: integers, in groups of 32
#define E2M1 0
#endif
#ifndef ZEROS  // 1: groups of 4-bit weights have zero points; 0: theirs are 8
#define ZEROS 0
#endif
#ifndef CODES  // 1: 8-bit values are codes in groups of 32, and meet bf16 inputs; 0: e4m3
#define CODES 0
#endif
#ifndef FINE  // 1: the same with their 256ths
#define FINE 0
#endif

// ---- Layout of a tile ----
constexpr bool kNarrow = BITS < 16 && !FINE;  // then MMAs take f16
constexpr bool kScaled = BITS < 16;           // rows have a scale
constexpr int kCodeBytes = BITS == 16 ? 1024 : BITS == 8 ? 512 + (CODES || FINE) * 32 : ZEROS ? 304 : 288;
constexpr int kFineBytes = FINE * 512, kTileBytes = kCodeBytes + kFineBytes;
constexpr int kLaneBytes = BITS == 4 ? 8 : 16;  // that are next to each other in a tile
constexpr int kScalesAt = BITS == 8 ? 512 : 256, kZerosAt = 288;
static_assert(BITS == 16 || BITS == 8 || BITS == 4, "Weights have 16, 8 or 4 bits.");
static_assert(BITS == 4 || !E2M1 && !ZEROS, "Only 4-bit codes are e2m1 or have zero points.");
static_assert(BITS == 8 || !CODES && !FINE, "Only 8-bit values are codes, with their 256ths or without.");
static_assert(!CODES || !FINE, "A head is read by its codes alone, or with their 256ths.");
static_assert(kTileBytes % 16 == 0, "Bulk copies move multiples of 16 bytes.");
// A lane's scales in a tile: of its two rows, f16, or e4m3 of its group.
__device__ inline int scales_at(int lane) { return kScalesAt + (E2M1 ? lane / 2 * 2 : lane / 4 * 4); }

// ---- Loads ----
// What a lane holds of a tile.
#if BITS == 4
struct Stored {
  uint2 codes;  // of row lane / 4, and of that + 8: inputs 8 (lane % 4) to + 7
  u32 scales;   // of both rows: f16, or of E2M1 e4m3 in the low bytes
  u32 zeros;    // of both rows, a byte each
};
#else
struct Stored {
  uint4 values[BITS / 8];
  u32 scales;  // of codes: of both rows, f16
#if FINE
  uint4 fine;
#endif
};
#endif

// From shared memory, by its own addresses: generic ones cost instructions at every step.
__device__ inline uint4 load(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from));
  return v;
}
__device__ inline uint2 load2(u32 from) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(from));
  return v;
}
__device__ inline float load_float(u32 from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from));
  return v;
}
// Where a lane's part of a tile is: what it reads next to each other, its scales, zero points and 256ths.
struct Part {
  u32 values, scales, zeros, fine;

  // Of the tile that is `first` of `tiles` at this address.
  __device__ Part(u32 at, int tiles, int first, int lane) : Part(at + first * kCodeBytes, lane) {
    fine = at + tiles * kCodeBytes + first * kFineBytes + lane * 16;
  }
  __device__ Part(u32 tile, int lane)
      : values(tile + lane * kLaneBytes), scales(tile + scales_at(lane)), zeros(tile + kZerosAt + lane / 4 * 2) {}
  __device__ void operator+=(u32 bytes) { values += bytes, scales += bytes, zeros += bytes, fine += bytes; }
};
// Of the tile that lies so many tiles behind.
__device__ inline Stored load_shared(const Part& part, int tiles) {
  const int behind = tiles * kCodeBytes;
  Stored to;
#if BITS == 4
  to.codes = load2(part.values + behind);
  if (E2M1)
    asm volatile("ld.shared.u16 %0, [%1];" : "=r"(to.scales) : "r"(part.scales + behind));
  else
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to.scales) : "r"(part.scales + behind));
  to.zeros = 0;
  if (ZEROS) asm volatile("ld.shared.u16 %0, [%1];" : "=r"(to.zeros) : "r"(part.zeros + behind));
#else
#pragma unroll
  for (int i = 0; i < BITS / 8; i++) to.values[i] = load(part.values + behind + i * 512);
  if (CODES || FINE) asm volatile("ld.shared.u32 %0, [%1];" : "=r"(to.scales) : "r"(part.scales + behind));
#if FINE
  to.fine = load(part.fine + tiles * kFineBytes);
#endif
#endif
  return to;
}
// A word of each load.
__device__ inline u32 word_of(const Stored& tile) {
#if BITS == 4
  return tile.codes.y | tile.scales | tile.zeros;
#elif FINE
  return tile.values[0].w | tile.scales | tile.fine.w;
#elif CODES
  return tile.values[0].w | tile.scales;
#else
  return tile.values[BITS / 8 - 1].w;
#endif
}
__device__ inline Stored load_shared(u32 tile, int lane) { return load_shared(Part(tile, lane), 0); }

// An expert's unit of 32 inputs: two tiles. Of integers of 4 bits without zero points a lane's codes of both are next to
// each other, then a row's scales, and codes are less 8.
constexpr bool kIntegers = BITS == 4 && !E2M1 && !ZEROS;
constexpr int kUnitBytes = 2 * kTileBytes;
__device__ inline void load_unit(Stored (&tiles)[2], u32 unit, int lane) {
#if BITS == 4
  if (kIntegers) {
    const uint4 codes = load(unit + lane * 16);
    const uint2 scales = load2(unit + 512 + lane / 4 * 8);
    tiles[0] = {{codes.x, codes.y}, scales.x, 0}, tiles[1] = {{codes.z, codes.w}, scales.y, 0};
    return;
  }
#endif
  tiles[0] = load_shared(unit, lane), tiles[1] = load_shared(unit + kTileBytes, lane);
}

// From memory that is never written while a kernel runs.
__device__ inline Stored load_tile(const u8* tile, int lane) {
  Stored to;
#if BITS == 4
  to.codes = *reinterpret_cast<const uint2*>(tile + lane * 8);
  to.scales = E2M1 ? *reinterpret_cast<const u16*>(tile + scales_at(lane)) : *reinterpret_cast<const u32*>(tile + scales_at(lane));
  to.zeros = ZEROS ? *reinterpret_cast<const u16*>(tile + kZerosAt + lane / 4 * 2) : 0;
#else
#pragma unroll
  for (int i = 0; i < BITS / 8; i++) to.values[i] = reinterpret_cast<const uint4*>(tile)[i * 32 + lane];
#endif
  return to;
}

// ---- Arithmetic on pairs ----
#if BITS == 4 || CODES
// Both halves of a word as two f16x2 of twice the same.
__device__ inline void twice(u32 both, u32& low, u32& high) {
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2; mov.b32 %0, {l, l}; mov.b32 %1, {h, h}; }"
      : "=r"(low), "=r"(high)
      : "r"(both));
}
__device__ inline u32 minus(u32 a, u32 b) {
  u32 v;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ inline u32 times(u32 a, u32 b) {
  u32 v;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
  return v;
}
__device__ inline u32 times_plus(u32 a, u32 b, u32 c) {
  u32 v;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(c));
  return v;
}
#endif

// ---- Decoding ----
#if E2M1
// Four codes of a word, those of inputs 4 `half` to + 3, as two f16x2. The three bits of a magnitude, where
// an f16 has the last of its exponent and the first of its mantissa, are value / 2^14. Two pairs are shifted
// there; a word has no room for four to be, so the bits of the others are where two shifts differ (nvfp4.py).
__device__ inline void decode(u32 word, int half, u32 scale, u32& first, u32& second) {
  constexpr u32 kValues = 0x8e008e00;  // sign and magnitude of either half
  first = times((half ? word ^ word << 2 : word << 6) & kValues, scale);
  second = times((half ? word ^ word >> 3 : word << 9) & kValues, scale);
}
#elif BITS == 4
constexpr u32 kSixteen = 0x4c004c00, kMinusMiddle = 0x80808080;  // 16, and -8 / 2^20: of either half

// Four codes of a word, in bits 0 to 7 of either half, as two f16x2. As the last bits of an f16 a code c
// is c / 2^24, and four bits higher c / 2^20; scales are 2^20 times what they mean.
__device__ inline void decode(u32 word, u32 scale, u32 sixteen, u32 middle, u32& first, u32& second) {
  const u32 low = word & 0x000f000f, high = word & 0x00f000f0;
  if (ZEROS) {  // of which a scale's product may have to be rounded, and nothing else
    first = times(minus(low, middle), sixteen), second = times(minus(high, middle << 4), scale);
  } else {
    first = times_plus(low, sixteen, middle), second = times_plus(high, scale, middle);
  }
}
#endif

#if CODES
// Four codes as two f16x2. As the last bits of an f16 of 1,024 a code c is 1,024 + c; `middle` is 1,152
// scales, and exact.
__device__ inline void decode(u32 word, u32 scale, u32 middle, u32& first, u32& second) {
  asm("prmt.b32 %0, %1, %2, 0x4140;" : "=r"(first) : "r"(word), "r"(0x64646464));
  asm("prmt.b32 %0, %1, %2, 0x4342;" : "=r"(second) : "r"(word), "r"(0x64646464));
  first = times_plus(first, scale, middle), second = times_plus(second, scale, middle);
}
constexpr u32 kMinusMiddle = 0xe480e480;  // -1,152 in either half
#endif

#if FINE
// Four codes and their 256ths as two bf16x2. Together they are the last 16 bits of a float of 2^23; scale: of a 256th.
__device__ inline void decode(u32 codes, u32 fine, float scale, u32& first, u32& second) {
  u32 pairs[2], words[4];
  asm("prmt.b32 %0, %1, %2, 0x5140;" : "=r"(pairs[0]) : "r"(fine), "r"(codes));
  asm("prmt.b32 %0, %1, %2, 0x7362;" : "=r"(pairs[1]) : "r"(fine), "r"(codes));
  float v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) {
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(words[i]) : "r"(pairs[i / 2]), "r"(0x4b000000), "r"(i % 2 ? 0x7632 : 0x7610));
    v[i] = __fmul_rn(__uint_as_float(words[i]) - 8421504.0f, scale);  // 2^23, and 128 and 128 / 256 codes
  }
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(first) : "f"(v[1]), "f"(v[0]));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(second) : "f"(v[3]), "f"(v[2]));
}
// A 256th of the scale in either half of a word.
__device__ inline float fine_scale(u32 both, int half) {
  float v;
  asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; cvt.f32.f16 %0, l; }" : "=f"(v) : "r"(half ? both >> 16 : both));
  return v * (1.0f / 256.0f);
}
#endif

// ---- Fragments ----
// Two bf16 as f16.
__device__ inline u32 halves(u32 pair) {
  u32 v;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(v) : "f"(__uint_as_float(pair & 0xffff0000)), "f"(__uint_as_float(pair << 16)));
  return v;
}
// Inputs in the type that the weights become.
__device__ inline uint4 as_weights(uint4 v) {
  return CODES ? make_uint4(halves(v.x), halves(v.y), halves(v.z), halves(v.w)) : v;
}

// Inputs 16 `half` to + 15 of a tile, in the order of `load_inputs`, as the A fragment of an MMA.
__device__ inline void expand(const Stored& from, int half, u32* a) {
#if E2M1
  u32 scales, none, scale[2];
  widen(from.scales, scales, none);
  twice(scales, scale[0], scale[1]);
  decode(from.codes.x, half, scale[0], a[0], a[2]);
  decode(from.codes.y, half, scale[1], a[1], a[3]);
#elif BITS == 4
  u32 scale[2], sixteen[2], middle[2];
  twice(from.scales, scale[0], scale[1]);
  twice(times(from.scales, kSixteen), sixteen[0], sixteen[1]);
  if (ZEROS)
    middle[0] = (from.zeros & 0xff) * 0x10001, middle[1] = (from.zeros >> 8) * 0x10001;
  else
    twice(times(from.scales, kMinusMiddle), middle[0], middle[1]);
  decode(from.codes.x >> half * 8, scale[0], sixteen[0], middle[0], a[0], a[2]);
  decode(from.codes.y >> half * 8, scale[1], sixteen[1], middle[1], a[1], a[3]);
#elif CODES
  u32 scale[2], middle[2];
  twice(from.scales, scale[0], scale[1]);
  twice(times(from.scales, kMinusMiddle), middle[0], middle[1]);
  decode(half ? from.values[0].z : from.values[0].x, scale[0], middle[0], a[0], a[2]);
  decode(half ? from.values[0].w : from.values[0].y, scale[1], middle[1], a[1], a[3]);
#elif FINE
  decode(half ? from.values[0].z : from.values[0].x, half ? from.fine.z : from.fine.x, fine_scale(from.scales, 0), a[0], a[2]);
  decode(half ? from.values[0].w : from.values[0].y, half ? from.fine.w : from.fine.y, fine_scale(from.scales, 1), a[1], a[3]);
#elif BITS == 8
  widen(half ? from.values[0].z : from.values[0].x, a[0], a[2]);
  widen(half ? from.values[0].w : from.values[0].y, a[1], a[3]);
#else
  const uint4 v = from.values[half];
  a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
#endif
}
