// Values of a record, by storage and state.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace {

// A storage in one state, as one word.
uint64_t key_of(uint32_t storage, int32_t state) { return uint64_t(storage) << 32 | uint32_t(state); }

// Numbers by such words.
class Keys {
 public:
  static constexpr int32_t kNone = -1;

  int32_t find(uint64_t key) const {
    if (slots_.empty()) return kNone;
    for (size_t slot = place(key);; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot].first == key) return slots_[slot].second;
      if (slots_[slot].first == kFree) return kNone;
    }
  }

  void put(uint64_t key, int32_t value) {
    if (2 * (size_ + 1) > slots_.size()) grow();
    size_t slot = place(key);
    while (slots_[slot].first != kFree && slots_[slot].first != key) slot = (slot + 1) & (slots_.size() - 1);
    size_ += slots_[slot].first == kFree;
    slots_[slot] = {key, value};
  }

  void reserve(size_t count) {
    while (2 * (count + 1) > slots_.size()) grow();
  }

 private:
  static constexpr uint64_t kFree = UINT64_MAX;  // no storage has that number

  size_t place(uint64_t key) const { return key * 0x9E3779B97F4A7C15ull >> 32 & (slots_.size() - 1); }

  void grow() {
    std::vector<std::pair<uint64_t, int32_t>> before(std::max<size_t>(64, 2 * slots_.size()), {kFree, 0});
    before.swap(slots_);
    size_ = 0;
    for (const auto &[key, value] : before)
      if (key != kFree) put(key, value);
  }

  std::vector<std::pair<uint64_t, int32_t>> slots_;
  size_t size_ = 0;
};

}  // namespace
