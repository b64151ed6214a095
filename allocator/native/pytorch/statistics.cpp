// What PyTorch's users see of memory: statistics, snapshots and its history.
#include "adapter.h"

#include <c10/util/ApproximateClock.h>

#include <algorithm>

namespace tiers {
namespace {

void set(c10::CachingAllocator::Stat &to, const tn_stat &from) {
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.gained;
  to.freed = from.lost;
}

}  // namespace

void Adapter::cacheInfo(c10::DeviceIndex device, size_t *largest) {
  tn_stats stats{};
  tn_get_stats(core(device), &stats);
  *largest = std::max<size_t>(stats.largest_idle, devices_[device].limit - stats.hbm_bytes);
}

DeviceStats Adapter::getDeviceStats(c10::DeviceIndex device) {
  tn_stats from{};
  tn_get_stats(core(device), &from);
  const int64_t page = tn_page_bytes(core(device));
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
      {from.hbm_bytes + from.dram_bytes, from.hbm_peak + from.dram_peak, from.maps * page, from.unmaps * page});
  to.reserved_bytes[TN_LARGE] = to.reserved_bytes[TN_ALL];
  set(to.inactive_split_bytes[TN_ALL], {from.idle_bytes, from.idle_bytes, 0, 0});
  to.num_alloc_retries = from.retries;
  to.num_ooms = from.failures;
  to.num_sync_all_streams = from.waits;
  to.num_device_alloc = from.maps;
  to.num_device_free = from.unmaps;
  return to;
}

caching::SnapshotInfo Adapter::snapshot(MempoolId_t pool, bool include_traces) {
  caching::SnapshotInfo info{};
  std::lock_guard<std::mutex> guard(mutex_);
  c10::ApproximateClockToUnixTimeConverter converter;
  auto to_time = converter.makeConverter();
  for (size_t device = 0; device < devices_.size(); ++device) {
    info.device_traces.emplace_back();
    if (!devices_[device].made()) continue;
    list(c10::DeviceIndex(device), pool, &info.segments);
    if (!include_traces) continue;
    auto &traces = info.device_traces.back();
    traces.assign(devices_[device].history.begin(), devices_[device].history.end());
    for (TraceEntry &entry : traces) entry.time_.t_ = to_time(entry.time_.approx_t_);
  }
  return info;
}

std::vector<tn_block> Adapter::all_blocks(c10::DeviceIndex device) {
  tn_core *core = devices_[device].made();
  std::vector<tn_block> blocks(tn_blocks(core, nullptr, 0) + 64);  // other threads may add some
  uint64_t count = tn_blocks(core, blocks.data(), blocks.size());
  blocks.resize(std::min<uint64_t>(count, blocks.size()));
  return blocks;
}

void Adapter::list(c10::DeviceIndex device, MempoolId_t wanted, std::vector<caching::SegmentInfo> *out) {
  std::map<uint64_t, MempoolId_t> ids{{0, {0, 0}}};
  for (auto &[id, pool] : devices_[device].pools) ids[pool.number] = id;
  uint64_t segment = 0;
  for (const tn_block &block : all_blocks(device)) {
    MempoolId_t id = ids.count(block.pool) ? ids[block.pool] : MempoolId_t{0, 0};
    if (wanted != MempoolId_t{0, 0} && id != wanted) continue;
    if (block.segment != segment) {
      segment = block.segment;
      out->emplace_back();
      out->back().device = device;
      out->back().address = block.segment;
      out->back().stream = reinterpret_cast<void *>(block.stream);
      out->back().is_large = true;
      out->back().is_expandable = true;
      out->back().owner_private_pool_id = id;
    }
    caching::SegmentInfo &of = out->back();
    caching::BlockInfo info;
    info.size = block.bytes;
    info.requested_size = block.kind == TN_FREE ? 0 : block.requested;
    info.allocated = block.kind == TN_USED;
    info.active = block.kind != TN_FREE;
    auto context = devices_[device].contexts.find(block.address);
    if (context != devices_[device].contexts.end()) info.context_when_allocated = context->second.second;
    of.total_size += info.size;
    of.requested_size += info.requested_size;
    of.allocated_size += info.allocated ? info.size : 0;
    of.active_size += info.active ? info.size : 0;
    of.blocks.push_back(std::move(info));
  }
}

void Adapter::recordHistory(bool enabled, caching::CreateContextFn recorder, size_t entries,
                            caching::RecordContext when, bool clear, const std::vector<std::string> &) {
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

void Adapter::attachOutOfMemoryObserver(caching::OutOfMemoryObserver observer) {
  std::lock_guard<std::mutex> guard(mutex_);
  observers_.push_back(std::move(observer));
}

void Adapter::note(c10::DeviceIndex device, uint64_t address, size_t bytes, cudaStream_t stream) {
  caching::CreateContextFn recorder = recorder_;
  auto context = recorder ? recorder() : nullptr;
  std::lock_guard<std::mutex> guard(mutex_);
  devices_[device].contexts[address] = {bytes, context};
  remember(device, TraceEntry::ALLOC, address, bytes, stream, std::move(context));
}

void Adapter::forget(c10::DeviceIndex device, uint64_t address) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = devices_[device].contexts.find(address);
  size_t bytes = found == devices_[device].contexts.end() ? 0 : found->second.first;
  if (found != devices_[device].contexts.end()) devices_[device].contexts.erase(found);
  remember(device, TraceEntry::FREE_REQUESTED, address, bytes, nullptr, nullptr);
  remember(device, TraceEntry::FREE_COMPLETED, address, bytes, nullptr, nullptr);
}

// PyTorch's profiler: a block came into use (1), or is about to be freed (-1).
void Adapter::tell_profiler(c10::DeviceIndex device, uint64_t address, int sign) {
  tn_core *of = core(device);
  uint64_t begin = 0, bytes = 0;
  if (tn_block_of(of, address, &begin, &bytes) != TN_OK) return;
  tn_stats stats{};
  tn_get_stats(of, &stats);
  c10::reportMemoryUsageToProfiler(reinterpret_cast<void *>(address), sign * int64_t(bytes),
                                   stats.allocated[TN_ALL].current - (sign < 0 ? bytes : 0),
                                   stats.hbm_bytes + stats.dram_bytes, c10::Device(c10::DeviceType::CUDA, device));
}

void Adapter::remember(c10::DeviceIndex device, TraceEntry::Action action, uint64_t address, size_t bytes,
                       cudaStream_t stream, std::shared_ptr<c10::GatheredContext> context) {
  auto &history = devices_[device].history;
  history.emplace_back(action, device, address, bytes, stream, MempoolId_t{0, 0}, c10::getApproximateTime(),
                       std::move(context));
  if (history.size() > entries_) history.pop_front();
}

}  // namespace tiers
