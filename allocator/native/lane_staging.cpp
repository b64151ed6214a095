#include "lane_staging.h"

#include <algorithm>
#include <map>
#include <mutex>

#include "gather.h"

namespace tiers::lane {
namespace {

constexpr uint64_t kWord = 16;  // what the kernel reads and writes at a time

}  // namespace

Result gathering_kernel(int device, Handle* kernel) {
    static std::mutex lock;
    static auto* kernels = new std::map<int, Handle>();  // to the end of the process, as the context
    std::lock_guard<std::mutex> guard(lock);
    Handle& known = (*kernels)[device];
    if (known == nullptr) {
        Handle module = nullptr;
        if (Result error = driver().load_module(&module, kGather)) return error;
        if (Result error = driver().get_function(&known, module, "tiers_gather")) return error;
    }
    *kernel = known;
    return 0;
}

int Staging::run_length(const Span* spans, int count) const {
    // What is left of a half is used up first: a half that holds little is sent before the next is filled.
    const int length = fitting(spans, count, half_ - used_);
    return length > 1 ? length : std::max(1, fitting(spans, count, half_));
}

// How many spans from the first on are small, follow one another but for what alignment costs, and fit.
int Staging::fitting(const Span* spans, int count, uint64_t room) const {
    const Span& first = spans[0];
    uint64_t end = first.target;
    int length = 0;
    for (; length < count; ++length) {
        const Span& span = spans[length];
        if (span.nbytes > largest_ || span.source % kWord || (span.target - first.target) % kWord) break;
        if (span.target < end || span.target - end >= kSlot) break;
        end = span.target + span.nbytes;
        if (end - first.target > room) break;
    }
    return length;
}

Result Staging::gather(Handle lane, const Span* run, int length, uint64_t* address) {
    const uint64_t nbytes = extent(run, length);
    if (Result error = make_room(lane, nbytes)) return error;
    *address = address_ + static_cast<uint64_t>(now_) * half_ + used_;
    used_ += (nbytes + kSlot - 1) / kSlot * kSlot;
    bool refused = false;
    for (int k = 0; k < length && !refused; k += kBatch) {
        refused = launch(run + k, std::min(kBatch, length - k), *address + (run[k].target - run[0].target));
    }
    if (refused) *address = 0;
    // Even then: earlier launches of the run may read sources, which whoever waits for the lane takes to be read.
    if (Result error = gathered_.record(beside_)) return error;
    return gathered_.hold_back(lane);
}

Result Staging::make_room(Handle lane, uint64_t nbytes) {
    if (used_ + nbytes <= half_) return 0;
    // All copies from this half were asked for by now, and none from the other since that was left.
    if (Result error = sent_[now_].record(lane)) return error;
    now_ = 1 - now_;
    used_ = 0;
    return sent_[now_].hold_back(beside_);
}

Result Staging::launch(const Span* spans, int count, uint64_t address) {
    GatherBatch batch;
    batch.target = address;
    uint64_t largest = 0;
    for (int k = 0; k < count; ++k) {
        const Span& span = spans[k];
        batch.spans[k] = {span.source, static_cast<uint32_t>(span.target - spans[0].target),
                          static_cast<uint32_t>(span.nbytes)};
        largest = std::max(largest, span.nbytes);
    }
    const uint64_t turns = (largest + kThreads * kWord - 1) / (kThreads * kWord);
    const unsigned blocks = static_cast<unsigned>(std::min<uint64_t>(kBlocks, turns));
    void* parameters[] = {&batch};
    return driver().launch(kernel_, blocks, static_cast<unsigned>(count), 1, kThreads, 1, 1, 0, beside_, parameters,
                           nullptr);
}

}  // namespace tiers::lane
