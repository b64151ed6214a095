// The primitives without a GPU: one anonymous file per tier stands for its memory, and a page is an offset in it.
// Pages that nobody touches take no memory, so that the sequences of large models can be replayed anywhere.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <mutex>
#include <vector>

#include "primitives.h"

namespace tiers {
namespace {

class Memfd final : public Primitives {
 public:
  using Primitives::Primitives;
  ~Memfd() override {
    for (File &file : files_)
      if (file.descriptor >= 0) close(file.descriptor);
  }

  Status open() {
    for (File &file : files_) {
      file.descriptor = memfd_create("tiers", MFD_CLOEXEC);
      if (file.descriptor < 0) return fail(Status::Driver, std::string("memfd_create: ") + strerror(errno));
    }
    return Status::Ok;
  }

  Status reserve(uint64_t bytes, uint64_t *address) override {
    // Addresses of pages are multiples of the page, as the driver's are: a page more than asked for, cut to fit.
    void *place = mmap(nullptr, bytes + page_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) return fail(Status::Full, std::string("mmap: ") + strerror(errno));
    uint64_t start = reinterpret_cast<uint64_t>(place), aligned = (start + page_ - 1) / page_ * page_;
    if (aligned > start) munmap(place, aligned - start);
    munmap(reinterpret_cast<void *>(aligned + bytes), start + page_ - aligned);
    *address = aligned;
    return Status::Ok;
  }

  Status unreserve(uint64_t address, uint64_t bytes) override {
    return check(munmap(reinterpret_cast<void *>(address), bytes), "munmap");
  }

  Status create(Tier tier, Handle *handle) override {
    std::lock_guard<std::mutex> guard(mutex_);
    File &file = files_[tier];
    if (file.holes.empty()) {
      if (ftruncate(file.descriptor, (file.pages + 1) * page_)) return check(-1, "ftruncate");
      file.holes.push_back(file.pages++);
    }
    *handle = (file.holes.back() << 1 | uint64_t(tier)) + 1;
    file.holes.pop_back();
    return Status::Ok;
  }

  Status release(Tier tier, Handle handle) override {
    std::lock_guard<std::mutex> guard(mutex_);
    File &file = files_[tier];
    uint64_t page = (handle - 1) >> 1;
    file.holes.push_back(page);
    return check(fallocate(file.descriptor, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, page * page_, page_),
                 "fallocate");
  }

  Status map(uint64_t address, const Handle *handles, uint64_t count) override {
    for (uint64_t i = 0; i < count; ++i) {
      uint64_t bits = handles[i] - 1;
      void *place = mmap(reinterpret_cast<void *>(address + i * page_), page_, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_FIXED, files_[bits & 1].descriptor, (bits >> 1) * page_);
      if (place == MAP_FAILED) {
        Status status = check(-1, "mmap");
        unmap(address, i);
        return status;
      }
    }
    return Status::Ok;
  }

  Status unmap(uint64_t address, uint64_t count) override {
    void *place = mmap(reinterpret_cast<void *>(address), count * page_, PROT_NONE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return check(place == MAP_FAILED ? -1 : 0, "mmap");
  }

  Status share(int, uint64_t, uint64_t) override { return Status::Ok; }

  Status copy(uint64_t to, uint64_t from, uint64_t bytes) override {
    std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), bytes);
    return Status::Ok;
  }

  // Without a GPU all work is done when it is given.
  Status synchronize(Stream) override { return Status::Ok; }
  Status synchronize_all() override { return Status::Ok; }
  Status record(Stream, Event *event) override { return *event = 1, Status::Ok; }
  Status query(Event, bool *passed) override { return *passed = true, Status::Ok; }
  bool capturing(Stream) override { return false; }

 private:
  struct File {
    int descriptor = -1;
    uint64_t pages = 0;
    std::vector<uint64_t> holes;
  };

  Status check(int result, const char *call) {
    if (result == 0) return Status::Ok;
    return fail(errno == ENOMEM || errno == ENOSPC ? Status::Full : Status::Driver,
                std::string(call) + ": " + strerror(errno));
  }

  File files_[kTiers];
  std::mutex mutex_;
};

}  // namespace

Status open_memfd(uint64_t page, std::unique_ptr<Primitives> *out) {
  auto made = std::make_unique<Memfd>(page);
  Status status = made->open();
  if (status == Status::Ok) *out = std::move(made);
  return status;
}

}  // namespace tiers
