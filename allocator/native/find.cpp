// Where a request goes: a free block, pages that are mapped for it, or idle ones that are taken from elsewhere.
#include <algorithm>
#include <chrono>
#include <utility>

#include "state.h"

using namespace tiers;

namespace {

constexpr uint64_t kSpare = 256;                 // one page in so many, for those that are in use only in part
constexpr uint64_t kLarge = uint64_t{64} << 20;  // bytes of a request of which a part may lie in DRAM

// Adds for how long it lives.
class Delay {
 public:
  explicit Delay(std::atomic<int64_t> &total) : total_(total) {}
  ~Delay() { total_ += std::chrono::nanoseconds(std::chrono::steady_clock::now() - begin_).count(); }
  Delay(const Delay &) = delete;
  Delay &operator=(const Delay &) = delete;

 private:
  std::atomic<int64_t> &total_;
  const std::chrono::steady_clock::time_point begin_ = std::chrono::steady_clock::now();
};

}  // namespace

Status tn_core::find(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap_out, Block **block) {
  if (no_growth) {
    no_growth -= !off_sequence;
    Status status = find_without_growth(bytes, stream, pool, heap_out, block);
    if (status != Status::Full) return status;
  }
  bool is_state = lifetime_class == TN_STATE && pool == 0 && !off_sequence;
  if (is_state && pages[kDram].limit() && state_in_hbm() + bytes > most_state) {
    Status status = find_in(kDram, bytes, stream, pool, false, heap_out, block);
    if (status != Status::Full) return status;
  }
  // Idle pages of HBM are used, wherever they are mapped, before anything goes to DRAM.
  Status status = find_in(kHbm, bytes, stream, pool, true, heap_out, block);
  if (status != Status::Full || pages[kDram].limit() == 0 || off_sequence) return status;
  if (bytes >= kLarge && pool == 0 && !is_state && !(layout.heap && layout.followed())) {
    status = find_in_both(bytes, stream, heap_out, block);
    if (status != Status::Full) return status;
  }
  return find_in(kDram, bytes, stream, pool, true, heap_out, block);
}

// A large request for most of which HBM has room: what is missing there lies in DRAM, and no more. Not beside a layout,
// of which pages lie idle for requests to come.
Status tn_core::find_in_both(uint64_t bytes, Stream stream, Heap **heap_out, Block **block) {
  Status status = heap({0, stream, kHbm, General}, heap_out);
  if (status != Status::Ok) return status;
  Heap::Growth growth;
  if (!(*heap_out)->growth(bytes, {}, &growth)) return fail(Status::Full, kFull);
  const Range place{growth.begin, growth.begin + bytes};
  const uint64_t there = within_reach(kHbm, *heap_out, place);
  if (4 * there < 3 * growth.pages) return fail(Status::Full, kFull);
  const Delay delay(delayed);
  status = reclaim(there, kHbm, *heap_out, place);
  if (status != Status::Ok) return status;
  *block = (*heap_out)->place(growth.begin, bytes);
  if (!*block) return fail(Status::Full, kFull);
  (*block)->in_both = true;
  return Status::Ok;
}

// As `find`, in HBM alone, without growth beyond what is expected to be alive at most: idle pages are mapped anew
// first.
Status tn_core::find_without_growth(uint64_t bytes, Stream stream, uint64_t pool, Heap **heap_out, Block **block) {
  // A block that fits needs no page, so the idle pages of all heaps need not be counted.
  Status status = fit_in(kHbm, bytes, stream, pool, heap_out, block);
  if (status != Status::Ok || *block) return status;
  uint64_t most = std::max(uint64_t(stats.active[TN_ALL].current) + bytes, expected) / page;
  most -= std::min(most, pages[kDram].made());
  uint64_t idle = pages[kHbm].idle();
  for (auto &[base, heap] : heaps) {
    if (heap->pool() == 0 || is_retired(heap->pool()))
      idle += heap->idle_pages(kHbm);
    else
      most += heap->idle_pages(kHbm);  // nobody takes a private pool's
  }
  struct Lowered {
    Pages &tier;
    uint64_t limit;
    int64_t &retries, before;
    ~Lowered() {
      tier.set_limit(limit);
      retries = before;  // HBM is not full
    }
  } lowered{pages[kHbm], pages[kHbm].limit(), stats.retries, stats.retries};
  // Pages that blocks use in part cannot be unmapped. Where all idle pages are too few, the difference is made, and no
  // more than that.
  uint64_t needed = (bytes + page - 1) / page;
  uint64_t least = pages[kHbm].made() + needed - std::min(needed, idle);
  pages[kHbm].set_limit(std::min(lowered.limit, std::max(most + most / kSpare, least)));
  return find_in(kHbm, bytes, stream, pool, false, heap_out, block);
}

// The region of the layout, if it lies in this heap and the program follows it: what is free there is for requests to
// come, and the last that others take.
Range tn_core::reserved_range(const Heap *heap) const {
  bool is_reserved = heap == layout.heap && layout.followed() && !off_sequence;
  return is_reserved ? layout.region() : Range{};
}

// The heap that the request belongs to, and a free block in it; null if there is none.
Status tn_core::fit_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, Heap **heap_out, Block **block) {
  int kind = bytes <= kSmall ? Small : General;
  if (lifetime_class == TN_STATE && pool == 0) kind = State;
  Status status = heap({pool, stream, tier, kind}, heap_out);
  *block = status == Status::Ok ? (*heap_out)->fit(bytes, reserved_range(*heap_out)) : nullptr;
  return status;
}

// If `patient`, it also waits for the streams that pending frees wait for, before the tier counts as full.
Status tn_core::find_in(Tier tier, uint64_t bytes, Stream stream, uint64_t pool, bool patient, Heap **heap_out,
                        Block **block) {
  Status status = fit_in(tier, bytes, stream, pool, heap_out, block);
  if (status != Status::Ok || *block) return status;
  const Delay delay(delayed);
  Heap *place = *heap_out;
  const Range region = reserved_range(place);
  uint64_t refused = 0;  // pages that the limit allows and the device does not give: other processes use it, too
  bool sparing = false;  // the place with the fewest pages to map covers idle ones that it would need elsewhere
  for (bool reclaimed = false;; reclaimed = true) {
    Heap::Growth growth;
    if (!place->growth(bytes, region, &growth, sparing)) {  // no addresses but those of the region
      process_events();
      return (*block = place->fit(bytes)) ? Status::Ok : fail(Status::Full, kFull);
    }
    if (growth.pages <= pages[tier].available()) {
      status = place->grow(growth, bytes, block);
      if (status != Status::Full) return status;
      refused = pages[tier].available() - pages[tier].idle();
    }
    if (!reclaimed) {
      process_events();
      if ((*block = place->fit(bytes))) return Status::Ok;
      stats.retries += !off_sequence;
    }
    // The device may refuse more of them: then there is more to reclaim.
    uint64_t idle = pages[tier].idle();
    status = reclaim(growth.pages + refused, tier, place, {growth.begin, growth.begin + bytes});
    if (status != Status::Ok && status != Status::Full) return status;
    if (pages[tier].idle() != idle) continue;
    if (!std::exchange(sparing, true)) continue;
    if (!patient || !wait_for_users(tier)) return fail(Status::Full, kFull);
    patient = false;
    if ((*block = place->fit(bytes))) return Status::Ok;
  }
}

// The pages of `tier` that are available, or could be: those that lie idle, but none of `place` in the heap `in`.
uint64_t tn_core::within_reach(Tier tier, const Heap *in, Range place) const {
  bool is_reserved = off_sequence && in == layout.heap;
  uint64_t there = pages[tier].available();
  for (auto &[base, heap] : heaps)
    if ((heap->pool() == 0 || is_retired(heap->pool())) && !(is_reserved && heap.get() == in))
      there += heap->idle_pages(tier, heap.get() == in ? place : Range{});
  return there;
}

// Unmap idle pages of `tier` until `goal` are available, those of the heap `but` last: it would map them again. None of
// `place` in it, where the request is to lie: for each of those one more would be missing there. If there are not
// enough of them, none is unmapped: the request goes to DRAM, and the next ones would have to map them anew.
Status tn_core::reclaim(uint64_t goal, Tier tier, const Heap *but, Range place) {
  // A request off the sequence must not take pages out of the layout's region: what comes there next would lie in DRAM,
  // unnoticed.
  bool is_reserved = off_sequence && but == layout.heap;
  auto missing = [&] { return goal - std::min(goal, pages[tier].available()); };
  if (within_reach(tier, but, place) < goal) return fail(Status::Full, "no idle pages");
  const uint64_t before = layout.heap ? layout.heap->unmaps() : 0;
  for (bool itself : {false, true}) {
    if (itself && is_reserved) break;
    for (auto &[base, heap] : heaps) {
      if ((heap.get() == but) != itself || !missing()) continue;
      // While much lies idle in one heap, requests for small blocks elsewhere would wait for each page by itself.
      const uint64_t count = no_growth && !itself ? std::max(missing(), kLoose / page) : missing();
      Status status = unmap_idle(*heap, tier, count, itself ? place : Range{});
      if (status != Status::Ok) return status;
    }
  }
  if (!off_sequence && layout.heap && layout.heap->unmaps() != before) count_displaced();
  return missing() ? fail(Status::Full, "no idle pages") : Status::Ok;
}
