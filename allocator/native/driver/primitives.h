// What the core asks of a driver: to reserve addresses, make pages, map them, copy, and wait. Nothing else.
//
// Two implementations: `cuda` (virtual memory management of the CUDA driver, opened with dlopen) and `memfd`
// (anonymous files mapped into host memory), so that everything above is tested on machines without a GPU.
//
// A *handle* is one page of physical memory in one tier. An *address* is a place in a reserved range; memory is
// reached through it only while a handle is mapped there. All sizes and addresses are multiples of a page's bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace tiers {

constexpr uint64_t kSmallestPage = uint64_t{2} << 20;  // of the driver's pages

enum Tier : int { kHbm = 0, kDram = 1, kTiers = 2 };

// What every call returns. `Full` and `Busy` are no failures of the driver: there is no memory left, or nobody may wait
// for a stream that is being captured into a graph, and the caller may go on.
enum class Status : int { Ok = 0, Full = 1, Driver = 2, Invalid = 3, Busy = 4 };

using Handle = uint64_t;  // 0 is none
using Stream = uint64_t;  // the driver's own handle of a stream; 0 is the default stream
using Event = uint64_t;

// The text of the last failure in this thread; empty before the first.
std::string &last_error();
Status fail(Status status, const std::string &text);

class Primitives {
 public:
  explicit Primitives(uint64_t page) : page_(page) {}
  virtual ~Primitives() = default;

  uint64_t page() const { return page_; }  // bytes

  // Reserve addresses that no memory backs. `Full` when the address space is used up.
  virtual Status reserve(uint64_t bytes, uint64_t *address) = 0;
  // Unreserve addresses. Nothing may be mapped in them.
  virtual Status unreserve(uint64_t address, uint64_t bytes) = 0;

  // Make one page of physical memory. `Full` when the tier has none left.
  virtual Status create(Tier tier, Handle *handle) = 0;
  // Release a page to the system. It must not be mapped anywhere.
  virtual Status release(Tier tier, Handle handle) = 0;

  // Map `count` pages at `address`, which must be reserved and not mapped; readable and writable when it returns.
  // On failure nothing is mapped.
  virtual Status map(uint64_t address, const Handle *handles, uint64_t count) = 0;
  // Unmap `count` pages at `address`. No work under way may touch them: the caller waits for it first.
  virtual Status unmap(uint64_t address, uint64_t count) = 0;

  // Have another GPU read and write `count` pages mapped at `address`, too; with 0, what is mapped from now on.
  virtual Status share(int device, uint64_t address, uint64_t count) = 0;

  // Copy between mapped addresses; done when it returns.
  virtual Status copy(uint64_t to, uint64_t from, uint64_t bytes) = 0;

  // Wait until all work that `stream` was given is done.
  virtual Status synchronize(Stream stream) = 0;
  // The same for all streams. None may be captured.
  virtual Status synchronize_all() = 0;
  // The end of what `stream` was given so far.
  virtual Status record(Stream stream, Event *event) = 0;
  // Whether it was passed. The event is destroyed when `*passed` is set, and not before.
  virtual Status query(Event event, bool *passed) = 0;
  // Whether `stream` is being captured into a graph: its work has not run, and no event of it can be waited for.
  virtual bool capturing(Stream stream) = 0;

 protected:
  const uint64_t page_;
};

// `Driver` with the reason in `last_error` where there is no such driver, or it lacks virtual memory management.
Status open_cuda(int device, uint64_t page, std::unique_ptr<Primitives> *out);
Status open_memfd(uint64_t page, std::unique_ptr<Primitives> *out);

}  // namespace tiers
