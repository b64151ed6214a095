// The state of one core: its heaps by pool, stream, tier and class; frees that are pending on other streams; the log of
// the period and its layout; counters. `core.cpp` serves requests, for which `find.cpp` finds memory, `layout.cpp`
// follows and sets the layout, and `interface.cpp` is the C interface, which takes the lock.
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

constexpr uint64_t kSmall = uint64_t{1} << 20;    // requests up to here share pages apart from larger ones
constexpr uint64_t kLoose = uint64_t{128} << 20;  // bytes that are mapped nowhere where others stay mapped though idle
constexpr char kFull[] = "every tier is full";
constexpr uint64_t kAlias = uint64_t{64} << 20;  // bytes through which pages are copied to another tier
constexpr size_t kNone = SIZE_MAX;
constexpr size_t kLongest = size_t{1} << 15;  // requests of a period that is laid out: time goes by their square
constexpr size_t kLost = 4;  // unpredicted requests, less the predicted ones since: from here on it is another sequence

enum Class : int { General = 0, Small = 1, State = 2 };  // of heaps

struct Log {
  std::vector<tn_request> requests;  // at most one more than `kLongest`: then the log is not handed out
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

struct Sequence {  // a kind of period: its requests, the least and the most bytes of each, and where in the region it
                   // lies
  std::vector<uint64_t> least, bytes, offsets;

  bool varies(size_t request) const { return least[request] < bytes[request]; }
  bool has(size_t request, uint64_t nbytes) const {
    return request < bytes.size() && least[request] <= nbytes && nbytes <= bytes[request];
  }
  // That request and no other: of one whose size varies the size tells little.
  bool has_surely(size_t request, uint64_t nbytes) const { return has(request, nbytes) && !varies(request); }
};

struct Layout {
  Heap *heap = nullptr;
  uint64_t base = 0, total = 0;
  std::vector<const Heap *> others;  // of other streams, which it does not lay out
  std::vector<Sequence> sequences;   // of which each period is one
  size_t present = 0;                // as far as its requests tell
  size_t next = 0;
  size_t came = 0;      // `next`, at the end of the last period
  size_t back = kNone;  // where it went on before it last jumped ahead
  size_t lost = 0;      // grows with each unpredicted request, shrinks with each predicted one

  bool followed() const { return lost < kLost; }
  Range region() const { return {base, base + total}; }
};

struct PendingFree {  // a block that was freed while other streams were using it
  Heap *heap;
  Block *block;
  size_t uses = 0;  // events that were recorded for it and have not been passed
};
struct UseEvent {  // recorded on a stream that used a block, when that was freed
  Event event;
  std::list<PendingFree>::iterator of;
};

struct Pool {
  uint64_t used = 0;
  bool retired = false;
};

// How many `tn_off_sequence` calls this thread is within: above 0, its requests are not part of the program's sequence.
// Large ones are freed before the program's next request, so they may lie in the layout's region until then.
extern thread_local int off_sequence;

// How many forks this process is away from the first that opened a core. What lies in one is the parent's, and its lock
// may have been held when the process forked, by a thread that does not exist here and cannot unlock it.
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
  std::list<tiers::PendingFree> pending_frees;
  std::map<Stream, std::deque<tiers::UseEvent>>
      use_events;         // in the order in which they were recorded, in which they are passed
  size_t unrecorded = 0;  // pending frees for which not all events could be recorded
  tiers::Alias alias;
  int lifetime_class = TN_ANY;
  uint64_t most_state = UINT64_MAX;  // bytes of state in HBM
  int64_t demoted = 0;               // bytes in use of state and weights that lie in DRAM, as they may
  // Bytes for which there was no room in HBM. `spilled` are in use in DRAM now. The others are the most in this period,
  // and in the one before; they count what the layout's region lacked, too.
  int64_t spilled = 0, spilled_most = 0, spilled_before = 0;
  int captures = 0;   // of graphs that may be under way
  tiers::Log log[3];  // of the present period, the one before, and the one before that
  uint32_t period = 0;
  tiers::Layout layout;
  tn_stats stats{};
  std::atomic<int64_t> delayed{0};  // nanoseconds, of requests for which pages were to be mapped
  uint64_t maps = 0, unmaps = 0;    // of heaps that are gone
  int64_t peaks[TN_PEAKS] = {};     // the most bytes needed after a request since each was last asked for
  // For how many more requests no page is made beyond `expected` bytes, or what is alive, while others lie idle. Set
  // for the one period that has no layout between others that have one: best fit alone would leave up to 4% idle. Each
  // time idle pages are unmapped for it costs a wait, with the lock held; so it is over after that many requests even
  // if no period ends.
  uint64_t no_growth = 0, expected = 0;

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
  Block *laid_out(uint64_t bytes, Stream stream, Heap **out);
  Status find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Status find_without_growth(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Status fit_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Range reserved_range(const Heap *heap) const;
  Status find_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, bool patient, Heap **heap, Block **block);
  Status find_in_both(uint64_t bytes, Stream stream, Heap **heap, Block **block);
  uint64_t within_reach(Tier tier, const Heap *in, Range place) const;
  Status reclaim(uint64_t goal, Tier tier, const Heap *but, Range place);
  void count_displaced();
  void make_room(uint64_t missing);
  Status unmap_idle(Heap &heap, Tier tier, uint64_t count, Range but = {});
  Status allocate(uint64_t requested, Stream stream, uint64_t pool, uint64_t *address);
  int64_t needed() const;
  uint64_t state_in_hbm() const;
  void demote(Block *block, uint64_t bytes);
  void spill(Block *block, uint64_t bytes);
  void record_allocation(Heap *heap, Block *block, uint64_t requested);
  Status free(uint64_t address);
  void release(Heap *heap, Block *block);
  void record_uses(std::list<tiers::PendingFree>::iterator entry);
  void process_events();
  bool wait_for_users(Tier tier);
  Status wait(Stream stream);
  Status wait_for_all();
  Status wait_for_readers(Stream stream);
  Status unmap_all_idle(const Heap *but);
  Status unmap_idle_beyond(uint64_t keep);
  Status set_layout(Stream stream, std::vector<tiers::Sequence> sequences, const std::vector<int64_t> &costs);
};
