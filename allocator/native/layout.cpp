// The layout of a period: which request of which sequence this one is, where it lies, and the region for all of them.
#include <algorithm>
#include <numeric>

#include "state.h"

using namespace tiers;

namespace {

constexpr size_t kWindow = 64;  // requests to look ahead for the one that came: more and the sequence is another
constexpr uint64_t kElsewhere = UINT64_MAX;

}  // namespace

// Which request of the present sequence this is, by its bytes, or by its number where these vary; `kNone` where the
// program departs from the sequence.
size_t tn_core::follow(uint64_t bytes) {
  const Sequence *all = &layout.sequences[layout.present];
  size_t found = layout.next;
  if (!all->has(found, bytes) && layout.back != kNone && all->has_surely(layout.back, bytes)) {
    found = layout.back;  // it jumped ahead for a request that is new in this period: go on where it left
    layout.back = kNone;
  }
  // Or this period is another sequence, which is the same up to here.
  for (size_t other = 0; !all->has(found, bytes) && other < layout.sequences.size(); ++other) {
    const Sequence &its = layout.sequences[other];
    if (found > all->bytes.size() || !its.has(found, bytes)) continue;
    if (!std::equal(its.bytes.begin(), its.bytes.begin() + found, all->bytes.begin())) continue;
    layout.present = other;
    layout.back = kNone;  // it is a position in the other sequence
    all = &its;
  }
  if (all->has(found, bytes)) {
    layout.next = found + 1;
    layout.lost -= layout.lost > 0;
    return found;
  }
  ++stats.mispredicted;
  layout.lost = std::min(layout.lost + 1, 2 * kLost);
  if (found < all->bytes.size() && all->varies(found)) {
    layout.next = found + 1;  // it is larger than it ever was, which the next layout knows
    return kNone;
  }
  size_t end = std::min(all->bytes.size(), layout.next + kWindow);
  while (found < end && !all->has_surely(found, bytes)) ++found;
  if (found < end) {
    // Either some requests did not come, or this one is new; the next request will show. Until then this one gets no
    // place in the layout: if it is new and stays alive, it would be in the way of all that are to come there.
    layout.back = layout.next;
    layout.next = found + 1;
  }
  return kNone;
}

// The block at the address that the layout has for this request; null where the sequence departs from it, or the place
// is taken.
Block *tn_core::laid_out(uint64_t bytes, Stream stream, Heap **out) {
  if (!layout.heap || layout.heap->stream() != stream) return nullptr;
  size_t request = follow(bytes);
  if (request == kNone || !layout.followed()) return nullptr;
  uint64_t offset = layout.sequences[layout.present].offsets[request];
  if (offset == kElsewhere) return nullptr;
  *out = layout.heap;
  Block *block = layout.heap->place(layout.base + offset, bytes, [this](uint64_t missing) { make_room(missing); });
  ++(block ? stats.planned : stats.misplaced);
  return block;
}

// Other requests have just taken pages of the layout's region. What that lacks now is mapped again when its turn comes:
// HBM has no room for both. Steps of such a program map and unmap hundreds of pages each, and wait for the device.
void tn_core::count_displaced() {
  spilled_most = std::max(spilled_most, spilled + int64_t(layout.heap->unmapped(layout.base, layout.total)));
}

// Unmap idle pages, of other heaps and beside the region, for those that a place of the region lacks, whoever took
// them. Without, the request would lie beside its place, where it takes further pages from the region, or in DRAM, and
// so would those of all later periods: nothing departs from the layout.
void tn_core::make_room(uint64_t missing) {
  for (auto &[base, heap] : heaps) {
    const uint64_t available = pages[kHbm].available();
    if (missing <= available) return;
    if (heap.get() != layout.heap && unmap_idle(*heap, kHbm, missing - available) != Status::Ok) return;
  }
  if (missing <= pages[kHbm].available() || layout.heap->idle_outside(layout.region()).empty()) return;
  if (wait_for_readers(layout.heap->stream()) == Status::Ok)
    layout.heap->unmap_idle_outside(layout.region());  // what this does not free lies in DRAM
}

// `costs` has an entry for each page of the region.
Status tn_core::set_layout(Stream stream, std::vector<Sequence> sequences, const std::vector<int64_t> &costs) {
  const uint64_t size = costs.size();
  for (const Sequence &one : sequences)
    for (size_t k = 0; k < one.bytes.size(); ++k)
      if (one.offsets[k] != kElsewhere && (one.bytes[k] > size * page || one.offsets[k] > size * page - one.bytes[k]))
        return fail(Status::Invalid, "a request reaches past its region");
  Heap *heap = nullptr;
  Status status = this->heap({0, stream, kHbm, General}, &heap);
  if (status == Status::Ok) status = wait_for_readers(stream);
  if (status != Status::Ok) return status;
  layout = {};
  no_growth = 0;
  process_events();
  Layout next;
  next.heap = heap;
  next.total = size * page;
  next.sequences = std::move(sequences);
  for (auto &[base, other] : heaps)
    if (other->pool() == 0 && other->tier() == kHbm && other->stream() != stream) next.others.push_back(other.get());
  // What the present period has requested so far stays where it is.
  next.next = std::count_if(log[0].requests.begin(), log[0].requests.end(),
                            [&](const tn_request &request) { return request.stream == stream; });
  if (!heap->find_run(next.total, &next.base)) return fail(Status::Full, "no addresses left for the region");
  // Idle pages outside of the region are unmapped, to be mapped in it.
  status = unmap_all_idle(heap);
  if (status == Status::Ok) status = heap->unmap_idle_outside(next.region());
  if (status != Status::Ok) return status;
  uint64_t there = heap->on(kHbm, next.base, next.total) / page;
  // Pages are made before the decision what lies where: within the limit, the device may still refuse some, as other
  // processes use it, too.
  uint64_t in_hbm = there + pages[kHbm].make_idle(size - there);
  if (size - in_hbm > pages[kDram].available() + heap->on(kDram, next.base, next.total) / page)
    return fail(Status::Full, "hbm and dram do not hold the region");
  std::vector<uint64_t> dearest(size);
  std::iota(dearest.begin(), dearest.end(), 0);
  std::stable_sort(dearest.begin(), dearest.end(), [&](uint64_t a, uint64_t b) { return costs[a] > costs[b]; });
  std::vector<bool> where(size);
  for (uint64_t i = 0; i < in_hbm; ++i) where[dearest[i]] = true;
  status = heap->lay_out(next.base, where);
  for (Pages &tier : pages) {
    Status trimmed = tier.trim();
    if (status == Status::Ok) status = trimmed;
  }
  if (status == Status::Ok) layout = std::move(next);
  return status;
}
