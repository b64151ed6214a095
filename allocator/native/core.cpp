// The core's decisions: where a request goes, and what is given back when.
#include <algorithm>

#include "state.h"

using namespace tiers;

namespace {

constexpr uint64_t kSmall = uint64_t{1} << 20;          // requests up to here share pages apart from larger ones
constexpr uint64_t kRange = uint64_t{1} << 40;          // addresses of a heap; they cost nothing
constexpr uint64_t kSmallestRange = uint64_t{1} << 34;  // where the address space is short

void add(tn_stat &stat, int64_t amount) {
  stat.current += amount;
  stat.peak = std::max(stat.peak, stat.current);
  (amount > 0 ? stat.gained : stat.lost) += std::abs(amount);
}

}  // namespace

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

Status tn_core::find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap_out, Block **block) {
  int kind = bytes <= kSmall ? Small : General;
  if (lifetime_class == TN_STATE && pool == 0) kind = State;
  // Idle HBM is used, or taken from where it lies idle, before anything goes to DRAM.
  for (int tier = kHbm; tier < kTiers; ++tier) {
    if (tier == kDram && pages[kDram].limit() == 0) break;
    Status status = heap({pool, stream, tier, kind}, heap_out);
    if (status != Status::Ok) return status;
    Heap *place = *heap_out;
    // While a sequence is followed, what is free in its region is somebody's to come, and the last to be taken.
    Range region = place == plan.heap && plan.followed() ? Range{plan.base, plan.base + plan.total} : Range{};
    if ((*block = place->fit(bytes, region))) return Status::Ok;
    for (bool reclaimed : {false, true}) {
      Heap::Growth growth;
      if (!place->growth(bytes, region, &growth)) {  // no addresses but those of the region
        settle();
        if ((*block = place->fit(bytes))) return Status::Ok;
        break;
      }
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

// Wait for the work on a heap's stream, so that its idle pages may be unmapped. `Invalid` while it is captured.
Status tn_core::wait(Heap *heap) {
  if (primitives->capturing(heap->stream())) return Status::Invalid;
  ++stats.waits;
  return primitives->synchronize(heap->stream());
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
  lap = std::max(lap, stats.allocated[TN_ALL].current);
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
      // One that could not be recorded is tried again: memory that may be in use is not handed out.
      auto &left = entry->block->streams;
      while (!captured && !left.empty()) {
        Event event = 0;
        if (primitives->record(left.back(), &event) != Status::Ok) break;
        entry->events.push_back(event);
        left.pop_back();
      }
      entry->recorded = left.empty();
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
