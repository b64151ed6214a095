// A driver whose streams do everything at once and whose log says in what order it was asked: for tests without a GPU.

#include <cstdint>
#include <cstdio>
#include <cstring>

#include "../../allocator/native/gather.h"

namespace {
thread_local void* current = nullptr;
long made = 0;
long recorded[64];
long clock_ = 0;
long number(void* handle) { return reinterpret_cast<long>(handle); }
}  // namespace

extern "C" {
int cuDeviceGet(int* device, int ordinal) { return *device = ordinal, ordinal < 2 ? 0 : 101; }
int cuDevicePrimaryCtxRetain(void** context, int device) {
    *context = reinterpret_cast<void*>(1000L + device);
    return 0;
}
int cuCtxGetCurrent(void** context) { return *context = current, 0; }
int cuCtxSetCurrent(void* context) {
    std::printf("context %ld\n", number(context));
    current = context;
    return 0;
}
int cuEventCreate(void** event, unsigned flags) {
    std::printf("create %ld%s\n", ++made, flags == 2 ? " untimed" : "");
    *event = reinterpret_cast<void*>(made);
    return 0;
}
int cuEventRecord(void* event, void* stream) {
    std::printf("record %ld on %ld\n", number(event), number(stream));
    recorded[number(event)] = ++clock_;
    return 0;
}
int cuEventQuery(void* event) { return recorded[number(event)] ? 0 : 600; }
int cuEventSynchronize(void*) { return 0; }
int cuEventElapsedTime(float* ms, void* start, void* end) {
    *ms = static_cast<float>(recorded[number(end)] - recorded[number(start)]);
    return 0;
}
int cuStreamWaitEvent(void* stream, void* event, unsigned) {
    std::printf("%ld waits for %ld\n", number(stream), number(event));
    return 0;
}
int cuModuleLoadData(void** module, const void* image) {
    *module = const_cast<void*>(image);
    return number(current) == 1001 ? 222 : 0;  // the second device's driver cannot compile
}
int cuModuleGetFunction(void** function, void* module, const char*) { return *function = module, 0; }
int cuLaunchKernel(void*, unsigned x, unsigned y, unsigned, unsigned threads, unsigned, unsigned, unsigned, void* stream,
                   void** parameters, void**) {
    const auto& batch = **reinterpret_cast<GatherBatch**>(parameters);
    for (unsigned k = 0; k < y; ++k) {
        const GatherSpan& span = batch.spans[k];
        std::memcpy(reinterpret_cast<char*>(batch.target) + span.offset, reinterpret_cast<char*>(span.source), span.nbytes);
    }
    std::printf("gather %u on %ld, %u blocks of %u each\n", y, number(stream), x, threads);
    return 0;
}
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void* stream) {
    if (nbytes == 13) return 700;
    std::printf("copy %zu on %ld\n", nbytes, number(stream));
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), nbytes);
    return 0;
}
}
