// Storages whose bytes somebody counts on: who dispatches a write to one tells them first.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <functional>
#include <mutex>

#include "record.h"

namespace {

// One storage, as it is now.
struct Watched {
  using Warn = std::function<void()>;

  explicit Watched(c10::weak_intrusive_ptr<c10::StorageImpl> on) : storage(std::move(on)) {}

  // From now on a version other than this means that it was written. Whether it is the one now.
  bool counts(const Counter &counter, uint32_t seen) {
    if (counter == nullptr) return true;
    versions_.emplace_back(counter.lock(), seen);
    const auto &version = versions_.back().first;
    return version.enabled() && version.current_version() == seen;
  }

  bool is_stale() const {
    return written || std::any_of(versions_.begin(), versions_.end(),
                                  [](const auto &each) { return each.first.current_version() != each.second; });
  }

  const c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // whose address is not used again
  std::atomic<bool> written = false;
  std::shared_ptr<const Warn> warn;  // under the lock of `Watches`

 private:
  std::vector<std::pair<c10::VariableVersion, uint32_t>> versions_;
};

// All of them. Nobody is called, and nothing waited for, while its lock is held.
class Watches {
 public:
  using Pointer = std::shared_ptr<Watched>;

  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  void add(const Pointer &watched) {
    std::lock_guard lock(mutex_);
    watches_.emplace(watched->storage._unsafe_get_target(), watched);
    count_ = watches_.size();
  }

  void remove(const Pointer &watched) {
    std::shared_ptr<const Watched::Warn> dropped;  // once the lock is
    std::lock_guard lock(mutex_);
    const auto [first, last] = watches_.equal_range(watched->storage._unsafe_get_target());
    for (auto it = first; it != last; ++it)
      if (it->second == watched) {
        watches_.erase(it);
        break;
      }
    count_ = watches_.size();
    dropped = std::move(watched->warn);
  }

  void on_write(const Pointer &watched, std::shared_ptr<const Watched::Warn> warn) {
    std::lock_guard lock(mutex_);
    watched->warn.swap(warn);
  }

  // The operator is about to run: tell whoever counts on what it writes.
  void before(const Effects &effects, const torch::jit::Stack &stack) {
    std::vector<Pointer> found;
    const c10::IValue *arguments = stack.data() + (stack.size() - effects.arguments);
    const bool resizes = effects.moves_the_tensor && effects.name.starts_with("aten::resize");
    for (size_t index = 0; index < effects.arguments; ++index)
      if (effects.is_written(arguments, index) || (resizes && index == 0)) find(arguments[index], found);
    tell(found);
  }

  // It was written, and no operator has done it; any may have been, where no storage is given.
  void was_written(const c10::StorageImpl *storage) {
    std::lock_guard lock(mutex_);
    for (const auto &[key, watched] : watches_)
      if (!storage || key == storage) watched->written = true;
  }

  // In a fork nobody else is there, and whoever had the lock is not.
  void forked() { new (&mutex_) std::mutex; }

 private:
  void find(const c10::IValue &value, std::vector<Pointer> &found) {
    if (value.isTensor()) {
      const at::Tensor &tensor = value.toTensor();
      const c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
      if (!storage) return;
      std::lock_guard lock(mutex_);
      const auto [first, last] = watches_.equal_range(storage);
      for (auto it = first; it != last; ++it) found.push_back(it->second);
    } else if (value.isTensorList() || value.isList()) {
      for (const c10::IValue &each : value.toListRef())
        if (each.isTensor()) find(each, found);
    }
  }

  void tell(const std::vector<Pointer> &found) {
    for (const Pointer &each : found) {
      std::shared_ptr<const Watched::Warn> warn;
      {
        std::lock_guard lock(mutex_);
        warn = each->warn;
      }
      if (warn && !each->written) (*warn)();
      each->written = true;
    }
  }

  std::mutex mutex_;
  std::unordered_multimap<const c10::StorageImpl *, Pointer> watches_;
  std::atomic<size_t> count_ = 0;
};

// Never taken away, as the recorder.
Watches &watches() {
  static Watches &one = *new Watches;
  return one;
}

}  // namespace
