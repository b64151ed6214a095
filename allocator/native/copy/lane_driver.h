// The driver's calls that copies need, within PyTorch's context, and the pool of events.
//
// Streams and events are the driver's own handles; devices are PyTorch's indices. The driver is opened when it is first
// asked for, so that the library builds and loads where there is none. A `Result` is 0 or the driver's error code.

#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace tiers::lane {

using Result = int;
using Handle = void *;

constexpr Result kNoDriver = 100;
constexpr Result kNotReady = 600;

// The flags of `event_create`. An event that keeps its time holds up the stream it is recorded in: a copy engine for
// 1.0 to 1.6 us on an H100, which is 2% of a copy of 4 MiB. One without costs nothing that shows.
enum Kind : int { kTimed = 0, kUntimed = 2 };

// How the driver reads what a batch copies: all of ours in the stream's order, as single copies do. The places are
// hints that managed memory alone would need.
struct CopyAttributes {
  int order = 1;  // CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
  int from[2] = {}, to[2] = {};
  unsigned flags = 0;
};

struct Driver {
  Result (*device_get)(int *, int);
  Result (*attribute)(int *, int, int);
  Result (*retain)(Handle *, int);
  Result (*get_context)(Handle *);
  Result (*set_context)(Handle);
  Result (*exchange_capture_mode)(int *);
  Result (*event_create)(Handle *, unsigned);
  Result (*event_record)(Handle, Handle);
  Result (*event_query)(Handle);
  Result (*event_synchronize)(Handle);
  Result (*event_elapsed)(float *, Handle, Handle);
  Result (*stream_create)(Handle *, unsigned);
  Result (*stream_destroy)(Handle);
  Result (*stream_wait)(Handle, Handle, unsigned);
  Result (*stream_synchronize)(Handle);
  Result (*copy)(uint64_t, uint64_t, size_t, Handle);
  // Of CUDA 12.8 and later, or null. Targets, sources, sizes, how many; attributes, from which copy on each holds, how
  // many; which copy failed.
  Result (*copy_batch)(uint64_t *, uint64_t *, size_t *, size_t, CopyAttributes *, size_t *, size_t, size_t *, Handle);
  Result (*error_name)(Result, const char **);
  bool found = false;
};

const Driver &driver();

// Within it, calls go to the device's primary context, which is PyTorch's; and none of them breaks a graph capture in
// another thread. In the default mode, even to query an event would be refused then, and end that capture.
class Within {
 public:
  explicit Within(int device);
  ~Within();
  Within(const Within &) = delete;
  Within &operator=(const Within &) = delete;

  Result error = 0;

 private:
  Handle before_ = nullptr;
  bool changed_ = false;
  int mode_ = 2;  // CU_STREAM_CAPTURE_MODE_RELAXED, and then what the thread had
};

// Return an event to the pool. Who waits for it already goes on waiting for what it was recorded for.
void release(int device, Handle event, Kind kind);

// An event of the pool, which returns there unless it is handed on. To be used within its device.
class Event {
 public:
  Event(int device, Kind kind) : device_(device), kind_(kind) {}
  ~Event() { release(device_, handle_, kind_); }
  Event(const Event &) = delete;
  Event &operator=(const Event &) = delete;

  // At the end of `stream`.
  Result record(Handle stream);
  // Have `stream` wait for it; not if it was never recorded here.
  Result delay(Handle stream) const { return handle_ == nullptr ? 0 : driver().stream_wait(stream, handle_, 0); }
  Handle hand_on() { return std::exchange(handle_, nullptr); }

 private:
  int device_;
  Kind kind_;
  Handle handle_ = nullptr;
};

// The two streams of a lane, which take turns: what one is given begins after all that the other was given.
//
// A copy engine goes on with a stream for as long as copies are queued there. With a single stream, a program's copy of
// four bytes in the same direction, such as a loss that is read, waited for all that the lane had queued: 84 ms of 84
// (H100). With two, the engine leaves a stream that waits for the other, and the program's copy goes in between: it
// waits for one turn.
class Streams {
 public:
  // A turn is over before a copy that would make it more than so many bytes.
  Streams(int device, uint64_t turn) : device_(device), turn_bytes_(turn) {}
  ~Streams();
  Streams(const Streams &) = delete;
  Streams &operator=(const Streams &) = delete;

  int device() const { return device_; }
  // Whose turn it is.
  Handle now() const { return streams_[current_]; }
  Result create();
  // Call before copies of `nbytes`: if they would make the turn too long, the other stream's turn begins.
  Result take_turn(uint64_t nbytes);
  // Wait for both: while a graph was captured, that one waits for the other may have become a part of it alone.
  Result synchronize() const;

 private:
  int device_;
  uint64_t turn_bytes_, in_turn_ = 0;  // the most that a turn has, and what this one has so far
  Handle streams_[2] = {};
  int current_ = 0;
};

// Copies that are submitted in few calls of the driver, where it has a call for several. A copy in a call of its own
// keeps a copy engine busy for 2.8 us longer than its bytes take (H100, H200), which is 9% for a MiB. In a batch that
// does not show, down to copies of 16 KiB.
class Batch {
 public:
  explicit Batch(int device) : device_(device) {}

  void add(uint64_t target, uint64_t source, uint64_t nbytes);
  // In no order among themselves.
  Result submit(Streams &lane);
  // Why the driver would not take them in one call, though it has such a call, and was asked one by one; or 0.
  Result refused() const { return refused_; }

 private:
  size_t a_call(size_t first) const;  // copies from there on that go together
  Result at_once(size_t first, size_t count, Handle stream);
  Result one_by_one(size_t first, size_t count, Handle stream) const;

  int device_;
  Result refused_ = 0;
  std::vector<uint64_t> targets_, sources_;
  std::vector<size_t> sizes_;
};

}  // namespace tiers::lane
