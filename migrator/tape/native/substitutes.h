// Storages that operators read elsewhere: from a copy of them that lies in faster memory.
//
// A product, a convolution or a cast that reads a tensor on such a storage is given an alias of the copy in its place.
// The tensor itself stays what it was: autograd, the program and the record never see the alias. All other operators
// read the storage.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "record.h"

namespace {

// Where the copies of some storages come from, and lie.
struct CopySource {
  // Returns where in the buffer the copy begins that the current stream may read; -1 if the storage itself is to be
  // read. `written`: the copy is outdated.
  using Ask = std::function<int64_t(size_t number, bool written)>;

  Ask ask;
  c10::Storage buffer;
};

struct Substitute {
  size_t number = 0;
  std::shared_ptr<const CopySource> source;
  // Weak, so that the address is not used again.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(nullptr);
  std::atomic<uint32_t> readers = 0;      // operators that were, or are being, given the copy
  std::atomic<bool> is_received = false;  // by collectives, which write at any time until somebody waits for them
  // The rest is under the lock of `Substitutes`.
  bool written = false;              // by operators that came by, since the last copy began
  std::vector<c10::Stream> writers;  // on these streams
  Counter counter;                   // of versions: operators that did not come by, as those of other threads, have it
  uint32_t seen = 0;                 // what it was when the last copy began

  // Of a tensor that is gone nobody counts; from here on the one that is read does.
  bool has_other_version(const at::Tensor &read) {
    const c10::VariableVersion version = counter.lock();
    if (version.enabled()) return version.current_version() != seen;
    if (!read.is_inference()) counter = Counter(read.unsafeGetTensorImpl()->version_counter());
    return true;
  }
};

class Substitutes {
 public:
  using All = std::vector<std::shared_ptr<Substitute>>;

  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  // One of each, with its place for a number.
  static All of(const std::vector<at::Tensor> &tensors, const std::shared_ptr<const CopySource> &source) {
    All all;
    for (const at::Tensor &each : tensors) {
      auto made = std::make_shared<Substitute>();
      made->number = all.size();
      made->source = source;
      made->storage = c10::weak_intrusive_ptr<c10::StorageImpl>(
          c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage_of(each)));
      made->counter = Counter(each.unsafeGetTensorImpl()->version_counter());
      all.push_back(std::move(made));
    }
    return all;
  }

  void add(const All &all) {
    std::lock_guard lock(mutex_);
    for (const auto &each : all) all_[each->storage._unsafe_get_target()] = each;
    count_ = all_.size();
  }

  void remove(const All &all) {
    std::lock_guard lock(mutex_);
    for (const auto &each : all) {
      const auto found = all_.find(each->storage._unsafe_get_target());
      if (found != all_.end() && found->second == each) all_.erase(found);
    }
    count_ = all_.size();
  }

  std::shared_ptr<Substitute> find(const at::Tensor &tensor) {
    const c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
    if (!storage) return nullptr;
    std::lock_guard lock(mutex_);
    const auto found = all_.find(storage);
    return found == all_.end() ? nullptr : found->second;
  }

  // An operator writes it on the current stream, a collective at some time on another.
  void note_written(const at::Tensor &tensor, bool is_collective) {
    const auto found = find(tensor);
    if (!found) return;
    if (is_collective) found->is_received = true;
    const Guard *guard = tensor.is_cpu() ? nullptr : guard_of(tensor.device());
    std::lock_guard lock(mutex_);
    found->written = true;
    if (!guard) return;
    const c10::Stream stream = guard->getStream(tensor.device());
    auto &all = found->writers;
    if (std::find(all.begin(), all.end(), stream) == all.end()) all.push_back(stream);
  }

  bool is_written(Substitute &of, const at::Tensor &read) {
    std::lock_guard lock(mutex_);
    return of.written || of.has_other_version(read);
  }

  // Another copy begins, of what it holds once these streams are through with what they have been given.
  std::vector<c10::Stream> renew(Substitute &of) {
    std::lock_guard lock(mutex_);
    const c10::VariableVersion version = of.counter.lock();
    of.seen = version.enabled() ? version.current_version() : 0;
    of.written = false;
    return std::exchange(of.writers, {});
  }

  // In a fork nobody else is there, and whoever had the lock is not.
  void forked() {
    new (&mutex_) std::mutex;
    count_ = 0;
    all_.clear();
  }

 private:
  std::mutex mutex_;  // with which nobody waits for another lock
  std::unordered_map<const c10::StorageImpl *, std::shared_ptr<Substitute>> all_;
  std::atomic<size_t> count_ = 0;
};

// Never taken away, as the recorder.
Substitutes &substitutes() {
  static Substitutes &one = *new Substitutes;
  return one;
}

// While it lives, an operator's arguments on the stack are the copies; of one that writes it is noted.
class ArgumentSwap {
 public:
  ArgumentSwap(const Effects &effects, torch::jit::Stack &stack) : effects_(effects), stack_(stack) {
    if (substitutes().empty()) return;
    const size_t first = stack.size() - effects.arguments;
    for (size_t index = 0; index < effects.arguments; ++index) {
      c10::IValue &argument = stack[first + index];
      if (effects.is_written(&stack[first], index))
        add_written(argument);
      else if (effects.reads_copies && argument.isTensor())
        replace(argument);
    }
    note_written();
  }

  // Once more: a copy that another thread has begun since has what was there before, or a part of it.
  ~ArgumentSwap() { note_written(); }

  ArgumentSwap(const ArgumentSwap &) = delete;
  ArgumentSwap &operator=(const ArgumentSwap &) = delete;

  // The operator has run. What it returned on the memory of a copy, as no schema told, is on the original's.
  void settle() {
    for (size_t index = stack_.size() - effects_.returns; !replaced_.empty() && index < stack_.size(); ++index) {
      if (stack_[index].isTensor()) restore(stack_[index].toTensor());
      if (stack_[index].isTensorList())
        for (const at::Tensor &each : stack_[index].toTensorVector()) restore(each);
    }
  }

 private:
  // The copy stays where it is for as long as this lives.
  class Reading {
   public:
    explicit Reading(std::shared_ptr<Substitute> of) : of_(std::move(of)) { ++of_->readers; }
    ~Reading() {
      if (of_) --of_->readers;
    }
    Reading(Reading &&) = default;
    Reading &operator=(Reading &&) = delete;

   private:
    std::shared_ptr<Substitute> of_;
  };

  struct Replaced {
    Reading reading;
    at::Tensor original;
    std::shared_ptr<const CopySource> source;
    uint64_t start;
  };

  void add_written(const c10::IValue &argument) {
    const auto add = [this](const at::Tensor &tensor) {
      if (substitutes().find(tensor)) written_.push_back(tensor);
    };
    if (argument.isTensor()) add(argument.toTensor());
    if (argument.isList())
      for (const c10::IValue &each : argument.toListRef())
        if (each.isTensor()) add(each.toTensor());
  }

  void note_written() const noexcept {
    for (const at::Tensor &each : written_) substitutes().note_written(each, effects_.collective);
  }

  void replace(c10::IValue &argument) {
    const at::Tensor original = argument.toTensor();
    auto found = substitutes().find(original);
    if (!found || found->is_received || original.layout() != c10::kStrided || original.key_set().has(kPython)) return;
    const std::shared_ptr<const CopySource> source = found->source;
    Reading reading(found);  // before it is asked for
    const int64_t start = source->ask(found->number, substitutes().is_written(*found, original));
    // Another thread, or a signal's handler, may have written it while it was copied.
    if (start < 0 || substitutes().is_written(*found, original)) return;
    at::Tensor alias(original.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
    alias.unsafeGetTensorImpl()->set_storage_keep_dtype(source->buffer);
    alias.unsafeGetTensorImpl()->set_storage_offset(original.storage_offset() + start / int64_t(original.itemsize()));
    argument = alias;
    replaced_.push_back({std::move(reading), original, source, uint64_t(start)});
  }

  void restore(const at::Tensor &result) {
    const c10::StorageImpl *storage = result.defined() ? storage_of(result) : nullptr;
    if (!storage) return;
    for (const Replaced &each : replaced_) {
      if (each.source->buffer.unsafeGetStorageImpl() != storage) continue;
      c10::TensorImpl *impl = result.unsafeGetTensorImpl();
      const auto at = uint64_t(impl->storage_offset()) * impl->itemsize();
      if (at < each.start || at >= each.start + each.original.storage().nbytes())
        continue;  // several copies share a buffer
      impl->set_storage_keep_dtype(each.original.storage());
      impl->set_storage_offset(int64_t((at - each.start) / impl->itemsize()));
      return;
    }
  }

  static constexpr auto kPython = c10::DispatchKey::Python;
  const Effects &effects_;
  torch::jit::Stack &stack_;
  std::vector<at::Tensor> written_;
  std::vector<Replaced> replaced_;
};

}  // namespace
