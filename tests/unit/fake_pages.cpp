// The part of the driver without a GPU that has pages: one anonymous file is all the memory of the device. A page that
// is unmapped while a stream has something left to do there is one that a GPU may still be at work on: that ends it.
// What the documentation forbids is refused: to map what is mapped, to unmap or give access to parts of mappings or to
// what is not mapped, to free addresses in which something is. Nobody reaches what nobody was given access to.

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <vector>

#include "fake_streams.h"

namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr int kInvalid = 1, kFull = 2;

struct Page {
  int mapped = 0;
  bool held = true;  // by its handle
  bool device = true;
};

long there = 1 << 20, made = 0, refuse_unmap = 0;
int file = -1;
std::map<uint64_t, Page> pages;           // by handle
std::vector<uint64_t> gone;               // handles
std::map<uint64_t, uint64_t> mappings;    // handles by address
std::map<uint64_t, size_t> reservations;  // bytes by address

void expect(bool holds, const char *what) {
  if (!holds) std::printf("%s\n", what), std::fflush(stdout), std::abort();
}

void *at(uint64_t address) { return reinterpret_cast<void *>(address); }

long on_device() {
  return std::count_if(pages.begin(), pages.end(), [](auto &page) { return page.second.device; });
}

void drop(std::map<uint64_t, Page>::iterator page) {
  if (page->second.held || page->second.mapped) return;
  gone.push_back(page->first);
  pages.erase(page);
}

// Whether whole mappings, each of a page, are all that lies there.
bool all_mapped(uint64_t address, size_t bytes) {
  bool all = bytes && bytes % kPage == 0;
  for (size_t k = 0; k < bytes; k += kPage) all = all && mappings.count(address + k);
  return all;
}

}  // namespace

extern "C" {
void fake_has_pages(long more) { there = on_device() + more; }  // the device, from now on
void fake_refuse_unmap(long call) { refuse_unmap = call; }      // of those to come, from 1 on

int cuInit(unsigned) {
  if (file < 0) file = memfd_create("fake", MFD_CLOEXEC);
  return 0;
}
// Host memory that is registered has another address for the second device.
int cuDeviceGetAttribute(int *value, int attribute, int device) { return *value = attribute != 91 || device != 1, 0; }
int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t, uint64_t, unsigned long long) {
  if (int error = fake_unsafe()) return error;
  void *place = mmap(nullptr, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (place == MAP_FAILED) return kFull;
  *address = (reinterpret_cast<uint64_t>(place) + kPage - 1) / kPage * kPage;
  reservations[*address] = bytes;
  return 0;
}
int cuMemAddressFree(uint64_t address, size_t bytes) {
  if (int error = fake_unsafe()) return error;
  auto inside = mappings.lower_bound(address);
  if (inside != mappings.end() && inside->first < address + bytes) return kInvalid;
  auto found = reservations.find(address);
  if (found == reservations.end() || found->second != bytes) return kInvalid;
  reservations.erase(found);
  return munmap(at(address), bytes);
}
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, unsigned long long) {
  if (int error = fake_unsafe()) return error;
  if (bytes != kPage) return kInvalid;
  bool device = static_cast<const int *>(properties)[2] == 1;  // what kind of place
  if (device && on_device() >= there) return kFull;
  if (gone.empty()) gone.push_back(static_cast<uint64_t>(++made));
  *handle = gone.back();
  gone.pop_back();
  pages[*handle].device = device;
  return ftruncate(file, made * static_cast<long>(kPage));
}
int cuMemRelease(uint64_t handle) {
  if (int error = fake_unsafe()) return error;
  auto page = pages.find(handle);
  if (page == pages.end() || !page->second.held) return kInvalid;
  page->second.held = false;
  drop(page);
  return 0;
}
int cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
  if (int error = fake_unsafe()) return error;
  auto page = pages.find(handle);
  auto after = reservations.upper_bound(address);
  if (bytes != kPage || mappings.count(address) || page == pages.end() || after == reservations.begin())
    return kInvalid;
  auto &[begin, reserved] = *std::prev(after);
  if ((address - begin) % kPage || address + bytes > begin + reserved) return kInvalid;
  mappings[address] = handle;
  ++page->second.mapped;
  long offset = static_cast<long>((handle - 1) * kPage);
  return mmap(at(address), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, file, offset) == MAP_FAILED;
}
int cuMemUnmap(uint64_t address, size_t bytes) {
  if (int error = fake_unsafe()) return error;
  if (refuse_unmap && --refuse_unmap == 0) return 700;
  expect(!fake_pending_at(address, bytes), "pages are unmapped under work");
  if (!all_mapped(address, bytes)) return kInvalid;
  for (size_t k = 0; k < bytes; k += kPage) {
    auto page = pages.find(mappings[address + k]);
    mappings.erase(address + k);
    --page->second.mapped;
    drop(page);
  }
  void *place = mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return place == MAP_FAILED;
}
int cuMemSetAccess(uint64_t address, size_t bytes, const void *users, size_t count) {
  if (int error = fake_unsafe()) return error;
  if (!all_mapped(address, bytes)) return kInvalid;
  auto *user = static_cast<const int *>(users);  // what kind of place, its number, and what it may do
  for (size_t k = 0; k < count; ++k, user += 3)
    if (user[1] > 1) return 217;  // the first two devices are peers
  return mprotect(at(address), bytes, PROT_READ | PROT_WRITE);
}
int cuMemcpy(uint64_t to, uint64_t from, size_t bytes) {
  if (int error = fake_unsafe()) return error;
  return cuMemcpyAsync(to, from, bytes, nullptr);
}
int cuGetErrorName(int, const char **name) { return *name = "CUDA_ERROR_FAKE", 0; }
}
