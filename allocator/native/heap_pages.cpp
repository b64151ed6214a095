// Pages under a heap's addresses: which physical memory lies where, and who reaches it.
#include <algorithm>

#include "heap.h"

namespace tiers {

Status Heap::map(uint64_t address, uint64_t count, Tier tier) {
  std::vector<Handle> handles;
  Status status = pages_[tier].take(count, &handles);
  if (status != Status::Ok) return status;
  status = primitives_.map(address, handles.data(), count);
  if (status != Status::Ok) {
    pages_[tier].add_idle(handles);
    return status;
  }
  if (table_.size() < index(address) + count) table_.resize(index(address) + count);
  for (uint64_t page = 0; page < count; ++page) table_[index(address) + page] = {handles[page], tier};
  mapped_ += count * page_;
  maps_ += count;
  convert(address, count * page_, Kind::Free);
  return Status::Ok;
}

Status Heap::unmap(uint64_t address, uint64_t count) {
  Status status = primitives_.unmap(address, count);
  if (status != Status::Ok) return status;  // still mapped, as far as anybody can tell: the pages stay where they are
  for (uint64_t page = index(address); page < index(address) + count; ++page) {
    pages_[table_[page].tier].add_idle({table_[page].handle});
    table_[page] = {};
  }
  mapped_ -= count * page_;
  unmaps_ += count;
  convert(address, count * page_, Kind::Void);
  return Status::Ok;
}

Status Heap::map_missing(uint64_t address, uint64_t bytes) {
  uint64_t begin = down(address, page_), end = up(address + bytes, page_);
  for (uint64_t at = begin; at < end;) {
    auto block = std::prev(blocks_.upper_bound(at));
    uint64_t until = std::min(end, block->first + block->second.bytes);
    if (block->second.kind == Kind::Void) {
      uint64_t missing = (until - at) / page_;
      uint64_t here = std::min(missing, pages_[tier_].available());
      // What is said to be available may still be refused: other processes use the device, too.
      if (here && map(at, here, tier_) != Status::Ok) here = 0;
      if (here < missing) {
        Status status = map(at + here * page_, missing - here, kDram);
        if (status != Status::Ok) return status;
      }
    }
    at = until;
  }
  return Status::Ok;
}

Status Heap::lay_out(uint64_t address, const std::vector<bool> &in_hbm) {
  for (uint64_t page = 0; page < in_hbm.size(); ++page) {  // what lies in the wrong tier makes room for what is right
    uint64_t at = address + page * page_;
    bool mapped = index(at) < table_.size() && table_[index(at)].handle;
    if (!mapped || (table_[index(at)].tier == kHbm) == in_hbm[page]) continue;
    Status status = unmap(at, 1);
    if (status != Status::Ok) return status;
  }
  for (uint64_t page = 0; page < in_hbm.size();) {
    auto missing = [&](uint64_t i) {
      uint64_t entry = index(address + i * page_);
      return entry >= table_.size() || !table_[entry].handle;
    };
    uint64_t count = 0;
    while (page + count < in_hbm.size() && in_hbm[page + count] == in_hbm[page] && missing(page + count)) ++count;
    if (count) {
      Status status = map(address + page * page_, count, in_hbm[page] ? kHbm : kDram);
      if (status != Status::Ok) return status;
    }
    page += std::max<uint64_t>(count, 1);
  }
  return Status::Ok;
}

uint64_t Heap::on(Tier tier, uint64_t address, uint64_t bytes) const {
  uint64_t sum = 0, end = address + bytes;
  for (uint64_t at = address; at < end;) {
    uint64_t next = std::min(end, down(at, page_) + page_);
    if (index(at) < table_.size() && table_[index(at)].handle && table_[index(at)].tier == tier) sum += next - at;
    at = next;
  }
  return sum;
}

uint64_t Heap::unmapped(uint64_t address, uint64_t bytes) const {
  return bytes - on(kHbm, address, bytes) - on(kDram, address, bytes);
}

uint64_t Heap::pages_on(Tier tier, uint64_t address, uint64_t bytes) const {
  const uint64_t begin = down(address, page_);
  return on(tier, begin, up(address + bytes, page_) - begin);
}

uint64_t Heap::pages_on(Tier tier) const {
  return std::count_if(table_.begin(), table_.end(),
                       [&](const Page &page) { return page.handle && page.tier == tier; });
}

Status clear(Alias &alias, Primitives &primitives, Pages &pages) {
  if (alias.left.empty()) return Status::Ok;
  Status status = primitives.unmap(alias.address, alias.left.size());
  if (status != Status::Ok) return status;
  pages.add_idle(alias.left);
  alias.left.clear();
  return status;
}

Range Heap::to_move(uint64_t address, uint64_t bytes, Tier tier) const {
  const uint64_t end = address + bytes;
  if (state_ || tier == kHbm) return {index(down(address, page_)), index(up(end, page_))};
  return {index(up(address, page_)), index(down(end, page_))};
}

Status Heap::move(uint64_t address, uint64_t bytes, Tier tier, Alias &alias) {
  Status cleared = clear(alias, primitives_, pages_[alias.tier]);
  if (cleared != Status::Ok) return cleared;
  auto [page, last] = to_move(address, bytes, tier);
  while (page < last) {
    if (!table_[page].handle || table_[page].tier == tier) {
      ++page;
      continue;
    }
    Tier from = table_[page].tier;
    uint64_t count = 1;
    while (count < alias.pages && page + count < last && table_[page + count].handle &&
           table_[page + count].tier == from)
      ++count;
    uint64_t at = base_ + page * page_;
    std::vector<Handle> fresh, old;
    Status status = pages_[tier].take(count, &fresh);
    if (status != Status::Ok) return status;
    status = primitives_.map(alias.address, fresh.data(), count);
    if (status != Status::Ok) {
      pages_[tier].add_idle(fresh);
      return status;
    }
    status = primitives_.copy(alias.address, at, count * page_);
    Status unmapped = primitives_.unmap(alias.address, count);
    if (status == Status::Ok) status = unmapped;
    if (status == Status::Ok) status = primitives_.unmap(at, count);
    if (status != Status::Ok) {  // the old pages are still in place and hold what they held
      if (unmapped == Status::Ok)
        pages_[tier].add_idle(fresh);
      else
        alias.left = fresh, alias.tier = tier;
      return status;
    }
    for (uint64_t i = 0; i < count; ++i) old.push_back(table_[page + i].handle);
    status = primitives_.map(at, fresh.data(), count);
    if (status != Status::Ok) {  // back to how it was, or the addresses would be without memory
      Status again = primitives_.map(at, old.data(), count);
      pages_[tier].add_idle(fresh);
      return again == Status::Ok ? status : fail(Status::Driver, "pages could be mapped neither anew nor as before");
    }
    for (uint64_t i = 0; i < count; ++i) table_[page + i] = {fresh[i], tier};
    pages_[from].add_idle(old);
    maps_ += count;
    unmaps_ += count;
    page += count;
  }
  return Status::Ok;
}

bool Heap::moved(uint64_t address, uint64_t bytes, Tier tier) const {
  const Range all = to_move(address, bytes, tier);
  for (uint64_t page = all.begin; page < all.end; ++page)
    if (table_[page].handle && table_[page].tier != tier) return false;
  return true;
}

uint64_t Heap::run(uint64_t page) const {
  uint64_t count = 0;
  while (page + count < table_.size() && table_[page + count].handle) ++count;
  return count;
}

Status Heap::share(int device) {
  for (uint64_t page = 0, count = 0; page < table_.size(); page += count + 1) {
    count = run(page);
    Status status = count ? primitives_.share(device, base_ + page * page_, count) : Status::Ok;
    if (status != Status::Ok) return status;
  }
  return Status::Ok;
}

Status Heap::close() {
  Status worst = Status::Ok;
  for (uint64_t page = 0; page < table_.size();) {
    uint64_t count = run(page);
    if (count) {
      Status status = primitives_.unmap(base_ + page * page_, count);
      worst = worst == Status::Ok ? status : worst;
      if (status == Status::Ok)
        for (uint64_t i = page; i < page + count; ++i) pages_[table_[i].tier].add_idle({table_[i].handle});
    }
    page += count + 1;
  }
  if (worst == Status::Ok) worst = primitives_.unreserve(base_, bytes_);
  blocks_.clear();
  free_.clear();
  void_.clear();
  table_.clear();
  mapped_ = used_ = 0;
  return worst;
}

}  // namespace tiers
