// What `fake_cuda.cpp`, which has contexts, streams and captures, offers to `fake_pages.cpp`.

#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
// Whether a stream has something left to do there, or nobody knows where.
bool fake_pending_at(uint64_t address, size_t bytes);
// What a call answers that may harm a graph which is being captured; if so, that is spoilt.
int fake_unsafe();
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void *stream);
}
