// A plain read of memory: the ceiling that everything else is measured against.
extern "C" __global__ void __launch_bounds__(512) stream(const uint4* data, size_t count, unsigned* out) {
  const size_t step = size_t(gridDim.x) * blockDim.x;
  unsigned seen = 0;
  size_t i = size_t(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; j++) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += step) seen ^= data[i].x;
  if (seen == 0x12345678u) *out = seen;  // so that the reads are not left out
}
