// Finds closures: goes back from the tensor that is wanted, operator by operator, to values that somebody promises to
// have, and to those that no operator of the record made. Then it goes forward once more, and gives each value a slot:
// views share their base's, and what is written in place takes over the slot before, unless somebody else still needs
// it.
#pragma once

#include "closure.h"
#include "states.h"
#include "unset.h"

namespace {

// One search, for one tensor. Under the recorder's lock.
class Search {
 public:
  // `words`: the tensor's form.
  Search(const Record &record, const States &states, const Stops &stops, const Use &wanted, const Words &words)
      : record_(record), states_(states), stops_(stops), wanted_(wanted), made_(std::make_unique<Closure>()) {
    made_->words = words;
  }

  // Whether a tensor of this form can be made again.
  static bool wants(const Words &words) {
    const Form form{words.data()};
    return !words.empty() && form.code() == kTensor && form.can_be_made();
  }

  // Null if there is none.
  std::unique_ptr<Closure> operator()() {
    try {
      walk();
      made_->calls.reserve(order_.size());
      made_->wires.reserve(4 * order_.size());
      last_.reserve(2 * order_.size());
      keys_.reserve(2 * order_.size());
      for (size_t each = order_.size(); each-- > 0;) forward(order_[each]);
      finish();
    } catch (const Refused &) {
      return nullptr;
    }
    return std::move(made_);
  }

 private:
  // There is no closure.
  struct Refused {};

  bool is_promised(uint64_t key) const { return stops_.keys.find(key) != Keys::kNone; }

  // Whether a storage is one that is refilled, and full, as it was then.
  bool is_refilled(const Use &use) const {
    if (stops_.refilled.empty()) return false;
    const Stored &stored = record_.storages[use.storage];
    if (stored.state != use.state || !stops_.refilled.count(stored.storage._unsafe_get_target())) return false;
    const auto storage = stored.storage.lock();
    return storage && storage->nbytes() > 0;
  }

  // ------------------------------------------------------------------------------------- back

  void mark(int32_t number) {
    uint64_t &word = marks_[uint32_t(number) / 64];
    const uint64_t bit = 1ull << (number & 63);
    marked_ += !(word & bit);
    word |= bit;
  }

  void walk() {
    // No operator of the record is known to have made it, or it is among what is there.
    if (wanted_.state < 0 || is_promised(key_of(wanted_.storage, wanted_.state))) throw Refused();
    marks_.assign(size_t(wanted_.state) / 64 + 1, 0);
    mark(wanted_.state);
    for (size_t word = marks_.size(); marked_ > 0;) {
      --word;
      while (marks_[word]) {
        const int bit = 63 - __builtin_clzll(marks_[word]);
        marks_[word] &= ~(1ull << bit);
        --marked_;
        visit(uint32_t(word * 64 + size_t(bit)));
      }
    }
  }

  void visit(uint32_t number) {
    const Call &call = record_.calls[number];
    const Recipe &recipe = recipe_of(*call.step);
    if (!recipe.can_run || call.waits) throw Refused();
    for (size_t input = 0; input < recipe.inputs.size(); ++input) {
      const Recipe::Input &of = recipe.inputs[input];
      if (!of.stored || of.access >= Access::kCovers) continue;
      const Use &use = record_.uses[call.inputs + input];
      if (use.state >= int32_t(number)) throw Refused();  // somebody else wrote while it ran
      if (use.state >= 0 && !is_promised(key_of(use.storage, use.state)) && !is_refilled(use)) mark(use.state);
    }
    order_.push_back(number);
  }

  // ------------------------------------------------------------------------------------- forward

  int32_t new_slot() {
    last_.push_back(0);
    return made_->slots++;
  }

  void forward(uint32_t number) {
    const Call &call = record_.calls[number];
    const Recipe &recipe = *call.step->recipe;
    Closure &made = *made_;
    Called called{call.step, &recipe, number};
    called.fresh = uint32_t(made.fresh.size());
    called.writes = uint32_t(made.writes.size());
    called.grad = call.grad;
    place(call, recipe);
    note_draw(recipe, called);
    called.inputs = uint32_t(made.wires.size());
    const Use *uses = &record_.uses[call.inputs];
    for (size_t input = 0; input < recipe.inputs.size(); ++input) {
      const Recipe::Input &of = recipe.inputs[input];
      made.wires.push_back(of.stored ? see(of, uses[input], Form{&call.step->words[of.word]}) : -1);
      touch(made.wires.back());
    }
    if (recipe.writes) write(recipe, uses, &made.wires[called.inputs], number);
    called.outputs = uint32_t(made.wires.size());
    for (size_t output = 0; output < recipe.outputs.size(); ++output) {
      const Recipe::Output &of = recipe.outputs[output];
      const int32_t slot = of.stored ? make(of, record_.uses[call.outputs + output], number) : -1;
      made.wires.push_back(slot);
      touch(slot);
    }
    if (recipe.writes && !unset_.empty()) note_written(call, recipe, number);
    called.fresh_count = uint32_t(made.fresh.size()) - called.fresh;
    called.writes_count = uint32_t(made.writes.size()) - called.writes;
    made.calls.push_back(std::move(called));
  }

  void touch(int32_t slot) {
    if (slot >= 0) last_[size_t(slot)] = uint32_t(made_->calls.size());
  }

  // All of a closure ran on one stream of one device, and with the same settings.
  void place(const Call &call, const Recipe &recipe) {
    if (made_->settings == kAnySettings) made_->settings = call.settings;
    if (call.settings != kAnySettings && call.settings != made_->settings) throw Refused();
    if (recipe.device.is_cpu()) {
      if (made_->threads == 0) made_->threads = call.threads;
      if (made_->threads != call.threads) throw Refused();
      return;
    }
    if (made_->device.is_cpu()) {
      made_->device = recipe.device;
      made_->stream = call.stream;
    }
    if (made_->device != recipe.device || made_->stream != call.stream) throw Refused();
  }

  void note_draw(const Recipe &recipe, Called &called) {
    if (!recipe.random) return;
    const auto found = std::lower_bound(record_.drawn.begin(), record_.drawn.end(), called.number,
                                        [](const Drawn &each, uint32_t number) { return each.call < number; });
    if (found == record_.drawn.end() || found->call != called.number) throw Refused();  // nobody knows what it drew
    called.drawn = int32_t(made_->drawn.size());
    made_->drawn.push_back(*found);
  }

  // An input: it is in a slot already, or it is a leaf, or it does not matter.
  int32_t see(const Recipe::Input &input, const Use &use, const Form &form) {
    const uint64_t key = key_of(use.storage, use.state);
    int32_t slot = keys_.find(key);
    if (slot < 0 && input.access >= Access::kCovers) {
      slot = new_slot();
      made_->fresh.push_back({slot, form.nbytes(), form.device()});
      unset_.begin(slot);
      keys_.put(key, slot);
      return slot;
    }
    if (slot < 0) {
      slot = new_slot();
      keys_.put(key, slot);
      met_.push_back({slot, use, form.nbytes(), form.device()});
    }
    const bool reads = input.access == Access::kReads || input.access == Access::kUpdates;
    if (reads && !unset_.empty() && !unset_.is_written(slot, form)) throw Refused();  // it read what nobody wrote
    return slot;
  }

  // Gives a new slot to each storage that it writes, and to all of its inputs that lie there.
  void write(const Recipe &recipe, const Use *uses, int32_t *slots, uint32_t number) {
    for (size_t input = 0; input < recipe.inputs.size(); ++input) {
      const Recipe::Input &of = recipe.inputs[input];
      const uint64_t after = key_of(uses[input].storage, int32_t(number));
      if (!of.stored || !of.written || keys_.find(after) >= 0) continue;
      const int32_t from = slots[input], to = new_slot();
      unset_.pass(from, to);
      touch(to);
      keys_.put(after, to);
      made_->writes.push_back({from, to, false});
      for (size_t other = 0; other < recipe.inputs.size(); ++other) {
        if (uses[other].storage != uses[input].storage || !recipe.inputs[other].stored) continue;
        if (uses[other].state != uses[input].state) throw Refused();  // somebody else wrote while it ran
        slots[other] = to;
      }
    }
  }

  int32_t make(const Recipe::Output &output, const Use &use, uint32_t number) {
    const uint64_t key = key_of(use.storage, use.state);
    int32_t slot = keys_.find(key);
    if (slot >= 0) return slot;
    if (use.state != int32_t(number)) throw Refused();  // it returned what nobody gave to it
    slot = new_slot();
    keys_.put(key, slot);
    if (output.unset) unset_.begin(slot);
    return slot;
  }

  void note_written(const Call &call, const Recipe &recipe, uint32_t number) {
    for (size_t input = 0; input < recipe.inputs.size(); ++input) {
      const Recipe::Input &of = recipe.inputs[input];
      if (!of.stored) continue;
      const int32_t slot = keys_.find(key_of(record_.uses[call.inputs + input].storage, int32_t(number)));
      if (of.access == Access::kCovers) unset_.write_all(slot);
      if (of.access == Access::kOverwrites) unset_.write(slot, Form{&call.step->words[of.word]});
    }
  }

  // ------------------------------------------------------------------------------------- at the end

  void finish();
  void hold(Leaf &leaf, Watched &watched) const;

  struct Met {
    int32_t slot;
    Use use;
    uint64_t nbytes;
    c10::Device device;
  };

  const Record &record_;
  const States &states_;
  const Stops &stops_;
  const Use wanted_;
  std::unique_ptr<Closure> made_;
  Keys keys_;
  std::vector<uint64_t> marks_;
  size_t marked_ = 0;
  std::vector<uint32_t> order_;  // from the newest
  std::vector<uint32_t> last_;   // for each slot, the last call that needs it
  std::vector<Met> met_;         // leaves
  Unset unset_;
};

void Search::finish() {
  Closure &made = *made_;
  const int32_t target = keys_.find(key_of(wanted_.storage, wanted_.state));
  if (target < 0) throw Refused();  // what made it does not return it
  if (!unset_.is_written(target, Form{made.words.data()})) throw Refused();
  made.targets.push_back({target, 0});
  std::vector<bool> is_leaf(size_t(made.slots));
  for (const Met &each : met_) is_leaf[size_t(each.slot)] = true;
  for (size_t call = 0; call < made.calls.size(); ++call)
    for (uint32_t each = 0; each < made.calls[call].writes_count; ++each) {
      Write &write = made.writes[made.calls[call].writes + each];
      const auto from = size_t(write.from);
      write.copies = is_leaf[from] || last_[from] > call;
    }
  for (int32_t slot = 0; slot < made.slots; ++slot)
    if (slot != target) ++made.calls[last_[size_t(slot)]].freed_count;
  uint32_t freed = 0;
  for (Called &call : made.calls) {
    call.freed = freed += call.freed_count;  // where they end; counted down below
  }
  made.freed.resize(freed);
  for (int32_t slot = 0; slot < made.slots; ++slot)
    if (slot != target) made.freed[--made.calls[last_[size_t(slot)]].freed] = slot;
  made.leaves.reserve(met_.size());
  made.leaf_slots.reserve(met_.size());
  made.watch = std::make_shared<Watch>(met_.size());
  for (const Met &each : met_) {
    Leaf &leaf = made.leaves.emplace_back(Leaf{each.use, each.nbytes, each.device});
    made.leaf_slots.push_back(each.slot);
    hold(leaf, made.watch->all[made.leaves.size() - 1]);
  }
  made.signature = signature_of(made);
}

// Products, for one, are computed otherwise where memory begins otherwise. More than allocators promise is chance.
uint64_t alignment_of(const c10::StorageImpl &storage) {
  const uintptr_t most = storage.device().is_cpu() ? 64 : 256, all = uintptr_t(storage.data()) | most;
  return all & -all;
}

// Finds the storage of a leaf, if it is as it was.
void Search::hold(Leaf &leaf, Watched &watched) const {
  const Stored &stored = record_.storages[leaf.use.storage];
  leaf.storage = stored.storage.lock();
  if (is_refilled(leaf.use) && leaf.storage->nbytes() == leaf.nbytes) {
    leaf.refilled = true;
    return;
  }
  bool is_same = leaf.storage && stored.state == leaf.use.state && leaf.storage->nbytes() == leaf.nbytes &&
                 states_.is_settled(leaf.use.storage) && watched.counts(stored.counter, stored.seen);
  if (is_same && stored.has_others)
    for (const Other &other : record_.storages.others.at(leaf.use.storage))
      is_same = is_same && watched.counts(other.counter, other.seen);
  if (is_same) {
    watched.storage = stored.storage;
    leaf.alignment = alignment_of(*leaf.storage);
    return;
  }
  leaf.storage.reset();
  if (is_promised(key_of(leaf.use.storage, leaf.use.state))) {
    leaf.not_on = stored.storage;
    return;
  }
  const auto constant = record_.constants.find(leaf.use.storage);
  if (constant != record_.constants.end() && constant->second.state == leaf.use.state) {
    leaf.constant = constant->second.bytes;
    if (leaf.constant.size() == leaf.nbytes) return;
  }
  throw Refused();  // it is gone, or was written since
}

}  // namespace
