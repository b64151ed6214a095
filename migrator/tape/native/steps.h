// The steps of all records, each kept once. A record mostly repeats those of the one before, in the same order.
#pragma once

#include "forms.h"

namespace {

// Under the recorder's lock.
class Steps {
 public:
  void begin() { cursor_ = 0; }

  // What the next call is, if the record goes on as the one before; none after its end.
  const Step *likely() const { return cursor_ < before_.size() ? before_[cursor_].get() : nullptr; }

  // How many steps the record before had.
  size_t before() const { return before_.size(); }

  // The step of a call that is about to run: one with the same inputs, or a new one.
  StepPointer find(Scratch &scratch, const Effects &effects, const torch::jit::Stack &stack) {
    const Words &words = scratch.words;
    const auto has_these = [&](const Step &step) {
      return step.inputs == words.size() && std::memcmp(step.words.data(), words.data(), words.size() * 8) == 0;
    };
    if (cursor_ < before_.size() && has_these(*before_[cursor_])) {
      return before_[cursor_++];
    }
    const uint64_t hash = hash_of(words, words.size());
    const auto [first, last] = all_.equal_range(hash);
    for (auto it = first; it != last; ++it) {
      if (!has_these(*it->second)) continue;
      constexpr size_t kAhead = 32;  // operators left out or put in, after which the rest is the same again
      for (size_t at = cursor_; at < std::min(cursor_ + kAhead, before_.size()); ++at)
        if (before_[at] == it->second) {
          cursor_ = at + 1;
          break;
        }
      return it->second;
    }
    auto step = std::make_shared<Step>();
    step->effects = &effects;
    step->name = scratch.name;
    step->inputs = words.size();
    step->words = words;
    step->places = scratch.places;
    step->whole = scratch.whole;
    step->arguments.reserve(effects.arguments);
    for (size_t index = 0; index < effects.arguments; ++index)
      step->arguments.push_back(without_tensors(stack[stack.size() - effects.arguments + index]));
    scratch.fresh = step;
    return step;
  }

  // It has run, and what it returned is known, too.
  void finish(Scratch &scratch, Call &call) {
    const Words &words = scratch.words;
    if (!scratch.fresh) {
      if (call.step->words == words) return;
      // The same inputs, and other results.
      const auto [first, last] = all_.equal_range(hash_of(words, call.step->inputs));
      for (auto it = first; it != last; ++it)
        if (it->second->words == words) {
          call.step = it->second;
          return;
        }
      scratch.fresh = std::make_shared<Step>(*call.step);
    }
    Step &step = *scratch.fresh;
    step.kind = hash_of(words, words.size());
    step.words = words;
    step.words.shrink_to_fit();
    call.step = scratch.fresh;
    all_.emplace(hash_of(words, step.inputs), std::move(scratch.fresh));
    scratch.fresh.reset();
  }

  // The record is over. Steps that neither it nor a closure has are forgotten, once they are many.
  void end(const std::vector<Call> &calls) {
    before_.clear();
    for (const Call &call : calls) before_.push_back(call.step);
    if (all_.size() < 2 * swept_ + 1024) return;
    std::erase_if(all_, [](const auto &each) { return each.second.use_count() == 1; });
    swept_ = all_.size();
  }

 private:
  std::unordered_multimap<uint64_t, StepPointer> all_;  // by what they are called with
  size_t swept_ = 0;
  std::vector<StepPointer> before_;  // of the record before
  size_t cursor_ = 0;                // the one among these that is likely to come next
};

}  // namespace
