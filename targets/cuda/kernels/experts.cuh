// Shared by the kernels of few rows' experts: the job, the pairs (row, rank) sorted by the expert that they picked, and
// how CTAs and their warps share the work.
#pragma once
#include "common.cuh"

#ifndef TOKENS  // of an expert that are multiplied together: 8 or 16, with integer codes 4 too; 1: there is one row
#define TOKENS 8
#endif

// ---- Shape, and the job ----
constexpr bool kLone = TOKENS == 1;  // then an expert's only pair is the rank at which it was picked
constexpr int kColumnTiles = TOKENS < 8 ? 1 : TOKENS / 8;  // columns of an MMA are eight
constexpr int kWarps = 8, kThreads = 32 * kWarps;
constexpr int kMaxExperts = 256;
constexpr int kFew = 64;  // up to so many pairs each is compared with all others
static_assert(kMaxExperts <= kThreads, "Each expert has a thread of the CTA.");

struct Job {
  const u8* weight;    // [experts, units, blocks, 2 tiles]
  const float* scale;  // [experts, n] of narrow weights
  const u16* x;        // blocked input: of rows for gate_up, of pairs for down
  void* out;           // gate_up: next input [pairs, out_stride]; down: float [pairs, out_stride]
  const int* numbers;  // [pairs] experts, -1 for none; pair = row * top_k + rank
  int n, units, blocks;       // rows of an expert; its units; 32-input blocks
  int experts, pairs, top_k, rows;
  int k_blocks, block;        // of x
  int row_groups, k_groups;   // of warps: powers of two
  int parts;                  // parts of k per warp; 1 for gate_up
  int groups, each;           // items per entry; blocks per part of k
  int processors;             // which share the grid's CTAs evenly
  int out_stride;
  int f16;                    // gate_up: `down` takes f16 inputs, else bf16
  int pdl_inputs_ready;       // gate_up: x and numbers were complete before it could start
};

// ---- Pairs sorted by expert ----
// Some pairs that picked the same expert: `count` of the list from `first` on.
struct Entry {
  u16 expert, count;
  int first;
};

// The rows' choice of experts, in shared memory. Both arrays have an element per pair.
struct Chosen {
  Entry* entries;
  int* list;
  int count;  // of entries

  __device__ Entry entry(int i) const {
    Entry found = entries[i];
    found.count = kLone ? 1 : of_warp(found.count);
    return found;
  }
  __device__ int pair(const Entry& entry, int token) const { return kLone ? entry.first : list[entry.first + token]; }
};

// Reads what a kernel before the previous one wrote, from L2: an early start cannot make it stale there.
__device__ inline int load_number(const int* p) {
  int v;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(v) : "l"(p));
  return v;
}

// Sorts few pairs by expert, each expert's by number: a thread finds its pair's place by comparing it with all others.
__device__ inline void sort_few(const Job& job, Chosen& chosen) {
  __shared__ u32 numbers[kFew], starts[kFew / 32];  // an entry starts at this place of the list
  const int i = threadIdx.x;
  if (i < job.pairs) numbers[i] = load_number(job.numbers + i);  // none is the greatest
  if (i < kFew / 32) starts[i] = 0;
  __syncthreads();
  const u32 mine = i < job.pairs ? numbers[i] : ~0u;
  int place = 0, before = 0, all = 0;  // of the same expert's
  if (mine != ~0u)
#pragma unroll 4
    for (int j = 0; j < job.pairs; j++) {
      const u32 other = numbers[j];
      const bool same = other == mine, earlier = same && j < i;
      place += other < mine || earlier, before += earlier, all += same;
    }
  const bool start = mine != ~0u && before % TOKENS == 0;
  if (mine != ~0u) chosen.list[place] = i;
  if (start) atomicOr(&starts[place / 32], 1u << place % 32);
  __syncthreads();
  chosen.count = 0;
  int entry = 0;
#pragma unroll
  for (int w = 0; w < kFew / 32; w++) {
    const u32 below = place >= 32 * w + 32 ? ~0u : place < 32 * w ? 0 : (1u << place % 32) - 1;
    chosen.count += __popc(starts[w]), entry += __popc(starts[w] & below);
  }
  if (start) chosen.entries[entry] = {u16(mine), u16(min(TOKENS, all - before)), place};
  __syncthreads();
}

// Sorts the pairs by expert, each expert's by number: the same order in all CTAs.
__device__ inline void sort_pairs(const Job& job, Chosen& chosen) {
  __shared__ int next[kMaxExperts];
  __shared__ u32 totals[kWarps];
  const int e = threadIdx.x, lane = e % 32;
  next[e] = 0;
  __syncthreads();
#pragma unroll 1
  for (int i = e; i < job.pairs; i += kThreads) {
    const int number = load_number(job.numbers + i);
    if (number >= 0) atomicAdd(&next[number], 1);
  }
  __syncthreads();
  const int mine = next[e], parts = (mine + TOKENS - 1) / TOKENS;
  const u32 both = u32(mine) << 16 | parts;
  u32 sum = sum_so_far(both, lane);  // of this expert and all before it
  if (lane == 31) totals[e / 32] = sum;
  __syncthreads();
  u32 all = 0;
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    if (w == e / 32) sum += all;
    all += totals[w];
  }
  const int first = (sum - both) >> 16, entry = (sum - both) & 0xffff;
#pragma unroll 1
  for (int i = 0; i < parts; i++)
    chosen.entries[entry + i] = {u16(e), u16(min(TOKENS, mine - i * TOKENS)), first + i * TOKENS};
  next[e] = first;
  __syncthreads();
  if (e < 32)
#pragma unroll 1
    for (int i = lane; i - lane < job.pairs; i += 32) {
      const int number = i < job.pairs ? load_number(job.numbers + i) : -1;
      const u32 same = __match_any_sync(~0u, number);
      if (number >= 0) {
        const int at = next[number] + __popc(same & ((1u << lane) - 1));
        chosen.list[at] = i;
        __syncwarp(same);
        if (lane == __ffs(same) - 1) next[number] = at + __popc(same);
      }
      __syncwarp();
    }
  __syncthreads();
  chosen.count = all & 0xffff;
}

// One row's pairs picked as many different experts, or none: no sorting is needed. number: this thread's expert.
__device__ inline bool take_pairs(const Job& job, Chosen& chosen, int number) {
  const int i = threadIdx.x;
  if (i < job.pairs) chosen.entries[i] = {u16(number), 1, i};
  __syncthreads();
  return chosen.entries[0].expert < job.experts;
}

// ---- Shares of CTAs and warps ----
// A CTA's position among its items. An item is some units of an entry's expert.
struct Walk {
  int entry, group, left;

  // CTAs that share a multiprocessor, as a rule those that are `processors` apart, have neighbouring parts:
  // where CTAs have an item more than others, no multiprocessor has two such.
  __device__ Walk(const Job& job, int entries) {
    const int turn = quotient(blockIdx.x, job.processors), turns = quotient(gridDim.x, job.processors);
    const int part = (blockIdx.x - turn * job.processors) * turns + turn, items = entries * job.groups;
    const int first = items_before(part, items);
    entry = quotient(first, job.groups), group = first - entry * job.groups;
    left = items_before(part + 1, items) - first;
  }
  // All CTAs round alike, so every item belongs to exactly one of them.
  static __device__ int items_before(int part, int items) {
    return part == gridDim.x ? items : min(items, int(part * __fdividef(items, gridDim.x)));
  }
  // -> whether the next item has another entry.
  __device__ bool next(int groups) {
    left--;
    if (++group < groups) return false;
    group = 0, entry++;
    return true;
  }
};

// A warp's place in the CTA, and what follows from it. An item is a unit for each of `row_groups`.
struct Warp {
  int lane, row_group, k_group;
  int first, blocks;  // of k: where its parts begin, and how long they are together

  __device__ Warp(const Job& job) : lane(threadIdx.x % 32) {
    const int warp = of_warp(threadIdx.x / 32), most = job.parts * job.each;
    row_group = warp & (job.row_groups - 1), k_group = warp >> (31 - __clz(job.row_groups));
    first = k_group * most, blocks = max(0, min(most, job.blocks - first));
  }
  // Past the last unit: that one again, which is read once more and not stored.
  __device__ int unit(const Job& job, int group) const { return min(group * job.row_groups + row_group, job.units - 1); }
  __device__ bool stores(const Job& job, int group) const { return group * job.row_groups + row_group < job.units; }
};
