// The physical pages of one tier: a limit, how many exist, and which of them are idle (mapped nowhere).
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
  // Make one page and release it, to see whether the driver can; the limit does not count.
  Status probe();
  // Pages that were unmapped are idle from now on.
  void add_idle(const std::vector<Handle> &handles) { idle_.insert(idle_.end(), handles.begin(), handles.end()); }
  // Release idle pages to the system, as long as there are more than `keep` altogether.
  Status trim(uint64_t keep = 0);

  // How many more can be taken without unmapping any.
  uint64_t available() const { return idle_.size() + (limit_ > made_ ? limit_ - made_ : 0); }
  // Those of them that are there already.
  uint64_t idle() const { return idle_.size(); }
  uint64_t made() const { return made_; }
  uint64_t peak() const { return peak_; }
  void reset_peak() { peak_ = made_; }
  uint64_t limit() const { return limit_; }
  // What is there already stays, and may be taken again until it is released to the system.
  void set_limit(uint64_t pages) { limit_ = pages; }

 private:
  Primitives &primitives_;
  Tier tier_;
  uint64_t limit_;
  uint64_t made_ = 0, peak_ = 0;
  std::vector<Handle> idle_;
};

}  // namespace tiers
