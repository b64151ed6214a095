#include "heap.h"

#include <algorithm>

namespace tiers {
namespace {

uint64_t up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
uint64_t down(uint64_t value, uint64_t unit) { return value / unit * unit; }

}  // namespace

Heap::Heap(Primitives &primitives, Pages (&pages)[kTiers], Tier tier, Stream stream, uint64_t base, uint64_t bytes,
           bool state)
    : primitives_(primitives), pages_(pages), tier_(tier), stream_(stream), base_(base), bytes_(bytes), state_(state) {
  Block all;
  all.address = base;
  all.bytes = bytes;
  enlist(blocks_.emplace(base, all).first->second);
}

void Heap::enlist(const Block &block) {
  if (block.kind == Kind::Free) free_.emplace(block.bytes, block.address);
  if (block.kind == Kind::Void) void_.insert(block.address);
}

void Heap::delist(const Block &block) {
  if (block.kind == Kind::Free) free_.erase({block.bytes, block.address});
  if (block.kind == Kind::Void) void_.erase(block.address);
}

// Splits a block, of any kind that is in a list, at `address`; the later part.
Heap::Iterator Heap::split(Iterator block, uint64_t address) {
  if (address == block->first) return block;
  delist(block->second);
  Block later = block->second;
  later.address = address;
  later.bytes = block->second.bytes - (address - block->first);
  block->second.bytes = address - block->first;
  enlist(block->second);
  auto made = blocks_.emplace_hint(std::next(block), address, later);
  enlist(later);
  return made;
}

// Joins a block with neighbours of its kind.
Heap::Iterator Heap::merge(Iterator block) {
  auto join = [&](Iterator first, Iterator second) {
    delist(first->second);
    delist(second->second);
    first->second.bytes += second->second.bytes;
    blocks_.erase(second);
    enlist(first->second);
    return first;
  };
  auto next = std::next(block);
  if (next != blocks_.end() && next->second.kind == block->second.kind) block = join(block, next);
  if (block != blocks_.begin()) {
    auto before = std::prev(block);
    if (before->second.kind == block->second.kind) block = join(before, block);
  }
  return block;
}

// Turns `[address, address + bytes)`, which lies within one Void or Free block, into the other kind.
void Heap::convert(uint64_t address, uint64_t bytes, Kind kind) {
  auto block = split(std::prev(blocks_.upper_bound(address)), address);
  if (block->second.bytes > bytes) split(block, address + bytes);
  delist(block->second);
  block->second.kind = kind;
  enlist(block->second);
  merge(block);
}

Block *Heap::cut(Iterator block, uint64_t address, uint64_t bytes) {
  block = split(block, address);
  if (block->second.bytes > bytes) split(block, address + bytes);
  delist(block->second);
  block->second.kind = Kind::Used;
  return &block->second;
}

Block *Heap::fit(uint64_t bytes, Range but) {
  for (auto best = free_.lower_bound({bytes, 0}); best != free_.end(); ++best) {
    uint64_t first = best->second, last = first + best->first;
    bool apart = last <= but.begin || first >= but.end;
    uint64_t address = apart || first + bytes <= but.begin ? first : but.end + bytes <= last ? but.end : 0;
    if (address) return cut(blocks_.find(first), address, bytes);
  }
  return nullptr;
}

Block *Heap::place(uint64_t address, uint64_t bytes) {
  auto first = std::prev(blocks_.upper_bound(address));
  uint64_t end = address + bytes;
  bool missing = false;
  for (auto block = first; block != blocks_.end() && block->first < end; ++block) {
    if (block->second.kind != Kind::Free && block->second.kind != Kind::Void) return nullptr;
    missing = missing || block->second.kind == Kind::Void;
  }
  if (missing) {
    if (back(address, bytes) != Status::Ok) return nullptr;
    first = std::prev(blocks_.upper_bound(address));
  }
  return cut(first, address, bytes);
}

bool Heap::growth(uint64_t bytes, Range but, Growth *out) const {
  bool found = false;
  for (uint64_t address : void_) {
    auto block = blocks_.find(address), next = std::next(block);
    uint64_t begin = address, end = address + block->second.bytes, limit = end;
    // Free neighbours save pages, as far as they are not in `but`.
    if (block != blocks_.begin() && std::prev(block)->second.kind == Kind::Free) {
      begin = std::prev(block)->first;
      if (begin < but.end && but.begin < address) begin = std::min(but.end, address);
    }
    if (next != blocks_.end() && next->second.kind == Kind::Free) {
      limit = next->first + next->second.bytes;
      if (end < but.end && but.begin < limit) limit = std::max(but.begin, end);
    }
    if (address <= but.end && but.begin < end) continue;  // a hole within it is its own, and behind it, it is to grow
    if (limit - begin < bytes) continue;
    if (address - begin >= bytes) begin = address;  // it would have fit there
    uint64_t need = std::min(up(begin + bytes - address, kPage), end - address);
    if (!found || need < out->pages * kPage) *out = {begin, address, need / kPage};
    found = true;
  }
  if (found || but.end <= base_ || but.end >= base_ + bytes_) return found;
  // What lies behind `but` may be one hole with its end, where that was given back.
  auto behind = std::prev(blocks_.upper_bound(but.end));
  if (behind->second.kind != Kind::Void) return false;
  uint64_t size = behind->first + behind->second.bytes - but.end;
  uint64_t half = down(size / 2, kPage), begin = but.end + half;  // addresses cost nothing
  if (size - half < bytes) return false;
  *out = {begin, begin, up(bytes, kPage) / kPage};
  return true;
}

Status Heap::grow(const Growth &growth, uint64_t bytes, Block **out) {
  Status status = map(growth.address, growth.pages, tier_);
  if (status == Status::Ok) *out = cut(std::prev(blocks_.upper_bound(growth.begin)), growth.begin, bytes);
  return status;
}

Status Heap::map(uint64_t address, uint64_t count, Tier tier) {
  std::vector<Handle> handles;
  Status status = pages_[tier].take(count, &handles);
  if (status != Status::Ok) return status;
  status = primitives_.map(address, handles.data(), count);
  if (status != Status::Ok) {
    pages_[tier].give(handles);
    return status;
  }
  if (table_.size() < index(address) + count) table_.resize(index(address) + count);
  for (uint64_t page = 0; page < count; ++page) table_[index(address) + page] = {handles[page], tier};
  mapped_ += count * kPage;
  maps_ += count;
  convert(address, count * kPage, Kind::Free);
  return Status::Ok;
}

Status Heap::unmap(uint64_t address, uint64_t count) {
  Status status = primitives_.unmap(address, count);
  if (status != Status::Ok) return status;  // still mapped, as far as anybody can tell: the pages stay where they are
  for (uint64_t page = index(address); page < index(address) + count; ++page) {
    pages_[table_[page].tier].give({table_[page].handle});
    table_[page] = {};
  }
  mapped_ -= count * kPage;
  unmaps_ += count;
  convert(address, count * kPage, Kind::Void);
  return Status::Ok;
}

Block *Heap::find(uint64_t address) {
  auto block = blocks_.find(address);
  return block != blocks_.end() && block->second.kind == Kind::Used ? &block->second : nullptr;
}

void Heap::free(Block *block) {
  auto place = blocks_.find(block->address);
  place->second.kind = Kind::Free;
  place->second.streams.clear();
  enlist(place->second);
  merge(place);
}

uint64_t Heap::idle_pages() const {
  uint64_t pages = 0;
  for (auto &[bytes, address] : free_) {
    uint64_t begin = up(address, kPage), end = down(address + bytes, kPage);
    if (end > begin) pages += (end - begin) / kPage;
  }
  return pages;
}

Status Heap::surrender(uint64_t count, uint64_t *surrendered) {
  *surrendered = 0;
  std::vector<std::pair<uint64_t, uint64_t>> largest(free_.rbegin(), free_.rend());
  for (auto &[bytes, address] : largest) {
    uint64_t begin = up(address, kPage), end = down(address + bytes, kPage);
    if (bytes < kPage || *surrendered == count) break;
    if (end <= begin) continue;
    uint64_t pages = std::min((end - begin) / kPage, count - *surrendered);
    Status status = unmap(end - pages * kPage, pages);  // from its end: what is left stays in one piece with its page
    if (status != Status::Ok) return status;
    *surrendered += pages;
  }
  return Status::Ok;
}

Status Heap::surrender_outside(uint64_t address, uint64_t bytes) {
  std::vector<std::pair<uint64_t, uint64_t>> all(free_.begin(), free_.end());
  for (auto &[size, at] : all) {
    uint64_t begin = up(at, kPage), end = down(at + size, kPage);
    for (auto [from, to] : {std::make_pair(begin, std::min(end, address)),
                            std::make_pair(std::max(begin, address + bytes), end)}) {
      if (from >= to) continue;
      Status status = unmap(from, (to - from) / kPage);
      if (status != Status::Ok) return status;
    }
  }
  return Status::Ok;
}

bool Heap::find_run(uint64_t bytes, uint64_t *address) const {
  bool found = false;
  uint64_t best = 0, begin = 0, length = 0, mapped = 0;
  auto end_run = [&] {
    uint64_t aligned = up(begin, kPage);
    if (length >= bytes + (aligned - begin) && (!found || mapped > best)) {
      found = true;
      best = mapped;
      *address = aligned;
    }
    length = mapped = 0;
  };
  for (auto &[at, block] : blocks_) {
    if (block.kind != Kind::Free && block.kind != Kind::Void) {
      end_run();
      continue;
    }
    if (length == 0) begin = at;
    length += block.bytes;
    if (block.kind == Kind::Free) mapped += block.bytes;
  }
  end_run();
  return found;
}

Status Heap::back(uint64_t address, uint64_t bytes) {
  uint64_t begin = down(address, kPage), end = up(address + bytes, kPage);
  for (uint64_t at = begin; at < end;) {
    auto block = std::prev(blocks_.upper_bound(at));
    uint64_t until = std::min(end, block->first + block->second.bytes);
    if (block->second.kind == Kind::Void) {
      uint64_t missing = (until - at) / kPage;
      uint64_t here = std::min(missing, pages_[tier_].available());
      // What is said to be available may still be refused: other processes use the device, too.
      if (here && map(at, here, tier_) != Status::Ok) here = 0;
      if (here < missing) {
        Status status = map(at + here * kPage, missing - here, kDram);
        if (status != Status::Ok) return status;
      }
    }
    at = until;
  }
  return Status::Ok;
}

Status Heap::lay_out(uint64_t address, const std::vector<bool> &in_hbm) {
  for (uint64_t page = 0; page < in_hbm.size(); ++page) {  // what lies in the wrong tier makes room for what is right
    uint64_t at = address + page * kPage;
    bool mapped = index(at) < table_.size() && table_[index(at)].handle;
    if (!mapped || (table_[index(at)].tier == kHbm) == in_hbm[page]) continue;
    Status status = unmap(at, 1);
    if (status != Status::Ok) return status;
  }
  for (uint64_t page = 0; page < in_hbm.size();) {
    auto missing = [&](uint64_t i) {
      uint64_t entry = index(address + i * kPage);
      return entry >= table_.size() || !table_[entry].handle;
    };
    uint64_t count = 0;
    while (page + count < in_hbm.size() && in_hbm[page + count] == in_hbm[page] && missing(page + count)) ++count;
    if (count) {
      Status status = map(address + page * kPage, count, in_hbm[page] ? kHbm : kDram);
      if (status != Status::Ok) return status;
    }
    page += std::max<uint64_t>(count, 1);
  }
  return Status::Ok;
}

uint64_t Heap::on(Tier tier, uint64_t address, uint64_t bytes) const {
  uint64_t sum = 0, end = address + bytes;
  for (uint64_t at = address; at < end;) {
    uint64_t next = std::min(end, down(at, kPage) + kPage);
    if (index(at) < table_.size() && table_[index(at)].handle && table_[index(at)].tier == tier) sum += next - at;
    at = next;
  }
  return sum;
}

Status Heap::move(uint64_t address, uint64_t bytes, Tier tier, uint64_t alias, uint64_t alias_pages) {
  uint64_t begin = index(up(address, kPage)), end = index(down(address + bytes, kPage));
  for (uint64_t page = begin; page < end;) {
    if (!table_[page].handle || table_[page].tier == tier) {
      ++page;
      continue;
    }
    Tier from = table_[page].tier;
    uint64_t count = 1;
    while (count < alias_pages && page + count < end && table_[page + count].handle &&
           table_[page + count].tier == from)
      ++count;
    uint64_t at = base_ + page * kPage;
    std::vector<Handle> fresh, old;
    Status status = pages_[tier].take(count, &fresh);
    if (status != Status::Ok) return status;
    status = primitives_.map(alias, fresh.data(), count);
    if (status != Status::Ok) {
      pages_[tier].give(fresh);
      return status;
    }
    status = primitives_.copy(alias, at, count * kPage);
    Status unmapped = primitives_.unmap(alias, count);
    if (status == Status::Ok) status = unmapped;
    if (status == Status::Ok) status = primitives_.unmap(at, count);
    if (status != Status::Ok) {  // the old pages are still in place and hold what they held
      if (unmapped == Status::Ok) pages_[tier].give(fresh);
      return status;
    }
    for (uint64_t i = 0; i < count; ++i) old.push_back(table_[page + i].handle);
    status = primitives_.map(at, fresh.data(), count);
    if (status != Status::Ok) {  // back to how it was, or the addresses would be without memory
      Status again = primitives_.map(at, old.data(), count);
      pages_[tier].give(fresh);
      return again == Status::Ok ? status : fail(Status::Driver, "pages could be mapped neither anew nor as before");
    }
    for (uint64_t i = 0; i < count; ++i) table_[page + i] = {fresh[i], tier};
    pages_[from].give(old);
    maps_ += count;
    unmaps_ += count;
    page += count;
  }
  return Status::Ok;
}

Status Heap::close() {
  Status worst = Status::Ok;
  for (uint64_t page = 0; page < table_.size();) {
    uint64_t count = 0;
    while (page + count < table_.size() && table_[page + count].handle) ++count;
    if (count) {
      Status status = primitives_.unmap(base_ + page * kPage, count);
      worst = worst == Status::Ok ? status : worst;
      if (status == Status::Ok)
        for (uint64_t i = page; i < page + count; ++i) pages_[table_[i].tier].give({table_[i].handle});
    }
    page += count + 1;
  }
  if (worst == Status::Ok) worst = primitives_.unreserve(base_, bytes_);
  blocks_.clear();
  free_.clear();
  void_.clear();
  table_.clear();
  mapped_ = 0;
  return worst;
}

}  // namespace tiers
