// The core: heaps per pool, stream and tier; where a request goes; what is counted; the sequence and its layout.
#include "core.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>

#include "heap.h"

namespace tiers {
namespace {

constexpr uint64_t kSmall = uint64_t{1} << 20;          // requests up to here share pages apart from larger ones
constexpr uint64_t kRange = uint64_t{1} << 40;          // addresses of a heap; they cost nothing
constexpr uint64_t kSmallestRange = uint64_t{1} << 34;  // where the address space is short
constexpr uint64_t kAliasPages = 32;
constexpr size_t kWindow = 64;  // requests to look ahead for the one that came: more and the sequence is another
constexpr uint64_t kElsewhere = UINT64_MAX;
constexpr size_t kNone = SIZE_MAX;
constexpr size_t kLost = 32;  // requests in a row that nobody foresaw: this is another sequence

enum Class : int { General = 0, Small = 1, State = 2 };

struct Log {
  std::vector<tn_request> requests;
  uint64_t events = 0;
};

struct Plan {
  Heap *heap = nullptr;
  uint64_t base = 0, total = 0;
  std::vector<uint64_t> bytes, offsets;
  size_t next = 0;
  size_t back = kNone;  // where it went on before it last jumped ahead
  size_t lost = 0;      // requests since the last that came as foreseen
};

struct Waiting {  // a block that was freed while other streams used it
  Heap *heap;
  Block *block;
  std::vector<Event> events;
  bool recorded;  // within a capture no event can be recorded: then it is done once the capture is over
};

struct Pool {
  uint64_t used = 0;
  bool retired = false;
};

void add(tn_stat &stat, int64_t amount) {
  stat.current += amount;
  stat.peak = std::max(stat.peak, stat.current);
  (amount > 0 ? stat.gained : stat.lost) += std::abs(amount);
}

}  // namespace
}  // namespace tiers

using namespace tiers;

struct tn_core {
  using Key = std::tuple<uint64_t, Stream, int, int>;  // pool, stream, tier, class

  std::mutex mutex;
  std::unique_ptr<Primitives> primitives;
  Pages pages[kTiers];
  std::map<Key, Heap *> by_key;
  std::map<uint64_t, std::pair<std::unique_ptr<Heap>, uint64_t>> heaps;  // by base; with the pool
  std::unordered_map<uint64_t, Pool> pools;
  std::deque<Waiting> waiting;
  std::vector<Stream> readers;
  uint64_t alias = 0;
  int lifetime_class = TN_ANY;
  Log log[3];  // of the present period, the one before, and the one before that
  uint32_t period = 0;
  Plan plan;
  tn_stats stats{};

  tn_core(std::unique_ptr<Primitives> made, uint64_t hbm, uint64_t dram)
      : primitives(std::move(made)),
        pages{Pages(*primitives, kHbm, hbm / kPage), Pages(*primitives, kDram, dram / kPage)} {}

  Status heap(const Key &key, Heap **out);
  Heap *heap_of(uint64_t address);
  Block *planned(uint64_t bytes, Stream stream, Heap **out);
  Status find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap, Block **block);
  Status reclaim(uint64_t goal, Tier tier, const Heap *but);
  Status allocate(uint64_t requested, Stream stream, uint64_t pool, uint64_t *address);
  void took(Heap *heap, Block *block, uint64_t requested, uint64_t pool);
  Status free(uint64_t address);
  void release(Heap *heap, Block *block);
  void settle();
  Status wait(Heap *heap);
  Status surrender_all(const Heap *but);
  Status set_plan(Stream stream, uint64_t count, const uint64_t *bytes, const uint64_t *offsets, uint64_t size,
                  const uint32_t *order);
  uint64_t pool_of(const Heap *heap) const;
};

Status tn_core::heap(const Key &key, Heap **out) {
  auto found = by_key.find(key);
  if (found != by_key.end()) return *out = found->second, Status::Ok;
  uint64_t base = 0, bytes = kRange;
  Status status = primitives->reserve(bytes, &base);
  while (status != Status::Ok && bytes > kSmallestRange) status = primitives->reserve(bytes /= 2, &base);
  if (status != Status::Ok) return status;
  auto made = std::make_unique<Heap>(*primitives, pages, Tier(std::get<2>(key)), std::get<1>(key), base, bytes,
                                     std::get<3>(key) == State);
  *out = by_key[key] = made.get();
  heaps.emplace(base, std::make_pair(std::move(made), std::get<0>(key)));
  return Status::Ok;
}

Heap *tn_core::heap_of(uint64_t address) {
  auto after = heaps.upper_bound(address);
  if (after == heaps.begin()) return nullptr;
  Heap *heap = std::prev(after)->second.first.get();
  return heap->contains(address) ? heap : nullptr;
}

uint64_t tn_core::pool_of(const Heap *heap) const {
  return std::prev(heaps.upper_bound(heap->blocks().begin()->first))->second.second;
}

// The block that the plan has for this request; null where the sequence departs from it, or the place is taken.
Block *tn_core::planned(uint64_t bytes, Stream stream, Heap **out) {
  if (!plan.heap || plan.heap->stream() != stream) return nullptr;
  size_t found = plan.next, end = std::min(plan.bytes.size(), plan.next + kWindow);
  if (found < plan.bytes.size() && plan.bytes[found] == bytes) {
    plan.lost = 0;  // as foreseen
  } else if (plan.back != kNone && plan.bytes[plan.back] == bytes) {
    found = plan.back;  // what made it jump was one that the period before did not have
    plan.back = kNone;
    plan.lost = 0;
  } else {
    ++stats.departed;
    ++plan.lost;
    while (found < end && plan.bytes[found] != bytes) ++found;
    if (found >= end) return nullptr;
    // Perhaps some did not come; perhaps this one is new. The next will show. Until then it gets no place of theirs:
    // one that is new and stays would be in the way of all that are to come there.
    plan.back = plan.next;
    plan.next = found + 1;
    return nullptr;
  }
  plan.next = found + 1;
  if (plan.offsets[found] == kElsewhere) return nullptr;
  *out = plan.heap;
  Block *block = plan.heap->place(plan.base + plan.offsets[found], bytes);
  ++(block ? stats.planned : stats.misplaced);
  return block;
}

Status tn_core::find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap_out, Block **block) {
  int kind = bytes <= kSmall ? Small : General;
  if (lifetime_class == TN_STATE && pool == 0) kind = State;
  // Idle HBM is used, or taken from where it lies idle, before anything goes to DRAM.
  for (int tier = kHbm; tier < kTiers; ++tier) {
    if (tier == kDram && pages[kDram].limit() == 0) break;
    Status status = heap({pool, stream, tier, kind}, heap_out);
    if (status != Status::Ok) return status;
    Heap *place = *heap_out;
    // While the sequence is followed, what is free in its region is somebody's to come, and the last to be taken.
    Range region = place == plan.heap && plan.lost < kLost ? Range{plan.base, plan.base + plan.total} : Range{};
    if ((*block = place->fit(bytes, region))) return Status::Ok;
    for (bool reclaimed : {false, true}) {
      Heap::Growth growth;
      if (!place->growth(bytes, region, &growth)) return fail(Status::Full, "no addresses left in a heap");
      if (growth.pages <= pages[tier].available()) {
        status = place->grow(growth, bytes, block);
        // What is said to be available may still be refused: other processes use the device, too.
        if (status != Status::Full) return status;
      }
      if (reclaimed) break;
      settle();
      if ((*block = place->fit(bytes))) return Status::Ok;
      ++stats.retries;
      status = reclaim(growth.pages, Tier(tier), place);
      if (status != Status::Ok && status != Status::Full) return status;
    }
  }
  return fail(Status::Full, "every tier is full");
}

// Unmap idle pages of `tier` until `goal` are available, those of the heap `but` last: it would map them again.
Status tn_core::reclaim(uint64_t goal, Tier tier, const Heap *but) {
  for (bool itself : {false, true}) {
    for (auto &[base, entry] : heaps) {
      Heap *heap = entry.first.get();
      if (pages[tier].available() >= goal) return Status::Ok;
      if ((heap == but) != itself || heap->tier() != tier) continue;
      auto pool = pools.find(entry.second);
      if (entry.second != 0 && pool != pools.end() && !pool->second.retired) continue;
      if (!heap->idle_pages()) continue;
      Status status = wait(heap);
      if (status == Status::Invalid) continue;
      uint64_t got = 0;
      if (status == Status::Ok) status = heap->surrender(goal - pages[tier].available(), &got);
      if (status != Status::Ok) return status;
    }
  }
  return pages[tier].available() >= goal ? Status::Ok : fail(Status::Full, "no idle pages");
}

// Wait for the work on a heap's stream, and that of readers, so that its idle pages may be unmapped. `Invalid` while it
// is captured.
Status tn_core::wait(Heap *heap) {
  if (primitives->capturing(heap->stream())) return Status::Invalid;
  ++stats.waits;
  Status status = primitives->synchronize(heap->stream());
  for (Stream reader : readers)
    if (status == Status::Ok) status = primitives->synchronize(reader);
  return status;
}

Status tn_core::allocate(uint64_t requested, Stream stream, uint64_t pool, uint64_t *address) {
  uint64_t bytes = (std::max<uint64_t>(requested, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (!waiting.empty()) settle();
  Heap *heap = nullptr;
  Block *block = pool == 0 ? planned(bytes, stream, &heap) : nullptr;
  if (!block) {
    Status status = find(bytes, stream, pool, &heap, &block);
    if (status != Status::Ok) {
      stats.failures += status == Status::Full;
      return status;
    }
  }
  took(heap, block, requested, pool);
  *address = block->address;
  return Status::Ok;
}

void tn_core::took(Heap *heap, Block *block, uint64_t requested, uint64_t pool) {
  block->requested = requested;
  block->small = block->bytes <= kSmall;
  block->period = period;
  block->request = UINT32_MAX;
  if (pool == 0) {
    Log &now = log[0];
    block->request = now.requests.size();
    now.requests.push_back({block->bytes, heap->stream(), int64_t(now.events++), -1, lifetime_class});
  }
  pools[pool].used += block->bytes;
  for (int size : {int(TN_ALL), int(block->small ? TN_SMALL : TN_LARGE)}) {
    add(stats.allocations[size], 1);
    add(stats.allocated[size], block->bytes);
    add(stats.requested[size], requested);
    add(stats.active[size], block->bytes);
    add(stats.active_blocks[size], 1);
  }
}

Status tn_core::free(uint64_t address) {
  Heap *heap = heap_of(address);
  Block *block = heap ? heap->find(address) : nullptr;
  if (!block) return fail(Status::Invalid, "nothing in use begins at this address");
  uint64_t pool = pool_of(heap);
  pools[pool].used -= block->bytes;
  if (block->request != UINT32_MAX) {
    uint32_t ago = period - block->period;
    int64_t now = log[0].events++;
    if (ago < 2) log[ago].requests[block->request].death = ago ? int64_t(log[1].events) + now : now;
  }
  for (int size : {int(TN_ALL), int(block->small ? TN_SMALL : TN_LARGE)}) {
    add(stats.allocations[size], -1);
    add(stats.allocated[size], -int64_t(block->bytes));
    add(stats.requested[size], -int64_t(block->requested));
  }
  if (block->streams.empty()) {
    release(heap, block);
    return Status::Ok;
  }
  block->kind = Kind::Held;
  Waiting entry{heap, block, {}, true};
  for (Stream stream : block->streams) {
    Event event = 0;
    if (primitives->capturing(stream)) {
      entry.recorded = false;
      break;
    }
    Status status = primitives->record(stream, &event);
    if (status != Status::Ok) return status;  // it stays held: memory that may be in use is not handed out
    entry.events.push_back(event);
  }
  waiting.push_back(std::move(entry));
  return Status::Ok;
}

void tn_core::release(Heap *heap, Block *block) {
  for (int size : {int(TN_ALL), int(block->small ? TN_SMALL : TN_LARGE)}) {
    add(stats.active[size], -int64_t(block->bytes));
    add(stats.active_blocks[size], -1);
  }
  heap->free(block);
}

// Release blocks that no other stream uses any more.
void tn_core::settle() {
  for (auto entry = waiting.begin(); entry != waiting.end();) {
    if (!entry->recorded) {
      bool captured = false;
      for (Stream stream : entry->block->streams) captured = captured || primitives->capturing(stream);
      if (!captured) {
        entry->recorded = true;
        for (Stream stream : entry->block->streams) {
          Event event = 0;
          if (primitives->record(stream, &event) == Status::Ok) entry->events.push_back(event);
        }
      }
    }
    auto &events = entry->events;
    while (entry->recorded && !events.empty()) {
      bool passed = false;
      if (primitives->query(events.back(), &passed) != Status::Ok || !passed) break;
      events.pop_back();
    }
    if (entry->recorded && events.empty()) {
      release(entry->heap, entry->block);
      entry = waiting.erase(entry);
    } else {
      ++entry;
    }
  }
}

// Unmap all idle pages, but not those of the heap `but`.
Status tn_core::surrender_all(const Heap *but) {
  for (auto &[base, entry] : heaps) {
    Heap *heap = entry.first.get();
    auto pool = pools.find(entry.second);
    if (entry.second != 0 && pool != pools.end() && !pool->second.retired) continue;
    if (heap == but || !heap->idle_pages()) continue;
    Status status = wait(heap);
    if (status == Status::Invalid) continue;
    uint64_t got = 0;
    if (status == Status::Ok) status = heap->surrender(UINT64_MAX, &got);
    if (status != Status::Ok) return status;
  }
  return Status::Ok;
}

Status tn_core::set_plan(Stream stream, uint64_t count, const uint64_t *bytes, const uint64_t *offsets, uint64_t size,
                         const uint32_t *order) {
  plan = {};
  Heap *heap = nullptr;
  Status status = this->heap({0, stream, kHbm, General}, &heap);
  if (status == Status::Ok) status = wait(heap);
  if (status != Status::Ok) return status;
  settle();
  Plan next;
  next.heap = heap;
  next.total = size * kPage;
  next.bytes.assign(bytes, bytes + count);
  next.offsets.assign(offsets, offsets + count);
  next.next = log[0].requests.size();  // those that the period had before go on as they are
  if (!heap->find_run(next.total, &next.base)) return fail(Status::Full, "no addresses left for the region");
  // What lies idle outside of the region is what the region is made of.
  status = surrender_all(heap);
  if (status == Status::Ok) status = heap->surrender_outside(next.base, next.total);
  if (status != Status::Ok) return status;
  uint64_t in_hbm = std::min(size, pages[kHbm].available() + heap->on(kHbm, next.base, next.total) / kPage);
  if (size - in_hbm > pages[kDram].available() + heap->on(kDram, next.base, next.total) / kPage)
    return fail(Status::Full, "hbm and dram do not hold the region");
  std::vector<bool> where(size);
  for (uint64_t i = 0; i < in_hbm; ++i) where[order[i]] = true;
  status = heap->lay_out(next.base, where);
  for (Pages &tier : pages) {
    Status trimmed = tier.trim();
    if (status == Status::Ok) status = trimmed;
  }
  if (status == Status::Ok) plan = std::move(next);
  return status;
}

// ------------------------------------------------------------------------------------------- the C interface

namespace {

// Every entry takes the lock, and lets no exception of the standard library out: there is only one, for want of memory.
template <typename Body>
int enter(tn_core *core, Body body) {
  try {
    std::lock_guard<std::mutex> guard(core->mutex);
    return int(body());
  } catch (const std::exception &error) {
    return int(fail(Status::Driver, error.what()));
  }
}

}  // namespace

extern "C" {

int tn_open(const char *backend, int device, uint64_t hbm_limit, uint64_t dram_limit, tn_core **core) {
  try {
    std::unique_ptr<Primitives> primitives;
    Status status = std::string(backend) == "cuda"    ? open_cuda(device, &primitives)
                    : std::string(backend) == "memfd" ? open_memfd(&primitives)
                                                      : fail(Status::Invalid, "no such backend");
    if (status != Status::Ok) return int(status);
    auto made = std::make_unique<tn_core>(std::move(primitives), hbm_limit, dram_limit);
    status = made->primitives->reserve(kAliasPages * kPage, &made->alias);
    if (status == Status::Ok) *core = made.release();
    return int(status);
  } catch (const std::exception &error) {
    return int(fail(Status::Driver, error.what()));
  }
}

int tn_close(tn_core *core) {
  int result = enter(core, [&] {
    Status worst = Status::Ok;
    auto note = [&](Status status) { worst = worst == Status::Ok ? status : worst; };
    for (auto &[base, entry] : core->heaps) {
      note(core->primitives->synchronize(entry.first->stream()));
      note(entry.first->close());
    }
    for (Pages &tier : core->pages) note(tier.trim());
    note(core->primitives->unreserve(core->alias, kAliasPages * kPage));
    return worst;
  });
  delete core;
  return result;
}

const char *tn_last_error(void) { return last_error().c_str(); }

int tn_allocate(tn_core *core, uint64_t bytes, uint64_t stream, uint64_t pool, uint64_t *address) {
  return enter(core, [&] { return core->allocate(bytes, stream, pool, address); });
}

int tn_free(tn_core *core, uint64_t address) {
  return enter(core, [&] { return core->free(address); });
}

int tn_used_on(tn_core *core, uint64_t address, uint64_t stream) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->find(address) : nullptr;
    if (!block) return fail(Status::Invalid, "nothing in use begins at this address");
    auto &streams = block->streams;
    if (stream != heap->stream() && std::find(streams.begin(), streams.end(), stream) == streams.end())
      streams.push_back(stream);
    return Status::Ok;
  });
}

int tn_block_of(tn_core *core, uint64_t address, uint64_t *begin, uint64_t *bytes) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    if (!heap) return fail(Status::Invalid, "not an address of this core");
    const Block &block = std::prev(heap->blocks().upper_bound(address))->second;
    if (block.kind != Kind::Used) return fail(Status::Invalid, "nothing in use holds this address");
    *begin = block.address;
    *bytes = block.bytes;
    return Status::Ok;
  });
}

int tn_owns(tn_core *core, uint64_t address) {
  std::lock_guard<std::mutex> guard(core->mutex);
  return core->heap_of(address) != nullptr;
}

int tn_pool_retire(tn_core *core, uint64_t pool) {
  return enter(core, [&] { return core->pools[pool].retired = true, Status::Ok; });
}

uint64_t tn_pool_used(tn_core *core, uint64_t pool) {
  std::lock_guard<std::mutex> guard(core->mutex);
  auto found = core->pools.find(pool);
  return found == core->pools.end() ? 0 : found->second.used;
}

int tn_pool_clear(tn_core *core, uint64_t pool) {
  return enter(core, [&] {
    for (auto &[base, entry] : core->heaps) {
      if (entry.second != pool) continue;
      std::vector<uint64_t> used;
      for (auto &[address, block] : entry.first->blocks())
        if (block.kind == Kind::Used) used.push_back(address);
      for (uint64_t address : used) {
        Status status = core->free(address);
        if (status != Status::Ok) return status;
      }
    }
    return Status::Ok;
  });
}

int tn_allocate_at(tn_core *core, uint64_t address, uint64_t bytes, uint64_t requested) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->place(address, bytes) : nullptr;
    if (!block) return fail(Status::Invalid, "the place is taken");
    core->took(heap, block, requested, core->pool_of(heap));
    return Status::Ok;
  });
}

void tn_class(tn_core *core, int lifetime_class) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->lifetime_class = lifetime_class;
}

int tn_limit(tn_core *core, int tier, uint64_t bytes) {
  return enter(core, [&] {
    if (tier < 0 || tier >= kTiers) return fail(Status::Invalid, "no such tier");
    core->pages[tier].set_limit(bytes / kPage);
    return Status::Ok;
  });
}

int tn_reader(tn_core *core, uint64_t stream) {
  return enter(core, [&] {
    auto &readers = core->readers;
    if (std::find(readers.begin(), readers.end(), stream) == readers.end()) readers.push_back(stream);
    return Status::Ok;
  });
}

int tn_trim(tn_core *core) {
  return enter(core, [&] {
    core->settle();
    Status status = core->surrender_all(nullptr);
    for (Pages &tier : core->pages) {
      Status trimmed = tier.trim();
      status = status == Status::Ok ? trimmed : status;
    }
    return status;
  });
}

void tn_mark(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  std::swap(core->log[2], core->log[1]);
  std::swap(core->log[1], core->log[0]);
  core->log[0].requests.clear();
  core->log[0].events = 0;
  ++core->period;
  core->plan.next = 0;
  core->plan.back = kNone;
  core->plan.lost = 0;
}

uint64_t tn_log(tn_core *core, int ago, tn_request *out, uint64_t capacity, uint64_t *events) {
  std::lock_guard<std::mutex> guard(core->mutex);
  if (ago < 0 || ago > 1) return 0;
  const Log &log = core->log[1 + ago];
  uint64_t count = std::min<uint64_t>(capacity, log.requests.size());
  std::copy(log.requests.begin(), log.requests.begin() + count, out);
  *events = log.events;
  return log.requests.size();
}

int tn_plan(tn_core *core, uint64_t stream, uint64_t count, const uint64_t *bytes, const uint64_t *offsets,
            uint64_t pages, const uint32_t *order) {
  return enter(core, [&] { return core->set_plan(stream, count, bytes, offsets, pages, order); });
}

void tn_unplan(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->plan = {};
}

int tn_move(tn_core *core, uint64_t address, int tier) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->find(address) : nullptr;
    if (!block || tier < 0 || tier >= kTiers) return fail(Status::Invalid, "no such block, or no such tier");
    // Pages at its ends hold parts of other blocks, of other streams only through `used_on`.
    for (auto &[base, entry] : core->heaps) {
      Status status = core->wait(entry.first.get());
      if (status != Status::Ok) return status;
    }
    return heap->move(block->address, block->bytes, Tier(tier), core->alias, kAliasPages);
  });
}

uint64_t tn_on(tn_core *core, uint64_t address, int tier) {
  std::lock_guard<std::mutex> guard(core->mutex);
  Heap *heap = core->heap_of(address);
  Block *block = heap ? heap->find(address) : nullptr;
  return block ? heap->on(Tier(tier), block->address, block->bytes) : 0;
}

void tn_get_stats(tn_core *core, tn_stats *out) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  stats.hbm_bytes = core->pages[kHbm].made() * kPage;
  stats.hbm_peak = core->pages[kHbm].most() * kPage;
  stats.dram_bytes = core->pages[kDram].made() * kPage;
  stats.dram_peak = core->pages[kDram].most() * kPage;
  stats.hbm_limit = core->pages[kHbm].limit() * kPage;
  stats.dram_limit = core->pages[kDram].limit() * kPage;
  stats.maps = stats.unmaps = stats.idle_bytes = stats.largest_idle = 0;
  for (auto &[base, entry] : core->heaps) {
    stats.maps += entry.first->maps();
    stats.unmaps += entry.first->unmaps();
    for (auto &[address, block] : entry.first->blocks()) {
      if (block.kind != Kind::Free) continue;
      stats.idle_bytes += block.bytes;
      stats.largest_idle = std::max<int64_t>(stats.largest_idle, block.bytes);
    }
  }
  *out = stats;
}

void tn_reset_peaks(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  for (auto *group : {stats.allocations, stats.allocated, stats.requested, stats.active, stats.active_blocks})
    for (int size = 0; size < TN_SIZES; ++size) group[size].peak = group[size].current;
  for (Pages &tier : core->pages) tier.reset_most();
}

void tn_reset_totals(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  for (auto *group : {stats.allocations, stats.allocated, stats.requested, stats.active, stats.active_blocks})
    for (int size = 0; size < TN_SIZES; ++size) group[size].gained = group[size].lost = 0;
  stats.retries = stats.failures = 0;
}

uint64_t tn_blocks(tn_core *core, tn_block *out, uint64_t capacity) {
  std::lock_guard<std::mutex> guard(core->mutex);
  uint64_t count = 0;
  for (auto &[base, entry] : core->heaps) {
    uint64_t segment = 0;
    const Heap &heap = *entry.first;
    for (auto &[address, block] : heap.blocks()) {
      if (block.kind == Kind::Void) {
        segment = 0;
        continue;
      }
      segment = segment ? segment : address;
      if (count < capacity) {
        bool foreign = heap.on(heap.tier(), address, block.bytes) < block.bytes;
        out[count] = {address, block.bytes, block.requested, heap.stream(), entry.second, int32_t(block.kind),
                      foreign ? int32_t(kDram) : int32_t(heap.tier()), segment, heap.state()};
      }
      ++count;
    }
  }
  return count;
}

}  // extern "C"
