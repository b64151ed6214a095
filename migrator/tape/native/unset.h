// Memory that an operator got and did not write, as `empty` does, and what others have written of it since. Nobody may
// read the rest: it is something else each time.
#pragma once

#include "recipe.h"

namespace {

// Bytes of one storage that are known to have been written: a part of them, where writes lie in it as we cannot tell.
class Written {
 public:
  void add(const Form &form) {
    if (form.is_dense()) return add(form.span());
    Rows &rows = rows_of(form);
    constexpr size_t kMost = 4096;
    if (rows.offsets.size() == kMost) return;
    const auto at = std::lower_bound(rows.offsets.begin(), rows.offsets.end(), form.offset());
    if (at != rows.offsets.end() && *at == form.offset()) return;
    rows.offsets.insert(at, form.offset());
    if (rows.are_dense()) add({rows.offsets.front(), rows.offsets.front() + rows.nbytes()});
  }

  bool has(std::pair<uint64_t, uint64_t> wanted) const {
    return wanted.first == wanted.second || std::any_of(spans_.begin(), spans_.end(), [&](const auto &each) {
             return each.first <= wanted.first && wanted.second <= each.second;
           });
  }

 private:
  using Span = std::pair<uint64_t, uint64_t>;

  // Tensors that differ in nothing but where they begin, as the columns of a matrix do.
  struct Rows {
    std::vector<std::pair<int64_t, int64_t>> dims;  // stride in bytes, size
    uint64_t itemsize;
    std::vector<uint64_t> offsets;

    uint64_t nbytes() const {
      uint64_t nbytes = itemsize * offsets.size();
      for (const auto &[stride, size] : dims) nbytes *= uint64_t(size);
      return nbytes;
    }

    bool are_dense() const {
      const uint64_t apart = offsets.size() < 2 ? 0 : offsets[1] - offsets[0];
      for (size_t each = 1; each < offsets.size(); ++each)
        if (offsets[each] - offsets[each - 1] != apart) return false;
      auto all = dims;
      all.emplace_back(int64_t(apart), int64_t(offsets.size()));
      return ::is_dense(std::move(all), int64_t(itemsize));
    }
  };

  Rows &rows_of(const Form &form) {
    const auto itemsize = uint64_t(c10::elementSize(form.type()));
    std::vector<std::pair<int64_t, int64_t>> dims;
    for (size_t dim = 0; dim < form.dims(); ++dim)
      dims.emplace_back(form.strides()[dim] * int64_t(itemsize), form.sizes()[dim]);
    for (Rows &each : rows_)
      if (each.dims == dims && each.itemsize == itemsize) return each;
    return rows_.emplace_back(Rows{std::move(dims), itemsize, {}});
  }

  void add(Span added) {
    if (added.first == added.second) return;
    std::erase_if(spans_, [&](const Span &each) {
      if (each.second < added.first || added.second < each.first) return false;
      added = {std::min(each.first, added.first), std::max(each.second, added.second)};
      return true;
    });
    spans_.push_back(added);
  }

  std::vector<Span> spans_;
  std::vector<Rows> rows_;
};

// By slot: those that are not there have been written as a whole.
class Unset {
 public:
  bool empty() const { return slots_.empty(); }

  void begin(int32_t slot) { slots_[slot] = Written(); }

  // Somebody writes: what was there is in another slot from now on.
  void pass(int32_t from, int32_t to) {
    const auto found = slots_.find(from);
    if (found == slots_.end()) return;
    Written written = found->second;
    slots_[to] = std::move(written);
  }

  void write_all(int32_t slot) { slots_.erase(slot); }

  void write(int32_t slot, const Form &form) {
    if (const auto found = slots_.find(slot); found != slots_.end()) found->second.add(form);
  }

  bool is_written(int32_t slot, const Form &form) const {
    const auto found = slots_.find(slot);
    return found == slots_.end() || found->second.has(form.span());
  }

 private:
  std::unordered_map<int32_t, Written> slots_;
};

}  // namespace
