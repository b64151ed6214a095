// The blocks of one reserved range of addresses, in the order of their addresses.
//
// A block is `Void` (no memory is mapped), `Free`, `Used`, or `PendingFree`: freed by the program, yet still read by
// work on another stream. Neighbours that are both Void or both Free are one block. Void blocks are whole pages; Free
// and Used ones meet anywhere. A heap belongs to one stream, so that a freed block may be handed out at once: the
// stream runs its work in order.
//
// Not safe for threads; the core locks.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "pages.h"

namespace tiers {

constexpr uint64_t kAlignment = 512;  // of blocks, and PyTorch's: kernels choose their code path by alignment

enum class Kind : uint8_t { Void, Free, Used, PendingFree };

struct Block {
  uint64_t address = 0, bytes = 0;
  Kind kind = Kind::Void;
  bool small = false;
  bool in_both = false;  // pages of its heap's tier, HBM, and of DRAM, which nobody else is to get
  uint64_t requested = 0;
  uint32_t period = 0, request = 0;  // where the log tells of its birth
  uint64_t demoted = 0;              // bytes that lie in DRAM, as they may
  uint64_t spilled = 0;              // bytes that lie in DRAM, as there was no room in HBM
  std::vector<Stream> streams;       // that use it besides its heap's own
};

struct Range {
  uint64_t begin = 0, end = 0;
};

// A reserved range through which pages are copied to another tier.
struct Alias {
  uint64_t address = 0, pages = 0;
  std::vector<Handle> left;  // mapped there still, as the driver would not unmap it: pages of `tier`
  Tier tier = kHbm;
};

inline uint64_t up(uint64_t value, uint64_t unit) { return (value + unit - 1) / unit * unit; }
inline uint64_t down(uint64_t value, uint64_t unit) { return value / unit * unit; }

// Unmap what is left there, and put its pages among the idle ones of their tier.
Status clear(Alias &alias, Primitives &primitives, Pages &pages);

class Heap {
 public:
  Heap(Primitives &primitives, Pages (&pages)[kTiers], Tier tier, Stream stream, uint64_t pool, bool state,
       uint64_t base, uint64_t bytes);

  bool contains(uint64_t address) const { return address >= base_ && address < base_ + bytes_; }

  // The smallest free block that holds `bytes` without touching `but`, cut to size; null if there is none.
  Block *fit(uint64_t bytes, Range but = {});
  // The block `[address, address + bytes)`, mapping pages where some are missing, for which `make_room` is called
  // before with their number; null if part of it is taken.
  Block *place(uint64_t address, uint64_t bytes, const std::function<void(uint64_t)> &make_room = {});
  // Where a block of `bytes` that does not touch `but` could begin, with the fewest pages to map for it; with
  // `sparing`, with the fewest of these and of the idle pages that it would cover. False where the range is too small.
  struct Growth {
    uint64_t begin = 0, address = 0, pages = 0;
  };
  bool growth(uint64_t bytes, Range but, Growth *out, bool sparing = false) const;
  // Map those pages, and cut that block.
  Status grow(const Growth &growth, uint64_t bytes, Block **out);

  Block *find(uint64_t address);  // the block in use that begins at `address`, or null
  void free(Block *block);
  void defer_free(Block *block);  // Used becomes PendingFree; `free` completes it

  // The whole free pages outside of `but`.
  std::vector<Range> idle_outside(Range but) const;
  // How many of them lie in `tier`.
  uint64_t idle_pages(Tier tier, Range but = {}) const;
  // Unmap up to `count` of those, of the largest free blocks first. Nothing may be at work on them.
  Status unmap_idle(Tier tier, uint64_t count, Range but = {});
  // Unmap them in both tiers. Nothing may be at work on them.
  Status unmap_idle_outside(Range but);

  // A run of `bytes` without blocks in use: of all such runs the one with the most mapped. False if there is none.
  bool find_run(uint64_t bytes, uint64_t *address) const;
  // Map the free run `[address, address + pages)` anew: `in_hbm[i]` says of each page whether it lies in HBM or in
  // DRAM.
  Status lay_out(uint64_t address, const std::vector<bool> &in_hbm);
  // Map what is missing in `[address, address + bytes)`, in this heap's tier while it lasts and in DRAM after that.
  Status map_missing(uint64_t address, uint64_t bytes);
  // Bytes of `[address, address + bytes)` on pages of `tier`.
  uint64_t on(Tier tier, uint64_t address, uint64_t bytes) const;
  // Bytes of it under which no page is mapped.
  uint64_t unmapped(uint64_t address, uint64_t bytes) const;
  // Bytes of the pages on `tier` that `[address, address + bytes)` has a part of.
  uint64_t pages_on(Tier tier, uint64_t address, uint64_t bytes) const;
  // How many of its pages lie on `tier`.
  uint64_t pages_on(Tier tier) const;
  // Put the pages under `[address, address + bytes)` on pages of `tier`: what they hold moves along. Those at the ends,
  // which others have a part of, go to HBM; to DRAM only where they are state's, as those others are read as rarely.
  // Nothing may be at work on them.
  Status move(uint64_t address, uint64_t bytes, Tier tier, Alias &alias);
  // Whether `move` would find all of them there.
  bool moved(uint64_t address, uint64_t bytes, Tier tier) const;

  // Have another GPU reach what is mapped, too.
  Status share(int device);

  // Unmap everything and unreserve the addresses. Nothing may be at work on them.
  Status close();

  Stream stream() const { return stream_; }
  uint64_t pool() const { return pool_; }
  Tier tier() const { return tier_; }
  bool state() const { return state_; }  // whether what lives as long as the program lies here, apart from the rest
  uint64_t mapped() const { return mapped_; }
  uint64_t idle() const { return mapped_ - used_; }  // bytes, those of parts of pages included, and pending frees
  uint64_t largest_free() const { return free_.empty() ? 0 : free_.rbegin()->first; }
  uint64_t maps() const { return maps_; }
  uint64_t unmaps() const { return unmaps_; }
  const std::map<uint64_t, Block> &blocks() const { return blocks_; }

 private:
  using Iterator = std::map<uint64_t, Block>::iterator;

  Block *cut(Iterator block, uint64_t address, uint64_t bytes);
  Iterator split(Iterator block, uint64_t address);
  void convert(uint64_t address, uint64_t bytes, Kind kind);
  void merge(Iterator block);
  void enlist(const Block &block);
  void delist(const Block &block);
  Status map(uint64_t address, uint64_t count, Tier tier);
  Status unmap(uint64_t address, uint64_t count);
  uint64_t run(uint64_t page) const;  // how many pages are mapped, one after the other, from this one on
  uint64_t index(uint64_t address) const { return (address - base_) / page_; }

  // Which pages `move` moves, from one up to another.
  Range to_move(uint64_t address, uint64_t bytes, Tier tier) const;

  struct Page {
    Handle handle = 0;
    Tier tier = kHbm;
  };

  Primitives &primitives_;
  const uint64_t page_;  // bytes
  Pages (&pages_)[kTiers];
  Tier tier_;
  Stream stream_;
  uint64_t pool_;
  bool state_;
  uint64_t base_, bytes_;
  uint64_t mapped_ = 0, used_ = 0, maps_ = 0, unmaps_ = 0;
  std::map<uint64_t, Block> blocks_;              // by address; they cover the range
  std::set<std::pair<uint64_t, uint64_t>> free_;  // (bytes, address) of Free blocks
  std::set<uint64_t> void_;                       // addresses of Void blocks
  std::vector<Page> table_;                       // by page of the range, as far as any was mapped
};

}  // namespace tiers
