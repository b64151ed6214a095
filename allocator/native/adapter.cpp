// PyTorch's allocator interface over the core. Compiled once against the torch that is installed; see allocator/adapter.py.
//
// Statistics, snapshots, memory history, private pools and OutOfMemoryError are those PyTorch's users know. The class
// derives from PyTorch's own pluggable allocator for what it need not change.
#include <c10/core/DeviceGuard.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>

#include <cstdio>
#include <deque>
#include <map>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "core.h"

namespace {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::TraceEntry;
using c10::cuda::MempoolId_t;
using Base = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

constexpr uint64_t kMargin = uint64_t{512} << 20;  // left to libraries that take memory of their own, without a budget

// Not with a stream: a compiler that brings parts of its own standard library has two ideas of what a locale is.
std::string size(int64_t bytes) {
  char text[32];
  snprintf(text, sizeof text, "%.2f GiB", double(bytes) / double(1 << 30));
  return text;
}

class Adapter;
Adapter *instance = nullptr;
void drop(void *pointer);

class Adapter final : public Base {
 public:
  Adapter(uint64_t hbm, uint64_t dram, bool (*more)(int, uint64_t))
      : Base([](size_t, int, cudaStream_t) -> void * { return nullptr; }, [](void *, size_t, int, cudaStream_t) {}),
        hbm_(hbm),
        dram_(dram),
        more_(more) {}

  void init(int count) override {
    std::lock_guard<std::mutex> guard(mutex_);
    if (devices_.size() < size_t(count)) devices_.resize(count);
    initialized_ = true;
  }

  // ------------------------------------------------------------------------------------------ memory

  c10::DataPtr allocate(size_t bytes) override {
    c10::DeviceIndex device = c10::cuda::current_device();
    void *pointer = bytes ? take(bytes, device, c10::cuda::getCurrentCUDAStream(device)) : nullptr;
    return {pointer, pointer, &drop, c10::Device(c10::DeviceType::CUDA, device)};
  }

  void *raw_alloc(size_t bytes) override {
    c10::DeviceIndex device = c10::cuda::current_device();
    return bytes ? take(bytes, device, c10::cuda::getCurrentCUDAStream(device)) : nullptr;
  }

  void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    return bytes ? take(bytes, c10::cuda::current_device(), stream) : nullptr;
  }

  c10::DeleterFnPtr raw_deleter() const override { return &drop; }

  void raw_delete(void *pointer) override {
    uint64_t address = reinterpret_cast<uint64_t>(pointer);
    for (size_t device = 0; device < devices_.size(); ++device) {
      tn_core *core = devices_[device].core;
      if (!core || (devices_.size() > 1 && !tn_owns(core, address))) continue;
      if (history_) forget(device, address);
      if (tn_free(core, address) != TN_OK) TORCH_WARN_ONCE("tiers: ", tn_last_error());
      return;
    }
  }

  void recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream) override {
    // Memory that is not ours, such as another process's, is not ours to look after either.
    if (!data.get() || data.get_deleter() != &drop) return;
    if (tn_core *core = core_of(data.get()))
      TORCH_CHECK(tn_used_on(core, reinterpret_cast<uint64_t>(data.get()),
                             reinterpret_cast<uint64_t>(stream.stream())) == TN_OK,
                  tn_last_error());
  }

  void *getBaseAllocation(void *pointer, size_t *bytes) override {
    uint64_t begin = 0, all = 0;
    tn_core *core = core_of(pointer);
    TORCH_CHECK(core && tn_block_of(core, reinterpret_cast<uint64_t>(pointer), &begin, &all) == TN_OK,
                "not an address of this allocator");
    if (bytes) *bytes = all;
    return reinterpret_cast<void *>(begin);
  }

  void emptyCache(MempoolId_t = {0, 0}) override {
    for (Device &device : devices_)
      if (device.core) TORCH_CHECK(tn_trim(device.core) == TN_OK, tn_last_error());
  }

  void cacheInfo(c10::DeviceIndex device, size_t *largest) override {
    tn_stats stats{};
    tn_get_stats(core(device), &stats);
    *largest = std::max<size_t>(stats.largest_idle, devices_[device].limit - stats.hbm_bytes);
  }

  double getMemoryFraction(c10::DeviceIndex device) override {
    core(device);
    return devices_[device].fraction;
  }

  void setMemoryFraction(double fraction, c10::DeviceIndex device) override {
    TORCH_CHECK(fraction >= 0 && fraction <= 1, "invalid fraction: please set one within [0, 1]");
    tn_core *of = core(device);
    devices_[device].fraction = fraction;
    uint64_t allowed = uint64_t(fraction * double(devices_[device].total));
    TORCH_CHECK(tn_limit(of, TN_HBM, std::min(allowed, devices_[device].limit)) == TN_OK, tn_last_error());
  }

  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { return {}; }

  // ----------------------------------------------------------------------------------------- numbers

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    tn_stats from{};
    tn_get_stats(core(device), &from);
    DeviceStats to;
    auto fill = [](auto &target, const tn_stat *source) {
      for (int kind = 0; kind < TN_SIZES; ++kind) set(target[kind], source[kind]);
    };
    fill(to.allocation, from.allocations);
    fill(to.allocated_bytes, from.allocated);
    fill(to.requested_bytes, from.requested);
    fill(to.active, from.active_blocks);
    fill(to.active_bytes, from.active);
    set(to.reserved_bytes[TN_ALL],
        {from.hbm_bytes + from.dram_bytes, from.hbm_peak + from.dram_peak, from.maps << 21, from.unmaps << 21});
    to.reserved_bytes[TN_LARGE] = to.reserved_bytes[TN_ALL];
    set(to.inactive_split_bytes[TN_ALL], {from.idle_bytes, from.idle_bytes, 0, 0});
    to.num_alloc_retries = from.retries;
    to.num_ooms = from.failures;
    to.num_sync_all_streams = from.waits;
    to.num_device_alloc = from.maps;
    to.num_device_free = from.unmaps;
    return to;
  }

  void resetPeakStats(c10::DeviceIndex device) override { tn_reset_peaks(core(device)); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { tn_reset_totals(core(device)); }

  caching::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override {
    caching::SnapshotInfo info{};
    std::lock_guard<std::mutex> guard(mutex_);
    c10::ApproximateClockToUnixTimeConverter converter;
    auto to_time = converter.makeConverter();
    for (size_t device = 0; device < devices_.size(); ++device) {
      info.device_traces.emplace_back();
      if (!devices_[device].core) continue;
      list(device, pool, &info.segments);
      if (!include_traces) continue;
      auto &traces = info.device_traces.back();
      traces.assign(devices_[device].history.begin(), devices_[device].history.end());
      for (TraceEntry &entry : traces) entry.time_.t_ = to_time(entry.time_.approx_t_);
    }
    return info;
  }

  bool isHistoryEnabled() override { return history_; }

  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries, caching::RecordContext when,
                     bool clear, const std::vector<std::string> &) override {
    std::lock_guard<std::mutex> guard(mutex_);
    history_ = enabled;
    recorder_ = enabled && when != caching::RecordContext::NEVER ? recorder : nullptr;
    entries_ = entries;
    for (Device &device : devices_) {
      if (!clear && enabled) continue;
      device.history.clear();
      device.contexts.clear();
    }
  }

  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override {
    std::lock_guard<std::mutex> guard(mutex_);
    observers_.push_back(std::move(observer));
  }

  // Nothing of ours comes from cudaMalloc, which is what its users would register.
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {}

  // ----------------------------------------------------------------------------------- private pools

  void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t id, std::shared_ptr<caching::CUDAAllocator> own) override {
    TORCH_CHECK(!own, "a MemPool with an allocator of its own needs PyTorch's allocator: set TIERS_ALLOCATOR=torch");
    core(device);
    std::lock_guard<std::mutex> guard(mutex_);
    ++pool(device, id).uses;
  }

  void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override {
    core(device);
    std::lock_guard<std::mutex> guard(mutex_);
    ++pool(device, id).uses;
    devices_[device].routes.push_back({id, std::move(filter)});
    ++routes_;
  }

  void endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) override {
    std::lock_guard<std::mutex> guard(mutex_);
    auto &routes = devices_[device].routes;
    for (auto route = routes.begin(); route != routes.end(); ++route) {
      if (route->id != id) continue;
      routes.erase(route);
      --routes_;
      return;
    }
    TORCH_CHECK(false, "endAllocateToPool: not currently recording to this pool");
  }

  void releasePool(c10::DeviceIndex device, MempoolId_t id) override {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = devices_[device].pools.find(id);
    TORCH_CHECK(found != devices_[device].pools.end(), "releasePool: no such pool");
    if (--found->second.uses > 0) return;
    tn_pool_retire(devices_[device].core, found->second.number);
    devices_[device].pools.erase(found);
  }

  int getPoolUseCount(c10::DeviceIndex device, MempoolId_t id) override {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = devices_[device].pools.find(id);
    return found == devices_[device].pools.end() ? 0 : found->second.uses;
  }

  // Our pools cut blocks to size and grow where there is room; neither of these changes that.
  void setUseOnOOM(c10::DeviceIndex, MempoolId_t, bool) override {}
  void setNoSplit(c10::DeviceIndex, MempoolId_t) override {}

  bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t id,
                                const std::unordered_set<void *> &expected) override {
    auto live = in_use(device, id);
    if (live.size() != expected.size()) return false;
    for (const tn_block &block : live)
      if (!expected.count(reinterpret_cast<void *>(block.address))) return false;
    return true;
  }

  struct State final : caching::AllocatorState {
    MempoolId_t id;
    std::vector<tn_block> blocks;
  };

  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device, MempoolId_t id) override {
    auto state = std::make_shared<State>();
    state->id = id;
    state->blocks = in_use(device, id);
    return state;
  }

  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<caching::AllocatorState> given) override {
    auto state = std::dynamic_pointer_cast<State>(given);
    TORCH_CHECK(state, "this state is another allocator's");
    caching::CheckpointDelta delta;
    for (const tn_block &block : in_use(device, state->id))
      delta.ptrs_freed.push_back(reinterpret_cast<void *>(block.address));
    uint64_t number = 0;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      number = pool(device, state->id).number;
    }
    TORCH_CHECK(tn_pool_clear(core(device), number) == TN_OK, tn_last_error());
    for (const tn_block &block : state->blocks) {
      TORCH_CHECK(tn_allocate_at(core(device), block.address, block.bytes, block.requested) == TN_OK, tn_last_error());
      void *pointer = reinterpret_cast<void *>(block.address);
      delta.dataptrs_allocd.emplace_back(pointer, pointer, &drop, c10::Device(c10::DeviceType::CUDA, device));
    }
    return delta;
  }

  std::string name() override { return "tiers"; }

  tn_core *known(int device) {
    return size_t(device) < devices_.size() ? devices_[device].core : nullptr;
  }

 private:
  struct Pool {
    uint64_t number = 0;
    int uses = 0;
  };
  struct Route {
    MempoolId_t id;
    std::function<bool(cudaStream_t)> filter;
  };
  struct Device {
    tn_core *core = nullptr;
    uint64_t limit = 0, total = 0;
    double fraction = 1.0;
    std::map<MempoolId_t, Pool> pools;
    std::vector<Route> routes;
    std::deque<TraceEntry> history;
    std::unordered_map<uint64_t, std::pair<size_t, std::shared_ptr<c10::GatheredContext>>> contexts;
  };

  static void set(c10::CachingAllocator::Stat &to, const tn_stat &from) {
    to.current = from.current;
    to.peak = from.peak;
    to.allocated = from.gained;
    to.freed = from.lost;
  }

  tn_core *core(c10::DeviceIndex device) {
    TORCH_CHECK(size_t(device) < devices_.size(), "no such CUDA device: ", std::to_string(device));
    if (!devices_[device].core) {
      c10::DeviceGuard on({c10::DeviceType::CUDA, device});
      std::lock_guard<std::mutex> guard(mutex_);
      Device &made = devices_[device];
      if (!made.core) {
        size_t free = 0, total = 0;
        C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
        made.total = total;
        made.limit = hbm_ ? hbm_ : (free > kMargin ? free - kMargin : free);
        tn_core *opened = nullptr;
        TORCH_CHECK(tn_open("cuda", device, made.limit, dram_, &opened) == TN_OK, "tiers: ", tn_last_error());
        made.core = opened;
      }
    }
    return devices_[device].core;
  }

  tn_core *core_of(void *pointer) {
    for (Device &device : devices_)
      if (device.core && tn_owns(device.core, reinterpret_cast<uint64_t>(pointer))) return device.core;
    return nullptr;
  }

  Pool &pool(c10::DeviceIndex device, MempoolId_t id) {
    Pool &found = devices_[device].pools[id];
    if (!found.number) found.number = ++pools_made_;
    return found;
  }

  uint64_t route(c10::DeviceIndex device, cudaStream_t stream) {
    std::lock_guard<std::mutex> guard(mutex_);
    for (Route &route : devices_[device].routes)
      if (route.filter(stream)) return pool(device, route.id).number;
    return 0;
  }

  void *take(size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
    tn_core *from = core(device);
    uint64_t address = 0, number = routes_ ? route(device, stream) : 0;
    int status = tn_allocate(from, bytes, reinterpret_cast<uint64_t>(stream), number, &address);
    while (status == TN_FULL && (others_let_go() || more_(device, bytes)))
      status = tn_allocate(from, bytes, reinterpret_cast<uint64_t>(stream), number, &address);
    if (status != TN_OK) refuse(status, bytes, device);
    if (history_) note(device, address, bytes, stream);
    return reinterpret_cast<void *>(address);
  }

  // Whoever holds memory for later, such as of tensors that were sent to other processes, is asked to let go of it.
  static bool others_let_go() {
    bool any = false;
    for (const auto &name : c10::FreeCudaMemoryCallbacksRegistry()->Keys())
      any |= c10::FreeCudaMemoryCallbacksRegistry()->Create(name)->Execute();
    return any;
  }

  [[noreturn]] void refuse(int status, size_t bytes, c10::DeviceIndex device) {
    std::string why = tn_last_error();
    TORCH_CHECK(status == TN_FULL, "tiers: ", why);
    tn_stats stats{};
    tn_get_stats(core(device), &stats);
    size_t free = 0, total = 0;
    C10_CUDA_CHECK(cudaMemGetInfo(&free, &total));
    std::vector<caching::OutOfMemoryObserver> observers;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      observers = observers_;
    }
    for (auto &observer : observers) observer(device, bytes, devices_[device].limit, free);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate ", size(bytes), " on GPU ",
                     std::to_string(device), ": ", why, ". hbm: ", size(stats.hbm_bytes), " of ", size(devices_[device].limit),
                     "; dram: ", size(stats.dram_bytes), " of ", size(stats.dram_limit), "; in use ", size(stats.allocated[0].current),
                     ", idle in fragments ", size(stats.idle_bytes),
                     ". Raise TIERS_DRAM (or TIERS_HBM), or let less live at once.");
  }

  // ---------------------------------------------------------------------------------------- history

  void note(c10::DeviceIndex device, uint64_t address, size_t bytes, cudaStream_t stream) {
    auto context = recorder_ ? recorder_() : nullptr;
    std::lock_guard<std::mutex> guard(mutex_);
    devices_[device].contexts[address] = {bytes, context};
    remember(device, TraceEntry::ALLOC, address, bytes, stream, std::move(context));
  }

  void forget(c10::DeviceIndex device, uint64_t address) {
    std::lock_guard<std::mutex> guard(mutex_);
    auto found = devices_[device].contexts.find(address);
    size_t bytes = found == devices_[device].contexts.end() ? 0 : found->second.first;
    if (found != devices_[device].contexts.end()) devices_[device].contexts.erase(found);
    remember(device, TraceEntry::FREE_REQUESTED, address, bytes, nullptr, nullptr);
    remember(device, TraceEntry::FREE_COMPLETED, address, bytes, nullptr, nullptr);
  }

  void remember(c10::DeviceIndex device, TraceEntry::Action action, uint64_t address, size_t bytes, cudaStream_t stream,
                std::shared_ptr<c10::GatheredContext> context) {
    auto &history = devices_[device].history;
    history.emplace_back(action, device, address, bytes, stream, MempoolId_t{0, 0}, c10::getApproximateTime(),
                         std::move(context));
    if (history.size() > entries_) history.pop_front();
  }

  std::vector<tn_block> all_blocks(c10::DeviceIndex device) {
    std::vector<tn_block> blocks(tn_blocks(devices_[device].core, nullptr, 0) + 64);
    uint64_t count = tn_blocks(devices_[device].core, blocks.data(), blocks.size());
    blocks.resize(std::min<uint64_t>(count, blocks.size()));
    return blocks;
  }

  std::vector<tn_block> in_use(c10::DeviceIndex device, MempoolId_t id) {
    core(device);
    std::lock_guard<std::mutex> guard(mutex_);
    uint64_t number = pool(device, id).number;
    std::vector<tn_block> found;
    for (const tn_block &block : all_blocks(device))
      if (block.pool == number && block.kind == 2) found.push_back(block);
    return found;
  }

  void list(size_t device, MempoolId_t wanted, std::vector<caching::SegmentInfo> *out) {
    std::map<uint64_t, MempoolId_t> ids{{0, {0, 0}}};
    for (auto &[id, pool] : devices_[device].pools) ids[pool.number] = id;
    uint64_t segment = 0;
    for (const tn_block &block : all_blocks(device)) {
      MempoolId_t id = ids.count(block.pool) ? ids[block.pool] : MempoolId_t{0, 0};
      if (wanted != MempoolId_t{0, 0} && id != wanted) continue;
      if (block.segment != segment) {
        segment = block.segment;
        out->emplace_back();
        out->back().device = c10::DeviceIndex(device);
        out->back().address = block.segment;
        out->back().stream = reinterpret_cast<void *>(block.stream);
        out->back().is_large = true;
        out->back().is_expandable = true;
        out->back().owner_private_pool_id = id;
      }
      caching::SegmentInfo &of = out->back();
      caching::BlockInfo info;
      info.size = block.bytes;
      info.requested_size = block.kind == 1 ? 0 : block.requested;
      info.allocated = block.kind == 2;
      info.active = block.kind != 1;
      auto context = devices_[device].contexts.find(block.address);
      if (context != devices_[device].contexts.end()) info.context_when_allocated = context->second.second;
      of.total_size += info.size;
      of.requested_size += info.requested_size;
      of.allocated_size += info.allocated ? info.size : 0;
      of.active_size += info.active ? info.size : 0;
      of.blocks.push_back(std::move(info));
    }
  }

  uint64_t hbm_, dram_;
  bool (*more_)(int, uint64_t);  // asks Python whether there is more DRAM to be had
  std::mutex mutex_;  // guards what follows, and never waits for the core's while that waits for this
  std::vector<Device> devices_;
  std::atomic<int> routes_{0};
  uint64_t pools_made_ = 0;
  std::atomic<bool> history_{false};
  caching::CreateContextFn recorder_ = nullptr;
  size_t entries_ = 0;
  std::vector<caching::OutOfMemoryObserver> observers_;
};

void drop(void *pointer) {
  if (pointer) instance->raw_delete(pointer);
}

}  // namespace

// Makes the core PyTorch's allocator, before CUDA is initialised. `hbm` 0: all that is free, less a margin.
extern "C" __attribute__((visibility("default"))) int tiers_install(uint64_t hbm, uint64_t dram,
                                                                     bool (*more)(int, uint64_t), char *error,
                                                                     uint64_t capacity) {
  try {
    auto made = std::make_shared<Adapter>(hbm, dram, more);
    torch::cuda::CUDAPluggableAllocator::changeCurrentAllocator(made);
    instance = made.get();
    static auto forever = made;  // tensors outlive the interpreter
    return 0;
  } catch (const std::exception &problem) {
    snprintf(error, capacity, "%s", problem.what());
    return 1;
  }
}

// The core of a device; null before its first allocation.
extern "C" __attribute__((visibility("default"))) void *tiers_core_of(int device) {
  return instance ? instance->known(device) : nullptr;
}
