// What `fake_cuda.cpp`, which has the streams, offers to `fake_pages.cpp`.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
bool fake_pending_anywhere();
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void* stream);
}
