// CUDA's intrinsics on a CPU: the threads of a cluster are fibers; one of them runs until it waits for others.
//
// The next fiber is drawn at random, and so is whether an asynchronous copy is done at once or when it is waited for:
// a missing barrier shows. Each cluster draws an order of its warps, and the first warp that is ready runs: warps
// then drift apart as far as barriers allow, which equal turns hardly do (probabilistic concurrency testing,
// Burckhardt et al. 2010). Outputs of earlier kernels that may still run read as NaN until all threads wait for those
// kernels, or for one another (early_starts.py); half of the clusters run as if those kernels had ended. Unwritten
// memory reads as NaN. The functions that emulated.py substitutes for inline PTX are defined here too.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <csetjmp>
#include <type_traits>
#include <ucontext.h>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __align__(bytes)
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(count)
#define __grid_constant__
#define threadIdx (fibers[running].index)
#define blockIdx (here().block)
#define __expf expf_of_cuda
#define clock clock_of_cuda

struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
inline void __trap() { std::abort(); }
struct int4 { int x, y, z, w; };
struct ulonglong2 { unsigned long long x, y; };
struct dim3 { int x, y, z; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

// ---- Threads

struct Copy {
  char* to;  // null: it is there
  const char* from;
  std::vector<char> early;  // the data when it was issued: before the wait for earlier kernels, and sometimes later
};
constexpr size_t kStack = 128 << 10, kDynamic = 228 << 10, kShared = 320 << 10;  // bytes
constexpr int kPeer = 24;  // an address of shared memory has the number of another CTA, from 1 on, above so many bits
struct Cta;
struct Fiber {
  ucontext_t context;  // where it begins
  jmp_buf pause;       // and where it waits: a jump is cheaper than swapping contexts, which is a system call
  Cta* cta;
  dim3 index;
  unsigned since;  // turns of the cluster's barrier
  int warp;        // its place in the order of warps
  int place;       // among those of its warp that are ready
  bool begun, waited;  // for earlier kernels
  std::vector<Copy> open;                  // since the last group of copies
  std::vector<std::vector<Copy>> groups;   // on their way
};
// Threads that meet; what each brings stays until the next time but one.
struct Meeting {
  int count = 0;
  unsigned turn = 0;
  std::vector<int> waiting;
  uint64_t brought[2][32];
};

// An mbarrier, and a bulk copy on its way, which reports to one.
struct Barrier {
  int expected, missing, bytes;
  unsigned phase;
  std::vector<int> waiting;
};
struct Bulk {
  unsigned to, bytes, barrier;
  const void* from;
  std::vector<char> early;
};
// Memory that earlier kernels write which may still run.
struct Hidden {
  char* at;
  int64_t bytes;
};
struct Watched {  // and how it was when this kernel was launched
  char* at;
  int64_t bytes;
  const char* before;
};
// What a kernel runs beside, and what came of it.
struct Start {
  const Hidden* hidden;
  const Watched* watched;
  int hidden_count, watched_count;
  int waited, late;  // some thread has waited; some CTA let the next kernel start only after a wait
  const char* failure;
};
struct Cta {
  dim3 block;
  unsigned rank;
  char* memory;                            // dynamic shared memory, then static
  Meeting everybody, numbered[16];         // at its barriers
  std::map<unsigned, Meeting> warps[32];   // by the mask of lanes that take part
  std::map<unsigned, Barrier> barriers;    // by address
  std::vector<Bulk> bulks;
  bool waited, lets_early;                 // some thread for earlier kernels; some the next kernel, before its own wait
};
static Start* start_of_grid;
static std::vector<int> at_wait;           // for earlier kernels
static std::vector<std::vector<char>> kept;  // of hidden memory
static bool is_early, is_first;            // earlier kernels may run still; of clusters
static std::vector<Fiber> fibers;
static std::vector<std::vector<int>> ready;  // by the order of warps
static std::vector<int> order;  // of the warps
static std::vector<Cta> ctas;  // of the cluster
static Meeting cluster;
static int running, left, waiting;  // threads that have not ended, and those of them that wait
static ucontext_t outside;
static char* stacks;
static std::minstd_rand random_draw;
static dim3 gridDim, blockDim;
static std::function<void()> body;

inline Cta& here() { return *fibers[running].cta; }

constexpr unsigned kUniform = 16;  // one turn in so many is drawn among all threads that are ready

inline void make_ready(int fiber) {
  std::vector<int>& warp = ready[fibers[fiber].warp];
  fibers[fiber].place = warp.size(), waiting--;
  warp.push_back(fiber);
}
inline void take_out(int fiber) {
  std::vector<int>& warp = ready[fibers[fiber].warp];
  const int place = fibers[fiber].place;
  warp[place] = warp.back(), fibers[warp[place]].place = place, waiting++;
  warp.pop_back();
}
inline char no_number(const char* at) { return reinterpret_cast<uintptr_t>(at) % 2 ? 0x7f : -1; }
inline void fill_with_no_numbers(char* at, size_t bytes) {
  for (size_t i = 0; i < bytes; i++) at[i] = no_number(at + i);
}
inline void fail(const char* why) {
  start_of_grid->failure = why;
  setcontext(&outside);
}
inline void hide() {
  kept.clear();
  for (int i = 0; is_early && i < start_of_grid->hidden_count; i++) {
    const Hidden& part = start_of_grid->hidden[i];
    kept.emplace_back(part.at, part.at + part.bytes);
    fill_with_no_numbers(part.at, part.bytes);
  }
}
inline void show() {
  for (size_t i = 0; i < kept.size(); i++) {
    const Hidden& part = start_of_grid->hidden[i];
    for (int64_t j = 0; j < part.bytes; j++)
      if (part.at[j] != no_number(part.at + j)) return fail("written before its wait, where an earlier kernel writes");
    memcpy(part.at, kept[i].data(), part.bytes);
  }
}
inline void check_that_nothing_is_written() {
  for (int i = 0; i < start_of_grid->watched_count; i++) {
    const Watched& part = start_of_grid->watched[i];
    if (memcmp(part.at, part.before, part.bytes)) fail("written before the wait for earlier kernels");
  }
}
inline void let_earlier_kernels_end() {
  if (!is_early) return;
  is_early = false;
  show();
  if (is_first) check_that_nothing_is_written();
  for (int fiber : std::exchange(at_wait, {})) make_ready(fiber);
}
inline void settle(Barrier& barrier) {
  if (barrier.missing || barrier.bytes) return;
  barrier.missing = barrier.expected, barrier.phase++;
  for (int fiber : std::exchange(barrier.waiting, {})) make_ready(fiber);
}
inline bool bring_a_copy(Cta& cta) {  // one of those on their way, the last first or not
  if (cta.bulks.empty()) return false;
  std::swap(cta.bulks[random_draw() % cta.bulks.size()], cta.bulks.back());
  const Bulk bulk = std::move(cta.bulks.back());
  cta.bulks.pop_back();
  Barrier& barrier = cta.barriers.at(bulk.barrier);
  memcpy(cta.memory + bulk.to, bulk.early.empty() ? bulk.from : bulk.early.data(), bulk.bytes);
  barrier.bytes -= bulk.bytes;
  settle(barrier);
  return true;
}
inline void bring_copies_until_one_is_ready() {
  while (waiting == int(fibers.size())) {
    bool brought = false;
    for (size_t i = 0, first = random_draw(); i < ctas.size() && !brought; i++) brought = bring_a_copy(ctas[(first + i) % ctas.size()]);
    if (!brought && at_wait.empty()) fail("all threads wait for one another");
    if (!brought) let_earlier_kernels_end();
  }
}
inline int next_fiber() {
  bring_copies_until_one_is_ready();
  unsigned nth = random_draw() % kUniform ? 0 : random_draw() % (fibers.size() - waiting);
  for (const std::vector<int>& warp : ready) {
    if (nth < warp.size()) return warp[random_draw() % warp.size()];
    nth -= warp.size();
  }
  abort();
}
inline void go_on(int next) {
  running = next;
  if (fibers[next].begun) _longjmp(fibers[next].pause, 1);
  fibers[next].begun = true;
  setcontext(&fibers[next].context);
}
inline void others_turn() {
  const int next = next_fiber();
  if (next != running && !_setjmp(fibers[running].pause)) go_on(next);
}
inline void arrive_at(Meeting& at, int expected) {  // and does not wait
  if (++at.count < expected) return;
  at.count = 0, at.turn++;
  for (int fiber : std::exchange(at.waiting, {})) make_ready(fiber);
}
inline void await_turn_after(Meeting& at, unsigned turn) {
  if (at.turn != turn) return;
  at.waiting.push_back(running);
  take_out(running);
  others_turn();
}
inline void meet(Meeting& at, int expected) {
  const unsigned turn = at.turn;
  arrive_at(at, expected);
  await_turn_after(at, turn);
}
inline const uint64_t* exchange(unsigned lanes, uint64_t value) {
  Meeting& at = here().warps[threadIdx.x / 32][lanes];
  uint64_t* brought = at.brought[at.turn % 2];
  brought[threadIdx.x % 32] = value;
  meet(at, __builtin_popcount(lanes));
  return brought;
}
inline void await_earlier_kernels() {
  fibers[running].waited = here().waited = true;
  if (!is_early) return;
  at_wait.push_back(running);
  take_out(running);
  others_turn();
}
inline void let_next_kernel_start() {
  if (!fibers[running].waited) here().lets_early = true;
}
inline void run_fiber() {
  body();
  const Fiber& fiber = fibers[running];
  const auto is_some = [](const std::vector<Copy>& group) { return !group.empty(); };
  if (!fiber.open.empty() || std::any_of(fiber.groups.begin(), fiber.groups.end(), is_some)) fail("a thread has ended, and copies of its were on the way");
  take_out(running);
  if (!--left) setcontext(&outside);
  go_on(next_fiber());
}
inline char* shared_memory(int cta) {
  static std::vector<std::unique_ptr<char[]>> all;
  while (int(all.size()) <= cta) all.emplace_back(new char[kShared + 1024]);
  char* begin = all[cta].get();
  begin += -reinterpret_cast<uintptr_t>(begin) & 1023;
  // an earlier CTA may have left anything, read as signed integers the largest or the smallest
  if (random_draw() % 2)
    fill_with_no_numbers(begin, kShared);
  else
    memset(begin, 0xff, kShared);
  return begin;
}
inline void begin_fiber(Fiber& fiber, int index, Cta& cta) {
  fiber.cta = &cta, fiber.index = {index, 0, 0}, fiber.begun = fiber.waited = false, fiber.open.clear(), fiber.groups.clear();
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = stacks + (&fiber - fibers.data()) * kStack, fiber.context.uc_stack.ss_size = kStack;
  makecontext(&fiber.context, run_fiber, 0);
}
inline void draw_order(int warps) {
  order.resize(warps);
  for (int i = 0; i < warps; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_draw);
}
inline void run_cluster(dim3 first, int count, int threads) {
  const int warps = (threads + 31) / 32;
  draw_order(count * warps);
  ctas.clear(), ctas.resize(count), cluster = {};
  fibers.resize(count * threads);
  for (int c = 0; c < count; c++) {
    ctas[c].block = {first.x + c, first.y, first.z}, ctas[c].rank = c, ctas[c].memory = shared_memory(c);
    for (int i = 0; i < threads; i++) begin_fiber(fibers[c * threads + i], i, ctas[c]);
  }
  ready.assign(order.size(), {}), left = waiting = fibers.size();
  for (int i = 0; i < left; i++) fibers[i].warp = order[i / threads * warps + i % threads / 32], make_ready(i);
  is_early = start_of_grid->hidden_count && random_draw() % 2;
  hide();
  bool volatile begun = false;
  getcontext(&outside);
  if (!begun) begun = true, go_on(next_fiber());
  if (start_of_grid->failure) return;
  let_earlier_kernels_end();
  is_first = false;
  for (const Cta& cta : ctas) {
    start_of_grid->waited |= cta.waited;
    start_of_grid->late |= cta.waited && !cta.lets_early;
  }
}
inline void run_grid(const int* grid, int threads, unsigned seed, Start* start, int of_cluster, std::function<void()> kernel) {
  // all at once, and given back: a process may have so many pieces of memory, and has many kernels
  const std::unique_ptr<char[]> room(new char[size_t(threads) * of_cluster * kStack]);
  random_draw.seed(seed), body = kernel, stacks = room.get(), start_of_grid = start, is_first = true;
  gridDim = {grid[0], grid[1], grid[2]}, blockDim = {threads, 1, 1};
  std::vector<dim3> firsts;
  for (int z = 0; z < grid[2]; z++)
    for (int y = 0; y < grid[1]; y++)
      for (int x = 0; x < grid[0]; x += of_cluster) firsts.push_back({x, y, z});
  std::shuffle(firsts.begin(), firsts.end(), random_draw);
  for (const dim3& first : firsts)
    if (!start->failure) run_cluster(first, of_cluster, threads);
}

// ---- What threads do together

inline void __syncthreads() { meet(here().everybody, blockDim.x); }
inline void arrive_of_cluster() {
  fibers[running].since = cluster.turn;
  arrive_at(cluster, fibers.size());
}
inline void await_cluster() {
  await_turn_after(cluster, fibers[running].since);
}
inline void __syncwarp(unsigned lanes = ~0u) { exchange(lanes, 0); }
template <typename T>
T from_lane(unsigned lanes, T value, int lane) {
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  memcpy(&value, exchange(lanes, bits) + lane, sizeof value);
  return value;
}
template <typename T>
T __shfl_sync(unsigned lanes, T value, int lane) { return from_lane(lanes, value, lane % 32); }
template <typename T>
T __shfl_xor_sync(unsigned lanes, T value, int by) { return from_lane(lanes, value, threadIdx.x % 32 ^ by); }
template <typename T>
T __shfl_up_sync(unsigned lanes, T value, int by, int width = 32) {
  const int lane = threadIdx.x % 32;
  return from_lane(lanes, value, lane % width < by ? lane : lane - by);
}
inline unsigned __match_any_sync(unsigned lanes, unsigned value) {
  const uint64_t* values = exchange(lanes, value);
  unsigned same = 0;
  for (int i = 0; i < 32; i++) same |= unsigned(lanes >> i & 1 && values[i] == value) << i;
  return same;
}
inline unsigned __reduce_max_sync(unsigned lanes, unsigned value) {
  const uint64_t* values = exchange(lanes, value);
  for (int i = 0; i < 32; i++)
    if (lanes >> i & 1 && values[i] > value) value = values[i];
  return value;
}
inline unsigned __ballot_sync(unsigned lanes, bool value) {
  const uint64_t* values = exchange(lanes, value);
  unsigned all = 0;
  for (int i = 0; i < 32; i++) all |= unsigned(lanes >> i & 1 && values[i]) << i;
  return all;
}
inline unsigned __reduce_min_sync(unsigned lanes, unsigned value) { return ~__reduce_max_sync(lanes, ~value); }
inline int __reduce_add_sync(unsigned lanes, int value) {
  const uint64_t* values = exchange(lanes, value);
  int all = 0;
  for (int i = 0; i < 32; i++) all += lanes >> i & 1 ? int(values[i]) : 0;
  return all;
}
template <typename T, typename U>
T atomicAdd(T* at, U value) { return std::exchange(*at, T(*at + value)); }
template <typename T>
T atomicMax(T* at, T value) { return std::exchange(*at, *at < value ? value : *at); }
template <typename T>
T atomicOr(T* at, T value) { return std::exchange(*at, *at | value); }

// ---- Shared memory and copies

inline size_t __cvta_generic_to_shared(const void* at) { return static_cast<const char*>(at) - here().memory; }
template <typename T>
T* shared_at(unsigned at) {
  const Cta& cta = at >> kPeer ? ctas[(at >> kPeer) - 1] : here();
  return reinterpret_cast<T*>(cta.memory + at % (1u << kPeer));
}
// Where what a function keeps in static shared memory is, by its number in the source: the same in all CTAs.
inline size_t static_place(int number, size_t bytes) {
  static std::map<int, size_t> places;
  static size_t next = kDynamic;
  const auto [found, added] = places.try_emplace(number, next);
  if (added) next += (bytes + 127) / 128 * 128;
  if (next > kShared) abort();
  return found->second;
}
template <typename T>
T& shared_static(int number) { return *reinterpret_cast<T*>(here().memory + static_place(number, sizeof(T))); }
inline void copy_async(unsigned to, const void* from, int bytes = 16) {  // 0: zeros
  static const char zeros[16] = {};
  Copy copy = {shared_at<char>(to), bytes ? static_cast<const char*>(from) : zeros};
  if (random_draw() % 2) memcpy(std::exchange(copy.to, nullptr), copy.from, 16);
  if (is_early) copy.early.assign(copy.from, copy.from + 16);
  fibers[running].open.push_back(copy);
}
inline void commit_copies() {
  Fiber& fiber = fibers[running];
  fiber.groups.push_back(std::exchange(fiber.open, {}));
}
inline void await_copies(size_t but) {
  auto& groups = fibers[running].groups;
  for (; groups.size() > but; groups.erase(groups.begin()))
    for (const Copy& copy : groups.front())
      if (copy.to) memcpy(copy.to, copy.early.empty() ? copy.from : copy.early.data(), 16);
}

inline unsigned clock_of_cuda() {
  static unsigned now;
  return now += 16;
}
inline void arrive_at(unsigned at, int bytes = 0) {
  Barrier& barrier = here().barriers.at(at);
  barrier.bytes += bytes, barrier.missing--;
  settle(barrier);
}
inline void copy_bulk(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  here().bulks.push_back({to, bytes, barrier, from});
  const char* begin = static_cast<const char*>(from);
  if (is_early || random_draw() % 2) here().bulks.back().early.assign(begin, begin + bytes);
}
inline bool passed(unsigned at, unsigned parity) { return here().barriers.at(at).phase % 2 != parity; }
inline bool has_passed(unsigned at, unsigned parity) {  // polling lets copies arrive
  if (passed(at, parity)) return true;
  if (random_draw() % 2) bring_a_copy(here());
  others_turn();
  return passed(at, parity);
}
inline void await_barrier(unsigned at, unsigned parity) {
  while (!has_passed(at, parity)) {
    here().barriers.at(at).waiting.push_back(running);
    take_out(running);
    others_turn();
  }
}

// ---- Numbers

template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) { return b < a ? b : a; }
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) { return a < b ? b : a; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(unsigned v) { return v ? __builtin_ctz(v) + 1 : 0; }
inline int __clz(unsigned v) { return v ? __builtin_clz(v) : 32; }
inline unsigned long long __float2ull_rz(float v) { return v; }
inline unsigned __umulhi(unsigned a, unsigned b) { return uint64_t(a) * b >> 32; }
inline float __uint2float_rn(unsigned v) { return v; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline float expf_of_cuda(float v) { return std::exp(v); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
template <typename To, typename From>
To bits_as(From from) {
  To to;
  static_assert(sizeof to == sizeof from);
  memcpy(&to, &from, sizeof to);
  return to;
}
inline float __uint_as_float(unsigned v) { return bits_as<float>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return bits_as<unsigned>(v); }
inline float from_half(unsigned v) { return bits_as<_Float16>(uint16_t(v)); }
inline unsigned to_half(double v) { return bits_as<uint16_t>(_Float16(v)); }
inline float from_brain(unsigned v) { return bits_as<float>(v << 16); }
inline unsigned to_brain(float v) {
  const unsigned bits = bits_as<unsigned>(v);
  return v != v ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline unsigned e4m3_as_half(unsigned v) {
  const int exponent = v >> 3 & 15, mantissa = v & 7;
  const double size = exponent ? std::ldexp(8 + mantissa, exponent - 10) : std::ldexp(mantissa, -9);
  return exponent == 15 && mantissa == 7 ? 0x7fff : to_half(v & 128 ? -size : size);
}
inline unsigned to_e4m3(float v) {  // saturates
  if (v != v) return 0x7f;
  const double size = min(std::fabs(double(v)), 448.0);
  const int exponent = max(std::ilogb(size), -6);  // of zero far below
  const int eighths = std::nearbyint(std::ldexp(size, 3 - exponent));
  return unsigned(std::signbit(v)) << 7 | (eighths + (exponent + 6) * 8);
}
inline unsigned pair_of(unsigned low, unsigned high) { return low & 0xffff | high << 16; }
template <typename Of>
unsigned of_halves(Of of, unsigned a, unsigned b, unsigned c = 0) {
  const auto one = [&](int s) { return to_half(of(double(from_half(a >> s)), double(from_half(b >> s)), double(from_half(c >> s)))); };
  return pair_of(one(0), one(16));
}
inline unsigned larger_of_words(unsigned a, unsigned b) { return pair_of(max(a & 0xffff, b & 0xffff), max(a >> 16, b >> 16)); }
inline unsigned permuted(unsigned a, unsigned b, unsigned which) {
  const uint64_t bytes = a | uint64_t(b) << 32;
  unsigned v = 0;
  for (int i = 0; i < 4; i++) v |= unsigned(bytes >> 8 * (which >> 4 * i & 7) & 255) << 8 * i;
  return v;
}

// ---- Tensor cores: D[16 x 8] of A[16 x 4 kEach] and B[4 kEach x 8], a word having kEach / 2 values of k

struct Fragments {
  unsigned a[4], b[2];
};
template <int kValues, typename T, typename Value>
void multiply_fragments(T (&d)[4], const Fragments& mine, const Value& value) {
  const uint64_t* all = exchange(~0u, reinterpret_cast<uint64_t>(&mine));
  const int lane = threadIdx.x % 32;
  const auto of = [&](int i) -> const Fragments& { return *reinterpret_cast<const Fragments*>(all[i]); };
  for (int e = 0; e < 4; e++) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    decltype(value(0u, 0)) sum = d[e];
    for (int k = 0; k < 8 * kValues; k++) {
      const int half = k / (4 * kValues), quarter = k / kValues % 4;
      sum += value(of(row % 8 * 4 + quarter).a[half * 2 + row / 8], k % kValues) * value(of(column * 4 + quarter).b[half], k % kValues);
    }
    d[e] = sum;
  }
  exchange(~0u, 0);  // until here the others' fragments are there
}
inline void mma_of_halves(float (&d)[4], const Fragments& mine) {
  multiply_fragments<2>(d, mine, [](unsigned word, int i) { return double(from_half(word >> 16 * i)); });
}
inline void mma_of_brains(float (&d)[4], const Fragments& mine) {
  multiply_fragments<2>(d, mine, [](unsigned word, int i) { return double(from_brain(word >> 16 * i & 0xffff)); });
}
inline void mma_of_bytes(int (&d)[4], const Fragments& mine) {
  d[0] = d[1] = d[2] = d[3] = 0;
  multiply_fragments<4>(d, mine, [](unsigned word, int i) { return int(int8_t(word >> 8 * i)); });
}
