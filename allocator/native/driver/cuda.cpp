// The primitives on a CUDA device. The driver's interface is declared here as far as it is used, after the
// documentation of its ABI, so that no toolkit is needed to build this.
#include <dlfcn.h>

#include <algorithm>
#include <vector>

#include "primitives.h"

namespace tiers {
namespace {

using Result = int;
using Context = void *;
using Pointer = unsigned long long;

constexpr Result kSuccess = 0, kOutOfMemory = 2, kNotReady = 600;
constexpr int kPinned = 1, kLocationDevice = 1, kLocationHostNuma = 3, kReadWrite = 3;
constexpr int kHostNumaId = 134, kVmmSupported = 102, kRdmaSupported = 110;  // CUdevice_attribute
constexpr int kRelaxed = 2;                                                  // CUstreamCaptureMode
constexpr unsigned kNoTiming = 2;                                            // CUevent_flags

struct Location {
  int type, id;
};
struct Properties {  // CUmemAllocationProp
  int type, handle_types;
  Location location;
  void *win32;
  unsigned char compression, rdma;
  unsigned short usage;
  unsigned char reserved[4];
};
struct Access {  // CUmemAccessDesc
  Location location;
  int flags;
};

struct Driver {
  Result (*init)(unsigned);
  Result (*device_get)(int *, int);
  Result (*attribute)(int *, int, int);
  Result (*primary_retain)(Context *, int);
  Result (*push)(Context);
  Result (*pop)(Context *);
  Result (*reserve)(Pointer *, size_t, size_t, Pointer, unsigned long long);
  Result (*unreserve)(Pointer, size_t);
  Result (*create)(Handle *, size_t, const Properties *, unsigned long long);
  Result (*release)(Handle);
  Result (*map)(Pointer, size_t, size_t, Handle, unsigned long long);
  Result (*unmap)(Pointer, size_t);
  Result (*access)(Pointer, size_t, const Access *, size_t);
  Result (*copy)(Pointer, Pointer, size_t);
  Result (*synchronize)(void *);
  Result (*synchronize_all)();
  Result (*event_create)(void **, unsigned);
  Result (*event_record)(void *, void *);
  Result (*event_query)(void *);
  Result (*event_destroy)(void *);
  Result (*is_capturing)(void *, int *);
  Result (*capture_mode)(int *);
  Result (*error_name)(Result, const char **);
};

bool load(Driver *driver) {
  void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!library) return false;
  bool all = true;
  auto find = [&](auto &function, const char *name) {
    function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    all = all && function;
  };
  find(driver->init, "cuInit");
  find(driver->device_get, "cuDeviceGet");
  find(driver->attribute, "cuDeviceGetAttribute");
  find(driver->primary_retain, "cuDevicePrimaryCtxRetain");
  find(driver->push, "cuCtxPushCurrent_v2");
  find(driver->pop, "cuCtxPopCurrent_v2");
  find(driver->reserve, "cuMemAddressReserve");
  find(driver->unreserve, "cuMemAddressFree");
  find(driver->create, "cuMemCreate");
  find(driver->release, "cuMemRelease");
  find(driver->map, "cuMemMap");
  find(driver->unmap, "cuMemUnmap");
  find(driver->access, "cuMemSetAccess");
  find(driver->copy, "cuMemcpy");
  find(driver->synchronize, "cuStreamSynchronize");
  find(driver->synchronize_all, "cuCtxSynchronize");
  find(driver->event_create, "cuEventCreate");
  find(driver->event_record, "cuEventRecord");
  find(driver->event_query, "cuEventQuery");
  find(driver->event_destroy, "cuEventDestroy_v2");
  find(driver->is_capturing, "cuStreamIsCapturing");
  find(driver->capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver->error_name, "cuGetErrorName");
  return all;
}

class Cuda final : public Primitives {
 public:
  Cuda(const Driver &driver, int device, uint64_t page, Context context, int numa, bool rdma)
      : Primitives(page),
        driver_(driver),
        device_(device),
        numa_(numa),
        rdma_(rdma),
        context_(context),
        users_{access(device)} {}

  Status reserve(uint64_t bytes, uint64_t *address) override {
    Relaxed relaxed(driver_);
    Pointer pointer = 0;
    Result result = driver_.reserve(&pointer, bytes, page_, 0, 0);
    *address = pointer;
    return check(result, "cuMemAddressReserve");
  }

  Status unreserve(uint64_t address, uint64_t bytes) override {
    Relaxed relaxed(driver_);
    return check(driver_.unreserve(address, bytes), "cuMemAddressFree");
  }

  Status create(Tier tier, Handle *handle) override {
    Relaxed relaxed(driver_);
    Properties properties{};
    properties.type = kPinned;
    properties.location = tier == kHbm ? Location{kLocationDevice, device_} : Location{kLocationHostNuma, numa_};
    properties.rdma = tier == kHbm && rdma_;
    Result result = driver_.create(handle, page_, &properties, 0);
    if (properties.rdma && result != kSuccess && result != kOutOfMemory) {
      properties.rdma = rdma_ = false;
      result = driver_.create(handle, page_, &properties, 0);
    }
    if (tier == kDram && result != kSuccess && result != kOutOfMemory && numa_ != 0) {
      properties.location.id = 0;  // the GPU's node may have no memory of its own, or not for this container
      result = driver_.create(handle, page_, &properties, 0);
      if (result == kSuccess) numa_ = 0;
    }
    return check(result, tier == kDram ? "cuMemCreate of host memory" : "cuMemCreate");
  }

  Status release(Tier, Handle handle) override {
    Relaxed relaxed(driver_);
    return check(driver_.release(handle), "cuMemRelease");
  }

  Status map(uint64_t address, const Handle *handles, uint64_t count) override {
    Relaxed relaxed(driver_);
    Status status = Status::Ok;
    uint64_t mapped = 0;
    while (mapped < count && status == Status::Ok) {
      status = check(driver_.map(address + mapped * page_, page_, 0, handles[mapped], 0), "cuMemMap");
      mapped += status == Status::Ok;
    }
    if (status == Status::Ok) {
      // Once for the whole run: the driver's time for this goes by calls more than by pages.
      status = check(driver_.access(address, count * page_, users_.data(), users_.size()), "cuMemSetAccess");
    }
    if (status != Status::Ok) {
      for (uint64_t page = 0; page < mapped; ++page) driver_.unmap(address + page * page_, page_);
    }
    return status;
  }

  Status unmap(uint64_t address, uint64_t count) override {
    Relaxed relaxed(driver_);
    return check(driver_.unmap(address, count * page_), "cuMemUnmap");
  }

  Status share(int device, uint64_t address, uint64_t count) override {
    Relaxed relaxed(driver_);
    Access given = access(device);
    if (count) return check(driver_.access(address, count * page_, &given, 1), "cuMemSetAccess");
    auto is_given = [&](const Access &user) { return user.location.id == device; };
    if (std::none_of(users_.begin(), users_.end(), is_given)) users_.push_back(given);
    return Status::Ok;
  }

  Status copy(uint64_t to, uint64_t from, uint64_t bytes) override {
    Current current(driver_, context_);
    Status status = check(driver_.copy(to, from, bytes), "cuMemcpy");
    // From device memory to device memory that returns before it is done, and our pages in DRAM may count as such.
    return status == Status::Ok ? synchronize(0) : status;
  }

  Status synchronize(Stream stream) override {
    Current current(driver_, context_);
    return check(driver_.synchronize(reinterpret_cast<void *>(stream)), "cuStreamSynchronize");
  }

  Status synchronize_all() override {
    Current current(driver_, context_);
    return check(driver_.synchronize_all(), "cuCtxSynchronize");
  }

  Status record(Stream stream, Event *event) override {
    Current current(driver_, context_);
    void *made = nullptr;
    Status status = check(driver_.event_create(&made, kNoTiming), "cuEventCreate");
    if (status != Status::Ok) return status;
    status = check(driver_.event_record(made, reinterpret_cast<void *>(stream)), "cuEventRecord");
    if (status != Status::Ok) driver_.event_destroy(made);
    *event = reinterpret_cast<Event>(made);
    return status;
  }

  Status query(Event event, bool *passed) override {
    Current current(driver_, context_);
    void *made = reinterpret_cast<void *>(event);
    Result result = driver_.event_query(made);
    *passed = result == kSuccess;
    if (*passed) driver_.event_destroy(made);
    return result == kNotReady ? Status::Ok : check(result, "cuEventQuery");
  }

  bool capturing(Stream stream) override {
    Current current(driver_, context_);
    int status = 0;
    // The default stream cannot even be asked while another that synchronises with it is being captured.
    return driver_.is_capturing(reinterpret_cast<void *>(stream), &status) != kSuccess || status != 0;
  }

 private:
  // What is done here is no part of a graph that this thread captures, or another. In the default mode the driver would
  // refuse it meanwhile, even to ask for an event, and give up the graph as well.
  struct Relaxed {
    explicit Relaxed(const Driver &with) : driver(with) { driver.capture_mode(&mode); }
    ~Relaxed() { driver.capture_mode(&mode); }
    const Driver &driver;
    int mode = kRelaxed;
  };

  static Access access(int device) { return {{kLocationDevice, device}, kReadWrite}; }

  // Streams and events belong to a context, which the calling thread need not have.
  struct Current : Relaxed {
    Current(const Driver &with, Context context) : Relaxed(with), pushed(driver.push(context) == kSuccess) {}
    ~Current() {
      Context popped = nullptr;
      if (pushed) driver.pop(&popped);
    }
    bool pushed;
  };

  Status check(Result result, const char *call) {
    if (result == kSuccess) return Status::Ok;
    const char *name = nullptr;
    driver_.error_name(result, &name);
    return fail(result == kOutOfMemory ? Status::Full : Status::Driver,
                std::string(call) + ": " + (name ? name : "unknown error"));
  }

  Driver driver_;
  int device_, numa_;
  bool rdma_;  // whether network cards may be given pages, as they may PyTorch's expandable segments
  Context context_;
  std::vector<Access> users_;  // the GPUs that reach what is mapped: this one first
};

}  // namespace

Status open_cuda(int device, uint64_t page, std::unique_ptr<Primitives> *out) {
  Driver driver{};
  if (!load(&driver)) return fail(Status::Driver, "no CUDA driver: libcuda.so.1 is missing, or older than 12.2");
  int handle = 0, supported = 0, numa = 0, rdma = 0;
  Context context = nullptr;
  // The primary context is kept for good: the runtime library, which shares it, ends it with the process.
  if (driver.init(0) != kSuccess || driver.device_get(&handle, device) != kSuccess)
    return fail(Status::Driver, "no CUDA device " + std::to_string(device));
  if (driver.attribute(&supported, kVmmSupported, handle) != kSuccess || !supported)
    return fail(Status::Driver, "the GPU or its driver lacks virtual memory management");
  if (driver.primary_retain(&context, handle) != kSuccess)
    return fail(Status::Driver, "CUDA device " + std::to_string(device) + " gives no context");
  if (driver.attribute(&numa, kHostNumaId, handle) != kSuccess || numa < 0) numa = 0;
  if (driver.attribute(&rdma, kRdmaSupported, handle) != kSuccess) rdma = 0;
  *out = std::make_unique<Cuda>(driver, handle, page, context, numa, rdma != 0);
  return Status::Ok;
}

}  // namespace tiers
