// Between the two matmuls of heads that are too wide for flash attention, in a long prefill chunk.
#include "common.cuh"

// Softmax of scores [kv_heads, rows, width] over the keys that a row's query sees, as bf16; the
// others become 0. Row r is query `first` + r / group among the keys. One CTA per row, which reads
// it twice: for the largest and the sum, then for the shares.
extern "C" __global__ void __launch_bounds__(256)
    softmax(const float* scores, u16* shares, int width, int first, int group, int window) {
  __shared__ float best_of[8], sum_of[8];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t row = size_t(blockIdx.y) * gridDim.x + blockIdx.x;
  const int query = first + blockIdx.x / group;
  const int from = window ? max(0, query - window + 1) : 0;
  const float4* in = reinterpret_cast<const float4*>(scores + row * width);
  uint2* out = reinterpret_cast<uint2*>(shares + row * width);
  const auto seen = [&](int i) {
    float4 v = in[i];
    const int k = 4 * i;
    if (k + 3 > query || k < from) {
      v.x = k <= query && k >= from ? v.x : -INFINITY;
      v.y = k + 1 <= query && k + 1 >= from ? v.y : -INFINITY;
      v.z = k + 2 <= query && k + 2 >= from ? v.z : -INFINITY;
      v.w = k + 3 <= query && k + 3 >= from ? v.w : -INFINITY;
    }
    return v;
  };
  float best = -1e30f, sum = 0.0f;
  for (int i = from / 4 + threadIdx.x; 4 * i <= query; i += 256) {
    const float4 v = seen(i);
    const float higher = fmaxf(best, fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)));
    sum = sum * __expf(best - higher) + ((__expf(v.x - higher) + __expf(v.y - higher)) +
                                         (__expf(v.z - higher) + __expf(v.w - higher)));
    best = higher;
  }
  const float top = warp_max(best);
  sum = warp_sum(sum * __expf(best - top));
  if (lane == 0) best_of[warp] = top, sum_of[warp] = sum;
  __syncthreads();
  const float all = warp_max(best_of[lane % 8]);
  sum = warp_sum(lane < 8 ? sum_of[lane] * __expf(best_of[lane] - all) : 0.0f);
  const float share = 1.0f / sum;
  for (int i = threadIdx.x; i < width / 4; i += 256) {
    if (4 * i > query || 4 * i + 3 < from) {
      out[i] = make_uint2(0, 0);
      continue;
    }
    const float4 v = seen(i);
    const u16 p[4] = {to_bf16(__expf(v.x - all) * share), to_bf16(__expf(v.y - all) * share),
                      to_bf16(__expf(v.z - all) * share), to_bf16(__expf(v.w - all) * share)};
    out[i] = make_uint2(p[0] | u32(p[1]) << 16, p[2] | u32(p[3]) << 16);
  }
}
