// Packing: where in a region each request of a period lies, when all lives are known. Pure; no state is kept.
//
// Requests of unlike sizes that come and go in turn do not pack well in any fixed order: tensors that leave early and
// groups that come back left up to a tenth of the region unused. So the order is searched. Requests are placed one
// after the other, each in a gap that is free throughout its life; whoever reaches past what is alive at most is moved
// to an earlier place in the order, at random, and what comes after is placed anew. Only the large ones are searched:
// the small ones fit in between. The random numbers are always the same, and work is counted, not time, so that a
// layout is the same on every machine.
#include "packing.h"

#include <algorithm>
#include <numeric>

namespace tiers {

namespace {

constexpr uint64_t kLarge = 4096;         // one in so many of the most that is alive
constexpr uint64_t kWork = 10'000'000;    // neighbours looked at in one search: some tenths of a second at most
constexpr uint64_t kStep = 2'000;          // as much work is one step of the search besides
constexpr uint64_t kWorse = 200;          // one in so many of the goal: how much worse an order may be, at first
constexpr uint64_t kNear = 2048;          // one in so many of the most that is alive: near enough

// What makes a request come early in an order. Which does best differs from program to program.
using Weight = double (*)(const Life &);
constexpr Weight kWeights[] = {
    [](const Life &life) { return double(life.bytes); },
    [](const Life &life) { return double(life.bytes) * double(life.death - life.birth); },
    [](const Life &life) { return double(life.death - life.birth); },
};

// Whether two lives on a circle of `events` meet.
bool meet(const Life &a, const Life &b, int64_t events) {
  for (int64_t turn : {int64_t(0), -events, events})
    if (a.birth + turn < b.death && b.birth < a.death + turn) return true;
  return false;
}

class Order {
 public:
  Order(const std::vector<Life> &lives, int64_t events) : lives_(lives), meets_(lives.size()) {
    for (uint32_t i = 0; i < lives.size(); ++i)
      for (uint32_t j = 0; j < i; ++j)
        if (meet(lives[i], lives[j], events)) {
          meets_[i].push_back(j);
          meets_[j].push_back(i);
        }
  }

  // Place all in the order of weight, then of size; of one size the longest-lived comes first.
  void start(Weight weight, bool tightest) {
    tightest_ = tightest;
    work_ = 0;
    order_.resize(lives_.size());
    std::iota(order_.begin(), order_.end(), 0);
    auto before = [&](uint32_t a, uint32_t b) {
      const Life &x = lives_[a], &y = lives_[b];
      if (weight(x) != weight(y)) return weight(x) > weight(y);
      if (x.bytes != y.bytes) return x.bytes > y.bytes;
      if (x.death - x.birth != y.death - y.birth) return x.death - x.birth > y.death - y.birth;
      return x.birth < y.birth;
    };
    std::stable_sort(order_.begin(), order_.end(), before);
    rank_.resize(order_.size());
    offsets_.assign(order_.size(), 0);
    place_from(0, UINT64_MAX);
  }

  void search(uint64_t goal) {
    uint64_t random = 0x9E3779B97F4A7C15;
    auto below = [&](uint64_t limit) {
      random ^= random << 13;
      random ^= random >> 7;
      random ^= random << 17;
      return random % limit;
    };
    std::vector<uint32_t> past;
    uint64_t best = top_;
    std::vector<uint64_t> best_offsets = offsets_;
    while (best > goal && work_ < kWork) {
      past.clear();
      for (uint32_t k = 1; k < order_.size(); ++k)
        if (offsets_[order_[k]] + lives_[order_[k]].bytes > goal) past.push_back(k);
      if (past.empty()) break;  // the first alone is larger
      uint32_t from = past[below(past.size())], to = uint32_t(below(from));
      std::vector<uint32_t> order = order_;
      std::vector<uint64_t> offsets = offsets_;
      uint64_t top = top_;
      std::rotate(order_.begin() + to, order_.begin() + from, order_.begin() + from + 1);
      work_ += kStep;
      // Worse orders are gone through, too, less and less of them (threshold accepting; Dueck and Scheuer, 1990).
      uint64_t left = work_ < kWork ? kWork - work_ : 0, allowed = goal / kWorse / 1024 * (left / (kWork / 1024));
      if (place_from(to, std::max(best + allowed, top))) {
        if (top_ < best) best = top_, best_offsets = offsets_;
        continue;
      }
      order_ = std::move(order);
      offsets_ = std::move(offsets);
      top_ = top;
      for (uint32_t k = to; k <= from; ++k) rank_[order_[k]] = k;
    }
    offsets_ = best_offsets;
    top_ = best;
  }

  uint64_t top() const { return top_; }
  const std::vector<uint64_t> &offsets() const { return offsets_; }

 private:
  // Place all from place `first` of the order on; false, and no further, as soon as one reaches past `most`.
  bool place_from(uint32_t first, uint64_t most) {
    for (uint32_t k = first; k < order_.size(); ++k) rank_[order_[k]] = k;
    for (uint32_t k = first; k < order_.size(); ++k) {
      uint32_t one = order_[k];
      around_.clear();
      for (uint32_t other : meets_[one])
        if (rank_[other] < k) around_.push_back({offsets_[other], offsets_[other] + lives_[other].bytes});
      work_ += meets_[one].size();
      offsets_[one] = gap(around_, lives_[one].bytes, tightest_);
      if (offsets_[one] + lives_[one].bytes > most) return false;
    }
    top_ = 0;
    for (uint32_t one = 0; one < offsets_.size(); ++one) top_ = std::max(top_, offsets_[one] + lives_[one].bytes);
    return true;
  }

  const std::vector<Life> &lives_;
  std::vector<std::vector<uint32_t>> meets_;  // who is alive at a time when this one is
  std::vector<uint32_t> order_, rank_;
  std::vector<uint64_t> offsets_;
  std::vector<Span> around_;
  bool tightest_ = false;
  uint64_t top_ = 0, work_ = 0;
};

}  // namespace

uint64_t gap(std::vector<Span> &taken, uint64_t bytes, bool tightest) {
  std::sort(taken.begin(), taken.end());
  uint64_t best = UINT64_MAX, size = UINT64_MAX, end = 0;
  for (const Span &span : taken) {
    // Spans below may reach past later ones: what counts is the furthest end so far.
    if (span.first >= end + bytes && span.first - end < size) {
      best = end;
      size = span.first - end;
      if (!tightest) return best;
    }
    end = std::max(end, span.second);
  }
  return best == UINT64_MAX ? end : best;
}

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

std::vector<uint64_t> pack(const std::vector<Life> &lives, int64_t events) {
  uint64_t most = most_alive(lives, events);
  std::vector<uint32_t> by_size(lives.size());
  std::iota(by_size.begin(), by_size.end(), 0);
  std::stable_sort(by_size.begin(), by_size.end(),
                   [&](uint32_t a, uint32_t b) { return lives[a].bytes > lives[b].bytes; });
  size_t large = 0;
  while (large < by_size.size() && lives[by_size[large]].bytes * kLarge >= most) ++large;

  std::vector<Life> searched;
  for (size_t k = 0; k < large; ++k) searched.push_back(lives[by_size[k]]);
  uint64_t goal = most + most / kNear;
  Order order(searched, events);
  uint64_t best = UINT64_MAX;
  std::vector<uint64_t> placed;
  for (Weight weight : kWeights) {
    order.start(weight, true);
    uint64_t tight = order.top();
    order.start(weight, false);
    if (tight <= order.top()) order.start(weight, true);
    order.search(goal);
    if (order.top() < best) best = order.top(), placed = order.offsets();
    if (best <= goal) break;
  }

  std::vector<uint64_t> offsets(lives.size(), 0);
  for (size_t k = 0; k < large; ++k) offsets[by_size[k]] = placed[k];
  std::vector<Span> around;
  for (size_t k = large; k < by_size.size(); ++k) {
    const Life &one = lives[by_size[k]];
    around.clear();
    for (size_t other = 0; other < k; ++other)
      if (meet(one, lives[by_size[other]], events))
        around.push_back({offsets[by_size[other]], offsets[by_size[other]] + lives[by_size[other]].bytes});
    offsets[by_size[k]] = gap(around, one.bytes, true);
  }
  return offsets;
}

}  // namespace tiers
