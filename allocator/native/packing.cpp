// Packing: where in a region each request of a period lies, when all lives are known. Pure; no state is kept.
//
// Requests of unlike sizes that come and go in turn do not pack well in any fixed order: tensors that leave early and
// groups that come back left up to a tenth of the region unused. A search over orders soon stood still, at 6% where a
// budget keeps the region full: a change early in an order moves all that comes after. So the search is over places.
// All are placed in the best of a few orders; then the region is made a little lower, again and again. What no longer
// fits is forced in where that which is in the way is the easiest to place elsewhere, which is learned: whoever finds
// no gap becomes dearer to push out. So Nagata and Braysy do with a vehicle less ("A powerful route minimization
// heuristic for the vehicle routing problem with time windows", 2009: the ejection pool and its penalty counters).
//
// The large ones are searched first: the small ones mostly fit in between. The random numbers are always the same, and
// work is counted, not time, so that a layout is the same on every machine.
#include "packing.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace tiers {

namespace {

constexpr uint64_t kLarge = 4096;        // one in so many of the most that is alive
constexpr uint64_t kNear = 2048;         // one in so many of the most that is alive: near enough, and the least step
constexpr uint64_t kStep = 10;           // one in so many of what is left to gain: how much lower the region is made
constexpr uint64_t kWork = 600'000'000;  // looks at what is placed, and moves of it, in one search: half a second
constexpr uint64_t kQuick = kWork / 12;  // where there is room for what was found by then
constexpr uint64_t kMove = 2'000;        // as much work is one move besides
constexpr uint64_t kPatience = 10'000;   // moves until one height is given up
constexpr double kDear = 32;             // how much dearer than the least the largest and longest is to push out

constexpr uint64_t kNowhere = UINT64_MAX;

// What makes a request come early in an order. Which does best differs from program to program.
using Weight = double (*)(const Life &);
constexpr Weight kWeights[] = {
    [](const Life &life) { return double(life.bytes); },
    [](const Life &life) { return double(life.bytes) * double(life.death - life.birth); },
    [](const Life &life) { return double(life.death - life.birth); },
};

struct Placed {
  uint64_t begin, end;
  int32_t birth, rest;  // the event at which it is made, and how many of a period's events it is not alive at
  uint32_t one;
};

// Who lies where, twice over: sorted by begin and by end. All who meet one are found by looking at all, which costs
// less than lists of who meets whom, and their sorting.
struct Places {
  std::vector<Placed> by_begin, by_end;
  std::vector<uint64_t> offsets;

  uint64_t top() const { return by_end.empty() ? 0 : by_end.back().end; }
};

class Search {
 public:
  // Lives by size, the largest first.
  Search(const std::vector<Life> &lives, int64_t events)
      : lives_(lives), events_(int32_t(events)), below_(lives.size()), above_(lives.size()) {
    places_.offsets.resize(lives.size());
    for (size_t i = 0; i < lives.size(); ++i) {
      double whole = std::max(double(lives[0].bytes) * double(events), 1.0);
      double share = double(lives[i].bytes) * double(length(i)) / whole;
      dear_.push_back(1 + uint64_t(kDear * std::sqrt(share)));
    }
    penalty_ = dear_;
  }

  // Place the first `count` in the best order by weight, then by size; of one size the longest-lived comes first.
  void start(size_t count, uint64_t goal) {
    Places best;
    for (Weight weight : kWeights) {
      for (bool tightest : {true, false}) {
        place_first(count, weight, tightest);
        if (best.by_end.empty() || places_.top() < best.top()) best = places_;
      }
      if (best.top() <= goal) break;
    }
    places_ = std::move(best);
  }

  // Lower the top of what is placed towards the goal, as far as the work allows that is left. Where it gets stuck, it
  // begins in turn from the first places, with nothing learned, and from the best: either alone reached less. Within
  // `room` a part of the work is enough.
  void lower(uint64_t goal, uint64_t least_step, uint64_t room) {
    Places first = places_, best = places_;
    bool anew = false;
    limit_ = best.top() > room ? kWork : kQuick;
    while (best.top() > goal && work_ < limit_) {
      uint64_t step = 1 + std::max((places_.top() - goal) / kStep, least_step);
      if (squeeze(places_.top() - std::min(step, places_.top() - goal))) {
        if (places_.top() < best.top()) best = places_;
        limit_ = best.top() > room ? kWork : kQuick;
        continue;
      }
      anew = !anew;
      places_ = anew ? first : best;
      if (anew) penalty_ = dear_;
    }
    places_ = std::move(best);
  }

  // Place one more.
  void add(uint32_t one) { put(one, gap(one, true, kNowhere)); }

  const std::vector<uint64_t> &offsets() const { return places_.offsets; }

 private:
  int64_t length(size_t one) const { return lives_[one].death - lives_[one].birth; }
  uint64_t end(uint32_t one) const { return places_.offsets[one] + lives_[one].bytes; }

  // Xorshift (Marsaglia, 2003).
  uint64_t random(uint64_t limit) {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return state_ % limit;
  }

  void place_first(size_t count, Weight weight, bool tightest) {
    std::vector<uint32_t> order(count);
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](uint32_t a, uint32_t b) {
      const Life &x = lives_[a], &y = lives_[b];
      if (weight(x) != weight(y)) return weight(x) > weight(y);
      if (x.bytes != y.bytes) return x.bytes > y.bytes;
      if (length(a) != length(b)) return length(a) > length(b);
      return x.birth < y.birth;
    });
    places_.by_begin.clear();
    places_.by_end.clear();
    for (uint32_t one : order) put(one, gap(one, tightest, kNowhere));
  }

  void put(uint32_t one, uint64_t offset) {
    places_.offsets[one] = offset;
    Placed placed{offset, end(one), int32_t(lives_[one].birth), events_ - int32_t(length(one)), one};
    auto begins = [](const Placed &a, const Placed &b) { return a.begin < b.begin; };
    auto ends = [](const Placed &a, const Placed &b) { return a.end < b.end; };
    auto &[by_begin, by_end, offsets] = places_;
    by_begin.insert(std::upper_bound(by_begin.begin(), by_begin.end(), placed, begins), placed);
    by_end.insert(std::upper_bound(by_end.begin(), by_end.end(), placed, ends), placed);
    work_ += by_begin.size();
  }

  void take(uint32_t one) {
    auto &[by_begin, by_end, offsets] = places_;
    auto begins = [](const Placed &a, uint64_t at) { return a.begin < at; };
    auto ends = [](const Placed &a, uint64_t at) { return a.end < at; };
    auto is = [&](const Placed &placed) { return placed.one == one; };
    auto first = std::lower_bound(by_begin.begin(), by_begin.end(), offsets[one], begins);
    by_begin.erase(std::find_if(first, by_begin.end(), is));
    first = std::lower_bound(by_end.begin(), by_end.end(), end(one), ends);
    by_end.erase(std::find_if(first, by_end.end(), is));
    work_ += by_begin.size();
  }

  // Which of `placed` are alive at an event when this one is: their number, and where they are found first in `found`.
  // Written without a branch, which would be mispredicted more often than not.
  size_t meeting(uint32_t one, const std::vector<Placed> &placed, std::vector<uint32_t> &found) {
    int32_t birth = int32_t(lives_[one].birth), alive = int32_t(length(one));
    size_t count = 0;
    for (uint32_t k = 0; k < placed.size(); ++k) {
      found[count] = k;
      int32_t later = placed[k].birth - birth;  // by how many events it is made later, on a circle
      later += later < 0 ? events_ : 0;
      count += (later < alive) | (later > placed[k].rest);
    }
    work_ += placed.size();
    return count;
  }

  // Begin of a gap that is free throughout its life and ends no higher than `top`, the smallest or the lowest.
  uint64_t gap(uint32_t one, bool tightest, uint64_t top) {
    below_count_ = meeting(one, places_.by_begin, below_);
    uint64_t bytes = lives_[one].bytes, best = kNowhere, size = UINT64_MAX, free = 0;
    for (size_t k = 0; k < below_count_; ++k) {
      const Placed &next = places_.by_begin[below_[k]];
      if (next.begin >= free + bytes && next.begin - free < size) {
        best = free;
        size = next.begin - free;
        if (!tightest) return best;
      }
      free = std::max(free, next.end);  // one that lies below may reach past later ones
    }
    return best == kNowhere && free + bytes <= top ? free : best;
  }

  // The offset at which the least penalty is in the way. It only grows on the way up but where one ends, so that only
  // the ends are looked at. To be asked right after `gap`, from where it is known who meets this one, by begin.
  uint64_t cheapest(uint32_t one, uint64_t top) {
    uint64_t bytes = lives_[one].bytes, cost = 0, least = UINT64_MAX, best = 0, ties = 0;
    size_t entered = 0, count = meeting(one, places_.by_end, above_);
    auto consider = [&](uint64_t offset) {
      for (; entered < below_count_; ++entered) {
        const Placed &next = places_.by_begin[below_[entered]];
        if (next.begin >= offset + bytes) break;
        cost += penalty_[next.one];
      }
      ties = cost < least ? 1 : ties + (cost == least);
      if (cost < least || (cost == least && random(ties) == 0)) best = offset;
      least = std::min(least, cost);
    };
    consider(0);
    for (size_t k = 0; k < count; ++k) {
      const Placed &last = places_.by_end[above_[k]];
      if (last.end + bytes > top) break;
      cost -= penalty_[last.one];
      consider(last.end);
    }
    return best;
  }

  // Place all below `top`; false if it takes too long, with some left out.
  bool squeeze(uint64_t top) {
    std::vector<uint32_t> out, pushed;
    auto &[by_begin, by_end, offsets] = places_;
    for (; !by_end.empty() && by_end.back().end > top; take(by_end.back().one)) out.push_back(by_end.back().one);
    for (uint64_t move = 0; !out.empty(); ++move) {
      if (move == kPatience || work_ >= limit_) return false;
      work_ += kMove;
      uint32_t one = out.back();
      out.pop_back();
      uint64_t offset = gap(one, false, top);
      if (offset == kNowhere) {
        penalty_[one] += dear_[one];
        offset = cheapest(one, top);
        pushed.clear();
        for (size_t k = 0; k < below_count_; ++k) {
          const Placed &other = by_begin[below_[k]];
          if (other.begin < offset + lives_[one].bytes && offset < other.end) pushed.push_back(other.one);
        }
        // The dearest is placed anew first, before what was left out earlier. The number settles what is equal.
        std::sort(pushed.begin(), pushed.end(), [&](uint32_t a, uint32_t b) {
          return penalty_[a] != penalty_[b] ? penalty_[a] < penalty_[b] : a > b;
        });
        for (uint32_t other : pushed) take(other);
        out.insert(out.end(), pushed.begin(), pushed.end());
      }
      put(one, offset);
      stir(top);
    }
    return true;
  }

  // Move one of them to another gap, if there is any, so that the same are not pushed to and fro.
  void stir(uint64_t top) {
    uint32_t one = places_.by_begin[random(places_.by_begin.size())].one;
    uint64_t before = places_.offsets[one];
    take(one);
    uint64_t offset = gap(one, random(2), top);
    put(one, offset == kNowhere ? before : offset);
  }

  const std::vector<Life> &lives_;
  const int32_t events_;
  Places places_;
  std::vector<uint64_t> dear_, penalty_;
  std::vector<uint32_t> below_, above_;  // who meets the one that is asked about, as places in the two orders
  size_t below_count_ = 0;
  uint64_t work_ = 0, limit_ = kWork;  // of the starts, too, which is little
  uint64_t state_ = 0x9E3779B97F4A7C15;
};

}  // namespace

uint64_t most_alive(const std::vector<Life> &lives, int64_t events) {
  std::vector<int64_t> change(size_t(events) + 1, 0);
  for (const Life &life : lives) {
    change[life.birth] += int64_t(life.bytes);
    change[std::min(life.death, events)] -= int64_t(life.bytes);
    if (life.death <= events) continue;
    change[0] += int64_t(life.bytes);
    change[life.death - events] -= int64_t(life.bytes);
  }
  int64_t alive = 0, most = 0;
  for (int64_t one : change) most = std::max(most, alive += one);
  return uint64_t(most);
}

std::vector<uint64_t> pack(const std::vector<Life> &lives, int64_t events, uint64_t room) {
  uint64_t most = most_alive(lives, events), goal = most + most / kNear;
  std::vector<uint32_t> by_size(lives.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](uint32_t a, uint32_t b) { return lives[a].bytes > lives[b].bytes; });
  std::vector<Life> sorted;
  for (uint32_t one : by_size) sorted.push_back(lives[one]);
  size_t large = 0;
  while (large < sorted.size() && sorted[large].bytes * kLarge >= most) ++large;

  const std::vector<Life> small(sorted.begin() + large, sorted.end());

  Search search(sorted, events);
  search.start(large, goal);
  search.lower(goal, most / kNear, room - std::min(room, most_alive(small, events)));
  for (size_t k = large; k < sorted.size(); ++k) search.add(uint32_t(k));
  search.lower(goal, most / kNear, room);  // where the small ones are many
  std::vector<uint64_t> offsets(lives.size());
  for (size_t k = 0; k < sorted.size(); ++k) offsets[by_size[k]] = search.offsets()[k];
  return offsets;
}

}  // namespace tiers
