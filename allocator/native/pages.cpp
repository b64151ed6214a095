#include "pages.h"

#include <algorithm>

namespace tiers {

std::string &last_error() {
  thread_local std::string text;
  return text;
}

Status fail(Status status, const std::string &text) {
  last_error() = text;
  return status;
}

Status Pages::take(uint64_t count, std::vector<Handle> *out) {
  if (count > available()) return fail(Status::Full, tier_ == kHbm ? "hbm is full" : "dram is full");
  std::vector<Handle> taken;
  taken.reserve(count);
  while (taken.size() < count) {
    if (!idle_.empty()) {
      taken.push_back(idle_.back());
      idle_.pop_back();
      continue;
    }
    Handle handle = 0;
    Status status = primitives_.create(tier_, &handle);
    if (status != Status::Ok) {
      add_idle(taken);
      return status;
    }
    peak_ = std::max(peak_, ++made_);
    taken.push_back(handle);
  }
  out->insert(out->end(), taken.begin(), taken.end());
  return Status::Ok;
}

Status Pages::probe() {
  Handle handle = 0;
  Status status = primitives_.create(tier_, &handle);
  return status == Status::Ok ? primitives_.release(tier_, handle) : status;
}

uint64_t Pages::make_idle(uint64_t count) {
  count = std::min(count, available());
  Handle handle = 0;
  while (idle_.size() < count && primitives_.create(tier_, &handle) == Status::Ok) {
    ++made_;
    idle_.push_back(handle);
  }
  peak_ = std::max(peak_, made_);
  return std::min<uint64_t>(count, idle_.size());
}

Status Pages::trim(uint64_t keep) {
  Status worst = Status::Ok;
  for (; made_ > keep && !idle_.empty(); --made_) {
    Status status = primitives_.release(tier_, idle_.back());
    worst = worst == Status::Ok ? status : worst;
    idle_.pop_back();
  }
  return worst;
}

}  // namespace tiers
