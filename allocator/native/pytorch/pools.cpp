// Private pools: CUDA graphs' and MemPools', which stream's requests they get, and graphs' checkpointed states.
#include "adapter.h"

namespace tiers {
namespace {

struct State final : caching::AllocatorState {
  MempoolId_t id;
  std::vector<tn_block> blocks;
};

}  // namespace

Adapter::Pool &Adapter::pool(c10::DeviceIndex device, MempoolId_t id) {
  Pool &found = devices_[device].pools[id];
  if (!found.number) found.number = ++pools_made_;
  return found;
}

uint64_t Adapter::route(c10::DeviceIndex device, cudaStream_t stream) {
  std::lock_guard<std::mutex> guard(mutex_);
  for (Route &route : devices_[device].routes)
    if (route.filter(stream)) return pool(device, route.id).number;
  return 0;
}

std::vector<tn_block> Adapter::in_use(c10::DeviceIndex device, MempoolId_t id) {
  core(device);
  std::lock_guard<std::mutex> guard(mutex_);
  uint64_t number = pool(device, id).number;
  std::vector<tn_block> found;
  for (const tn_block &block : all_blocks(device))
    if (block.pool == number && block.kind == TN_USED) found.push_back(block);
  return found;
}

void Adapter::createOrIncrefPool(c10::DeviceIndex device, MempoolId_t id, std::shared_ptr<caching::CUDAAllocator> own) {
  TORCH_CHECK(!own, "a MemPool with an allocator of its own needs PyTorch's allocator: set TIERS_ALLOCATOR=torch");
  core(device);
  std::lock_guard<std::mutex> guard(mutex_);
  ++pool(device, id).uses;
}

void Adapter::beginAllocateToPool(c10::DeviceIndex device, MempoolId_t id, std::function<bool(cudaStream_t)> filter) {
  tn_capture(core(device), 1);  // PyTorch tells us before the capture begins, and after it has ended
  std::lock_guard<std::mutex> guard(mutex_);
  ++pool(device, id).uses;
  devices_[device].routes.push_back({id, std::move(filter)});
  ++routes_;
}

void Adapter::endAllocateToPool(c10::DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto &routes = devices_[device].routes;
  for (auto route = routes.begin(); route != routes.end(); ++route) {
    if (route->id != id) continue;
    routes.erase(route);
    --routes_;
    tn_capture(devices_[device].made(), 0);
    return;
  }
  TORCH_CHECK(false, "endAllocateToPool: not currently recording to this pool");
}

void Adapter::releasePool(c10::DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = devices_[device].pools.find(id);
  TORCH_CHECK(found != devices_[device].pools.end(), "releasePool: no such pool");
  if (--found->second.uses > 0) return;
  tn_pool_retire(devices_[device].made(), found->second.number);
  devices_[device].pools.erase(found);
}

int Adapter::getPoolUseCount(c10::DeviceIndex device, MempoolId_t id) {
  std::lock_guard<std::mutex> guard(mutex_);
  auto found = devices_[device].pools.find(id);
  return found == devices_[device].pools.end() ? 0 : found->second.uses;
}

bool Adapter::checkPoolLiveAllocations(c10::DeviceIndex device, MempoolId_t id,
                                       const std::unordered_set<void *> &expected) {
  auto live = in_use(device, id);
  if (live.size() != expected.size()) return false;
  for (const tn_block &block : live)
    if (!expected.count(reinterpret_cast<void *>(block.address))) return false;
  return true;
}

std::shared_ptr<caching::AllocatorState> Adapter::getCheckpointState(c10::DeviceIndex device, MempoolId_t id) {
  auto state = std::make_shared<State>();
  state->id = id;
  state->blocks = in_use(device, id);
  return state;
}

caching::CheckpointDelta Adapter::setCheckpointPoolState(c10::DeviceIndex device,
                                                         std::shared_ptr<caching::AllocatorState> given) {
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

}  // namespace tiers
