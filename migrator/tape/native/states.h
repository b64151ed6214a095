// The state that each storage of a record is in: which operator wrote it last. What an operator writes counts up the
// versions of tensors; where one was counted up otherwise, somebody wrote unseen.
#pragma once

#include "forms.h"

namespace {

// Of one record at a time. Under the recorder's lock.
class States {
 public:
  void begin(Record &record) {
    record_ = &record;
    pending_.clear();
  }

  // PyTorch looks whether what counts versions is a tensor's alone.
  void end() { pending_.clear(); }

  // A tensor as an operator finds it; kNoStorage where it has none. `counted_before`: its version has been counted up
  // for that operator already.
  Use look(const at::Tensor &tensor, c10::StorageImpl *storage, bool counted_before = false) {
    if (!storage) return {kNoStorage, 0};
    const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
    const uint32_t version = version_of(impl);
    const c10::VariableVersion &counter = impl.version_counter();
    uint32_t index = record_->storages.find(storage);
    if (index == Storages::kNone) {
      index = add(storage, counter, version, --record_->foreign);
      return {index, record_->foreign};
    }
    if (version != kNoVersion && version != seen(index, counter)) {
      if (!pending_.empty()) settle([&](const Pending &each) { return each.storage == index; });
      uint32_t &before = seen(index, counter);
      if (version != before && !(counted_before && version == before + 1)) was_written_unseen(index);
      before = version;
    }
    Stored &stored = record_->storages[index];
    if (stored.nbytes != storage->nbytes()) {
      stored.nbytes = storage->nbytes();
      was_written_unseen(index);
    }
    return {index, stored.state};
  }

  // A storage without a tensor.
  Use look(c10::StorageImpl *storage) {
    uint32_t index = record_->storages.find(storage);
    if (index == Storages::kNone) index = add(storage, {}, kNoVersion, --record_->foreign);
    return {index, record_->storages[index].state};
  }

  // A call has ended: what it was given to write it has written, or some of it, if it raised.
  void note_writes(Scratch &scratch, const Call &call, uint32_t number, bool raised) {
    const Effects &effects = *call.step->effects;
    for (size_t index = 0; index < scratch.places.size(); ++index) {
      const Use &use = record_->uses[call.inputs + index];
      if (!effects.is_written(call.step->arguments.data(), scratch.places[index].first) || use.storage == kNoStorage)
        continue;
      Stored &stored = record_->storages[use.storage];
      stored.state = raised ? --record_->foreign : int32_t(number);
      if (const auto alive = stored.storage.lock()) stored.nbytes = alive->nbytes();
    }
    for (auto &[version, storage] : scratch.written) {
      seen(storage, version) = version.current_version();
      pending_.push_back({std::move(version), storage, call.thread, effects.counts_versions});
    }
    scratch.written.clear();
  }

  // A tensor that a call returned; kNoStorage where it has none.
  Use made(const at::Tensor &tensor, c10::StorageImpl *storage, const Scratch &scratch, const Call &call,
           uint32_t number) {
    if (!storage) return {kNoStorage, 0};
    const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
    const uint32_t index = record_->storages.find(storage), version = version_of(impl);
    if (index == Storages::kNone) {
      const uint32_t added = add(storage, impl.version_counter(), version, int32_t(number));
      return {added, int32_t(number)};
    }
    const auto first = record_->uses.begin() + call.inputs, last = first + std::ptrdiff_t(scratch.places.size());
    const bool is_on_input = std::any_of(first, last, [&](const Use &each) { return each.storage == index; });
    Stored &stored = record_->storages[index];
    const bool moves_the_tensor = call.step->effects->moves_the_tensor;
    if (moves_the_tensor && stored.nbytes != storage->nbytes()) {  // it was resized
      stored.nbytes = storage->nbytes();
      stored.state = int32_t(number);
    }
    if (moves_the_tensor && impl.version_counter().enabled()) {
      seen(index, impl.version_counter()) = version;
      pending_.push_back({impl.version_counter(), index, call.thread, false});
      return {index, stored.state};
    }
    // A view counts versions with its base, but not before we are through.
    if (is_on_input) return {index, stored.state};
    stored.state = int32_t(number);
    stored.nbytes = storage->nbytes();
    seen(index, impl.version_counter()) = version;
    return {index, stored.state};
  }

  // From now on it holds other bytes than any that are known.
  void was_written_unseen(uint32_t index) { record_->storages[index].state = --record_->foreign; }

  // Count what the calls of a thread have written: what they stood in the middle of is over.
  void settle_of(uint32_t thread) {
    if (!pending_.empty()) settle([&](const Pending &each) { return each.thread == thread; });
  }

  // Whether all that has been written to a storage so far has been counted.
  bool is_settled(uint32_t storage) const {
    return std::none_of(pending_.begin(), pending_.end(), [&](const auto &each) { return each.storage == storage; });
  }

 private:
  // A version that is counted up once what we stand in the middle of is over.
  struct Pending {
    c10::VariableVersion version;
    uint32_t storage, thread;
    bool any;
  };

  uint32_t add(c10::StorageImpl *storage, const c10::VariableVersion &counter, uint32_t version, int32_t state) {
    auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    return record_->storages.add({c10::weak_intrusive_ptr<c10::StorageImpl>(strong), Counter(counter), version, state,
                                  storage->nbytes(), false});
  }

  // The version that was seen last of one counter. A storage that is an alias of another has its own, which begins at
  // 0.
  uint32_t &seen(uint32_t index, const c10::VariableVersion &version) {
    const void *counter = counter_of(version);
    Stored &stored = record_->storages[index];
    if (stored.counter == counter) return stored.seen;
    stored.has_others = true;
    auto &others = record_->storages.others[index];
    for (Other &other : others)
      if (other.counter == counter) return other.seen;
    constexpr size_t kMost = 8;
    if (others.size() == kMost) others.erase(others.begin());
    others.push_back({Counter(version), 0});
    return others.back().seen;
  }

  template <typename Which>
  void settle(Which &&which) {
    for (size_t index = 0; index < pending_.size();) {
      Pending &pending = pending_[index];
      if (!which(pending)) {
        ++index;
        continue;
      }
      uint32_t &before = seen(pending.storage, pending.version);
      const uint32_t version = pending.version.current_version();
      if (version != before && version != before + 1 && !pending.any) was_written_unseen(pending.storage);
      before = version;
      pending = std::move(pending_.back());
      pending_.pop_back();
    }
  }

  Record *record_ = nullptr;
  std::vector<Pending> pending_;
};

}  // namespace
