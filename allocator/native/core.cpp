// The core's decisions: what a request counts for, when a free takes effect, and when idle pages are unmapped.
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <set>
#include <utility>

#include "state.h"

using namespace tiers;

namespace {

constexpr uint64_t kLargest = uint64_t{1} << 60;  // request; more would not count up to whole pages
// Addresses of a heap. There are some 2^47 for the whole process, so after so many heaps the next ones get half as
// many, down to a quarter; requests that are small, and private pools then, make do with less: more than any GPU has.
constexpr uint64_t kRange = uint64_t{1} << 40, kSmallRange = uint64_t{1} << 38;
constexpr size_t kHalve = 8, kHalvings = 2;
constexpr uint64_t kSmallestRange = uint64_t{1} << 34;  // where the driver has no more
constexpr char kCapturing[] = "a stream is being captured into a graph";

void add(tn_stat &stat, int64_t amount) {
  stat.current += amount;
  stat.peak = std::max(stat.peak, stat.current);
  (amount > 0 ? stat.gained : stat.lost) += std::abs(amount);
}

}  // namespace

thread_local int tiers::off_sequence = 0;

uint64_t tiers::forks() {
  static std::atomic<uint64_t> count{0};
  static const int watched = pthread_atfork(nullptr, nullptr, [] { ++count; });
  (void)watched;  // fails for want of memory only
  return count.load(std::memory_order_relaxed);
}

Status tn_core::heap(const Key &key, Heap **out) {
  auto found = by_key.find(key);
  if (found != by_key.end()) return *out = found->second, Status::Ok;
  auto [pool, stream, tier, kind] = key;
  uint64_t base = 0, bytes = kRange >> std::min(heaps.size() / kHalve, kHalvings);
  if (kind == Small || (pool != 0 && heaps.size() >= kHalve)) bytes = kSmallRange;
  Status status = primitives->reserve(bytes, &base);
  while (status != Status::Ok && bytes > kSmallestRange) status = primitives->reserve(bytes /= 2, &base);
  if (status != Status::Ok) {  // those of pools that are gone may be had
    status = unmap_all_idle(nullptr);
    if (status == Status::Ok) status = primitives->reserve(bytes, &base);
  }
  if (status != Status::Ok) return status;
  auto made = std::make_unique<Heap>(*primitives, pages, Tier(tier), stream, pool, kind == State, base, bytes);
  *out = by_key[key] = made.get();
  if (layout.heap && pool == 0 && tier == kHbm && stream != layout.heap->stream()) layout.others.push_back(made.get());
  heaps.emplace(base, std::move(made));
  std::lock_guard<std::mutex> guard(places_mutex);
  places[base] = base + bytes;
  return Status::Ok;
}

// Without the core's lock, which another thread may hold while it waits for a stream. Work on that stream may itself
// wait for what another GPU's thread is about to launch; and that thread may first free a block, and ask every core
// whose it is.
bool tn_core::owns(uint64_t address) {
  std::lock_guard<std::mutex> guard(places_mutex);
  auto after = places.upper_bound(address);
  return after != places.begin() && address < std::prev(after)->second;
}

Heap *tn_core::heap_of(uint64_t address) {
  auto after = heaps.upper_bound(address);
  if (after == heaps.begin()) return nullptr;
  Heap *heap = std::prev(after)->second.get();
  return heap->contains(address) ? heap : nullptr;
}

bool tn_core::is_retired(uint64_t pool) const {
  auto found = pools.find(pool);
  return found != pools.end() && found->second.retired;
}

// Unmap up to `count` idle pages of a heap that lie in `tier` and outside of `but`; none of a private pool, or while
// they may be in use.
Status tn_core::unmap_idle(Heap &heap, Tier tier, uint64_t count, Range but) {
  bool is_private = heap.pool() != 0;
  if (!count || (is_private && !is_retired(heap.pool())) || !heap.idle_pages(tier, but)) return Status::Ok;
  // A graph may still be replaying, on any stream, and what reads its memory asked nobody for any.
  Status status = is_private ? wait_for_all() : wait_for_readers(heap.stream());
  if (status == Status::Busy) return Status::Ok;
  return status == Status::Ok ? heap.unmap_idle(tier, count, but) : status;
}

// Wait for the work on a stream. `Busy` while it is captured.
Status tn_core::wait(Stream stream) {
  if (primitives->capturing(stream)) return fail(Status::Busy, kCapturing);
  ++stats.waits;
  return primitives->synchronize(stream);
}

// The same for all streams, those included from which no memory was asked for.
Status tn_core::wait_for_all() {
  bool capturing = captures > 0;
  for (auto &[base, heap] : heaps) capturing = capturing || primitives->capturing(heap->stream());
  if (capturing) return fail(Status::Busy, kCapturing);
  ++stats.waits;
  return primitives->synchronize_all();
}

// Wait for whoever may read what lies idle on a stream's pages, so that these may be unmapped: a stream that is done
// with a block may free it while another reads it, as long as it waits for that one before it asks for more, as FSDP2
// does with gradients. Those are the streams with heaps, and those that `tn_used_on` named. Others are not waited for,
// as NCCL's: a message under way there may take what the peer does after one of ours that this thread is yet to send.
Status tn_core::wait_for_readers(Stream stream) {
  if (primitives->capturing(stream)) return fail(Status::Busy, kCapturing);
  std::set<Stream> readers;
  for (auto &[base, heap] : heaps) readers.insert(heap->stream());
  for (auto &[user, queue] : use_events) readers.insert(user);
  ++stats.waits;
  for (Stream reader : readers) {
    if (primitives->capturing(reader)) continue;
    Status status = primitives->synchronize(reader);
    if (status != Status::Ok) return status;
  }
  return Status::Ok;
}

Status tn_core::allocate(uint64_t requested, Stream stream, uint64_t pool, uint64_t *address) {
  if (requested > kLargest) return fail(Status::Full, kFull);
  uint64_t bytes = (std::max<uint64_t>(requested, 1) + kAlignment - 1) / kAlignment * kAlignment;
  if (!pending_frees.empty()) process_events();
  Heap *heap = nullptr;
  Block *block = pool == 0 && !off_sequence ? laid_out(bytes, stream, &heap) : nullptr;
  if (!block) {
    Status status = find(bytes, stream, pool, &heap, &block);
    if (status != Status::Ok) return status;
  }
  record_allocation(heap, block, requested);
  *address = block->address;
  return Status::Ok;
}

void tn_core::record_allocation(Heap *heap, Block *block, uint64_t requested) {
  block->demoted = block->spilled = 0;
  if (heap->state() && heap->tier() == kDram)
    demote(block, block->bytes);
  else if (pages[kDram].made())
    spill(block, heap->on(kDram, block->address, block->bytes));
  block->requested = requested;
  block->small = block->bytes <= kSmall;
  block->period = period;
  block->request = UINT32_MAX;
  if (heap->pool() == 0 && !off_sequence && log[0].requests.size() <= kLongest) {
    Log &now = log[0];
    block->request = now.requests.size();
    now.note({block->bytes, heap->stream(), int64_t(now.events++), -1, lifetime_class});
  }
  pools[heap->pool()].used += block->bytes;
  for (int size : {int(TN_ALL), int(block->small ? TN_SMALL : TN_LARGE)}) {
    add(stats.allocations[size], 1);
    add(stats.allocated[size], block->bytes);
    add(stats.requested[size], requested);
    add(stats.active[size], block->bytes);
    add(stats.active_blocks[size], 1);
  }
  for (int64_t now = needed(); int64_t &peak : peaks) peak = std::max(peak, now);
}

Status tn_core::free(uint64_t address) {
  Heap *heap = heap_of(address);
  Block *block = heap ? heap->find(address) : nullptr;
  if (!block) return fail(Status::Invalid, "nothing in use begins at this address");
  pools[heap->pool()].used -= block->bytes;
  demote(block, 0);
  spill(block, 0);
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
  heap->defer_free(block);
  pending_frees.push_back({heap, block});
  record_uses(std::prev(pending_frees.end()));
  return Status::Ok;
}

// Record an event on each stream that uses a freed block besides its own. Streams on which none can be recorded, as
// they are being captured or the driver refuses, stay on the block's list: its free is pending until one can.
void tn_core::record_uses(std::list<PendingFree>::iterator entry) {
  auto recorded = [&](Stream stream) {
    Event event = 0;
    if (primitives->capturing(stream) || primitives->record(stream, &event) != Status::Ok) return false;
    use_events[stream].push_back({event, entry});
    ++entry->uses;
    return true;
  };
  auto &left = entry->block->streams;
  left.erase(std::remove_if(left.begin(), left.end(), recorded), left.end());
  unrecorded += !left.empty();
}

void tn_core::release(Heap *heap, Block *block) {
  for (int size : {int(TN_ALL), int(block->small ? TN_SMALL : TN_LARGE)}) {
    add(stats.active[size], -int64_t(block->bytes));
    add(stats.active_blocks[size], -1);
  }
  const bool in_both = std::exchange(block->in_both, false);
  heap->free(block);
  // Or the next requests would lie there in DRAM, though HBM has room again.
  const bool holds_layout = heap == layout.heap;
  if (in_both) unmap_idle(*heap, kDram, UINT64_MAX, holds_layout ? layout.region() : Range{});
}

// Complete the pending frees whose events have all been passed. Every request comes here while frees are pending, and
// to query an event takes the driver a microsecond: of each stream only the first that is not passed is queried, as
// none behind it can be.
void tn_core::process_events() {
  if (unrecorded) {
    unrecorded = 0;
    for (auto entry = pending_frees.begin(); entry != pending_frees.end(); ++entry)
      if (!entry->block->streams.empty()) record_uses(entry);
  }
  for (auto next = use_events.begin(); next != use_events.end();) {
    auto here = next++;
    auto &queue = here->second;
    bool over = true;
    while (!queue.empty() && primitives->query(queue.front().event, &over) == Status::Ok && over) {
      auto entry = queue.front().of;
      queue.pop_front();
      if (--entry->uses || !entry->block->streams.empty()) continue;
      release(entry->heap, entry->block);
      pending_frees.erase(entry);
    }
    if (queue.empty()) use_events.erase(here);
  }
}

// Wait for the streams that use blocks of `tier` which their own streams are through with, and release those; whether
// there were any. PyTorch does so before it gives up, too.
bool tn_core::wait_for_users(Tier tier) {
  std::vector<Stream> users;
  for (auto &[stream, queue] : use_events)
    if (std::any_of(queue.begin(), queue.end(), [&](const UseEvent &use) { return use.of->heap->tier() == tier; }))
      users.push_back(stream);
  bool waited = false;
  for (Stream stream : users) waited |= wait(stream) == Status::Ok;
  if (waited) process_events();
  return waited;
}

// Unmap all idle pages, but not those of the heap `but`; and close the heaps of retired pools that have none left.
Status tn_core::unmap_all_idle(const Heap *but) {
  for (auto next = heaps.begin(); next != heaps.end();) {
    auto here = next++;
    Heap &heap = *here->second;
    if (&heap == but) continue;
    for (Tier tier : {kHbm, kDram}) {
      Status status = unmap_idle(heap, tier, UINT64_MAX);
      if (status != Status::Ok) return status;
    }
    if (heap.mapped() || !is_retired(heap.pool())) continue;
    maps += heap.maps();
    unmaps += heap.unmaps();
    {
      std::lock_guard<std::mutex> guard(places_mutex);
      places.erase(here->first);  // before the addresses may be somebody else's
    }
    Status status = heap.close();
    by_key.erase(std::find_if(by_key.begin(), by_key.end(), [&](auto &entry) { return entry.second == &heap; }));
    heaps.erase(here);
    if (status != Status::Ok) return status;
  }
  return Status::Ok;
}

// The same of all heaps, but not of as many pages of HBM as `keep` leaves room for in the heap that has most of them:
// to unmap a page and to map it anew takes the driver 80 us, and thousands would be when plans change. A few are
// unmapped all the same: small blocks take theirs one by one, and each would wait.
Status tn_core::unmap_idle_beyond(uint64_t keep) {
  Heap *most = nullptr;
  for (auto &[base, heap] : heaps)
    if (heap->pool() == 0 && heap->tier() == kHbm && !heap->state() &&
        (!most || heap->idle_pages(kHbm) > most->idle_pages(kHbm)))
      most = heap.get();
  Status status = unmap_all_idle(most);
  if (status != Status::Ok || !most) return status;
  uint64_t made = pages[kHbm].made(), goal = made - std::min(made, keep) + kLoose / page;
  status = unmap_idle(*most, kHbm, goal - std::min(goal, pages[kHbm].idle()));
  return status == Status::Ok ? unmap_idle(*most, kDram, UINT64_MAX) : status;
}
