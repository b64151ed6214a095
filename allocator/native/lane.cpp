// Copies of one page group on one lane, in one call: what PyTorch would take tens of calls from Python for.
//
// Small spans of HBM are gathered by one kernel and leave as one copy. A copy of its own costs each of them more of the
// host's time, and more of the link's, than its bytes do.
//
// Streams and events are the driver's own handles, as integers; devices are PyTorch's indices. The driver is opened when
// it is first asked for, so that the library builds and loads where there is none. Events belong to a pool here: to make
// one costs more than to record it. Every function returns 0 or the driver's error code, and may be called in any thread.

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "gather.h"

namespace {

using Result = int;
using Handle = void*;

// What `event_create` is told. An event that keeps its time holds up the stream it is recorded in: a copy engine for 1.0
// to 1.6 us on an H100, which is 2% of a copy of 4 MiB. One without costs nothing that shows.
enum Kind : int { kTimed = 0, kUntimed = 2 };
constexpr Result kNoDriver = 100;
constexpr Result kNotReady = 600;
constexpr uint64_t kGap = 512;   // below this between two spans, they follow one another: what alignment costs
constexpr uint64_t kWord = 16;  // what the gathering kernel reads and writes at a time
// Bytes a copy: with both directions busy, 16 MiB at a time gave 100 GB/s on an H100 where 256 MiB in one gave 95.
constexpr uint64_t kChunk = uint64_t{16} << 20;

struct Driver {
    Result (*device_get)(int*, int);
    Result (*retain)(Handle*, int);
    Result (*get_context)(Handle*);
    Result (*set_context)(Handle);
    Result (*event_create)(Handle*, unsigned);
    Result (*event_record)(Handle, Handle);
    Result (*event_query)(Handle);
    Result (*event_synchronize)(Handle);
    Result (*event_elapsed)(float*, Handle, Handle);
    Result (*stream_wait)(Handle, Handle, unsigned);
    Result (*copy)(uint64_t, uint64_t, size_t, Handle);
    Result (*load_module)(Handle*, const void*);
    Result (*get_function)(Handle*, Handle, const char*);
    Result (*launch)(Handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, Handle, void**, void**);
    bool found = false;
};

template <typename Function>
bool look_up(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    return function != nullptr;
}

Driver open_driver() {
    Driver d{};
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (library == nullptr) return d;
    d.found = look_up(library, "cuDeviceGet", d.device_get) &&
              look_up(library, "cuDevicePrimaryCtxRetain", d.retain) &&
              look_up(library, "cuCtxGetCurrent", d.get_context) &&
              look_up(library, "cuCtxSetCurrent", d.set_context) &&
              look_up(library, "cuEventCreate", d.event_create) &&
              look_up(library, "cuEventRecord", d.event_record) &&
              look_up(library, "cuEventQuery", d.event_query) &&
              look_up(library, "cuEventSynchronize", d.event_synchronize) &&
              look_up(library, "cuEventElapsedTime", d.event_elapsed) &&
              look_up(library, "cuStreamWaitEvent", d.stream_wait) &&
              look_up(library, "cuMemcpyAsync", d.copy) &&
              look_up(library, "cuModuleLoadData", d.load_module) &&
              look_up(library, "cuModuleGetFunction", d.get_function) &&
              look_up(library, "cuLaunchKernel", d.launch);
    return d;
}

const Driver& driver() {
    static const Driver opened = open_driver();
    return opened;
}

std::mutex lock;

// What is kept per device, from its first use to the end of the process: nobody could say when to give it back.
struct Device {
    Handle context = nullptr;
    Handle gather = nullptr;     // the kernel
    std::map<Kind, std::vector<Handle>> events;  // recorded by nobody
};

std::map<int, Device>& devices() {
    static auto* known = new std::map<int, Device>();
    return *known;
}

// Within it, calls go to the device's primary context, which is PyTorch's.
class Within {
  public:
    explicit Within(int device) {
        if (!driver().found) {
            error = kNoDriver;
            return;
        }
        Handle wanted = nullptr;
        if ((error = primary(device, &wanted))) return;
        if ((error = driver().get_context(&before_)) || before_ == wanted) return;
        error = driver().set_context(wanted);
        // A thread that had no context keeps this one, as after any call of the runtime library.
        changed_ = !error && before_ != nullptr;
    }
    ~Within() {
        if (changed_) driver().set_context(before_);
    }
    Within(const Within&) = delete;
    Within& operator=(const Within&) = delete;

    Result error = 0;

  private:
    static Result primary(int device, Handle* context) {
        std::lock_guard<std::mutex> guard(lock);
        Device& known = devices()[device];
        if (known.context == nullptr) {
            int number = 0;
            if (Result error = driver().device_get(&number, device)) return error;
            if (Result error = driver().retain(&known.context, number)) return error;
        }
        *context = known.context;
        return 0;
    }

    Handle before_ = nullptr;
    bool changed_ = false;
};

// To be called within the device.
Result record(int device, Handle stream, Kind kind, Handle* event) {
    *event = nullptr;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto& events = devices()[device].events[kind];
        if (!events.empty()) {
            *event = events.back();
            events.pop_back();
        }
    }
    if (*event == nullptr) {
        if (Result error = driver().event_create(event, kind)) return error;
    }
    return driver().event_record(*event, stream);
}

void release(int device, Handle event, Kind kind) {
    if (event == nullptr) return;
    std::lock_guard<std::mutex> guard(lock);
    devices()[device].events[kind].push_back(event);
}

Result wait(Handle stream, int count, const Handle* events) {
    for (int k = 0; k < count; ++k) {
        if (Result error = driver().stream_wait(stream, events[k], 0)) return error;
    }
    return 0;
}

struct Span {
    uint64_t target, source, nbytes;
};

// Where small spans are gathered: HBM that only this lane touches, so the order of its stream is all the protection
// it needs.
struct Staging {
    Handle kernel;
    uint64_t address, nbytes;
    uint64_t below;  // spans smaller than this are small
};

// How many spans from the first on, `count` of them at most, are small and follow one another, and fit.
int run_length(const Span* spans, int count, const Staging& staging) {
    const Span& first = spans[0];
    uint64_t end = first.target;
    int length = 0;
    for (; length < std::min(count, kBatch); ++length) {
        const Span& span = spans[length];
        if (span.nbytes >= staging.below || span.source % kWord || (span.target - first.target) % kWord) break;
        if (span.target < end || span.target - end >= kGap) break;
        end = span.target + span.nbytes;
        if (end - first.target > staging.nbytes) break;
    }
    return length;
}

Result gather(Handle lane, const Span* spans, int count, const Staging& staging) {
    GatherBatch batch;
    batch.target = staging.address;
    const Span& first = spans[0];
    uint64_t largest = 0;
    for (int k = 0; k < count; ++k) {
        const Span& span = spans[k];
        batch.spans[k] = {span.source, static_cast<uint32_t>(span.target - first.target),
                          static_cast<uint32_t>(span.nbytes)};
        largest = std::max(largest, span.nbytes);
    }
    const uint64_t turns = (largest + kThreads * kWord - 1) / (kThreads * kWord);
    const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>(kBlocks, turns));
    void* parameters[] = {&batch};
    if (driver().launch(staging.kernel, blocks, static_cast<unsigned>(count), 1, kThreads, 1, 1, 0, lane, parameters,
                        nullptr)) {
        for (int k = 0; k < count; ++k) {  // then each by itself: nothing was gathered
            if (Result error = driver().copy(spans[k].target, spans[k].source, spans[k].nbytes, lane)) return error;
        }
        return 0;
    }
    const Span& last = spans[count - 1];
    return driver().copy(first.target, staging.address, last.target + last.nbytes - first.target, lane);
}

Result copy(Handle lane, const Span& span) {
    for (uint64_t at = 0; at < span.nbytes; at += kChunk) {
        const uint64_t nbytes = std::min(kChunk, span.nbytes - at);
        if (Result error = driver().copy(span.target + at, span.source + at, nbytes, lane)) return error;
    }
    return 0;
}

Result copy_all(Handle lane, const Span* spans, int count, const Staging& staging) {
    for (int k = 0; k < count;) {
        const int length = staging.kernel == nullptr ? 0 : run_length(spans + k, count - k, staging);
        const Result error = length > 1 ? gather(lane, spans + k, length, staging) : copy(lane, spans[k]);
        if (error) return error;
        k += std::max(length, 1);
    }
    return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Whether the driver was found.
int tiers_lane_available() { return driver().found; }

// Record an event of the pool at the end of `stream`, and its time.
Result tiers_event_record(int device, Handle stream, Handle* event) {
    Within within(device);
    return within.error ? within.error : record(device, stream, kTimed, event);
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
    Result error = record(device, stream, kTimed, reached);
    if (!error) error = wait(stream, 1, &event);
    if (!error) error = record(device, stream, kTimed, on);
    if (error) {
        release(device, *reached, kTimed);
        release(device, *on, kTimed);
        *reached = *on = nullptr;
    }
    return error;
}

// Have the driver compile the gathering kernel for a device, whose copies use it from then on.
Result tiers_lane_prepare(int device) {
    Within within(device);
    if (within.error) return within.error;
    {
        std::lock_guard<std::mutex> guard(lock);
        if (devices()[device].gather != nullptr) return 0;
    }
    Handle module = nullptr, kernel = nullptr;
    if (Result error = driver().load_module(&module, kGather)) return error;
    if (Result error = driver().get_function(&kernel, module, "tiers_gather")) return error;
    std::lock_guard<std::mutex> guard(lock);
    devices()[device].gather = kernel;
    return 0;
}

// Have `lane` wait for `events`, and for all that the stream at `behind` (unless that is null) was given so far, record
// `begin` (unless it is null; then neither it nor `done` is timed), copy every span, and record `done`. Spans smaller
// than `below` lie in HBM, and are gathered in the `room` bytes at `staging`.
Result tiers_copy(int device, Handle lane, int count, const Span* spans, uint64_t below, uint64_t staging, uint64_t room,
                  int waits, const Handle* events, const Handle* behind, Handle* begin, Handle* done) {
    Within within(device);
    if (within.error) return within.error;
    if (Result error = wait(lane, waits, events)) return error;
    if (behind != nullptr) {
        Handle reached = nullptr;
        Result error = record(device, *behind, kUntimed, &reached);
        if (!error) error = wait(lane, 1, &reached);
        release(device, reached, kUntimed);
        if (error) return error;
    }
    const Kind kind = begin == nullptr ? kUntimed : kTimed;
    if (begin != nullptr) {
        if (Result error = record(device, lane, kind, begin)) return error;
    }
    Handle kernel = nullptr;
    if (below) {
        std::lock_guard<std::mutex> guard(lock);
        kernel = devices()[device].gather;
    }
    if (Result error = copy_all(lane, spans, count, {kernel, staging, room, below})) return error;
    return record(device, lane, kind, done);
}

}  // extern "C"
#pragma GCC visibility pop
