// The C interface: every entry takes the core's lock, and lets nothing out that C does not know.
#include <algorithm>

#include "packing.h"
#include "state.h"

using namespace tiers;

namespace {

constexpr uint64_t kPages = 2048, kLargestPage = uint64_t{16} << 20;

// Bytes of a page: the driver takes 75 us to map one and to unmap it, however large it is, and each heap ends with one
// that is used in part. So there are some thousands of them.
uint64_t page_bytes(uint64_t hbm_limit) {
  uint64_t page = kSmallestPage;
  while (page < kLargestPage && page * 2 * kPages <= hbm_limit) page *= 2;
  return page;
}

// Exceptions of the standard library end here: there is only one, for want of memory.
template <typename Body>
int enter(tn_core *core, Body body) {
  try {
    if (core->is_inherited()) return int(fail(Status::Invalid, "this process was forked: the memory is its parent's"));
    std::lock_guard<std::mutex> guard(core->mutex);
    return int(body());
  } catch (const std::exception &error) {
    return int(fail(Status::Driver, error.what()));
  }
}

tn_glance glance(const tn_core &core) {
  uint64_t state = 0;
  for (auto &[base, heap] : core.heaps)
    if (heap->state() && core.pages[kDram].made()) state += heap->pages_on(kDram);
  return {core.stats.mispredicted + core.stats.misplaced,
          int64_t(core.pages[kDram].made() * core.page),
          int64_t(state * core.page),
          int64_t(core.layout.present),
          int64_t(core.layout.came),
          int64_t(core.log[0].requests.size()),
          core.log[1].repeats(core.log[2]),
          core.spilled_before,
          core.spilled_most};
}

}  // namespace

extern "C" {

int tn_open(const char *backend, int device, uint64_t hbm_limit, uint64_t dram_limit, tn_core **core) {
  try {
    std::unique_ptr<Primitives> primitives;
    const uint64_t page = page_bytes(hbm_limit);
    Status status = std::string(backend) == "cuda"    ? open_cuda(device, page, &primitives)
                    : std::string(backend) == "memfd" ? open_memfd(page, &primitives)
                                                      : fail(Status::Invalid, "no such backend");
    if (status != Status::Ok) return int(status);
    auto made = std::make_unique<tn_core>(std::move(primitives), hbm_limit, dram_limit);
    made->alias.pages = kAlias / page;
    status = made->primitives->reserve(kAlias, &made->alias.address);
    if (status == Status::Ok) *core = made.release();
    return int(status);
  } catch (const std::exception &error) {
    return int(fail(Status::Driver, error.what()));
  }
}

int tn_close(tn_core *core) {
  if (core->is_inherited()) return TN_OK;
  int result = enter(core, [&] {
    Status worst = Status::Ok;
    auto note = [&](Status status) { worst = worst == Status::Ok ? status : worst; };
    note(core->primitives->synchronize_all());
    for (auto &[base, heap] : core->heaps) note(heap->close());
    note(clear(core->alias, *core->primitives, core->pages[core->alias.tier]));
    for (Pages &tier : core->pages) note(tier.trim());
    note(core->primitives->unreserve(core->alias.address, kAlias));
    return worst;
  });
  delete core;
  return result;
}

const char *tn_last_error(void) { return last_error().c_str(); }

uint64_t tn_page_bytes(const tn_core *core) { return core->page; }

int tn_allocate(tn_core *core, uint64_t bytes, uint64_t stream, uint64_t pool, uint64_t *address) {
  return enter(core, [&] { return core->allocate(bytes, stream, pool, address); });
}

int tn_free(tn_core *core, uint64_t address) {
  if (core->is_inherited()) return TN_OK;  // a copy of the parent's tensor goes, which has the memory still
  return enter(core, [&] { return core->free(address); });
}

int tn_used_on(tn_core *core, uint64_t address, uint64_t stream) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->find(address) : nullptr;
    if (!block) return fail(Status::Invalid, "nothing in use begins at this address");
    auto &streams = block->streams;
    if (stream != heap->stream() && std::find(streams.begin(), streams.end(), stream) == streams.end())
      streams.push_back(stream);
    return Status::Ok;
  });
}

int tn_block_of(tn_core *core, uint64_t address, uint64_t *begin, uint64_t *bytes) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    if (!heap) return fail(Status::Invalid, "not an address of this core");
    const Block &block = std::prev(heap->blocks().upper_bound(address))->second;
    if (block.kind != Kind::Used) return fail(Status::Invalid, "nothing in use holds this address");
    *begin = block.address;
    *bytes = block.bytes;
    return Status::Ok;
  });
}

int tn_owns(tn_core *core, uint64_t address) { return !core->is_inherited() && core->owns(address); }

int tn_pool_retire(tn_core *core, uint64_t pool) {
  return enter(core, [&] { return core->pools[pool].retired = true, Status::Ok; });
}

uint64_t tn_pool_used(tn_core *core, uint64_t pool) {
  std::lock_guard<std::mutex> guard(core->mutex);
  auto found = core->pools.find(pool);
  return found == core->pools.end() ? 0 : found->second.used;
}

int tn_pool_clear(tn_core *core, uint64_t pool) {
  return enter(core, [&] {
    for (auto &[base, heap] : core->heaps) {
      if (heap->pool() != pool) continue;
      std::vector<uint64_t> used;
      for (auto &[address, block] : heap->blocks())
        if (block.kind == Kind::Used) used.push_back(address);
      for (uint64_t address : used) {
        Status status = core->free(address);
        if (status != Status::Ok) return status;
      }
    }
    return Status::Ok;
  });
}

int tn_allocate_at(tn_core *core, uint64_t address, uint64_t bytes, uint64_t requested) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->place(address, bytes) : nullptr;
    if (!block) return fail(Status::Invalid, "the place is taken");
    core->record_allocation(heap, block, requested);
    return Status::Ok;
  });
}

void tn_capture(tn_core *core, int begins) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->captures += begins ? 1 : -1;
}

void tn_refused(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->stats.failures += !off_sequence;
}

void tn_class(tn_core *core, int lifetime_class, uint64_t most_hbm) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->lifetime_class = lifetime_class;
  core->most_state = most_hbm == UINT64_MAX ? most_hbm : core->state_in_hbm() + most_hbm;
}

void tn_off_sequence(int begins) { off_sequence += begins ? 1 : -1; }
int tn_is_off_sequence(void) { return off_sequence > 0; }

int tn_limit(tn_core *core, int tier, uint64_t bytes) {
  return enter(core, [&] {
    if (tier < 0 || tier >= kTiers) return fail(Status::Invalid, "no such tier");
    Pages &pages = core->pages[tier];
    // Not every driver gives host memory everywhere (containers, nodes without processors): better known now than
    // later.
    bool more = bytes / core->page > pages.limit();
    Status status = tier == kDram && !pages.made() && more ? pages.probe() : Status::Ok;
    if (status == Status::Ok) pages.set_limit(bytes / core->page);
    return status;
  });
}

int tn_share(tn_core *core, int device) {
  return enter(core, [&] {
    for (auto &[base, heap] : core->heaps) {
      Status status = heap->share(device);
      if (status != Status::Ok) return status;
    }
    return core->primitives->share(device, 0, 0);  // last: with a GPU that cannot, nothing could be mapped any more
  });
}

int tn_trim(tn_core *core, uint64_t keep) {
  return enter(core, [&] {
    core->process_events();
    Status status = core->unmap_idle_beyond(keep / core->page);
    for (Status trimmed : {core->pages[kHbm].trim(keep / core->page), core->pages[kDram].trim()})
      status = status == Status::Ok ? trimmed : status;
    return status;
  });
}

int tn_trim_outside(tn_core *core) {
  return enter(core, [&] {
    Heap *heap = core->layout.heap;
    if (!heap || core->captures) return Status::Ok;
    Status status = core->wait_for_readers(heap->stream());
    if (status != Status::Ok) return status == Status::Busy ? Status::Ok : status;
    core->process_events();
    status = heap->unmap_idle_outside(core->layout.region());
    for (Pages &tier : core->pages) {
      Status trimmed = tier.trim();
      status = status == Status::Ok ? trimmed : status;
    }
    return status;
  });
}

void tn_mark(tn_core *core, tn_glance *out) {
  std::lock_guard<std::mutex> guard(core->mutex);
  std::swap(core->log[2], core->log[1]);
  std::swap(core->log[1], core->log[0]);
  core->log[0].requests.clear();
  core->log[0].events = core->log[0].sum = 0;
  ++core->period;
  core->spilled_before = std::exchange(core->spilled_most, core->spilled);
  core->no_growth = 0;
  core->layout.came = core->layout.next;
  core->layout.next = 0;
  core->layout.back = kNone;  // `lost` stays: where one period was not as predicted, the next may not be either
  if (out) *out = glance(*core);
}

uint64_t tn_log(tn_core *core, int ago, tn_request *out, uint64_t capacity, uint64_t *events) {
  std::lock_guard<std::mutex> guard(core->mutex);
  *events = 0;
  if (ago < 0 || ago > 1) return 0;
  const Log &log = core->log[1 + ago];
  if (log.requests.size() > kLongest) return 0;
  uint64_t count = std::min<uint64_t>(capacity, log.requests.size());
  std::copy(log.requests.begin(), log.requests.begin() + count, out);
  *events = log.events;
  return log.requests.size();
}

int tn_set_layout(tn_core *core, uint64_t stream, uint64_t sequences, const uint64_t *counts, const uint64_t *least,
                  const uint64_t *bytes, const uint64_t *offsets, uint64_t units, const int64_t *costs) {
  return enter(core, [&] {
    if (!sequences) return fail(Status::Invalid, "a layout is made of one sequence or more");
    std::vector<Sequence> all(sequences);
    for (Sequence &one : all) {
      one.least.assign(least, least + *counts);
      one.bytes.assign(bytes, bytes + *counts);
      one.offsets.assign(offsets, offsets + *counts);
      least += *counts;
      bytes += *counts;
      offsets += *counts++;
    }
    const uint64_t each = core->page / TN_UNIT_BYTES;
    std::vector<int64_t> by_page((units + each - 1) / each, 0);
    for (uint64_t unit = 0; unit < units; ++unit) by_page[unit / each] += costs[unit];
    return core->set_layout(stream, std::move(all), by_page);
  });
}

void tn_forget_layout(tn_core *core, uint64_t expected) {
  std::lock_guard<std::mutex> guard(core->mutex);
  core->layout = {};
  core->no_growth = 2 * core->log[1].requests.size();
  core->expected = expected;
}

int tn_pack(uint64_t count, const uint64_t *bytes, const int64_t *births, const int64_t *deaths, int64_t events,
            uint64_t room, uint64_t *offsets, uint64_t *most) {
  try {
    std::vector<Life> lives;
    for (uint64_t k = 0; k < count; ++k) {
      bool within = 0 <= births[k] && births[k] <= events && births[k] <= deaths[k] && deaths[k] - births[k] <= events;
      if (!within) return int(fail(Status::Invalid, "a request that lives longer than a period has no place in it"));
      lives.push_back({bytes[k], births[k], deaths[k]});
    }
    std::vector<uint64_t> found = pack(lives, events, room);
    std::copy(found.begin(), found.end(), offsets);
    *most = most_alive(lives, events);
    return TN_OK;
  } catch (const std::exception &error) {
    return int(fail(Status::Driver, error.what()));
  }
}

int tn_wait_to_move(tn_core *core, uint64_t address, int tier) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->find(address) : nullptr;
    const bool none = !block || tier < 0 || tier >= kTiers || heap->moved(block->address, block->bytes, Tier(tier));
    return none ? Status::Ok : core->wait_for_all();
  });
}

int tn_move(tn_core *core, uint64_t address, int tier) {
  return enter(core, [&] {
    Heap *heap = core->heap_of(address);
    Block *block = heap ? heap->find(address) : nullptr;
    if (!block || tier < 0 || tier >= kTiers) return fail(Status::Invalid, "no such block, or no such tier");
    Status status = Status::Ok;
    if (!heap->moved(block->address, block->bytes, Tier(tier))) {
      status = core->wait_for_all();
      if (status != Status::Ok) return status;
      status = heap->move(block->address, block->bytes, Tier(tier), core->alias);
    }
    const uint64_t in_dram = heap->on(kDram, block->address, block->bytes);
    core->demote(block, tier == kDram ? in_dram : 0);
    core->spill(block, tier == kDram ? 0 : in_dram);
    core->spilled_most = core->spilled;  // what lay there before is over
    // What it left in DRAM is other processes' as well; what it left in HBM would be taken for what the program needs.
    Status trimmed = core->pages[tier == kHbm ? kDram : kHbm].trim();
    return status == Status::Ok ? trimmed : status;
  });
}

uint64_t tn_on(tn_core *core, uint64_t address, int tier) {
  std::lock_guard<std::mutex> guard(core->mutex);
  Heap *heap = core->heap_of(address);
  Block *block = heap ? heap->find(address) : nullptr;
  return block ? heap->on(Tier(tier), block->address, block->bytes) : 0;
}

uint64_t tn_pages_on(tn_core *core, uint64_t address, uint64_t bytes, int tier) {
  std::lock_guard<std::mutex> guard(core->mutex);
  Heap *heap = core->heap_of(address);
  return heap ? heap->pages_on(Tier(tier), address, bytes) : 0;
}

void tn_get_stats(tn_core *core, tn_stats *out) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  stats.hbm_bytes = core->pages[kHbm].made() * core->page;
  stats.hbm_peak = core->pages[kHbm].peak() * core->page;
  stats.dram_bytes = core->pages[kDram].made() * core->page;
  stats.dram_peak = core->pages[kDram].peak() * core->page;
  stats.hbm_limit = core->pages[kHbm].limit() * core->page;
  stats.dram_limit = core->pages[kDram].limit() * core->page;
  stats.demoted_bytes = core->demoted;
  stats.maps = core->maps;
  stats.unmaps = core->unmaps;
  stats.largest_idle = 0;
  // Not block by block: programs ask for this in every step, some while the device has nothing to do.
  uint64_t mapped = 0;
  for (auto &[base, heap] : core->heaps) {
    stats.maps += heap->maps();
    stats.unmaps += heap->unmaps();
    stats.largest_idle = std::max<int64_t>(stats.largest_idle, heap->largest_free());
    mapped += heap->mapped();
  }
  stats.idle_bytes = int64_t(mapped) - stats.active[TN_ALL].current;
  *out = stats;
}

void tn_get_glance(tn_core *core, tn_glance *out) {
  std::lock_guard<std::mutex> guard(core->mutex);
  *out = glance(*core);
}

int64_t tn_delayed(const tn_core *core) { return core->delayed; }

int64_t tn_retries(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  return core->stats.retries;
}

void tn_reset_peaks(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  for (auto *group : {stats.allocations, stats.allocated, stats.requested, stats.active, stats.active_blocks})
    for (int size = 0; size < TN_SIZES; ++size) group[size].peak = group[size].current;
  for (Pages &tier : core->pages) tier.reset_peak();
}

uint64_t tn_take_peak(tn_core *core, int of, int with_present) {
  std::lock_guard<std::mutex> guard(core->mutex);
  int64_t present = core->needed();
  int64_t &peak = core->peaks[of == TN_PERIODS];
  return uint64_t(std::max(std::exchange(peak, with_present ? present : 0), present));
}

void tn_reset_totals(tn_core *core) {
  std::lock_guard<std::mutex> guard(core->mutex);
  tn_stats &stats = core->stats;
  for (auto *group : {stats.allocations, stats.allocated, stats.requested, stats.active, stats.active_blocks})
    for (int size = 0; size < TN_SIZES; ++size) group[size].gained = group[size].lost = 0;
  stats.retries = stats.failures = 0;
}

uint64_t tn_blocks(tn_core *core, tn_block *out, uint64_t capacity) {
  std::lock_guard<std::mutex> guard(core->mutex);
  uint64_t count = 0;
  for (auto &[base, heap] : core->heaps) {
    uint64_t segment = 0;
    for (auto &[address, block] : heap->blocks()) {
      if (block.kind == Kind::Void) {
        segment = 0;
        continue;
      }
      segment = segment ? segment : address;
      if (count < capacity) {
        bool foreign = heap->on(heap->tier(), address, block.bytes) < block.bytes;
        out[count] = {address,
                      block.bytes,
                      block.requested,
                      heap->stream(),
                      heap->pool(),
                      int32_t(block.kind),
                      foreign ? int32_t(kDram) : int32_t(heap->tier()),
                      segment,
                      heap->state()};
      }
      ++count;
    }
  }
  return count;
}

}  // extern "C"
