// What operators take the device: an event before each and one after it, on the stream that computes.
//
// Between two operators the device may wait for the host, or for another stream; collectives wait for other ranks. None
// of that is in here, and so it can be told what the program's own work takes while all else is late. Nor are kernels
// in here that no operator launches, but for what is compiled.
#pragma once

#include <c10/core/DeviceGuard.h>

#include <atomic>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "recorder.h"

namespace {

class Clock {
 public:
  static constexpr size_t kMost = 1 << 17;  // spans: of a program that does something else than it did, to no end

  std::atomic<bool> on = false;

  // From now on, of a device and the stream that computes there, begun by this thread; the number of this time, or 0 if
  // others are being timed.
  uint64_t begin(c10::DeviceIndex device, int64_t stream) {
    std::lock_guard lock(mutex_);
    const Guard *guard = guard_of(c10::Device(c10::DeviceType::CUDA, device));
    if (on || !guard) return 0;
    recycle_events();
    guard_ = guard;
    device_ = c10::Device(c10::DeviceType::CUDA, device);
    stretch_ = 0;
    stream_ = stream;
    thread_ = this_thread();
    is_whole_ = on = true;
    return ++number_;
  }

  // The next stretch begins, on that stream.
  void tick(int64_t stream) {
    std::lock_guard lock(mutex_);
    ++stretch_;
    stream_ = stream;
  }

  // That time is over: seconds of operators in each stretch, once the device is through with them. None where nobody
  // wants to know, or that time was over already.
  std::vector<double> end(uint64_t number, bool is_wanted) {
    std::lock_guard lock(mutex_);
    if (number != number_ || !on) return {};
    on = false;
    std::vector<double> seconds;
    if (is_wanted && is_whole_) {
      const c10::DeviceGuard on_it(device_);
      seconds.resize(stretch_ + 1);
      for (const Span &span : spans_)
        if (span.to && !span.is_within) seconds[span.stretch] += seconds_of(span);
    }
    recycle_events();
    return seconds;
  }

  // Whether this thread's operators go by it.
  bool is_of_this_thread() const { return on && thread_ == this_thread(); }

  // In a fork the parent's events are of no use.
  void forked() {
    on = false;
    new (&mutex_) std::mutex;
    spans_.clear();
    idle_.clear();
  }

  // An operator is about to run, or something else that launches kernels; -1 if it is not to be timed.
  ptrdiff_t before(const c10::OperatorHandle *op, c10::DispatchKeySet keys) noexcept {
    try {
      std::lock_guard lock(mutex_);
      if (!on || (op && !launches(*op, keys))) return -1;
      const c10::DeviceGuard on_it(device_);
      const c10::Stream stream = guard_->getStream(device_);
      if (stream.id() != stream_ || is_capturing(*guard_, stream)) return -1;
      if (spans_.size() == kMost) is_whole_ = false;
      if (!is_whole_) return -1;
      spans_.push_back({record(stream), nullptr, stream_, stretch_, this_thread(), false});
      return ptrdiff_t(spans_.size()) - 1;
    } catch (...) {
      return -1;
    }
  }

  void after(ptrdiff_t span) noexcept {
    try {
      std::lock_guard lock(mutex_);
      if (!on || size_t(span) >= spans_.size() || spans_[span].to || spans_[span].thread != this_thread()) return;
      const c10::DeviceGuard on_it(device_);
      spans_[span].to = record(c10::Stream(c10::Stream::UNSAFE, device_, spans_[span].stream));
      for (size_t within = size_t(span) + 1; within < spans_.size(); ++within)
        spans_[within].is_within |= spans_[within].thread == this_thread();
    } catch (...) {
    }
  }

 private:
  struct Span {
    void *from, *to;
    int64_t stream;
    size_t stretch;
    uint32_t thread;
    bool is_within;  // another, which has its time
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
    auto &idle = idle_[device_.index()];
    if (!idle.empty()) {
      event = idle.back();
      idle.pop_back();
    }
    guard_->record(&event, stream, device_.index(), c10::EventFlag::BACKEND_DEFAULT);
    return event;
  }

  void recycle_events() {
    for (const Span &span : spans_)
      for (void *event : {span.from, span.to})
        if (event) idle_[device_.index()].push_back(event);
    spans_.clear();
  }

  // Views launch nothing, and they are half of all. A collective's time is other ranks'.
  bool launches(const c10::OperatorHandle &op, c10::DispatchKeySet keys) {
    const auto [known, is_new] = launches_.try_emplace(&op.operator_name());
    Launches &of = known->second;
    if (is_new) {
      const auto &returns = op.schema().returns();
      const std::string &name = op.schema().name();
      of.any = returns.empty() || std::any_of(returns.begin(), returns.end(), [](const c10::Argument &each) {
                 return !each.alias_info() || each.alias_info()->isWrite();
               });
      of.any &= !begins_with_one_of(name, kCollectives);
      of.copies = is_among(name, kCopies);  // what lies on the host, for the device
    }
    const bool has_backend = (keys.raw_repr() & c10::full_backend_mask) != 0;
    return of.any && (of.copies || !has_backend || keys.has_backend(c10::BackendComponent::CUDABit));
  }

  struct Launches {
    bool any = false, copies = false;
  };

  std::mutex mutex_;
  const Guard *guard_ = nullptr;
  c10::Device device_ = c10::Device(c10::DeviceType::CUDA, 0);
  int64_t stream_ = 0;
  size_t stretch_ = 0;
  uint64_t number_ = 0;
  std::atomic<uint32_t> thread_ = UINT32_MAX;
  bool is_whole_ = true;
  std::vector<Span> spans_;
  std::map<c10::DeviceIndex, std::vector<void *>> idle_;  // events that nobody has
  std::unordered_map<const c10::OperatorName *, Launches> launches_;
};

// Never taken away, as the recorder.
Clock &clock_of_operators() {
  static Clock &one = *new Clock;
  return one;
}

// Times an operator for as long as this lives.
class Timed {
 public:
  Timed(const c10::OperatorHandle &op, c10::DispatchKeySet keys) {
    if (clock_of_operators().on.load(std::memory_order_relaxed)) span_ = clock_of_operators().before(&op, keys);
  }
  ~Timed() {
    if (span_ >= 0) clock_of_operators().after(span_);
  }
  Timed(const Timed &) = delete;
  Timed &operator=(const Timed &) = delete;

 private:
  ptrdiff_t span_ = -1;
};

}  // namespace
