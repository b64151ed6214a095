// Threads that make every call of the core at once, for a sanitiser to watch. Usage: stress SECONDS SEED
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core.h"

namespace {

constexpr int kThreads = 8;
constexpr uint64_t kMiB = uint64_t{1} << 20;

struct Block {
  uint64_t address, bytes;
  unsigned char stamp;
};

std::atomic<int> failures{0};

void expect(bool holds, const char *what) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "does not hold: %s (%s)\n", what, tn_last_error());
}

bool intact(const Block &block) {
  auto *memory = reinterpret_cast<unsigned char *>(block.address);
  return memory[0] == block.stamp && memory[block.bytes - 1] == block.stamp;
}

// What neither allocates for the program nor frees: questions, counters, and requests that are gone again at once.
void ask(tn_core *core, std::mt19937 &random, const std::vector<Block> &blocks, uint64_t own_pool) {
  tn_stats stats;
  tn_get_stats(core, &stats);
  expect(stats.hbm_bytes <= stats.hbm_limit && stats.dram_bytes <= stats.dram_limit, "the caps hold");
  tn_glance glance;
  tn_get_glance(core, &glance);
  std::vector<tn_block> all(4096);
  tn_blocks(core, all.data(), all.size());
  std::vector<tn_request> requests(4096);
  uint64_t events = 0;
  tn_log(core, random() % 2, requests.data(), requests.size(), &events);
  tn_take_peak(core, TN_PARTS, 0);
  tn_retries(core);
  expect(tn_delayed(core) >= 0, "time goes on");
  expect(tn_page_bytes(core) % kMiB == 0, "pages are whole MiB");
  tn_pool_used(core, own_pool);
  if (random() % 4 == 0) tn_reset_peaks(core);
  if (random() % 4 == 0) tn_reset_totals(core);
  expect(tn_limit(core, 1, 128 * kMiB) == TN_OK, "a limit can be set");
  for (int begins : {1, 0}) tn_capture(core, begins);
  tn_refused(core);
  if (!blocks.empty()) {
    const Block &one = blocks[random() % blocks.size()];
    uint64_t begin = 0, bytes = 0;
    expect(tn_owns(core, one.address), "a core knows what it gave out");
    expect(tn_block_of(core, one.address + one.bytes - 1, &begin, &bytes) == TN_OK && begin == one.address,
           "a core knows where a block begins");
    tn_on(core, one.address, random() % 2);
    tn_pages_on(core, one.address, one.bytes, random() % 2);
  }
  uint64_t bytes[2] = {kMiB, kMiB}, offsets[2], most = 0;
  int64_t births[2] = {0, 1}, deaths[2] = {2, 3};
  expect(tn_pack(2, bytes, births, deaths, 4, 0, offsets, &most) == TN_OK && most == 2 * kMiB,
         "what is alive is packed");
}

void request_in_passing(tn_core *core, std::mt19937 &random, uint64_t fresh_pool) {
  uint64_t address = 0;
  tn_off_sequence(1);
  expect(tn_is_off_sequence(), "a thread knows that it is off the sequence");
  if (tn_allocate(core, kMiB, 0, 0, &address) == TN_OK)
    expect(tn_free(core, address) == TN_OK, "what is off the sequence is freed");
  tn_off_sequence(0);
  tn_class(core, TN_STATE, UINT64_MAX);
  bool served = tn_allocate(core, kMiB, 0, 0, &address) == TN_OK;
  tn_class(core, TN_ANY, UINT64_MAX);
  if (served) {
    expect(tn_free(core, address) == TN_OK, "state can be freed");
    // Another thread may have the place by now.
    if (tn_allocate_at(core, address, kMiB, kMiB) == TN_OK) expect(tn_free(core, address) == TN_OK, "a place is freed");
  }
  for (unsigned k = 0; k < 1 + random() % 3; ++k) tn_allocate(core, 4096, k, fresh_pool, &address);
  expect(tn_pool_clear(core, fresh_pool) == TN_OK && tn_pool_used(core, fresh_pool) == 0, "a pool is cleared");
  expect(tn_pool_retire(core, fresh_pool) == TN_OK, "a pool can be retired");
}

void work(tn_core *core, int thread, unsigned seed, std::chrono::steady_clock::time_point until) {
  std::mt19937 random(seed * 1000 + thread);
  std::vector<Block> blocks;
  uint64_t pool = 1 + thread, passing = uint64_t{1} << 40 | thread;  // of this thread alone
  auto drop = [&](size_t i) {
    expect(intact(blocks[i]), "a block holds what was written");
    expect(tn_free(core, blocks[i].address) == TN_OK, "a block in use can be freed");
    blocks[i] = blocks.back();
    blocks.pop_back();
  };
  while (std::chrono::steady_clock::now() < until) {
    unsigned dice = random() % 1000;
    if (blocks.empty() || (dice < 500 && blocks.size() < 60)) {
      uint64_t bytes = dice % 4 ? 1 + random() % 8192 : 1 + random() % (4 * kMiB), address = 0;
      int status = tn_allocate(core, bytes, thread % 4, dice % 10 ? 0 : pool, &address);
      expect(status == TN_OK || status == TN_FULL, "a request is served, or the tiers are full");
      if (status != TN_OK) {
        while (!blocks.empty()) drop(0);
        continue;
      }
      Block made{address, bytes, static_cast<unsigned char>(random() % 255 + 1)};
      auto *memory = reinterpret_cast<unsigned char *>(address);
      memory[0] = memory[bytes - 1] = made.stamp;
      blocks.push_back(made);
    } else if (dice < 980) {
      if (dice == 500) expect(tn_share(core, 1) == TN_OK, "memory can be shared with another GPU");
      if (dice % 7 == 0) tn_used_on(core, blocks[0].address, random() % 4);
      drop(random() % blocks.size());
    } else if (dice < 990) {
      uint64_t counts[2] = {2, 1}, sizes[3] = {kMiB, 2 * kMiB, 3 * kMiB}, offsets[3] = {0, kMiB, 0};
      uint64_t least[3] = {kMiB, random() % 2 * 2 * kMiB, 3 * kMiB};
      int64_t costs[2] = {1, 2};
      int status = tn_set_layout(core, thread % 4, 2, counts, least, sizes, offsets, 2, costs);
      expect(status == TN_OK || status == TN_FULL, "a layout is taken, or the tiers are full");
      tn_mark(core, nullptr);
    } else if (dice < 995) {
      expect(tn_pool_retire(core, pool) == TN_OK, "a pool can be retired");
      pool += kThreads;
      if (dice == 990) tn_forget_layout(core, dice * 4096);
      int status = dice % 2 ? tn_trim(core, dice % 3 * 128 * kMiB) : tn_trim_outside(core);
      expect(status == TN_OK, "idle memory goes back");
    } else if (dice < 998) {
      ask(core, random, blocks, pool);
    } else {
      request_in_passing(core, random, passing += kThreads);
    }
  }
  while (!blocks.empty()) drop(0);
}

// Moving waits for work on streams, which threads of the host are not: pages are moved while the others stand still.
void move_all(tn_core *core, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<Block> blocks;
  for (int i = 0; i < 20; ++i) {
    Block block{0, (1 + random() % 8) * kMiB, static_cast<unsigned char>(i + 1)};
    if (tn_allocate(core, block.bytes, 0, 0, &block.address) != TN_OK) break;
    std::memset(reinterpret_cast<void *>(block.address), block.stamp, block.bytes);
    blocks.push_back(block);
  }
  for (int i = 0; i < 200 && !blocks.empty(); ++i) {
    const uint64_t moved = blocks[random() % blocks.size()].address;
    const int tier = random() % 2;
    tn_wait_to_move(core, moved, tier);
    int status = tn_move(core, moved, tier);
    expect(status == TN_OK || status == TN_FULL, "a block moves, or the tier is full");
  }
  for (const Block &block : blocks) {
    expect(intact(block), "a block that moved holds what was written");
    expect(tn_free(core, block.address) == TN_OK, "a block that moved can be freed");
  }
}

}  // namespace

int main(int, char **arguments) {
  double seconds = std::atof(arguments[1]);
  unsigned seed = std::atoi(arguments[2]);
  std::printf("seed %u\n", seed);
  tn_core *core = nullptr;
  if (tn_open("memfd", 0, 256 * kMiB, 128 * kMiB, &core) != TN_OK) return 2;
  for (int round = 0; round < 4; ++round) {
    auto until = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::steady_clock::duration>(
                                                        std::chrono::duration<double>(seconds / 4));
    std::vector<std::thread> threads;
    for (int thread = 0; thread < kThreads; ++thread) threads.emplace_back(work, core, thread, seed + round, until);
    for (std::thread &thread : threads) thread.join();
    move_all(core, seed + round);
  }
  expect(tn_close(core) == TN_OK, "an empty core closes");
  return failures ? 1 : 0;
}
