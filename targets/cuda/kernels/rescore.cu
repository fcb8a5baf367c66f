// The candidates' logits (screen.cu), from the head itself: a CTA takes one at a time as if it were a tile's first row,
// with gemm.cu's MMAs in gemm.cu's order, so that they are the same bits.
//
// Few candidates take as long as one chain of MMAs. So all that a CTA reads is in flight at once, and each candidate has
// a chain of its own: a multiprocessor works on four side by side. 16 bytes of a tile are of two rows, of which one is the
// candidate.
#define BITS 8
#define FINE 1
#include "tile.cuh"

// ---- Shape, and the job ----
constexpr int kThreads = 256;
constexpr int kResident = 4;  // CTAs on a multiprocessor
constexpr int kAhead = 3;     // quarters of 32 inputs that a thread has on their way

struct Job {
  const u8* weight;  // int16, tiled
  const float* scale;  // [vocab]
  const u8* x;       // blocked input, bf16
  const int* found;  // [M, room]
  const int* count;  // [M]; below 0, or more than there is room for: the whole head is computed
  float* logits;     // [M, vocab]
  int room, vocab, rows;
  int ctas, tiles, steps, row_groups, wide, depth;  // how the weight is dealt (tiles.py), in one k group
  int x_bytes;       // of 32 inputs of all tokens
  float softcap;     // 0: none
};

// ---- Candidates ----
// Candidates of all rows, in order.
struct Item {
  int m, at;  // row, `rows` past the last; which of its candidates
};

__device__ inline Item item_of(const Job& job, int i, int lane) {
  const int count = lane < job.rows ? job.count[lane] : 0;
  const int mine = count > job.room ? 0 : max(count, 0);
  const int end = sum_so_far(mine, lane), m = __popc(__ballot_sync(~0u, end <= i));
  if (m == 32) return {job.rows, 0};
  return {m, i - __shfl_sync(~0u, end - mine, m)};
}

// Eight inputs' codes and their 256ths, as a lane of MMAs holds them, and scales: of both rows of a tile's pair.
struct Packed {
  uint4 codes, fine;
  u32 scales;
};

// Where a block of 32 inputs is, behind its row's first, in so many bytes.
constexpr int kUnit = 32;
struct Place {
  u32 codes, fine;
};

__device__ inline Place place_of(const Job& job, int block) {
  const int tiles_of_step = job.row_groups * job.depth * job.wide, steps = quotient(block, job.depth);
  const u32 from = u32(steps * job.ctas) * (tiles_of_step * kTileBytes / kUnit), behind = (block - steps * job.depth) * job.wide;
  return {from + behind * (kCodeBytes / kUnit), from + behind * (kFineBytes / kUnit)};
}

// A candidate's row, as one of the four lanes reads it that have it in an MMA.
struct Row {
  const u8 *codes, *fine, *scale;
  bool second;  // of the two rows in a lane's 16 bytes

  __device__ Row(const Job& job, int n, int quarter) : second(n % 16 >= 8) {
    const int tile = n / 16, dealt = job.ctas * job.tiles, pass = quotient(tile, dealt), rest = tile - pass * dealt;
    const int cta = quotient(rest, job.tiles), mine = rest - cta * job.tiles, group = quotient(mine, job.wide);
    const int tiles_of_step = job.row_groups * job.depth * job.wide, first = (group * job.depth - group) * job.wide + mine;
    const int bytes = tiles_of_step * kTileBytes;  // of a CTA's step
    const u8* at = job.weight + (size_t(pass) * job.steps * job.ctas + cta) * bytes;
    const int lanes = n % 8 * 64 + quarter * 16;
    codes = at + first * kCodeBytes + lanes;
    scale = at + first * kCodeBytes + kScalesAt + n % 8 * 4;
    fine = at + tiles_of_step * kCodeBytes + first * kFineBytes + lanes;
  }
  __device__ Packed load(Place place) const {
    const size_t behind = size_t(place.codes) * kUnit;
    return {*reinterpret_cast<const uint4*>(codes + behind), *reinterpret_cast<const uint4*>(fine + size_t(place.fine) * kUnit),
            *reinterpret_cast<const u32*>(scale + behind)};
  }
  // As the MMAs take them.
  __device__ uint4 values(const Packed& from) const {
    const float scale = fine_scale(from.scales, second);
    uint4 a;
    decode(second ? from.codes.y : from.codes.x, second ? from.fine.y : from.fine.x, scale, a.x, a.y);
    decode(second ? from.codes.w : from.codes.z, second ? from.fine.w : from.fine.z, scale, a.z, a.w);
    return a;
  }
};

// ---- Multiply ----
// In shared memory: what a CTA multiplies, its row's values and inputs [blocks][4 lanes], and where blocks are.
struct Fed {
  int quarters;  // of blocks
  uint4 *values, *inputs;
  Place* places;

  __device__ Fed(const Job& job, uint4* memory)
      : quarters(job.steps * job.depth * 4), values(memory), inputs(memory + quarters),
        places(reinterpret_cast<Place*>(inputs + quarters)) {
    for (int b = threadIdx.x; b < quarters / 4; b += kThreads) places[b] = place_of(job, b);
    __syncthreads();
  }
  __device__ void bring(const Job& job, int m, const Row& row) const {
#pragma unroll 1
    for (int first = threadIdx.x; first < quarters; first += kAhead * kThreads) {
      Packed packed[kAhead];
#pragma unroll
      for (int j = 0; j < kAhead; j++) {
        const int i = min(first + j * kThreads, quarters - 4 + int(threadIdx.x) % 4);
        packed[j] = row.load(places[i / 4]);
        copy16(shared_address(inputs + i), job.x + size_t(i / 4) * job.x_bytes + m * 64 + i % 4 * 16);
      }
#pragma unroll
      for (int j = 0; j < kAhead; j++)
        if (first + j * kThreads < quarters) values[first + j * kThreads] = row.values(packed[j]);
    }
    copies_done();
  }
  // By a warp: of the MMAs' first row and column.
  __device__ float product(int lane) const {
    float sum[4] = {};
#pragma unroll 4
    for (int i = lane % 4; i < quarters; i += 4) {
      const uint4 a = values[i], x = inputs[i];
      mma_bf16(sum, a.x, 0, a.y, 0, x.x, x.y);
      mma_bf16(sum, a.z, 0, a.w, 0, x.z, x.w);
    }
    return sum[0];
  }
};

// ---- Kernel ----
extern "C" __global__ void __launch_bounds__(kThreads, kResident) rescore(const __grid_constant__ Job job) {
  extern __shared__ uint4 memory[];
  let_next_start();
  const int lane = threadIdx.x % 32;
  const Fed fed(job, memory);
  wait_for_previous();
#pragma unroll 1
  for (int i = blockIdx.x;; i += gridDim.x) {
    const Item item = item_of(job, i, lane);
    if (item.m >= job.rows) return;
    const int n = job.found[size_t(item.m) * job.room + item.at];
    const float scale = job.scale[n];
    fed.bring(job, item.m, Row(job, n, threadIdx.x % 4));
    __syncthreads();
    if (threadIdx.x < 32) {
      const float v = fed.product(lane) * scale;
      if (lane == 0) job.logits[size_t(item.m) * job.vocab + n] = job.softcap > 0.0f ? soft_cap(v, job.softcap) : v;
    }
    __syncthreads();
  }
}
