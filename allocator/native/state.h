// What a core knows: its heaps by pool, stream, tier and class; blocks that wait for other streams; the log of the
// period and its layout; counters. `core.cpp` decides, `layout.cpp` foresees, `interface.cpp` locks and is called.
#pragma once

#include <atomic>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core.h"
#include "heap.h"

namespace tiers {

constexpr uint64_t kAlias = uint64_t{64} << 20;  // bytes through which pages are copied to another tier
constexpr size_t kNone = SIZE_MAX;
constexpr size_t kLongest = size_t{1} << 15;  // requests of a period that is laid out: time goes by their square
constexpr size_t kLost = 4;  // requests that nobody foresaw, beyond those that came as foreseen: another sequence

enum Class : int { General = 0, Small = 1, State = 2 };  // of heaps

struct Log {
  std::vector<tn_request> requests;  // at most one more than `kLongest`: then nobody is told of them
  uint64_t events = 0;
  uint64_t sum = 0;  // of what came and when, in that order: that of another period is another, but by chance

  void note(const tn_request &request) {
    for (uint64_t value : {request.bytes, request.stream, uint64_t(request.birth)})
      sum = (sum ^ value) * 0x9E3779B97F4A7C15 + (sum >> 32);
    requests.push_back(request);
  }
  bool repeats(const Log &before) const {
    bool is_whole = requests.size() <= kLongest;
    return is_whole && sum == before.sum && events == before.events && requests.size() == before.requests.size();
  }
};

struct Sequence {  // a kind of period: its requests, and where in the region they lie
  std::vector<uint64_t> bytes, offsets;
};

struct Plan {
  Heap *heap = nullptr;
  uint64_t base = 0, total = 0;
  std::vector<const Heap *> others;  // of other streams, which it does not lay out
  std::vector<Sequence> sequences;   // of which each period is one
  size_t present = 0;                // as far as its requests tell
  size_t next = 0;
  size_t came = 0;      // `next`, at the end of the last period
  size_t back = kNone;  // where it went on before it last jumped ahead
  size_t lost = 0;      // grows with requests that nobody foresaw, shrinks with those that came as foreseen

  bool followed() const { return lost < kLost; }
};

struct Waiting {  // a block that was freed while other streams used it
  Heap *heap;
  Block *block;
  size_t ends = 0;  // of streams that are not on the block's list any more, and were not passed so far
};
struct End {  // how far a stream was that used a block
  Event event;
  std::list<Waiting>::iterator of;
};

struct Pool {
  uint64_t used = 0;
  bool retired = false;
};

// Whether what this thread asks for is of no sequence. What is large of it is back before the program's next request,
// and may lie until then where the layout has others to come.
extern thread_local int aside;

// How many forks this process is away from the first that opened a core. What lies in one is the parent's, and its lock
// may have been held when the process forked, by a thread that is not there to let it go.
uint64_t forks();

}  // namespace tiers

struct tn_core {
  using Status = tiers::Status;
  using Heap = tiers::Heap;
  using Block = tiers::Block;
  using Range = tiers::Range;
  using Stream = tiers::Stream;
  using Tier = tiers::Tier;
  using Key = std::tuple<uint64_t, Stream, int, int>;  // pool, stream, tier, class

  const uint64_t opened_in = tiers::forks();
  std::mutex mutex;
  std::unique_ptr<tiers::Primitives> primitives;
  const uint64_t page;  // bytes
  tiers::Pages pages[tiers::kTiers];
  std::map<Key, Heap *> by_key;
  std::map<uint64_t, std::unique_ptr<Heap>> heaps;  // by base
  std::mutex places_mutex;                          // held for the next alone, and so at any time free at once
  std::map<uint64_t, uint64_t> places;              // where heaps begin and end
  std::unordered_map<uint64_t, tiers::Pool> pools;
  std::list<tiers::Waiting> waiting;
  std::map<Stream, std::deque<tiers::End>> ends;  // in the order in which they were recorded, and so are passed
  size_t untold = 0;                              // blocks with streams of which that cannot be told
  tiers::Alias alias;
  int lifetime_class = TN_ANY;
  int captures = 0;   // of graphs that may be under way
  tiers::Log log[3];  // of the present period, the one before, and the one before that
  uint32_t period = 0;
  tiers::Plan plan;
  tn_stats stats{};
  std::atomic<int64_t> delayed{0};  // nanoseconds, of requests for which pages were to be mapped
  uint64_t maps = 0, unmaps = 0;    // of heaps that are gone
  int64_t laps[TN_LAPS] = {};       // the most bytes needed after a request since each was last asked for
  // Requests for which no page is made beyond what is `expected` to be alive at most while others lie idle: those of
  // the one period without a layout, after others that had one. Best fit alone would leave up to 4% idle. To unmap that
  // costs a wait each, with the lock held, as where HBM is full; so there is an end to it even if no period ends.
  uint64_t thrifty = 0, expected = 0;

  tn_core(std::unique_ptr<tiers::Primitives> made, uint64_t hbm, uint64_t dram)
      : primitives(std::move(made)),
        page(primitives->page()),
        pages{tiers::Pages(*primitives, tiers::kHbm, hbm / page),
              tiers::Pages(*primitives, tiers::kDram, dram / page)} {}

  bool is_inherited() const { return tiers::forks() != opened_in; }
  Status heap(const Key &key, Heap **out);
  Heap *heap_of(uint64_t address);
  bool owns(uint64_t address);
  bool is_retired(uint64_t pool) const;
  size_t follow(uint64_t bytes);
  Block *planned(uint64_t bytes, Stream stream, Heap **out);
  Status find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Status find_thriftily(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Status fit_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Range kept_in(const Heap *heap) const;
  Status find_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, bool patient, Heap **heap, Block **block);
  Status reclaim(uint64_t goal, Tier tier, const Heap *but);
  Status surrender(Heap &heap, Tier tier, uint64_t count);
  Status allocate(uint64_t requested, Stream stream, uint64_t pool, uint64_t *address);
  int64_t needed() const;
  void took(Heap *heap, Block *block, uint64_t requested);
  Status free(uint64_t address);
  void release(Heap *heap, Block *block);
  void record_ends(std::list<tiers::Waiting>::iterator entry);
  void settle();
  bool wait_for_users(Tier tier);
  Status wait(Stream stream);
  Status wait_for_all();
  Status wait_for_readers(Stream stream);
  Status surrender_all(const Heap *but);
  Status surrender_beyond(uint64_t keep);
  Status set_plan(Stream stream, std::vector<tiers::Sequence> sequences, const std::vector<int64_t> &visits);
};
