// Mixture of experts for few rows: bound by reading the experts that the rows picked, and no other.
//
// Weights are the A operand as in gemm.cu, the tokens that picked an expert its columns, so that a
// token's result depends on nothing beside it. A unit is two tiles of 16 weight rows (gate's and
// up's of the same features) with all of their inputs, contiguous in memory. A CTA takes
// `row_groups` units of one expert at a time; `k_groups` warps share the eighths of k of each, which are
// added as a binary tree.
// The CTAs find out on the device which experts were picked, and share their units evenly, each a contiguous
// part: the host does not take part. Each warp keeps a ring of its weights in flight, across the ends of
// units and experts: there is no producer, and warps wait for each other only at the end of a unit. Inputs are
// fetched once per expert, into shared memory: the multiplying loop is then short, and registers suffice for
// three CTAs on a multiprocessor.
#include "experts.cuh"
#include "integers.cuh"

// ---- Shape of a CTA ----
// 32-input blocks that are copied, waited for and multiplied at once
constexpr int kBlocksPerStage = BITS == 16 ? 2 : 3;
constexpr int kRingStages = 2;                   // pieces of a warp's ring: more are no faster (docs/performance.md)
constexpr int kRing = kRingStages * kBlocksPerStage * kUnitBytes;
constexpr int kRegisters = kColumnTiles == 1 ? 80 : 255;  // three CTAs' on a multiprocessor: experts.py
// Integer codes of 4 bits are multiplied by inputs of 16 bits, in integer MMAs (`multiply_codes`).
// an MMA's eight columns are then two bytes of four tokens
constexpr int kInputTiles = kIntegers ? (TOKENS + 3) / 4 : kColumnTiles;
// tokens per lane, with four sums of two tiles each
constexpr int kTokens = kIntegers ? kInputTiles : 2 * kColumnTiles;
constexpr bool kOwn = BITS >= 8;  // a lane reads of a piece what it has copied
constexpr int kMostParts = 2;  // of k that a warp of `down` has, which is short: fewer barriers for as many units
// bytes before a warp's inputs: value of their last bits
constexpr int kScales = kIntegers ? kMostParts * kInputTiles * 16 : 0;
static_assert(kRingStages >= 2, "One piece of the ring is multiplied while the next one arrives.");
static_assert(kUnitBytes % 16 == 0, "Lanes copy 16 bytes at a time.");

// ---- The ring ----
// A warp's ring: the next piece's copy is issued when all lanes have read the piece that it replaces. Small bulk
// copies would be no faster, and need barriers. In `down`, a part of k is one piece, or several with 16-bit weights.
template <bool kGate>
struct Ring {
  static constexpr bool kShort = !kGate && BITS == 16;  // pieces, shorter than a part
  const Job& job;
  const Warp& warp;
  const Chosen& chosen;
  Walk ahead;
  const u8* from;  // of the next piece, this lane's
  int left, here;  // blocks of the item from that piece on, and if pieces are short of its part
  u32 at, begin;   // the next piece that is read, and where the ring begins

  __device__ Ring(const Job& job, const Warp& warp, const Chosen& chosen, const Walk& walk, u8* memory)
      : job(job), warp(warp), chosen(chosen), ahead(walk), begin(shared_address(memory)) {
    at = begin;
    find();
#pragma unroll 1
    for (int i = 0; i < kRingStages; i++) ask();
  }
  __device__ void find() {
    left = ahead.left > 0 ? warp.blocks : 0;
    if (kShort) here = min(job.each, left);
    if (!left) return;
    const u32 unit = chosen.entries[ahead.entry].expert * job.units + warp.unit(job, ahead.group);
    from = job.weight + size_t((unit * job.blocks + warp.first) * (kUnitBytes / 16) + warp.lane) * 16;
  }
  __device__ void ask() {
    if (left > 0) {
      const int size = kGate || kShort ? kBlocksPerStage : job.each, blocks = min(size, kShort ? here : left);
      const int bytes = blocks * kUnitBytes - warp.lane * 16;
      const u32 to = at + warp.lane * 16;
#pragma unroll
      for (int i = 0; i < kBlocksPerStage * kUnitBytes; i += 512)
        if (i + 512 <= kUnitBytes || i < bytes) copy16(to + i, from + i);
      from += size * kUnitBytes, left -= size;
      if (kShort && (here -= kBlocksPerStage) <= 0) from += here * kUnitBytes, left -= here, here = min(job.each, left);
      if (left <= 0) ahead.next(job.groups), find();
    }
    asked();
    if ((at += kBlocksPerStage * kUnitBytes) == begin + kRing) at = begin;
  }
  __device__ u32 wait() const {
    await_asked<kRingStages - 1>();
    if (!kOwn) __syncwarp();
    return at;
  }
  __device__ void pass() {
    if (!kOwn) __syncwarp();
    ask();
  }
};

// ---- Inputs ----
constexpr int kChunks = 2;  // of a warp's part of k, eight inputs each, that a lane has at most
struct Chunks {
  int at[kChunks];  // in x; -1: none
};

// A warp's part of an entry's inputs: in its room in shared memory [token][block][32 inputs].
template <bool kGate>
struct Inputs {
  u32 room;
  u32 at[kInputTiles];  // a lane's in each block of 8 columns; in columns past the last token a copy of its, never read

  // Issues the copies, for few rows; they arrive with the first piece of weights.
  __device__ void ask(const Job& job, const Warp& warp, const Chosen& chosen, const Entry& entry) {
    const int chunks = warp.blocks * 4, all = entry.count * chunks;
#pragma unroll 1
    for (int c = warp.lane; c < all; c += 32) {
      const int token = quotient(c, chunks), pair = chosen.pair(entry, token);
      copy16(room + c * 16, job.x + place(job, warp, pair, c - token * chunks));
    }
  }
  __device__ void fetch(const Job& job, const Warp& warp, const Chosen& chosen, const Entry& entry) {
    constexpr int kAtOnce = 2;
    const int chunks = warp.blocks * 4, all = entry.count * chunks;  // of 16 bytes
    __syncwarp();
#pragma unroll 1
    for (int first = warp.lane; first < all; first += 32 * kAtOnce) {
      uint4 v[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; i++) {
        const int c = first + 32 * i, token = quotient(c, chunks);
        if (c >= all) continue;
        v[i] = load(job, place(job, warp, chosen.pair(entry, token), c - token * chunks));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; i++)
        if (first + 32 * i < all) store(room + (first + 32 * i) * 16, v[i]);
    }
    __syncwarp();
  }
  // Where this lane's chunks of a token are in memory.
  __device__ Chunks find(const Job& job, const Warp& warp, const Chosen& chosen, const Entry& entry, int token) const {
    Chunks found;
    const int pair = chosen.pair(entry, token);
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int c = warp.lane + 32 * i;
      found.at[i] = c < warp.blocks * 4 ? place(job, warp, pair, c) : -1;
    }
    return found;
  }
  __device__ void load(const Job& job, const Chunks& chunks, uint4 (&v)[kChunks]) const {
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      v[i] = make_uint4(0, 0, 0, 0);
      if (chunks.at[i] >= 0) v[i] = load(job, chunks.at[i]);
    }
  }
  // Fetches inputs as 16-bit integers, scaled so that the largest in a token's part of k becomes kMostInput. Per block:
  // the high bytes of its inputs, then the low ones. first: where the first token's chunks are.
  __device__ void fetch_rounded(const Job& job, const Warp& warp, const Chosen& chosen, const Entry& entry, const Chunks& first) const {
    uint4 v[kChunks], next[kChunks];
    load(job, first, v);
    __syncwarp();  // all lanes have read the last entry's inputs
#pragma unroll 1
    for (int token = 0; token < entry.count; token++) {
      if (token + 1 < entry.count) load(job, find(job, warp, chosen, entry, token + 1), next);
      store_rounded(job, warp, token, v);
#pragma unroll
      for (int i = 0; i < kChunks; i++) v[i] = next[i];
    }
    __syncwarp();
  }
  // The same, in place, for inputs that are in shared memory already.
  __device__ void round(const Job& job, const Warp& warp, const Entry& entry) const {
    __syncwarp();
#pragma unroll 1
    for (int token = 0; token < entry.count; token++) {
      uint4 v[kChunks];
#pragma unroll
      for (int i = 0; i < kChunks; i++) {
        v[i] = make_uint4(0, 0, 0, 0);
        if (warp.lane + 32 * i < warp.blocks * 4) v[i] = ::load(room + (token * warp.blocks * 4 + warp.lane + 32 * i) * 16);
      }
      store_rounded(job, warp, token, v);
    }
    __syncwarp();
  }
  __device__ void store_rounded(const Job& job, const Warp& warp, int token, const uint4 (&v)[kChunks]) const {
    float factor[kMostParts];
#pragma unroll
    for (int part = 0; part < (kGate ? 1 : kMostParts); part++) {
      u32 most = 0;
#pragma unroll
      for (int i = 0; i < kChunks; i++)
        if (kGate || (warp.lane + 32 * i >= job.each * 4) == part) most = larger(most, largest_of(v[i]));
      const float largest = largest_of_warp(most);
      factor[part] = __fdividef(kMostInput, fmaxf(largest, 1e-30f));
      if (warp.lane == 0) store(scales(part) + token * 4, largest * (1.0f / (kMostInput * 16 * (1 << 20))));
    }
#pragma unroll
    for (int i = 0; i < kChunks; i++) {
      const int c = warp.lane + 32 * i;
      if (c < warp.blocks * 4)
        ::store_rounded(room + (token * warp.blocks + c / 4) * 64 + c % 4 * 8, v[i], !kGate && c >= job.each * 4 ? factor[1] : factor[0]);
    }
  }
  // Where the scales of a part of k are, [token].
  __device__ u32 scales(int part) const { return room - kScales + part * kInputTiles * 16; }
  __device__ void point(const Warp& warp, const Entry& entry) {
#pragma unroll
    for (int j = 0; j < kInputTiles; j++) {
      const int column = j * 8 + warp.lane / 4, token = min(kIntegers ? column / 2 : column, entry.count - 1);
      at[j] = room + token * warp.blocks * 64 + (kIntegers ? column % 2 * 32 + warp.lane % 4 * 8 : warp.lane % 4 * 16);
    }
  }
  // Where inputs 8 i to 8 i + 7 of the warp's part are in x, for a pair.
  static __device__ int place(const Job& job, const Warp& warp, int pair, int i) {
    const int m = !kGate ? pair : kLone ? 0 : quotient(pair, job.top_k), block = warp.first + i / 4, f = i % 4 * 8;
    // up to eight rows are one block; each pair is a block of its own
    if (!kGate) return (m * job.k_blocks + block) * 32 + f;
    return kColumnTiles == 1 ? (block * job.block + m) * 32 + f : int(x_offset(m, block * 32 + f, job.k_blocks, job.block));
  }
  static __device__ uint4 load(const Job& job, int place) {
    return load_inputs(reinterpret_cast<const u32*>(job.x + place), kGate && kColumnTiles > 1 ? job.block : 1);
  }
  static __device__ void store(u32 to, float v) { asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory"); }
  static __device__ void store(u32 to, uint4 v) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
  }
};

// ---- Multiply ----
typedef float Four[4];
// A lane's sums of two tiles and all tokens, as MMAs return them: [tile][8 tokens] fragments; with integer codes
// [4 tokens]: both rows of each tile, of token lane % 4.
struct Sum {
  Four of[kTokens];

  __device__ Four& fragment(int t, int j) { return of[t * kColumnTiles + j]; }
  // Of row lane / 4 (+ 8: half) of a tile, and the lane's token i.
  __device__ float get(int t, int half, int i) const {
    return kIntegers ? of[i][t * 2 + half] : of[t * kColumnTiles + i / 2][half * 2 + i % 2];
  }
};
__device__ inline int token_of(int i, int lane) { return kIntegers ? i * 4 + lane % 4 : i / 2 * 8 + lane % 4 * 2 + i % 2; }
// Whether the i-th four sums of a lane are of a token in any lane.
__device__ inline bool used(int i, int count) { return !kIntegers || !i || count > 4 * i; }

__device__ inline void accumulate(Four& sum, const u32 (&a)[4], u32 first, u32 second) {
  if (kNarrow)
    mma_f16(sum, a[0], a[1], a[2], a[3], first, second);
  else
    mma_bf16(sum, a[0], a[1], a[2], a[3], first, second);
}

#if BITS == 4
// kBlocks blocks of codes and their inputs, for four tokens at a time: exact sums over 32 inputs, each then scaled.
template <int kBlocks, bool kGate>
__device__ inline void multiply_codes(Sum& sum, u32 piece, const Inputs<kGate>& inputs, int block, int count, int lane) {
#pragma unroll
  for (int j = 0; j < kInputTiles; j++) {
    if (!used(j, count)) break;
    if (j && kColumnTiles == 1) __syncwarp();  // so that weights are read again: there are no registers to keep them
    Stored w[kBlocks][2];
#pragma unroll
    for (int u = 0; u < kBlocks; u++) load_unit(w[u], piece + u * kUnitBytes, lane);
    uint2 x[kBlocks];
#pragma unroll
    for (int u = 0; u < kBlocks; u++) x[u] = load2(inputs.at[j] + (block + u) * 64);
    int part[kBlocks][2][4];
#pragma unroll
    for (int i = 0; i < kBlocks * 2; i++) {
      u32 a[4];
      signed_bytes(w[i / 2][i % 2], a);
      mma_s8(part[i / 2][i % 2], a, x[i / 2]);
    }
#pragma unroll
    for (int i = 0; i < kBlocks * 2; i++) {
      const float2 scale = floats(w[i / 2][i % 2].scales);
      const int* v = part[i / 2][i % 2];
      float* to = sum.of[j] + i % 2 * 2;
      to[0] = fmaf(float(v[0] * 256 + v[1]), scale.x, to[0]);
      to[1] = fmaf(float(v[2] * 256 + v[3]), scale.y, to[1]);
    }
  }
}
#endif

// kBlocks blocks and their inputs: all loads first, and the tiles by turns.
template <int kBlocks, bool kGate>
__device__ inline void multiply(Sum& sum, u32 piece, const Inputs<kGate>& inputs, int block, int count, int lane) {
#if BITS == 4
  if constexpr (kIntegers) return multiply_codes<kBlocks>(sum, piece, inputs, block, count, lane);
#endif
  Stored w[kBlocks][2];
  uint4 x[kBlocks][kColumnTiles];
#pragma unroll
  for (int u = 0; u < kBlocks; u++) load_unit(w[u], piece + u * kUnitBytes, lane);
#pragma unroll
  for (int i = 0; i < kBlocks * kColumnTiles; i++)
    x[i / kColumnTiles][i % kColumnTiles] = load(inputs.at[i % kColumnTiles] + (block + i / kColumnTiles) * 64);
#pragma unroll
  for (int u = 0; u < kBlocks; u++) {
    u32 a[2][2][4];
#pragma unroll
    for (int i = 0; i < 4; i++) expand(w[u][i / 2], i % 2, a[i / 2][i % 2]);
#pragma unroll
    for (int j = 0; j < kColumnTiles; j++) {
      if (j && count <= 8 * j) continue;
#pragma unroll
      for (int t = 0; t < 2; t++) accumulate(sum.fragment(t, j), a[t][0], x[u][j].x, x[u][j].y);
#pragma unroll
      for (int t = 0; t < 2; t++) accumulate(sum.fragment(t, j), a[t][1], x[u][j].z, x[u][j].w);
    }
  }
}

// One warp: a piece of a unit, of blocks `begin` to `end` as many as fit.
template <bool kGate>
__device__ inline void multiply_piece(Sum& sum, int begin, int end, int count, Ring<kGate>& ring, const Inputs<kGate>& inputs) {
  const u32 piece = ring.wait();
  if (end - begin >= kBlocksPerStage)
    multiply<kBlocksPerStage>(sum, piece, inputs, begin, count, ring.warp.lane);
  else if (kBlocksPerStage > 2 && end - begin == 2)
    multiply<2>(sum, piece, inputs, begin, count, ring.warp.lane);
  else
    multiply<1>(sum, piece, inputs, begin, count, ring.warp.lane);
  ring.pass();
}

// The value of the last bit of a token's integer inputs in a part of k; 1 for floats.
template <bool kGate>
__device__ inline float last_bit(const Inputs<kGate>& inputs, int part, int i, int count, int lane) {
  return kIntegers ? load_float(inputs.scales(part) + min(token_of(i, lane), count - 1) * 4) : 1.0f;
}

template <bool kGate>
__device__ inline void add_part(Sum& sum, Sum& own, int part, int count, const Inputs<kGate>& inputs, int lane) {
#pragma unroll
  for (int i = 0; i < kTokens; i++) {
    if (!used(i, count)) break;
    const float bit = last_bit(inputs, part, i, count, lane);
#pragma unroll
    for (int e = 0; e < 4; e++) sum.of[i][e] += kIntegers ? __fmul_rn(own.of[i][e], bit) : own.of[i][e];
  }
}

// One warp: all its parts of k of a unit, each summed separately. Not unrolled: code that runs once comes from memory.
template <bool kGate>
__device__ inline void multiply_all(Sum& sum, const Job& job, int count, Ring<kGate>& ring, const Inputs<kGate>& inputs) {
  const int blocks = ring.warp.blocks;
  Sum own = {};
#pragma unroll 1
  for (int part = 0, begin = 0; begin < blocks;) {
    const int end = kGate ? blocks : min(begin + job.each, blocks);
    if constexpr (!Ring<kGate>::kShort) {
      multiply_piece(own, begin, end, count, ring, inputs);
      begin += kGate ? kBlocksPerStage : job.each;
    } else {
      for (; begin < end; begin += kBlocksPerStage) multiply_piece(own, begin, end, count, ring, inputs);
      begin = end;
    }
    if (kGate) continue;
    add_part(sum, own, part++, count, inputs, ring.warp.lane);
    own = {};
  }
  if (kGate) add_part(sum, own, 0, count, inputs, ring.warp.lane);
}

// ---- Add the parts of k ----
// Shared memory for a unit's sums over parts of k: of all warps except the one that adds them (`finisher`).
struct Room {
  float4* mine;
  int size;  // of a part of k, of all row groups

  __device__ float4& of(int part, int finisher, int i) const { return mine[(part - (part > finisher)) * size + i * 32]; }
};
__device__ inline void leave(const Sum& sum, const Room& room, int k_group, int finisher, int count) {
#pragma unroll
  for (int i = 0; i < kTokens; i++) {
    if (!used(i, count)) break;
    const Four& v = sum.of[i];
    room.of(k_group, finisher, i) = make_float4(v[0], v[1], v[2], v[3]);
  }
}
template <int kParts>
__device__ inline void add(Sum& sum, const Room& room, int finisher, int count) {
#pragma unroll
  for (int i = 0; i < kTokens; i++) {
    if (!used(i, count)) break;
    Four& to = sum.of[i];
    float4 v[8];
#pragma unroll
    for (int g = 0; g < kParts; g++) {
      v[g] = make_float4(to[0], to[1], to[2], to[3]);
      if (g != finisher) v[g] = room.of(g, finisher, i);
    }
    const float4 all = tree_sum(v, kParts);
    to[0] = all.x, to[1] = all.y, to[2] = all.z, to[3] = all.w;
  }
}
__device__ inline void add(Sum& sum, const Room& room, int k_groups, int finisher, int count) {
  if (k_groups == 8) return add<8>(sum, room, finisher, count);
  if (k_groups == 4) return add<4>(sum, room, finisher, count);
  if (k_groups == 2) return add<2>(sum, room, finisher, count);
}

// ---- Finish ----
// Of a unit's tile t: the weight's row that is `row` of it, or past its end.
template <bool kGate>
__device__ inline int row_of(const Job& job, int unit, int t, int row) {
  if (!kGate) return (2 * unit + t) * 16 + row;
  return unit * 16 + row < job.n / 2 ? t * (job.n / 2) + unit * 16 + row : job.n;
}

typedef float Scales[2][2];  // [tile][half of its rows]
template <bool kGate>
__device__ inline void load_scales(const Job& job, Scales& scales, int expert, int unit, int lane) {
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int n = row_of<kGate>(job, unit, i / 2, lane / 4 + i % 2 * 8);
    scales[i / 2][i % 2] = kNarrow && n < job.n ? job.scale[size_t(expert) * job.n + n] : 1.0f;
  }
}

template <bool kGate>
__device__ inline void finish(const Job& job, const Sum& sum, const Scales& scales, const Entry& entry, int unit,
                              const Chosen& chosen, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++)
#pragma unroll
    for (int t = 0; t < (kGate ? 1 : 2); t++) {
      const int n = row_of<kGate>(job, unit, t, lane / 4 + half * 8);
      if (n >= job.n) continue;
#pragma unroll
      for (int i = 0; i < kTokens; i++) {
        const int token = token_of(i, lane);
        if (token >= entry.count) continue;
        const size_t at = size_t(chosen.pair(entry, token)) * job.out_stride + n;
        const float v = sum.get(t, half, i) * scales[t][half];
        if (kGate) {
          const float gated = gelu_tanh(v) * (sum.get(1, half, i) * scales[1][half]);
          static_cast<u16*>(job.out)[at] = job.f16 ? input_of_fp8(gated) : to_bf16(gated);
        } else {
          static_cast<float*>(job.out)[at] = v;
        }
      }
    }
}

// ---- Kernels ----
template <bool kGate>
__device__ inline void run(const Job& job) {
  extern __shared__ __align__(128) u8 memory[];
  const int number = kLone && threadIdx.x < job.pairs ? load_number(job.numbers + threadIdx.x) : -1;
  const int part = job.row_groups * kTokens * 32, room = (job.k_groups - 1) * part;  // for a unit's sums
  const int most = min(TOKENS, job.rows) * job.parts * job.each * 64 + kScales;     // bytes of a warp's inputs
  float4* sums = reinterpret_cast<float4*>(memory + kWarps * kRing);
  u8* inputs_at = reinterpret_cast<u8*>(sums + 2 * room);
  const Warp warp(job);
  Chosen chosen;
  chosen.entries = reinterpret_cast<Entry*>(inputs_at + kWarps * most);
  chosen.list = reinterpret_cast<int*>(chosen.entries + job.pairs);
  // copies first inputs before weights; one row's are known before experts
  constexpr bool kAsks = kGate && kColumnTiles == 1;
  Inputs<kGate> inputs;
  inputs.room = shared_address(inputs_at + threadIdx.x / 32 * most) + kScales;
  if (kAsks && kLone) inputs.ask(job, warp, chosen, {0, 1, 0}), asked();
  Walk walk(job, job.pairs);  // for one row, known before its experts are
  if (kLone) {
    if (!take_pairs(job, chosen, number)) walk.left = 0;
  } else {
    if (job.pairs <= kFew)
      sort_few(job, chosen);
    else
      sort_pairs(job, chosen);
    walk = Walk(job, chosen.count);
  }
  if (kAsks && !kLone && walk.left > 0) inputs.ask(job, warp, chosen, chosen.entries[walk.entry]), asked();
  Ring<kGate> ring(job, warp, chosen, walk, memory + threadIdx.x / 32 * kRing);  // before the inputs are there
  Entry entry;
  Chunks places = {};
  if (walk.left > 0) entry = chosen.entry(walk.entry);
  if (kIntegers && !kAsks && walk.left > 0) places = inputs.find(job, warp, chosen, entry, 0);
  if (!kGate) wait_for_previous();
  sums += warp.row_group * kTokens * 32 + warp.lane;
  bool another = true;
  int turn = 0;
#pragma unroll 1
  for (; walk.left > 0; another = walk.next(job.groups), turn++) {
    if (another) {
      if (turn) entry = chosen.entry(walk.entry);
      if (kAsks && turn == 0) {
        await_asked<kRingStages>();
        if (kIntegers)
          inputs.round(job, warp, entry);
        else
          __syncwarp();
      } else if (kIntegers) {
        inputs.fetch_rounded(job, warp, chosen, entry, turn ? inputs.find(job, warp, chosen, entry, 0) : places);
      } else {
        inputs.fetch(job, warp, chosen, entry);
      }
      inputs.point(warp, entry);
    }
    const int unit = warp.unit(job, walk.group);
    // the warp that adds the parts, and the shared memory for them, alternate by unit: one barrier is enough
    const int finisher = turn & (job.k_groups - 1);
    const Room to{sums + turn % 2 * room, part};
    Scales scales;
    if (warp.k_group == finisher) load_scales<kGate>(job, scales, entry.expert, unit, warp.lane);
    Sum sum = {};
    multiply_all(sum, job, entry.count, ring, inputs);
    if (warp.k_group != finisher) leave(sum, to, warp.k_group, finisher, entry.count);
    __syncthreads();
    if (kGate && turn == 0) wait_for_previous();  // until here only what was ready is read, and nothing written
    if (warp.k_group != finisher) continue;
    add(sum, to, job.k_groups, finisher, entry.count);
    if (warp.stores(job, walk.group)) finish<kGate>(job, sum, scales, entry, unit, chosen, warp.lane);
  }
  if (kGate && turn == 0) wait_for_previous();
  copies_done();  // of inputs for a row that picked no expert
}

extern "C" __global__ void __maxnreg__(kRegisters) gate_up(const __grid_constant__ Job job) {
  if (!job.pdl_inputs_ready) wait_for_previous();
  let_next_start();  // only now: `down` may then read what the router wrote before it waits
  run<true>(job);
}

extern "C" __global__ void __maxnreg__(kRegisters) down(const __grid_constant__ Job job) {
  let_next_start();
  run<false>(job);
}
