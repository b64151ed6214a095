// PyTorch's allocator interface over the core: what PyTorch's users know of memory on a GPU, on our pages.
//
// The class derives from PyTorch's own pluggable allocator for what it need not change. `adapter.cpp` serves memory,
// `statistics.cpp` tells of it, `pools.cpp` has the pools of graphs and MemPools. Compiled once against the torch that
// is installed; see `adapter.py`.
//
// No streams: a compiler that brings parts of its own standard library has two ideas of what a locale is. Messages
// are put together with `snprintf` and `std::to_string`, and TORCH_CHECK gets one string: it joins several by a stream.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <torch/csrc/cuda/CUDAPluggableAllocator.h>
#include <cstdint>
#include <functional>

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "../core.h"

namespace tiers {

namespace caching = c10::cuda::CUDACachingAllocator;
using c10::CachingDeviceAllocator::DeviceStats;
using c10::CachingDeviceAllocator::TraceEntry;
using c10::cuda::MempoolId_t;
using Pluggable = torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator;

class Adapter final : public Pluggable {
 public:
  // `more` asks Python whether there is DRAM to be had; in the beginning there is none.
  Adapter(uint64_t hbm, bool (*more)(int, uint64_t));

  // What tensors carry as their deleter.
  static void drop(void *pointer);

  // The core of a device, or null before its first allocation.
  tn_core *known(int device) const;

  void init(int count) override;
  std::string name() override { return "tiers"; }

  // Memory.
  c10::DataPtr allocate(size_t bytes) override;
  void *raw_alloc(size_t bytes) override;
  void *raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
  c10::DeleterFnPtr raw_deleter() const override { return &drop; }
  void raw_delete(void *pointer) override;
  void recordStream(const c10::DataPtr &data, c10::cuda::CUDAStream stream) override;
  void *getBaseAllocation(void *pointer, size_t *bytes) override;
  void emptyCache(MempoolId_t = {0, 0}) override;
  double getMemoryFraction(c10::DeviceIndex device) override;
  void setMemoryFraction(double fraction, c10::DeviceIndex device) override;

  // Several GPUs.
  void enablePeerAccess(c10::DeviceIndex device, c10::DeviceIndex owner) override;
  cudaError_t memcpyAsync(void *to, int to_device, const void *from, int from_device, size_t bytes, cudaStream_t stream,
                          bool peers) override;

  // Statistics, snapshots and history.
  void cacheInfo(c10::DeviceIndex device, size_t *largest) override;
  std::vector<caching::StreamSegmentSize> getExpandableSegmentSizes(c10::DeviceIndex) override { return {}; }
  DeviceStats getDeviceStats(c10::DeviceIndex device) override;
  void resetPeakStats(c10::DeviceIndex device) override { tn_reset_peaks(core(device)); }
  void resetAccumulatedStats(c10::DeviceIndex device) override { tn_reset_totals(core(device)); }
  caching::SnapshotInfo snapshot(MempoolId_t pool, bool include_traces) override;
  bool isHistoryEnabled() override { return history_; }
  void recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries, caching::RecordContext when,
                     bool clear, const std::vector<std::string> &) override;
  void attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) override;
  // Nothing of ours comes from cudaMalloc, which is what its users would register.
  void attachAllocatorTraceTracker(caching::AllocatorTraceTracker) override {}

  // Private pools.
  void createOrIncrefPool(c10::DeviceIndex device, MempoolId_t id,
                          std::shared_ptr<caching::CUDAAllocator> own) override;
  void beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, std::function<bool(cudaStream_t)> filter) override;
  void endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) override;
  void releasePool(c10::DeviceIndex device, MempoolId_t id) override;
  int getPoolUseCount(c10::DeviceIndex device, MempoolId_t id) override;
  // Our pools cut blocks to size and grow where there is room; neither of these changes that.
  void setUseOnOOM(c10::DeviceIndex, MempoolId_t, bool) override {}
  void setNoSplit(c10::DeviceIndex, MempoolId_t) override {}
  bool checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t id,
                                const std::unordered_set<void *> &expected) override;
  std::shared_ptr<caching::AllocatorState> getCheckpointState(c10::DeviceIndex device, MempoolId_t id) override;
  caching::CheckpointDelta setCheckpointPoolState(c10::DeviceIndex device,
                                                  std::shared_ptr<caching::AllocatorState> given) override;

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
    // Made once, under the lock, and then for good; looked up without it by every request. What is written before the
    // release, `limit` and `total` and all of the core itself, is there for whoever acquires the pointer: a thread sees
    // null and comes to the lock, where it finds what another made meanwhile, or it sees a whole core. Were the pointer
    // plain, a thread could see it before what it points to.
    std::atomic<tn_core *> core{nullptr};
    uint64_t limit = 0, total = 0;
    double fraction = 1.0;
    std::map<MempoolId_t, Pool> pools;
    std::vector<Route> routes;
    std::deque<TraceEntry> history;
    std::unordered_map<uint64_t, std::pair<size_t, std::shared_ptr<c10::GatheredContext>>> contexts;

    tn_core *made() const { return core.load(std::memory_order_acquire); }
  };

  tn_core *core(c10::DeviceIndex device);
  tn_core *core_of(void *pointer) const;
  void *take(size_t bytes, c10::DeviceIndex device, cudaStream_t stream);
  [[noreturn]] void refuse(int status, size_t bytes, c10::DeviceIndex device);

  Pool &pool(c10::DeviceIndex device, MempoolId_t id);
  uint64_t route(c10::DeviceIndex device, cudaStream_t stream);
  std::vector<tn_block> in_use(c10::DeviceIndex device, MempoolId_t id);

  void note(c10::DeviceIndex device, uint64_t address, size_t bytes, cudaStream_t stream);
  void forget(c10::DeviceIndex device, uint64_t address);
  void tell_profiler(c10::DeviceIndex device, uint64_t address, int sign);
  void remember(c10::DeviceIndex device, TraceEntry::Action action, uint64_t address, size_t bytes, cudaStream_t stream,
                std::shared_ptr<c10::GatheredContext> context);
  void list(c10::DeviceIndex device, MempoolId_t wanted, std::vector<caching::SegmentInfo> *out);
  std::vector<tn_block> all_blocks(c10::DeviceIndex device);

  const uint64_t hbm_;
  bool (*const more_)(int, uint64_t);
  std::deque<Device> devices_;  // made by `init`, before any memory is asked for; a deque, as they cannot be moved
  std::mutex mutex_;  // guards what follows and what devices hold but the core; never waited for with the core's held
  uint64_t pools_made_ = 0;
  size_t entries_ = 0;
  std::vector<caching::OutOfMemoryObserver> observers_;
  // Looked at by every request, without the lock.
  std::atomic<int> routes_{0};
  std::atomic<bool> history_{false};
  std::atomic<caching::CreateContextFn> recorder_{nullptr};
};

}  // namespace tiers
