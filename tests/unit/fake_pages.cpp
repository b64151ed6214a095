// The part of the driver without a GPU that has pages: one anonymous file is all the memory of the device. A page that
// is unmapped while any stream has something left to do would be one that a GPU may still be at work on: that ends it.

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "fake_streams.h"

namespace {

constexpr size_t kPage = size_t{2} << 20;
constexpr int kFull = 2;

long there = 1 << 20, made = 0, depth = 0;
int file = -1;

void expect(bool holds, const char* what) {
    if (!holds) std::printf("%s\n", what), std::fflush(stdout), std::abort();
}

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {
void fake_has_pages(long pages) { there = made + pages; }  // from now on
long fake_contexts() { return depth; }                     // that were pushed and not popped

int cuInit(unsigned) {
    if (file < 0) file = memfd_create("fake", MFD_CLOEXEC);
    return 0;
}
int cuDeviceGetAttribute(int* value, int, int) { return *value = 1, 0; }
int cuCtxPushCurrent_v2(void*) { return ++depth, 0; }
int cuCtxPopCurrent_v2(void** context) {
    expect(depth > 0, "a context is popped that nobody pushed");
    return *context = nullptr, --depth, 0;
}
int cuMemAddressReserve(uint64_t* address, size_t bytes, size_t, uint64_t, unsigned long long) {
    void* place = mmap(nullptr, bytes + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    *address = (reinterpret_cast<uint64_t>(place) + kPage - 1) / kPage * kPage;
    return place == MAP_FAILED ? kFull : 0;
}
int cuMemAddressFree(uint64_t address, size_t bytes) { return munmap(at(address), bytes); }
int cuMemCreate(uint64_t* handle, size_t, const void*, unsigned long long) {
    if (made == there) return kFull;
    *handle = static_cast<uint64_t>(++made);
    return ftruncate(file, made * static_cast<long>(kPage));
}
int cuMemRelease(uint64_t) { return 0; }
int cuMemMap(uint64_t address, size_t bytes, size_t, uint64_t handle, unsigned long long) {
    long offset = static_cast<long>((handle - 1) * kPage);
    void* place = mmap(at(address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file, offset);
    return place == MAP_FAILED ? 1 : 0;
}
int cuMemUnmap(uint64_t address, size_t bytes) {
    expect(!fake_pending_anywhere(), "pages are unmapped under work");
    void* place = mmap(at(address), bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return place == MAP_FAILED ? 1 : 0;
}
int cuMemSetAccess(uint64_t, size_t, const void* users, size_t count) {
    auto* user = static_cast<const int*>(users);  // what kind of place, its number, and what it may do
    for (size_t k = 0; k < count; ++k, user += 3)
        if (user[1] > 1) return 217;  // the first two devices are peers
    return 0;
}
int cuMemcpy(uint64_t to, uint64_t from, size_t bytes) { return cuMemcpyAsync(to, from, bytes, nullptr); }
int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR_FAKE", 0; }
}
