#include "lane_driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <numeric>
#include <type_traits>
#include <vector>

namespace tiers::lane {
namespace {

Driver open_driver() {
  Driver d{};
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) return d;
  auto find = [library](auto &function, const char *name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    return function != nullptr;
  };
  d.found = true;
  d.found &= find(d.device_get, "cuDeviceGet");
  d.found &= find(d.attribute, "cuDeviceGetAttribute");
  d.found &= find(d.retain, "cuDevicePrimaryCtxRetain");
  d.found &= find(d.get_context, "cuCtxGetCurrent");
  d.found &= find(d.set_context, "cuCtxSetCurrent");
  d.found &= find(d.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  d.found &= find(d.event_create, "cuEventCreate");
  d.found &= find(d.event_record, "cuEventRecord");
  d.found &= find(d.event_query, "cuEventQuery");
  d.found &= find(d.event_synchronize, "cuEventSynchronize");
  d.found &= find(d.event_elapsed, "cuEventElapsedTime");
  d.found &= find(d.stream_create, "cuStreamCreate");
  d.found &= find(d.stream_destroy, "cuStreamDestroy_v2");
  d.found &= find(d.stream_wait, "cuStreamWaitEvent");
  d.found &= find(d.stream_synchronize, "cuStreamSynchronize");
  d.found &= find(d.copy, "cuMemcpyAsync");
  d.found &= find(d.error_name, "cuGetErrorName");
  find(d.copy_batch, "cuMemcpyBatchAsync");  // of CUDA 12.8 and later
  return d;
}

// Bytes a call: with both directions busy, 32 MiB at a time gave 100.4 GB/s on an H100 where 256 MiB in one call
// gave 95.8, be it one copy or a batch of parts (16 MiB: 99.8). One way 32 MiB cost 0.4%, 16 MiB 0.7%.
constexpr uint64_t kBytes = uint64_t{32} << 20;

constexpr size_t kMost = 1024;  // copies a call: drivers were seen to fail with tens of thousands

constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: PyTorch's default stream is not waited for

constexpr int kRegisteredHasOneAddress = 91;  // CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM

std::mutex lock;

// What is kept per device, from its first use to the end of the process: nobody could say when to release it.
struct Device {
  Handle context = nullptr;
  int takes_batches = -1;                      // not known yet
  std::map<Kind, std::vector<Handle>> events;  // recorded by nobody
};

std::map<int, Device> &devices() {
  static auto *known = new std::map<int, Device>();
  return *known;
}

Result primary(int device, Handle *context) {
  std::lock_guard<std::mutex> guard(lock);
  Device &known = devices()[device];
  if (known.context == nullptr) {
    int number = 0;
    if (Result error = driver().device_get(&number, device)) return error;
    if (Result error = driver().retain(&known.context, number)) return error;
  }
  *context = known.context;
  return 0;
}

// Whether several copies can be asked for in one call. Where registered host memory has another address for the device
// (Windows' Linux), single copies translate it and batches do not.
bool takes_batches(int device) {
  std::lock_guard<std::mutex> guard(lock);
  int &known = devices()[device].takes_batches;
  if (known < 0) {
    int number = 0, one_address = 0;
    known = driver().copy_batch != nullptr && driver().device_get(&number, device) == 0 &&
            driver().attribute(&one_address, kRegisteredHasOneAddress, number) == 0 && one_address != 0;
  }
  return known != 0;
}

// To make an event costs more than to record it, so they are kept.
Result take(int device, Kind kind, Handle *event) {
  {
    std::lock_guard<std::mutex> guard(lock);
    auto &events = devices()[device].events[kind];
    if (!events.empty()) {
      *event = events.back();
      events.pop_back();
      return 0;
    }
  }
  return driver().event_create(event, kind);
}

}  // namespace

const Driver &driver() {
  static const Driver opened = open_driver();
  return opened;
}

Within::Within(int device) {
  if (!driver().found) {
    error = kNoDriver;
    return;
  }
  driver().exchange_capture_mode(&mode_);
  Handle wanted = nullptr;
  if ((error = primary(device, &wanted))) return;
  if ((error = driver().get_context(&before_)) || before_ == wanted) return;
  error = driver().set_context(wanted);
  // A thread that had no context keeps this one, as after any call of the runtime library.
  changed_ = !error && before_ != nullptr;
}

Within::~Within() {
  if (driver().found) driver().exchange_capture_mode(&mode_);
  if (changed_) driver().set_context(before_);
}

void release(int device, Handle event, Kind kind) {
  if (event == nullptr) return;
  std::lock_guard<std::mutex> guard(lock);
  devices()[device].events[kind].push_back(event);
}

Streams::~Streams() {
  for (Handle stream : streams_) {
    if (stream != nullptr) driver().stream_destroy(stream);
  }
}

Result Streams::create() {
  for (Handle &stream : streams_) {
    if (Result error = driver().stream_create(&stream, kNonBlocking)) return error;
  }
  return 0;
}

Result Streams::synchronize() const {
  for (Handle stream : streams_) {
    if (Result error = driver().stream_synchronize(stream)) return error;
  }
  return 0;
}

Result Streams::take_turn(uint64_t nbytes) {
  if (in_turn_ && in_turn_ + nbytes > turn_bytes_) {
    Event over(device_, kUntimed);
    if (Result error = over.record(now())) return error;
    if (Result error = over.delay(streams_[1 - current_])) return error;
    current_ = 1 - current_;
    in_turn_ = 0;
  }
  in_turn_ += nbytes;
  return 0;
}

void Batch::add(uint64_t target, uint64_t source, uint64_t nbytes) {
  for (uint64_t at = 0; at < nbytes; at += kBytes) {
    targets_.push_back(target + at);
    sources_.push_back(source + at);
    sizes_.push_back(std::min(kBytes, nbytes - at));
  }
}

size_t Batch::a_call(size_t first) const {
  size_t end = first;
  for (uint64_t nbytes = 0; end < sizes_.size() && end - first < kMost; ++end) {
    if (nbytes += sizes_[end]; nbytes > kBytes) break;
  }
  return end - first;
}

Result Batch::submit(Streams &lane) {
  const bool batches = sizes_.size() > 1 && takes_batches(device_);
  for (size_t first = 0, count = 0; first < sizes_.size(); first += count) {
    count = a_call(first);
    const auto begin = sizes_.begin() + first;
    if (Result error = lane.take_turn(std::accumulate(begin, begin + count, uint64_t{0}))) return error;
    const Handle stream = lane.now();
    const bool together = batches && count > 1;
    const Result refused = together ? at_once(first, count, stream) : 0;
    if (together && !refused) continue;
    // Also what the driver refuses at once it may do one by one. To copy some bytes twice does no harm.
    if (Result error = one_by_one(first, count, stream)) return error;
    if (refused) refused_ = refused;
  }
  return 0;
}

Result Batch::at_once(size_t first, size_t count, Handle stream) {
  CopyAttributes attributes;
  size_t from = 0, failed = 0;
  return driver().copy_batch(&targets_[first], &sources_[first], &sizes_[first], count, &attributes, &from, 1, &failed,
                             stream);
}

Result Batch::one_by_one(size_t first, size_t count, Handle stream) const {
  for (size_t k = first; k < first + count; ++k) {
    if (Result error = driver().copy(targets_[k], sources_[k], sizes_[k], stream)) return error;
  }
  return 0;
}

Result Event::record(Handle stream) {
  if (handle_ == nullptr) {
    if (Result error = take(device_, kind_, &handle_)) return error;
  }
  return driver().event_record(handle_, stream);
}

}  // namespace tiers::lane
