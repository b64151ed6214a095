// What a core counts beyond its statistics: how much HBM is needed, and how much of what is in use was demoted.
#include <algorithm>

#include "state.h"

using namespace tiers;

// Bytes of HBM that are in use, or would be if there was room, and those that lie idle on other streams than the
// layout's: what is mapped there is of no use to it. Nor is what those have freed and others are still reading.
int64_t tn_core::needed() const {
  int64_t bytes = stats.allocated[TN_ALL].current - demoted;
  for (const Heap *other : layout.others) bytes += other->idle();
  return bytes;
}

uint64_t tn_core::state_in_hbm() const {
  uint64_t bytes = 0;
  for (auto &[base, heap] : heaps)
    if (heap->state() && heap->tier() == kHbm) bytes += heap->mapped() - heap->idle();
  return bytes;
}

// So many bytes of a block lie in DRAM, and need no HBM.
void tn_core::demote(Block *block, uint64_t bytes) {
  demoted += int64_t(bytes) - int64_t(block->demoted);
  block->demoted = bytes;
}

// So many bytes of a block lie in DRAM, as there was no room in HBM.
void tn_core::spill(Block *block, uint64_t bytes) {
  spilled += int64_t(bytes) - int64_t(block->spilled);
  block->spilled = bytes;
  spilled_most = std::max(spilled_most, spilled);
}
