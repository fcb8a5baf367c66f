// Tiled weights back to rows, for the library's matmuls: the inverse of `tiles.tile`.
//
// One CTA per step of one pass of one CTA of the schedule; a warp takes a tile (16 rows, 32 inputs)
// at a time. k must be a multiple of 8, which every Gemma's is.
#include "common.cuh"

struct Job {
  const uint4* tiled;
  u8* out;  // [experts * n, k]
  int n, k; // of one expert
  int passes, tiles;  // of one expert; per CTA and pass
  int row_groups, k_groups, wide, depth;
  int gated, fp8;
};

__device__ inline int row_of(const Job& job, int tile, int r) {  // -1: only pads
  const int half = job.n / 2, row = (job.gated ? tile / 2 : tile) * 16 + r;
  if (!job.gated) return row < job.n ? row : -1;
  return row < half ? row + tile % 2 * half : -1;
}

__device__ inline void put(const Job& job, int tile, int r, int input, const u32 (&words)[4]) {
  const int row = row_of(job, tile, r);
  if (row < 0 || input >= job.k) return;
  const size_t at = (size_t(blockIdx.z / job.passes) * job.n + row) * job.k + input;
  if (job.fp8)
    *reinterpret_cast<uint2*>(job.out + at) = make_uint2(words[0], words[1]);
  else
    *reinterpret_cast<uint4*>(job.out + 2 * at) = make_uint4(words[0], words[1], words[2], words[3]);
}

extern "C" __global__ void __launch_bounds__(256) untile(const __grid_constant__ Job job) {
  const int lane = threadIdx.x % 32, parts = job.fp8 ? 1 : 2;
  const int count = job.row_groups * job.k_groups * job.depth * job.wide;
  const size_t step = (size_t(blockIdx.z) * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const uint4* from = job.tiled + step * count * parts * 32 + lane;
  const int first = ((blockIdx.z % job.passes) * gridDim.x + blockIdx.x) * job.tiles;
  // a tile's place within a step: [k group][row group][depth][wide]
  for (int i = threadIdx.x / 32; i < count; i += 8) {
    const int t = i % job.wide, d = i / job.wide % job.depth, group = i / job.wide / job.depth;
    const int tile = first + group % job.row_groups * job.wide + t;
    const int block = (blockIdx.y * job.k_groups + group / job.row_groups) * job.depth + d;
    const int input = block * 32 + lane % 4 * 8;
    const uint4 a = from[i * parts * 32];
    const uint4 b = job.fp8 ? make_uint4(0, 0, 0, 0) : from[(i * parts + 1) * 32];
    const u32 low[4] = {a.x, a.z, b.x, b.z}, high[4] = {a.y, a.w, b.y, b.w};
    put(job, tile, lane / 4, input, low);
    put(job, tile, lane / 4 + 8, input, high);
  }
}
