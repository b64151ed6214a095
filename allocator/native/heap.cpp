// Blocks: which addresses of a heap are in use, free, or without memory.
#include "heap.h"

#include <algorithm>

namespace tiers {

Heap::Heap(Primitives &primitives, Pages (&pages)[kTiers], Tier tier, Stream stream, uint64_t pool, bool state,
           uint64_t base, uint64_t bytes)
    : primitives_(primitives),
      page_(primitives.page()),
      pages_(pages),
      tier_(tier),
      stream_(stream),
      pool_(pool),
      state_(state),
      base_(base),
      bytes_(bytes) {
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

// Joins a block, which is in no list, with neighbours of its kind, and lists what they make together.
void Heap::merge(Iterator block) {
  auto next = std::next(block);
  if (next != blocks_.end() && next->second.kind == block->second.kind) {
    delist(next->second);
    block->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (block != blocks_.begin()) {
    auto before = std::prev(block);
    if (before->second.kind == block->second.kind) {
      delist(before->second);
      before->second.bytes += block->second.bytes;
      blocks_.erase(block);
      block = before;
    }
  }
  enlist(block->second);
}

// Turns `[address, address + bytes)`, which lies within one Void or Free block, into the other kind.
void Heap::convert(uint64_t address, uint64_t bytes, Kind kind) {
  auto block = split(std::prev(blocks_.upper_bound(address)), address);
  if (block->second.bytes > bytes) split(block, address + bytes);
  delist(block->second);
  block->second.kind = kind;
  merge(block);
}

// Takes `[address, address + bytes)` out of a Free block. On the way of every request: its list entry is moved, not
// made anew, and once.
Block *Heap::cut(Iterator block, uint64_t address, uint64_t bytes) {
  uint64_t end = block->first + block->second.bytes;
  auto entry = free_.extract({block->second.bytes, block->first});
  auto list = [&](Block &rest) {
    if (entry.empty()) return enlist(rest);
    entry.value() = {rest.bytes, rest.address};
    free_.insert(std::move(entry));
  };
  auto free_from = [&](uint64_t begin) {
    Block made;
    made.address = begin;
    made.bytes = end - begin;
    made.kind = Kind::Free;
    return blocks_.emplace_hint(std::next(block), begin, std::move(made));
  };
  if (block->first < address) {
    block->second.bytes = address - block->first;
    list(block->second);
    block = free_from(address);
  }
  if (address + bytes < end) list(free_from(address + bytes)->second);
  block->second.bytes = bytes;
  block->second.kind = Kind::Used;
  used_ += bytes;
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

Block *Heap::place(uint64_t address, uint64_t bytes, const std::function<void(uint64_t)> &make_room) {
  if (!bytes || !contains(address) || bytes > base_ + bytes_ - address) return nullptr;
  auto first = std::prev(blocks_.upper_bound(address));
  uint64_t end = address + bytes, missing = 0;
  for (auto block = first; block != blocks_.end() && block->first < end; ++block) {
    if (block->second.kind != Kind::Free && block->second.kind != Kind::Void) return nullptr;
    if (block->second.kind == Kind::Void)
      missing += (std::min(up(end, page_), block->first + block->second.bytes) -
                  std::max(down(address, page_), block->first)) /
                 page_;
  }
  if (missing) {
    if (make_room) make_room(missing);
    if (map_missing(address, bytes) != Status::Ok) return nullptr;
    first = std::prev(blocks_.upper_bound(address));
  }
  return cut(first, address, bytes);
}

bool Heap::growth(uint64_t bytes, Range but, Growth *out, bool sparing) const {
  bool found = false;
  uint64_t least = 0, idle = sparing ? idle_pages(tier_) : 0;
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
    uint64_t need = std::min(up(begin + bytes - address, page_), end - address);
    const uint64_t pages = need / page_;
    const uint64_t cost = pages + (sparing ? idle - idle_pages(tier_, {begin, begin + bytes}) : 0);
    if (!found || cost < least) *out = {begin, address, pages}, least = cost;
    found = true;
  }
  if (found || but.end <= base_ || but.end >= base_ + bytes_) return found;
  // What lies behind `but` may be one hole with its end, where that was unmapped.
  auto behind = std::prev(blocks_.upper_bound(but.end));
  if (behind->second.kind != Kind::Void) return false;
  uint64_t size = behind->first + behind->second.bytes - but.end;
  uint64_t half = down(size / 2, page_), begin = but.end + half;  // addresses cost nothing
  if (size - half < bytes) return false;
  *out = {begin, begin, up(bytes, page_) / page_};
  return true;
}

Status Heap::grow(const Growth &growth, uint64_t bytes, Block **out) {
  Status status = map(growth.address, growth.pages, tier_);
  if (status == Status::Ok) *out = cut(std::prev(blocks_.upper_bound(growth.begin)), growth.begin, bytes);
  return status;
}

Block *Heap::find(uint64_t address) {
  auto block = blocks_.find(address);
  return block != blocks_.end() && block->second.kind == Kind::Used ? &block->second : nullptr;
}

void Heap::free(Block *block) {
  auto place = blocks_.find(block->address);
  if (place->second.kind == Kind::Used) used_ -= place->second.bytes;
  place->second.kind = Kind::Free;
  place->second.streams.clear();
  merge(place);
}

void Heap::defer_free(Block *block) {
  block->kind = Kind::PendingFree;
  used_ -= block->bytes;
}

std::vector<Range> Heap::idle_outside(Range but) const {
  std::vector<Range> found;
  for (auto &[size, at] : free_) {
    uint64_t begin = up(at, page_), end = down(at + size, page_);
    for (Range part :
         {Range{begin, std::min(end, down(but.begin, page_))}, Range{std::max(begin, up(but.end, page_)), end}})
      if (part.begin < part.end) found.push_back(part);
  }
  return found;
}

uint64_t Heap::idle_pages(Tier tier, Range but) const {
  uint64_t idle = 0;
  for (const Range &part : idle_outside(but)) idle += on(tier, part.begin, part.end - part.begin);
  return idle / page_;
}

Status Heap::unmap_idle(Tier tier, uint64_t count, Range but) {
  std::vector<Range> largest = idle_outside(but);
  std::stable_sort(largest.begin(), largest.end(),
                   [](const Range &a, const Range &b) { return a.end - a.begin > b.end - b.begin; });
  for (auto [begin, end] : largest) {
    while (end > begin && count) {  // from its end: what is left stays in one piece with its page
      uint64_t pages = 0;
      while (pages < count && end - pages * page_ > begin && table_[index(end) - pages - 1].tier == tier) ++pages;
      Status status = pages ? unmap(end - pages * page_, pages) : Status::Ok;
      if (status != Status::Ok) return status;
      count -= pages;
      end -= std::max<uint64_t>(pages, 1) * page_;
    }
  }
  return Status::Ok;
}

Status Heap::unmap_idle_outside(Range but) {
  for (const Range &part : idle_outside(but)) {
    Status status = unmap(part.begin, (part.end - part.begin) / page_);
    if (status != Status::Ok) return status;
  }
  return Status::Ok;
}

bool Heap::find_run(uint64_t bytes, uint64_t *address) const {
  bool found = false;
  uint64_t best = 0, begin = 0, length = 0, mapped = 0;
  auto end_run = [&] {
    uint64_t aligned = up(begin, page_);
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

}  // namespace tiers
