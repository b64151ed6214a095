// Copies of one page group on one lane, in one call: what PyTorch would take tens of calls from Python for.
//
// Streams and events are the driver's own handles, as integers; devices are PyTorch's indices. Every function returns 0
// or the driver's error code, and may be called in any thread.

#include <cstdint>
#include <utility>

#include "lane_driver.h"
#include "lane_staging.h"

namespace {

using namespace tiers::lane;

Result wait(Handle stream, int count, const Handle* events) {
    for (int k = 0; k < count; ++k) {
        if (Result error = driver().stream_wait(stream, events[k], 0)) return error;
    }
    return 0;
}

// A group on its way. Two streams may work on it, the lane and the one beside it that gathers. Each waits for what the
// group is to follow when it first gets something to do, so that a lane of gathered spans only waits for the gathering.
class Group {
  public:
    Group(int device, Handle lane, Staging* staging, int waits, const Handle* events, bool timed)
        : begin(device, kTimed), done(device, timed ? kTimed : kUntimed), lane_(lane), staging_(staging), waits_(waits),
          events_(events), behind_(device, kUntimed), timed_(timed) {}

    // Also wait for all that `stream` was given so far.
    Result follow(Handle stream) { return behind_.record(stream); }

    Result copy(const Span* spans, int count) {
        for (int k = 0; k < count;) {
            const int length = staging_ == nullptr ? 1 : staging_->run_length(spans + k, count - k);
            if (length == 1) {
                add(spans[k]);
            } else if (Result error = copy_gathered(spans + k, length)) {
                return error;
            }
            k += length;
        }
        if (Result error = submit()) return error;
        if (Result error = start()) return error;  // if there was nothing to copy
        return done.record(lane_);
    }

    // After an error: until nothing that was asked for is under way, and memory and events may be used again.
    void abandon() {
        driver().stream_synchronize(lane_);
        if (staging_ != nullptr) driver().stream_synchronize(staging_->beside());
    }

    Event begin, done;

  private:
    Result hold_back(Handle stream) {
        if (Result error = wait(stream, waits_, events_)) return error;
        return behind_.hold_back(stream);
    }

    Result start() {
        if (started_) return 0;
        if (Result error = hold_back(lane_)) return error;
        return started();
    }

    // The lane's waits are over, and its time begins.
    Result started() {
        if (std::exchange(started_, true) || !timed_) return 0;
        return begin.record(lane_);
    }

    void add(const Span& span) { batch_.add(span.target, span.source, span.nbytes); }

    Result submit() {
        if (batch_.empty()) return 0;
        if (Result error = start()) return error;
        return batch_.submit(lane_);
    }

    Result copy_gathered(const Span* run, int length) {
        if (Result error = submit()) return error;  // which need not wait for the gathering
        if (!std::exchange(gathering_, true)) {
            if (Result error = hold_back(staging_->beside())) return error;
        }
        uint64_t address = 0;
        if (Result error = staging_->gather(lane_, run, length, &address)) return error;
        if (Result error = started()) return error;
        if (address != 0) return driver().copy(run[0].target, address, extent(run, length), lane_);
        for (int k = 0; k < length; ++k) add(run[k]);
        return 0;
    }

    Handle lane_;
    Staging* staging_;
    int waits_;
    const Handle* events_;
    Event behind_;
    Batch batch_;  // what was not yet asked for
    bool timed_;
    bool started_ = false;    // the lane waits,
    bool gathering_ = false;  // and so does the stream beside it
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Whether the driver was found.
int tiers_lane_available() { return driver().found; }

// Record an event of the pool at the end of `stream`, and its time.
Result tiers_event_record(int device, Handle stream, Handle* event) {
    Within within(device);
    if (within.error) return within.error;
    Event recorded(device, kTimed);
    if (Result error = recorded.record(stream)) return error;
    *event = recorded.hand_on();
    return 0;
}

// Give an event back. Who waits for it already goes on waiting for what it was recorded for.
void tiers_event_release(int device, Handle event, int timed) { release(device, event, timed ? kTimed : kUntimed); }

// 0 if passed, 600 if not yet.
Result tiers_event_query(int device, Handle event) {
    Within within(device);
    return within.error ? within.error : driver().event_query(event);
}

// Block until it is passed.
Result tiers_event_synchronize(int device, Handle event) {
    Within within(device);
    return within.error ? within.error : driver().event_synchronize(event);
}

// From one event to another, both timed and passed.
Result tiers_event_elapsed(int device, Handle start, Handle end, float* milliseconds) {
    Within within(device);
    return within.error ? within.error : driver().event_elapsed(milliseconds, start, end);
}

// Have `stream` wait for an event, and record in `reached` when it got there and in `on` when it went on; both are null
// if the event was passed already.
Result tiers_stream_follow(int device, Handle stream, Handle event, Handle* reached, Handle* on) {
    *reached = *on = nullptr;
    Within within(device);
    if (within.error) return within.error;
    const Result passed = driver().event_query(event);
    if (passed != kNotReady) return passed;
    Event before(device, kTimed), after(device, kTimed);
    Result error = before.record(stream);
    if (!error) error = wait(stream, 1, &event);
    if (!error) error = after.record(stream);
    if (error) return error;
    *reached = before.hand_on();
    *on = after.hand_on();
    return 0;
}

// Make a staging for one lane; `Staging` says of what. Where the driver cannot compile the kernel there is none.
Result tiers_staging_open(int device, Handle beside, uint64_t address, uint64_t nbytes, uint64_t largest,
                          Staging** staging) {
    Within within(device);
    Handle kernel = nullptr;
    if (within.error) return within.error;
    if (Result error = gathering_kernel(device, &kernel)) return error;
    *staging = new Staging(device, kernel, beside, address, nbytes, largest);
    return 0;
}

// Forget it. Its memory is in use until the lane is done.
void tiers_staging_close(Staging* staging) { delete staging; }

// Have `lane` wait for `events`, and for all that the stream at `behind` (unless that is null) was given so far, record
// `begin` (unless it is null; then neither it nor `done` is timed), copy every span, and record `done`. With `staging`
// (unless it is null) small spans, which must lie in HBM, are gathered; one call at a time may use it. After an error
// nothing of the group is under way.
Result tiers_copy(int device, Handle lane, int count, const Span* spans, Staging* staging, int waits,
                  const Handle* events, const Handle* behind, Handle* begin, Handle* done) {
    Within within(device);
    if (within.error) return within.error;
    Group group(device, lane, staging, waits, events, begin != nullptr);
    Result error = behind == nullptr ? 0 : group.follow(*behind);
    if (!error) error = group.copy(spans, count);
    if (error) {
        group.abandon();
        return error;
    }
    if (begin != nullptr) *begin = group.begin.hand_on();
    *done = group.done.hand_on();
    return 0;
}

}  // extern "C"
#pragma GCC visibility pop
