// Copies of one page group on one lane, in one call: what PyTorch would take tens of calls from Python for.
//
// Streams and events are the driver's own handles, as integers; devices are PyTorch's indices. A `Result` is 0 or the
// driver's error code. Everything may be called in any thread; one lane is given copies by one at a time.

#include <atomic>
#include <cstdint>
#include <memory>

#include "lane_driver.h"

namespace {

using namespace tiers::lane;

struct Span {
  uint64_t target, source, nbytes;
};

Result wait(Handle stream, int count, const Handle *events) {
  for (int k = 0; k < count; ++k) {
    if (Result error = driver().stream_wait(stream, events[k], 0)) return error;
  }
  return 0;
}

// What was asked of the driver for one group.
struct Asked {
  Event begin, done, behind;
  Batch batch;

  Result copy(Streams &lane, const Span *spans, int count, int waits, const Handle *events, bool timed) {
    if (Result error = wait(lane.now(), waits, events)) return error;
    if (Result error = behind.delay(lane.now())) return error;
    if (timed) {
      if (Result error = begin.record(lane.now())) return error;
    }
    for (int k = 0; k < count; ++k) batch.add(spans[k].target, spans[k].source, spans[k].nbytes);
    if (Result error = batch.submit(lane)) return error;
    return done.record(lane.now());
  }
};

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Why the driver first refused to take several copies in one call; 0 as long as it never did, below 0 once that was
// said.
std::atomic<int> tiers_batch_refused{0};

// Whether the driver was found.
int tiers_lane_available() { return driver().found; }

// What the driver calls its error.
const char *tiers_error_name(Result error) {
  const char *name = nullptr;
  if (driver().found) driver().error_name(error, &name);
  return name != nullptr ? name : "unknown";
}

// Record an event of the pool at the end of `stream`, and its time.
Result tiers_event_record(int device, Handle stream, Handle *event) {
  Within within(device);
  if (within.error) return within.error;
  Event recorded(device, kTimed);
  if (Result error = recorded.record(stream)) return error;
  *event = recorded.hand_on();
  return 0;
}

// Return an event to the pool. Who waits for it already goes on waiting for what it was recorded for.
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
Result tiers_event_elapsed(int device, Handle start, Handle end, float *milliseconds) {
  Within within(device);
  return within.error ? within.error : driver().event_elapsed(milliseconds, start, end);
}

// Have `stream` wait for an event.
Result tiers_stream_wait(int device, Handle stream, Handle event) {
  Within within(device);
  return within.error ? within.error : wait(stream, 1, &event);
}

// Have `stream` wait for an event, and record in `reached` when it got there and in `on` when it went on; both are null
// if the event was passed already.
Result tiers_stream_follow(int device, Handle stream, Handle event, Handle *reached, Handle *on) {
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

// Make a lane, whose streams take turns of so many bytes.
Result tiers_lane_open(int device, uint64_t turn, Streams **lane) {
  *lane = nullptr;
  Within within(device);
  if (within.error) return within.error;
  auto made = std::make_unique<Streams>(device, turn);
  if (Result error = made->create()) return error;
  *lane = made.release();
  return 0;
}

// Forget a lane. What it was given is still carried out. Not in a child process, which has none of the driver's
// streams.
void tiers_lane_close(Streams *lane) {
  Within within(lane->device());
  if (!within.error) delete lane;
}

// Block until a lane has done all that it was given. Not while it is being given more.
Result tiers_lane_synchronize(const Streams *lane) {
  Within within(lane->device());
  return within.error ? within.error : lane->synchronize();
}

// Have `lane` wait for `events`, and for all that the stream at `behind` (unless that is null) was given so far, record
// `begin` (unless it is null; then neither it nor `done` is timed), copy every span, and record `done`. After an error
// nothing of the group is under way.
Result tiers_copy(Streams *lane, int count, const Span *spans, int waits, const Handle *events, const Handle *behind,
                  Handle *begin, Handle *done) {
  const int device = lane->device();
  Within within(device);
  if (within.error) return within.error;
  const bool timed = begin != nullptr;
  Asked asked{{device, kTimed}, {device, timed ? kTimed : kUntimed}, {device, kUntimed}, Batch(device)};
  Result error = behind == nullptr ? 0 : asked.behind.record(*behind);
  if (!error) error = asked.copy(*lane, spans, count, waits, events, timed);
  if (error) {
    lane->synchronize();  // the caller may give the memory to others
    return error;
  }
  int none = 0;
  if (asked.batch.refused()) tiers_batch_refused.compare_exchange_strong(none, asked.batch.refused());
  if (timed) *begin = asked.begin.hand_on();
  *done = asked.done.hand_on();
  return 0;
}

}  // extern "C"
#pragma GCC visibility pop
