// Memory: requests and frees, the cores of the devices, OutOfMemoryError, and how PyTorch comes to use all this.
#include "adapter.h"

#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <cstdio>

namespace tiers {
namespace {

constexpr uint64_t kMargin = uint64_t{512} << 20;  // left to libraries that take memory of their own, without a budget

Adapter *instance = nullptr;

std::string size(int64_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(1 << 30));
  return text;
}

std::string failure() { return std::string("tiers: ") + tn_last_error(); }

// Have whoever keeps memory for later free it, such as that of tensors that were sent to other processes.
bool run_free_memory_callbacks() {
  bool any = false;
  for (const auto &name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
    any |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
  return any;
}

}  // namespace

Adapter::Adapter(uint64_t hbm, bool (*more)(int, uint64_t))
    : Pluggable([](size_t, int, cudaStream_t) -> void * { return nullptr; }, [](void *, size_t, int, cudaStream_t) {}),
      hbm_(hbm),
      more_(more) {}

void Adapter::init(int count) {
  std::lock_guard<std::mutex> guard(mutex_);
  while (devices_.size() < size_t(count)) devices_.emplace_back();
  initialized_ = true;
}

void Adapter::drop(void *pointer) {
  if (pointer) instance->raw_delete(pointer);
}

tn_core *Adapter::known(int device) const {
  return size_t(device) < devices_.size() ? devices_[device].made() : nullptr;
}

tn_core *Adapter::core(c10::DeviceIndex device) {
  TORCH_CHECK(size_t(device) < devices_.size(), "no such CUDA device: " + std::to_string(device));
  Device &of = devices_[device];
  if (tn_core *made = of.made()) return made;
  c10::DeviceGuard on({c10::DeviceType::CUDA, device});
  std::lock_guard<std::mutex> guard(mutex_);
  if (tn_core *made = of.made()) return made;  // by another thread, while this one came to the lock
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  of.total = total;
  of.limit = hbm_ ? hbm_ : (free > kMargin ? free - kMargin : free);
  tn_core *opened = nullptr;
  TORCH_CHECK(tn_open("cuda", device, of.limit, 0, &opened) == TN_OK, failure());
  of.core.store(opened, std::memory_order_release);
  return opened;
}

tn_core *Adapter::core_of(void *pointer) const {
  for (const Device &device : devices_)
    if (tn_core *core = device.made(); core && tn_owns(core, reinterpret_cast<uint64_t>(pointer))) return core;
  return nullptr;
}

c10::DataPtr Adapter::allocate(size_t bytes) {
  c10::DeviceIndex device = c10::cuda::current_device();
  void *pointer = bytes ? take(bytes, device, c10::cuda::getCurrentCUDAStream(device)) : nullptr;
  return {pointer, pointer, &drop, c10::Device(c10::DeviceType::CUDA, device)};
}

void *Adapter::raw_alloc(size_t bytes) {
  c10::DeviceIndex device = c10::cuda::current_device();
  return bytes ? take(bytes, device, c10::cuda::getCurrentCUDAStream(device)) : nullptr;
}

void *Adapter::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
  return bytes ? take(bytes, c10::cuda::current_device(), stream) : nullptr;
}

void *Adapter::take(size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
  tn_core *from = core(device);
  uint64_t address = 0, number = routes_ ? route(device, stream) : 0;
  int status = tn_allocate(from, bytes, reinterpret_cast<uint64_t>(stream), number, &address);
  while (status == TN_FULL && (run_free_memory_callbacks() || more_(device, bytes)))
    status = tn_allocate(from, bytes, reinterpret_cast<uint64_t>(stream), number, &address);
  if (status != TN_OK) refuse(status, bytes, device);
  if (history_) note(device, address, bytes, stream);
  if (c10::memoryProfilingEnabled()) tell_profiler(device, address, 1);
  return reinterpret_cast<void *>(address);
}

void Adapter::refuse(int status, size_t bytes, c10::DeviceIndex device) {
  std::string why = tn_last_error();
  TORCH_CHECK(status == TN_FULL, failure());
  tn_refused(core(device));
  tn_stats stats{};
  tn_get_stats(core(device), &stats);
  size_t free = 0, total = 0;
  C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
  std::vector<caching::OutOfMemoryObserver> observers;
  if (!tn_is_off_sequence()) {  // what runs off the sequence is not the program's
    std::lock_guard<std::mutex> guard(mutex_);
    observers = observers_;
  }
  uint64_t limit = devices_[device].limit;
  for (auto &observer : observers) observer(device, bytes, limit, free);
  TORCH_CHECK_WITH(OutOfMemoryError, false,
                   "CUDA out of memory. Tried to allocate " + size(bytes) + " on GPU " + std::to_string(device) + ": " +
                       why + ". hbm: " + size(stats.hbm_bytes) + " of " + size(limit) +
                       "; dram: " + size(stats.dram_bytes) + " of " + size(stats.dram_limit) +
                       " that could be had beside what was moved there; in use " + size(stats.allocated[0].current) +
                       ", idle in fragments " + size(stats.idle_bytes) +
                       ". Raise TIERS_DRAM (or TIERS_HBM), or let less live at once.");
}

void Adapter::raw_delete(void *pointer) {
  uint64_t address = reinterpret_cast<uint64_t>(pointer);
  for (size_t device = 0; device < devices_.size(); ++device) {
    tn_core *core = devices_[device].made();
    if (!core || (devices_.size() > 1 && !tn_owns(core, address))) continue;
    if (history_) forget(c10::DeviceIndex(device), address);
    if (c10::memoryProfilingEnabled()) tell_profiler(c10::DeviceIndex(device), address, -1);
    if (tn_free(core, address) != TN_OK) {
      TORCH_WARN_ONCE(failure());
    }
    return;
  }
}

void Adapter::recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream) {
  // Memory that is not ours, such as another process's, is not ours to look after either.
  if (!data.get() || data.get_deleter() != &drop) return;
  if (tn_core *core = core_of(data.get()))
    TORCH_CHECK(
        tn_used_on(core, reinterpret_cast<uint64_t>(data.get()), reinterpret_cast<uint64_t>(stream.stream())) == TN_OK,
        tn_last_error());
}

void *Adapter::getBaseAllocation(void *pointer, size_t *bytes) {
  uint64_t begin = 0, all = 0;
  tn_core *core = core_of(pointer);
  TORCH_CHECK(core && tn_block_of(core, reinterpret_cast<uint64_t>(pointer), &begin, &all) == TN_OK,
              "not an address of this allocator");
  if (bytes) *bytes = all;
  return reinterpret_cast<void *>(begin);
}

// Once two GPUs are peers, each reaches what cudaMalloc gave on the other; pages that we map have to be shared by a
// call.
void Adapter::enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) {
  Pluggable::enablePeerAccess(device, owner);
  TORCH_CHECK(tn_share(core(owner), device) == TN_OK, failure());
}

cudaError_t Adapter::memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t bytes,
                                 cudaStream_t stream, bool peers) {
  // Between GPUs that are no peers, a plain copy works for what cudaMalloc gave only.
  if (peers || to_device == from_device) return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
  return cudaMemcpyPeerAsync(to, to_device, from, from_device, bytes, stream);
}

void Adapter::emptyCache(MempoolId_t) {
  for (Device &device : devices_)
    if (tn_core *core = device.made()) TORCH_CHECK(tn_trim(core, 0) == TN_OK, tn_last_error());
}

double Adapter::getMemoryFraction(c10::DeviceIndex device) {
  core(device);
  std::lock_guard<std::mutex> guard(mutex_);
  return devices_[device].fraction;
}

void Adapter::setMemoryFraction(double fraction, c10::DeviceIndex device) {
  TORCH_CHECK(fraction >= 0 && fraction <= 1, "invalid fraction: please set one within [0, 1]");
  tn_core *of = core(device);
  std::lock_guard<std::mutex> guard(mutex_);
  devices_[device].fraction = fraction;
  uint64_t allowed = uint64_t(fraction * double(devices_[device].total));
  TORCH_CHECK(tn_limit(of, TN_HBM, std::min(allowed, devices_[device].limit)) == TN_OK, tn_last_error());
}

}  // namespace tiers

// Makes the core PyTorch's allocator, before CUDA is initialised. `hbm` 0: all that is free, less a margin.
extern "C" TN_API int tiers_install(uint64_t hbm, bool (*more)(int, uint64_t), char *error, uint64_t capacity) {
  try {
    auto made = std::make_shared<tiers::Adapter>(hbm, more);
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(made);
    // Never destroyed: tensors outlive the interpreter, and those that other libraries hold our own static objects.
    tiers::instance = (new auto(made))->get();
    return 0;
  } catch (const std::exception &problem) {
    snprintf(error, capacity, "%s", problem.what());
    return 1;
  }
}

// The core of a device; null before its first allocation.
extern "C" TN_API void *tiers_core_of(int device) { return tiers::instance ? tiers::instance->known(device) : nullptr; }
