"""What a hop from every multiprocessor to every other costs, with memory idle and saturated: the
edge between two operations of a kernel that would stay on the card for a whole layer.

    python docs/log/hops.py OUT.json

One CTA a multiprocessor. A thread of each keeps a ring of 96 KiB of bulk copies full, or doesn't;
another adds itself to a counter (release), waits until all have (acquire), and then, in the second
half of the table, fetches an operation's input from the L2 cache. Needs cupy.
"""

from __future__ import annotations

import json
import sys
from itertools import product
from pathlib import Path
from statistics import median

import cupy

ROUNDS, STARTS = 2000, 9
INPUTS = {0: "nothing", 5376 * 2: "one row of 31B's hidden state", 8 * 5376 * 2: "eight rows of it"}
SOURCE = r"""
typedef unsigned u32; typedef unsigned long long u64;
#define STAGE 16384
#define STAGES 6
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
                                u32 streaming, u32* counter, u64* nanoseconds, u64* copied) {
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
  if (threadIdx.x == 32 && streaming) {
    u64 at = u64(blockIdx.x) * STAGE, bytes = 0;
    u32 n = 0;
    for (; n < STAGES || !over; n++) {
      const u32 stage = n % STAGES;
      if (n >= STAGES) await(address(bars + stage), (n / STAGES - 1) & 1);
      fetch(address(shared) + stage * STAGE, weights + (at & (size - 1)), STAGE,
            address(bars + stage));
      at += u64(gridDim.x) * STAGE, bytes += STAGE;
    }
    for (u32 last = n; last < n + STAGES; last++)
      await(address(bars + last % STAGES), (last / STAGES - 1) & 1);
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
    room = 6 * 16384 + max(INPUTS)
    kernel.max_dynamic_shared_size_bytes = room
    size = 8 << 30
    weights = cupy.zeros(size + 16384, cupy.uint8)
    x = cupy.zeros(max(INPUTS), cupy.uint8)
    name = cupy.cuda.runtime.getDeviceProperties(device.id)["name"].decode()
    rows = []
    for input, streaming in product(INPUTS, (0, 1)):
        hops, rates = [], []
        for _ in range(STARTS):
            counter = cupy.zeros(1, "u4")
            spent, copied = cupy.zeros(sms, "u8"), cupy.zeros(sms, "u8")
            given = (weights, cupy.uint64(size), x, cupy.uint32(input), cupy.uint32(ROUNDS))
            given += (cupy.uint32(streaming), counter, spent, copied)
            kernel((sms,), (64,), given, shared_mem=room)
            nanoseconds = float(spent.max())
            hops.append(nanoseconds / 1e3 / ROUNDS)
            rates.append(float(copied.sum()) / nanoseconds / 1e3)
        row = {"input_bytes": input, "streaming": bool(streaming), "hop_us": median(hops)}
        rows.append({**row, "least_us": min(hops), "most_us": max(hops), "tb_per_s": median(rates)})
        print(f"{INPUTS[input]:32} streaming {streaming}: {rows[-1]}", flush=True)
    out.write_text(json.dumps({"card": name, "multiprocessors": sms, "rows": rows}, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
