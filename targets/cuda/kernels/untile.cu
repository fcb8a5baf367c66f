// Tiled weights back to rows, for the library's matmuls: the inverse of `tiles.tile`.
//
// One CTA per few steps of one pass of one CTA of the schedule: so many that rows come out in whole
// cache lines. k must be a multiple of 8, which every Gemma's is.
#include "common.cuh"

struct Job {
  const uint4* tiled;
  u8* out;  // [experts * n, k]
  int n, k; // of one expert
  int passes, tiles;  // of one expert; per CTA and pass
  int row_groups, k_groups, wide, depth;
  int steps, together;  // along k; of a CTA
  int gate_rows, fp8;  // of gate's rows, as many as stand together; 0: not gated
};

__device__ inline int row_of(const Job& job, int tile, int r) {  // -1: only pads
  const int place = tile * 16 + r, together = job.gate_rows, half = job.n / 2;
  if (!together) return place < job.n ? place : -1;
  const int row = place / together / 2 * together + place % together;
  return row < half ? row + place / together % 2 * half : -1;
}

constexpr int kWarps = 16;
constexpr int kAhead = 4;  // tiles that a warp has on their way

// Where a tile of a block is stored, and where its first value goes.
struct Place {
  const uint4* from;
  u8* to;
};

__device__ inline Place place_of(const Job& job, u8* rows, int pitch, int first_step, int i) {
  const int lane = threadIdx.x % 32, parts = job.fp8 ? 1 : 2, together = job.k_groups * job.depth;
  const int count = job.row_groups * together * job.wide;
  const int s = i / count, place = i % count;  // [k group][row group][depth][wide]
  const int t = place % job.wide, d = place / job.wide % job.depth, group = place / job.wide / job.depth;
  const size_t step = (size_t(blockIdx.z) * job.steps + first_step + s) * gridDim.x + blockIdx.x;
  const int row = (group % job.row_groups * job.wide + t) * 16 + lane / 4;
  const int column = (s * together + group / job.row_groups * job.depth + d) * 32 + lane % 4 * 8;
  return {job.tiled + (step * count + place) * parts * 32 + lane, rows + row * pitch + column * parts};
}

// What was stored tile by tile, into rows of shared memory.
__device__ inline void lay_out(const Job& job, u8* rows, int pitch, int first_step, int steps) {
  const int count = steps * job.row_groups * job.k_groups * job.depth * job.wide;
  for (int first = threadIdx.x / 32; first < count; first += kAhead * kWarps) {
    uint4 a[kAhead], b[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i * kWarps >= count) break;
      const uint4* from = place_of(job, rows, pitch, first_step, first + i * kWarps).from;
      a[i] = from[0];
      if (!job.fp8) b[i] = from[32];
    }
#pragma unroll
    for (int i = 0; i < kAhead; i++) {
      if (first + i * kWarps >= count) break;
      u8* to = place_of(job, rows, pitch, first_step, first + i * kWarps).to;
      if (job.fp8) {
        *reinterpret_cast<uint2*>(to) = make_uint2(a[i].x, a[i].z);
        *reinterpret_cast<uint2*>(to + 8 * pitch) = make_uint2(a[i].y, a[i].w);
      } else {
        *reinterpret_cast<uint4*>(to) = make_uint4(a[i].x, a[i].z, b[i].x, b[i].z);
        *reinterpret_cast<uint4*>(to + 8 * pitch) = make_uint4(a[i].y, a[i].w, b[i].y, b[i].w);
      }
    }
  }
}

extern "C" __global__ void __launch_bounds__(32 * kWarps, 2) untile(const __grid_constant__ Job job) {
  extern __shared__ __align__(16) u8 rows[];  // [16 tiles][pitch]
  const int size = job.fp8 ? 1 : 2, width = job.k_groups * job.depth * 32;  // inputs of a step
  const int first_step = blockIdx.y * job.together, steps = min(job.together, job.steps - first_step);
  const int pitch = job.together * width * size + 16;
  lay_out(job, rows, pitch, first_step, steps);
  __syncthreads();
  const int first = ((blockIdx.z % job.passes) * gridDim.x + blockIdx.x) * job.tiles, input = first_step * width;
  const int inputs = min(steps * width, job.k - input);
  for (int r = threadIdx.x / 32; r < job.tiles * 16; r += kWarps) {
    const int row = row_of(job, first + r / 16, r % 16);
    if (row < 0) continue;
    const u8* from = rows + r * pitch;
    u8* to = job.out + ((size_t(blockIdx.z / job.passes) * job.n + row) * job.k + input) * size;
    for (int i = threadIdx.x % 32 * 8; i < inputs * size; i += 256)
      *reinterpret_cast<uint2*>(to + i) = *reinterpret_cast<const uint2*>(from + i);
  }
}
