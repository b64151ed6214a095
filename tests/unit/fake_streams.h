// What `fake_cuda.cpp`, which has contexts, streams and captures, offers to `fake_pages.cpp`.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
bool fake_pending_anywhere();
// What a call answers that may harm a graph which is being captured; if so, that is spoilt.
int fake_unsafe();
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void* stream);
}
