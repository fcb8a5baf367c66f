// Tiled weights back to rows, for the library's matmuls: the inverse of `packing.tile`.
//
// One CTA per few steps of one pass of one CTA of the schedule: so many that rows come out in whole
// cache lines; where k groups are contiguous, of one group. k must be a multiple of 8, which every Gemma's is.
#include "tile.cuh"

// ---- The job ----
struct Job {
  const u8* tiled;
  u8* out;  // [experts * n, k]
  int n, k; // of one expert
  int passes, ctas, tiles;  // of one expert; of a pass, some of which may be left out; per CTA and pass
  int row_groups, k_groups, wide, depth;
  int steps, steps_per_cta, groups;  // along k; of a CTA: steps and k groups
  int gate_rows;  // of gate's rows, as many as stand together; 0: not gated
};

__device__ inline int row_of(const Job& job, int tile, int r) {  // -1: only pads
  const int place = tile * 16 + r, rows = job.gate_rows, half = job.n / 2;
  if (!rows) return place < job.n ? place : -1;
  const int row = place / rows / 2 * rows + place % rows;
  return row < half ? row + place / rows % 2 * half : -1;
}

// ---- Shape of a CTA ----
constexpr int kWarps = 16;
constexpr int kAhead = 4;  // tiles that a warp has on their way
constexpr int kSize = BITS == 8 ? 1 : 2;  // bytes of a value: e4m3, bf16, or f16 of 4 bits

// ---- Places ----
// Where a tile of a CTA's is: stored, from its first; and its first value, among the rows.
// Found once per tile, by one thread: divisions by every lane would take longer than the memory.
__device__ inline uint2 place_of(const Job& job, int pitch, int i) {
  const int count = job.groups * job.row_groups * job.depth * job.wide;
  const int s = i / count, place = i % count;  // [k group][row group][depth][wide]
  const int t = place % job.wide, d = place / job.wide % job.depth, group = place / job.wide / job.depth;
  const int row = (group % job.row_groups * job.wide + t) * 16;
  const int column = ((s * job.depth + d) * job.groups + group / job.row_groups) * 32;
  return make_uint2((s * job.ctas * (job.k_groups / job.groups) * count + place) * kTileBytes, row * pitch + column * kSize);
}

// ---- Rows ----
// What was stored tile by tile, into rows of shared memory.
__device__ inline void untile_rows(const Job& job, const u8* tiled, u8* rows, int pitch, const uint2* places, int count) {
  const int lane = threadIdx.x % 32;
  rows += lane / 4 * pitch + lane % 4 * 8 * kSize;
  for (int first = threadIdx.x / 32; first < count; first += kAhead * kWarps) {
    Stored tile[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++)
      if (first + i * kWarps < count) tile[i] = load_tile(tiled + places[first + i * kWarps].x, lane);
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i * kWarps >= count) break;
      u8* to = rows + places[first + i * kWarps].y;
#if BITS == 8
      const uint4 v = tile[i].values[0];
      *reinterpret_cast<uint2*>(to) = make_uint2(v.x, v.z);
      *reinterpret_cast<uint2*>(to + 8 * pitch) = make_uint2(v.y, v.w);
#else
      u32 a[2][4];
      expand(tile[i], 0, a[0]), expand(tile[i], 1, a[1]);
      *reinterpret_cast<uint4*>(to) = make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]);
      *reinterpret_cast<uint4*>(to + 8 * pitch) = make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]);
#endif
    }
  }
}

// `bytes` of each row that is real, to its place in the output.
template <class Piece>
__device__ inline void store_rows(const Job& job, const u8* rows, int pitch, const int* numbers, int input, int bytes) {
  const int lane = threadIdx.x % 32;
  u8* out = job.out + (size_t(blockIdx.z / job.passes) * job.n * job.k + input) * kSize;
  for (int r = threadIdx.x / 32; r < job.tiles * 16; r += kWarps) {
    if (numbers[r] < 0) continue;
    const Piece* from = reinterpret_cast<const Piece*>(rows + r * pitch);
    Piece* to = reinterpret_cast<Piece*>(out + size_t(numbers[r]) * job.k * kSize);
    for (int i = lane; i < bytes / int(sizeof(Piece)); i += 32) to[i] = from[i];
  }
}

// ---- Kernel ----
// Shared memory: rows [16 tiles][pitch], the rows' numbers, the tiles' places (untile.py).
extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) untile(const __grid_constant__ Job job) {
  extern __shared__ __align__(16) u8 rows[];
  const int width = job.groups * job.depth * 32;  // inputs of a step
  const int parts = job.k_groups / job.groups, part = blockIdx.y % parts, first_step = blockIdx.y / parts * job.steps_per_cta;
  const int steps = min(job.steps_per_cta, job.steps - first_step);
  const int pitch = (job.steps_per_cta * width + 32) * kSize;  // so that a tile's rows lie in banks of their own
  const int each = job.groups * job.row_groups * job.depth * job.wide, count = steps * each;
  int* numbers = reinterpret_cast<int*>(rows + job.tiles * 16 * pitch);
  uint2* places = reinterpret_cast<uint2*>(numbers + job.tiles * 16);
  const int first = ((blockIdx.z % job.passes) * job.ctas + blockIdx.x) * job.tiles;
  for (int r = threadIdx.x; r < job.tiles * 16; r += blockDim.x) numbers[r] = row_of(job, first + r / 16, r % 16);
  for (int i = threadIdx.x; i < count; i += blockDim.x) places[i] = place_of(job, pitch, i);
  __syncthreads();
  const size_t step = (size_t(blockIdx.z) * job.steps + first_step) * job.ctas + blockIdx.x;
  untile_rows(job, job.tiled + (step * parts + part) * each * kTileBytes, rows, pitch, places, count);
  __syncthreads();
  const int input = (part * job.steps + first_step) * width, bytes = min(steps * width, job.k - input) * kSize;
  if (bytes <= 0) return;
  if (job.k * kSize % 16 == 0)
    store_rows<uint4>(job, rows, pitch, numbers, input, bytes);
  else
    store_rows<uint2>(job, rows, pitch, numbers, input, bytes);
}
