// Physical pages of one tier: how many there may be, how many there are, and those that are mapped nowhere.
#pragma once

#include <vector>

#include "driver/primitives.h"

namespace tiers {

class Pages {
 public:
  Pages(Primitives &primitives, Tier tier, uint64_t limit) : primitives_(primitives), tier_(tier), limit_(limit) {}

  // Take `count` pages, idle ones first. `Full` beyond the limit, or when the tier has none left; then none are taken.
  Status take(uint64_t count, std::vector<Handle> *out);
  // Have at least `count` idle, as far as the limit and the device allow: how many there are then, at most `count`.
  uint64_t make_idle(uint64_t count);
  // Make one page and give it back; the limit does not count.
  Status probe();
  // Put pages that are not mapped any more among the idle.
  void give(const std::vector<Handle> &handles) { idle_.insert(idle_.end(), handles.begin(), handles.end()); }
  // Give idle pages back to the system, as long as there are more than `keep` altogether.
  Status trim(uint64_t keep = 0);

  // How many more can be taken without asking anybody to give up theirs.
  uint64_t available() const { return idle_.size() + (limit_ > made_ ? limit_ - made_ : 0); }
  // Those of them that are there already.
  uint64_t idle() const { return idle_.size(); }
  uint64_t made() const { return made_; }
  uint64_t most() const { return most_; }
  void reset_most() { most_ = made_; }
  uint64_t limit() const { return limit_; }
  // What is there already stays, and may be taken again until it is given back to the system.
  void set_limit(uint64_t pages) { limit_ = pages; }

 private:
  Primitives &primitives_;
  Tier tier_;
  uint64_t limit_;
  uint64_t made_ = 0, most_ = 0;
  std::vector<Handle> idle_;
};

}  // namespace tiers
