// Copies of one page group on one lane, in one call: what PyTorch would take tens of calls from Python for.
//
// Streams and events are the driver's own handles, as integers; devices are PyTorch's indices. The driver is opened when
// it is first asked for, so that the library builds and loads where there is none. Events belong to a pool here: to make
// one costs more than to record it. Every function returns 0 or the driver's error code, and may be called in any thread.

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace {

using Result = int;
using Handle = void*;

constexpr unsigned kTimed = 0;  // stalls are told from the times of events
constexpr Result kNoDriver = 100;

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
              look_up(library, "cuMemcpyAsync", d.copy);
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
    std::vector<Handle> events;  // recorded by nobody
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
Result record(int device, Handle stream, Handle* event) {
    *event = nullptr;
    {
        std::lock_guard<std::mutex> guard(lock);
        auto& events = devices()[device].events;
        if (!events.empty()) {
            *event = events.back();
            events.pop_back();
        }
    }
    if (*event == nullptr) {
        if (Result error = driver().event_create(event, kTimed)) return error;
    }
    return driver().event_record(*event, stream);
}

Result wait(Handle stream, int count, const Handle* events) {
    for (int k = 0; k < count; ++k) {
        if (Result error = driver().stream_wait(stream, events[k], 0)) return error;
    }
    return 0;
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

// Whether the driver was found.
int tiers_lane_available() { return driver().found; }

// Record an event of the pool at the end of `stream`.
Result tiers_event_record(int device, Handle stream, Handle* event) {
    Within within(device);
    return within.error ? within.error : record(device, stream, event);
}

// Give an event back. Who waits for it already goes on waiting for what it was recorded for.
void tiers_event_release(int device, Handle event) {
    std::lock_guard<std::mutex> guard(lock);
    devices()[device].events.push_back(event);
}

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

// From one event to another, both passed.
Result tiers_event_elapsed(int device, Handle start, Handle end, float* milliseconds) {
    Within within(device);
    return within.error ? within.error : driver().event_elapsed(milliseconds, start, end);
}

// Have `stream` wait for an event.
Result tiers_stream_wait(int device, Handle stream, Handle event) {
    Within within(device);
    return within.error ? within.error : wait(stream, 1, &event);
}

// Have `lane` wait for `events`, copy every piece, and record `done`.
Result tiers_copy(int device, Handle lane, int pieces, const uint64_t* target, const uint64_t* source,
                  const uint64_t* nbytes, int waits, const Handle* events, Handle* done) {
    Within within(device);
    if (within.error) return within.error;
    if (Result error = wait(lane, waits, events)) return error;
    for (int k = 0; k < pieces; ++k) {
        if (Result error = driver().copy(target[k], source[k], nbytes[k], lane)) return error;
    }
    return record(device, lane, done);
}

}  // extern "C"
#pragma GCC visibility pop
