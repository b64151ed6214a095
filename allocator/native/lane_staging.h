// HBM in which the small spans of a group are gathered, so that they leave as few large copies.
//
// A copy of its own costs each span about 1.6 us of an H100's copy engine, 4 us with both directions busy, and the host
// a call. Gathering costs none of the engine's time: a stream beside the lane fills one half of the staging while the
// engine still carries what lies in the other. Events alone settle who may touch a half:
//
//     beside    gather into A           gather into B            A was sent?  gather into A
//     lane             gathered?  copy from A      gathered?  copy from B            gathered?  ...
//
// A half takes run after run, of several groups if they are small, and what it held is sent once the last of them is.

#pragma once

#include <cstdint>

#include "lane_driver.h"

namespace tiers::lane {

struct Span {
    uint64_t target, source, nbytes;
};

// Bytes from the first span's begin to the last one's end, in their target.
inline uint64_t extent(const Span* run, int length) {
    return run[length - 1].target + run[length - 1].nbytes - run[0].target;
}

// The kernel that gathers, compiled by the driver when a device is first asked for it. To be called within the device.
Result gathering_kernel(int device, Handle* kernel);

// Belongs to one lane, for one call at a time. To be used within the device.
class Staging {
  public:
    // `beside` is a stream that gathers for this lane alone, in the `nbytes` bytes of HBM at `address`. Spans of up to
    // `largest` bytes are small.
    Staging(int device, Handle kernel, Handle beside, uint64_t address, uint64_t nbytes, uint64_t largest)
        : kernel_(kernel), beside_(beside), address_(address), half_(nbytes / 2 / kSlot * kSlot), largest_(largest),
          gathered_(device, kUntimed), sent_{{device, kUntimed}, {device, kUntimed}} {}

    Handle beside() const { return beside_; }

    // How many spans, from the first of `count` on, are to be gathered together; 1 if the first is a copy of its own.
    int run_length(const Span* spans, int count) const;

    // Gather a run, and have `lane` wait for that; `beside` must already wait for the sources. The run then lies at
    // `address`, laid out as in its target, and the caller has `lane` copy it before it calls again. 0 if the driver
    // refused to gather: spans must leave as they lie.
    Result gather(Handle lane, const Span* run, int length, uint64_t* address);

  private:
    static constexpr uint64_t kSlot = 512;  // what spans are aligned to within a group

    int fitting(const Span* spans, int count, uint64_t room) const;
    Result make_room(Handle lane, uint64_t nbytes);
    Result launch(const Span* spans, int count, uint64_t address);

    Handle kernel_, beside_;
    uint64_t address_, half_, largest_;
    Event gathered_, sent_[2];
    int now_ = 0;        // the half that is being filled,
    uint64_t used_ = 0;  // as far as this
};

}  // namespace tiers::lane
