"""What a hop from every multiprocessor to every other costs, with memory idle and saturated: the
edge between two operations of a kernel that would stay on the card for a whole layer.

    python docs/log/hops.py OUT.json

One CTA a multiprocessor. A thread of each keeps so many KiB of bulk copies in flight; another adds
itself to a counter (release), waits until all have (acquire), and then, but for the first column,
fetches an operation's input from the L2 cache. Needs cupy.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from statistics import median

import cupy

ROUNDS = 2000
STARTS = 5
STAGE = 8192
FLYING = (0, 1, 2, 3, 4, 6, 8, 12, 20)
"""Stages in flight."""
INPUTS = (0, 5376 * 2, 8 * 5376 * 2 // 2)
"""Bytes: none, a row of 31B's hidden state, four."""
SOURCE = r"""
typedef unsigned u32; typedef unsigned long long u64;
#define STAGE 8192
#define STAGES 20
__device__ u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ void await(u32 bar, u32 parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra"
               " done; bra again; done: }" ::"r"(bar), "r"(parity) : "memory");
}
__device__ void fetch(u32 to, const void* from, u32 bytes, u32 bar) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2,"
               " [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(bar) : "memory");
}
extern "C" __global__ void hops(const char* weights, u64 size, const char* x, u32 input, u32 rounds,
                                u32 stages, u32* counter, u64* nanoseconds, u64* copied) {
  extern __shared__ __align__(128) char shared[];
  __shared__ u64 bars[STAGES + 1];
  __shared__ volatile u32 over;
  if (threadIdx.x == 0) {
    over = 0;
    for (int i = 0; i <= STAGES; i++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(address(bars + i)));
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (threadIdx.x == 32 && stages) {
    u64 at = u64(blockIdx.x) * STAGE, bytes = 0;
    u32 n = 0;
    for (; n < stages || !over; n++) {
      const u32 stage = n % stages;
      if (n >= stages) await(address(bars + stage), (n / stages - 1) & 1);
      fetch(address(shared) + stage * STAGE, weights + (at & (size - 1)), STAGE,
            address(bars + stage));
      at += u64(gridDim.x) * STAGE, bytes += STAGE;
    }
    for (u32 last = n; last < n + stages; last++)
      await(address(bars + last % stages), (last / stages - 1) & 1);
    copied[blockIdx.x] = bytes;
  }
  if (threadIdx.x == 0) {
    u64 begin = 0, end;
    for (u32 r = 0; r < rounds + 100; r++) {
      if (r == 100) asm volatile("mov.u64 %0, %globaltimer;" : "=l"(begin));
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      u32 seen;
      do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
      while (seen < (r + 1) * gridDim.x);
      if (input) {
        fetch(address(shared) + STAGES * STAGE, x, input, address(bars + STAGES));
        await(address(bars + STAGES), r & 1);
      }
    }
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(end));
    nanoseconds[blockIdx.x] = end - begin;
    over = 1;
  }
}
"""


def main(out: Path) -> None:
    device = cupy.cuda.Device()
    sms = device.attributes["MultiProcessorCount"]
    kernel = cupy.RawKernel(SOURCE, "hops")
    room = 20 * STAGE + max(INPUTS)
    kernel.max_dynamic_shared_size_bytes = room
    size = 8 << 30
    weights = cupy.zeros(size + STAGE, cupy.uint8)
    x = cupy.zeros(max(INPUTS), cupy.uint8)
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    rows = []
    for stages, input in product(FLYING, INPUTS):
        hops, rates = [], []
        for _ in range(STARTS):
            counter = cupy.zeros(1, "u4")
            spent, copied = cupy.zeros(sms, "u8"), cupy.zeros(sms, "u8")
            given = (weights, cupy.uint64(size), x, cupy.uint32(input), cupy.uint32(ROUNDS))
            given += (cupy.uint32(stages), counter, spent, copied)
            kernel((sms,), (64,), given, shared_mem=room)
            nanoseconds = float(spent.max())
            hops.append(nanoseconds / 1e3 / ROUNDS)
            rates.append(float(copied.sum()) / nanoseconds / 1e3)
        row = {"kib_in_flight": stages * STAGE >> 10, "input_bytes": input}
        row |= {"hop_us": median(hops), "tb_per_s": median(rates)}
        rows.append({**row, "least_us": min(hops), "most_us": max(hops)})
        print(", ".join(f"{name} {round(value, 3)}" for name, value in row.items()), flush=True)
    out.write_text(json.dumps({"card": name, "multiprocessors": sms, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
