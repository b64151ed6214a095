// Packing: gives requests of known lifetimes offsets in a region; see packing.cpp.
#pragma once

#include <cstdint>
#include <vector>

namespace tiers {

// A request: its bytes, and the events of a period at which it is made and freed. A death past the period's events
// lies in the next one.
struct Life {
  uint64_t bytes = 0;
  int64_t birth = 0, death = 0;
};

// The most bytes that are alive at once: what no layout can do without.
uint64_t most_alive(const std::vector<Life> &lives, int64_t events);

// An offset for each, so that no two overlap in both time and space. None may live longer than a period. What takes no
// more than `room` is soon good enough.
std::vector<uint64_t> pack(const std::vector<Life> &lives, int64_t events, uint64_t room);

}  // namespace tiers
