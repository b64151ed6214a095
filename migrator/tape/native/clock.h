// What operators take the device: an event before each and one after it, on the stream that computes.
//
// Between two operators the device may wait for the host, for another stream, or, in a collective's, for other ranks.
// None of that is in here, and so it can be told what the program's own work takes while all else is late. Nor are
// kernels in here that no operator launches, but for what is compiled.
#pragma once

#include <c10/core/impl/LocalDispatchKeySet.h>

#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "devices.h"
#include "effects.h"
#include "key.h"

namespace {

class Clock {
 public:
  std::atomic<bool> on = false;

  // From now on, of a device and the stream that computes there; false if another device's are timed.
  bool begin(c10::DeviceIndex device, int64_t stream) {
    std::lock_guard lock(mutex_);
    if (on) return false;
    guard_ = guard_of(c10::Device(c10::DeviceType::CUDA, device));
    if (!guard_) return false;
    device_ = c10::Device(c10::DeviceType::CUDA, device);
    spans_.clear();
    stretch_ = 0;
    stream_ = stream;
    on = true;
    return true;
  }

  // The next stretch begins, on that stream.
  void tick(int64_t stream) {
    std::lock_guard lock(mutex_);
    ++stretch_;
    stream_ = stream;
  }

  // It is over: seconds of operators in each stretch. The device must be through with them.
  std::vector<double> end() {
    std::lock_guard lock(mutex_);
    on = false;
    std::vector<double> seconds(stretch_ + 1, 0.0);
    for (const Span &span : spans_) {
      if (span.to) seconds[span.stretch] += seconds_of(span);
      for (void *event : {span.from, span.to})
        if (event) idle_.push_back(event);
    }
    spans_.clear();
    return seconds;
  }

  // In a fork the parent's events are of no use.
  void forked() {
    on = false;
    new (&mutex_) std::mutex;
    spans_.clear();
    idle_.clear();
  }

  // An operator is about to run, or something else that launches kernels; -1 if it is not to be timed.
  ptrdiff_t before(const c10::OperatorHandle *op) noexcept {
    std::lock_guard lock(mutex_);
    if (!on || (op && !launches(*op))) return -1;
    try {
      const c10::Stream stream = guard_->getStream(device_);
      if (stream.id() != stream_ || is_capturing(*guard_, stream)) return -1;
      spans_.push_back({record(stream), nullptr, stream_, stretch_});
    } catch (...) {
      return -1;
    }
    return ptrdiff_t(spans_.size()) - 1;
  }

  void after(ptrdiff_t span) noexcept {
    std::lock_guard lock(mutex_);
    if (!on || size_t(span) >= spans_.size() || spans_[span].to) return;
    try {
      spans_[span].to = record(c10::Stream(c10::Stream::UNSAFE, device_, spans_[span].stream));
    } catch (...) {
    }
  }

 private:
  struct Span {
    void *from, *to;
    int64_t stream;
    size_t stretch;
  };

  double seconds_of(const Span &span) const noexcept {
    try {
      return guard_->elapsedTime(span.from, span.to, device_.index()) / 1e3;
    } catch (...) {
      return 0.0;  // on a stream that is behind the one that was waited for
    }
  }

  void *record(const c10::Stream &stream) {
    void *event = nullptr;
    if (!idle_.empty()) {
      event = idle_.back();
      idle_.pop_back();
    }
    guard_->record(&event, stream, device_.index(), c10::EventFlag::BACKEND_DEFAULT);
    return event;
  }

  // Views launch nothing, and they are half of all.
  bool launches(const c10::OperatorHandle &op) {
    const auto [known, is_new] = launches_.try_emplace(&op.operator_name(), true);
    if (is_new) {
      const auto &returns = op.schema().returns();
      known->second = returns.empty() || std::any_of(returns.begin(), returns.end(), [](const c10::Argument &each) {
                        return !each.alias_info() || each.alias_info()->isWrite();
                      });
    }
    return known->second;
  }

  std::mutex mutex_;
  const Guard *guard_ = nullptr;
  c10::Device device_ = c10::Device(c10::DeviceType::CUDA, 0);
  int64_t stream_ = 0;
  size_t stretch_ = 0;
  std::vector<Span> spans_;
  std::vector<void *> idle_;  // events
  std::unordered_map<const c10::OperatorName *, bool> launches_;
};

// Never taken away, as the recorder.
Clock &clock_of_operators() {
  static Clock &one = *new Clock;
  return one;
}

// Times an operator for as long as this lives: the outermost of the thread.
class Timed {
 public:
  Timed(const c10::OperatorHandle &op, c10::DispatchKeySet keys) {
    if (depth()++ || !clock_of_operators().on.load(std::memory_order_relaxed)) return;
    const bool has_backend = (keys.raw_repr() & c10::full_backend_mask) != 0;
    if (!has_backend || keys.has_backend(c10::BackendComponent::CUDABit)) span_ = clock_of_operators().before(&op);
  }
  ~Timed() {
    --depth();
    if (span_ >= 0) clock_of_operators().after(span_);
  }
  Timed(const Timed &) = delete;
  Timed &operator=(const Timed &) = delete;

 private:
  static int &depth() {
    static thread_local int depth = 0;
    return depth;
  }

  ptrdiff_t span_ = -1;
};

}  // namespace
