// Storages whose bytes somebody counts on: who dispatches a write to one says so first.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include <atomic>
#include <mutex>

#include "buffer.h"
#include "key.h"
#include "record.h"

namespace {

// One storage, as it is now.
struct Watched {
  // A version other than this means that it was written. Whether it is the one now; nobody counts, where all tensors
  // that did are gone.
  bool counts(const Counter &counter, uint32_t seen) {
    c10::VariableVersion version = counter.lock();
    if (!version.enabled()) return true;
    const bool is_same = version.current_version() == seen;
    if (!first_.first.enabled())
      first_ = {std::move(version), seen};
    else
      others_.emplace_back(std::move(version), seen);
    return is_same;
  }

  bool is_stale() const {
    const auto is_other = [](const auto &each) { return each.first.current_version() != each.second; };
    return written || (first_.first.enabled() && is_other(first_)) ||
           std::any_of(others_.begin(), others_.end(), is_other);
  }

  const c10::StorageImpl *target() const { return storage._unsafe_get_target(); }

  // Whose address is not used again; none where nobody watches.
  c10::weak_intrusive_ptr<c10::StorageImpl> storage = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(nullptr);
  std::atomic<bool> written = false;
  std::atomic<bool> is_copied = false;  // before it is written

 private:
  using Version = std::pair<c10::VariableVersion, uint32_t>;
  Version first_;
  std::vector<Version> others_;
};

// Those that one closure counts on. Of some it takes a copy before they are written, such as of biases, which plain
// PyTorch needs no more.
class Watch : public std::enable_shared_from_this<Watch> {
 public:
  explicit Watch(size_t count) : all(count) {}

  std::vector<Watched> all;

  // An operator is about to write one. Where there is no memory for a copy the program writes all the same, and only
  // who asks for what is made from it is told.
  void before_write(size_t index) {
    Watched &watched = all[index];
    if (watched.is_copied && !watched.written) copy(index);
    watched.written = true;
  }

  // One as it was before it was written, if that was copied.
  std::optional<Buffer> copy_of(size_t index) {
    std::lock_guard lock(mutex_);
    const auto copy = copies_.find(index);
    if (copy == copies_.end()) return std::nullopt;
    return Buffer{copy->second, 0, copy->second.nbytes()};
  }

 private:
  void copy(size_t index) {
    auto storage = all[index].storage.lock();
    if (!storage) return;
    const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
    const uint64_t nbytes = storage->nbytes();
    try {
      const at::Tensor copy = bytes_of({c10::Storage(std::move(storage)), 0, nbytes}).clone();
      std::lock_guard lock(mutex_);
      copies_.try_emplace(index, copy.storage());  // that of whoever was first: it may have written since
    } catch (const c10::Error &) {
    }
  }

  std::mutex mutex_;
  std::unordered_map<size_t, c10::Storage> copies_;
};

// All of them. Nothing is waited for, while its lock is held.
class Watches {
 public:
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

  void add(Watch &watch) {
    std::lock_guard lock(mutex_);
    for (size_t index = 0; index < watch.all.size(); ++index)
      if (watch.all[index].target()) put({watch.all[index].target(), &watch, index});
  }

  void remove(Watch &watch) {
    std::lock_guard lock(mutex_);
    for (size_t index = 0; index < watch.all.size(); ++index)
      if (watch.all[index].target()) take(watch.all[index].target(), &watch, index);
  }

  // The operator is about to run.
  void before(const Effects &effects, const torch::jit::Stack &stack) {
    const bool resizes = effects.moves_the_tensor && effects.name.starts_with("aten::resize");
    if (!effects.writes && !resizes) return;
    std::vector<Found> found;
    const c10::IValue *arguments = stack.data() + (stack.size() - effects.arguments);
    for (size_t index = 0; index < effects.arguments; ++index)
      if (effects.is_written(arguments, index) || (resizes && index == 0)) find(arguments[index], found);
    for (const auto &[watch, index] : found) watch->before_write(index);
  }

  // It was written, by what did not come by.
  void was_written(const c10::StorageImpl *storage) {
    std::lock_guard lock(mutex_);
    for (const Slot &slot : slots_)
      if (slot.storage == storage) slot.watch->all[slot.index].written = true;
  }

  // In a fork nobody else is there, and whoever had the lock is not.
  void forked() { new (&mutex_) std::mutex; }

 private:
  struct Slot {
    const c10::StorageImpl *storage = nullptr;
    Watch *watch = nullptr;
    size_t index = 0;
  };

  struct Found {
    std::shared_ptr<Watch> watch;
    size_t index;
  };

  void find(const c10::IValue &value, std::vector<Found> &found) {
    if (value.isTensor()) {
      const at::Tensor &tensor = value.toTensor();
      const c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
      if (!storage) return;
      std::lock_guard lock(mutex_);
      if (slots_.empty()) return;
      for (size_t at = place(storage); slots_[at].storage; at = next(at)) {
        if (slots_[at].storage != storage) continue;
        if (auto watch = slots_[at].watch->weak_from_this().lock())  // none, if it is about to be removed
          found.push_back({std::move(watch), slots_[at].index});
      }
    } else if (value.isList()) {
      for (const c10::IValue &each : value.toListRef())
        if (each.isTensor()) find(each, found);
    }
  }

  size_t place(const c10::StorageImpl *storage) const {
    return (uintptr_t(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (slots_.size() - 1);
  }

  size_t next(size_t at) const { return (at + 1) & (slots_.size() - 1); }

  void put(const Slot &slot) {
    if (2 * (count_ + 1) > slots_.size()) {
      std::vector<Slot> before(std::max<size_t>(256, 2 * slots_.size()));
      before.swap(slots_);
      count_ = 0;
      for (const Slot &each : before)
        if (each.storage) put(each);
    }
    size_t at = place(slot.storage);
    while (slots_[at].storage) at = next(at);
    slots_[at] = slot;
    ++count_;
  }

  void take(const c10::StorageImpl *storage, const Watch *watch, size_t index) {
    if (slots_.empty()) return;
    size_t at = place(storage);
    while (slots_[at].storage && !(slots_[at].watch == watch && slots_[at].index == index)) at = next(at);
    if (!slots_[at].storage) return;
    --count_;
    // Those that follow move up, as far as they may.
    for (size_t hole = at, each = next(at);; each = next(each)) {
      if (!slots_[each].storage) {
        slots_[hole] = Slot();
        return;
      }
      const size_t from_home = (each - place(slots_[each].storage)) & (slots_.size() - 1);
      if (from_home < ((each - hole) & (slots_.size() - 1))) continue;
      slots_[hole] = slots_[each];
      hole = each;
    }
  }

  std::mutex mutex_;
  std::vector<Slot> slots_;
  std::atomic<size_t> count_ = 0;
};

// Never taken away, as the recorder.
Watches &watches() {
  static Watches &one = *new Watches;
  return one;
}

}  // namespace
