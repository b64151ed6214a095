// A driver whose streams do everything at once and whose log says in what order it was asked: for tests without a GPU.

#include <cstdint>
#include <cstdio>
#include <cstring>

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
int cuEventCreate(void** event, unsigned) {
    std::printf("create %ld\n", ++made);
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
int cuMemcpyAsync(uint64_t target, uint64_t source, size_t nbytes, void* stream) {
    if (nbytes == 13) return 700;
    std::printf("copy %zu on %ld\n", nbytes, number(stream));
    std::memcpy(reinterpret_cast<void*>(target), reinterpret_cast<void*>(source), nbytes);
    return 0;
}
}
