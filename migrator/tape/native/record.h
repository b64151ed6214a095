// What a record holds. No tensor and no storage of the program's: these are weak.
//
// A `Step` is what an operator call has in common with the same call of the next record, or of the next layer: the
// operator, its scalars, the forms of its tensors. Each is kept once. A `Call` is what differs: when, where, and which
// storages in which state.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/StorageImpl.h>

#include <cstring>
#include <memory>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "devices.h"
#include "effects.h"

namespace {

using Words = std::vector<uint64_t>;

// The first byte of a word says what follows. A tensor's goes on: scalar type, device type, device index, dimensions,
// bits; then its offset in bytes, how many bytes its storage has, its sizes and its strides.
enum Code : uint8_t {
  kNothing = 1,
  kInt,
  kDouble,
  kBool,
  kComplex,
  kString,
  kDevice,
  kStream,
  kGenerator,
  kList,
  kObject,     // known by its address alone, and not kept: it may hold tensors
  kTensor,     // a strided one
  kOpaque,     // a tensor that has a storage and no strides, or none that we may ask for: nested ones, wrappers
  kShapeless,  // a tensor without a storage of its own
  kUndefined,
  kNumber,  // a number that PyTorch made a tensor of, with its value
};

struct Recipe;  // see recipe.h

struct Step {
  uint64_t kind = 0;                        // by its words: the same whenever it is made anew, in this process
  const c10::OperatorName *name = nullptr;  // where the dispatcher has it
  const Effects *effects = nullptr;
  Words words;                                       // inputs, then outputs
  size_t inputs = 0;                                 // words of the inputs
  std::vector<std::pair<uint16_t, int32_t>> places;  // for each input value its argument, and its place in a list or -1
  std::vector<c10::IValue> arguments;                // what is no tensor; None in the place of those
  bool whole = true;                                 // whether nothing else is missing there
  mutable std::shared_ptr<const Recipe> recipe;      // once it was to be called again; under the recorder's lock
};

using StepPointer = std::shared_ptr<const Step>;

// A storage at one moment: `state` is the number of the call that wrote it last, or negative where that is not known,
// and then another number whenever it was found to have changed unseen.
struct Use {
  uint32_t storage;
  int32_t state;
};

constexpr uint32_t kNoStorage = UINT32_MAX, kNoVersion = UINT32_MAX;

constexpr uint32_t kAnySettings = UINT32_MAX;  // of what does not heed them

struct Call {
  StepPointer step;
  uint32_t inputs = 0, outputs = 0;  // where its uses begin
  uint32_t thread = 0;
  int64_t stream = 0;
  bool waits = false;
  bool grad = false;                 // whether gradients were on: some kernels look
  uint8_t threads = 1;               // that the host computes with
  uint32_t settings = kAnySettings;  // of PyTorch
};

const void *counter_of(const c10::VariableVersion &version) {
  static_assert(sizeof(c10::VariableVersion) == sizeof(void *));
  const void *counter;
  std::memcpy(&counter, static_cast<const void *>(&version), sizeof counter);
  return counter;
}

// What counts versions. It is weak: PyTorch looks whether it is a tensor's alone. While we have it, its address is not
// used again.
class Counter {
  using Target = c10::intrusive_ptr_target;

 public:
  Counter() : counter_(c10::weak_intrusive_ptr<Target>::reclaim(nullptr)) {}
  explicit Counter(const c10::VariableVersion &version) : Counter() {
    auto *target = static_cast<Target *>(const_cast<void *>(counter_of(version)));
    if (target) counter_ = c10::weak_intrusive_ptr<Target>(c10::intrusive_ptr<Target>::reclaim_copy(target));
  }

  bool operator==(const void *counter) const { return counter_._unsafe_get_target() == counter; }

  // None that is enabled, if no tensor has it any more, or there never was one.
  c10::VariableVersion lock() const {
    c10::VariableVersion version;
    if (*this == nullptr) return version;
    const void *counter = counter_.lock().release();
    std::memcpy(static_cast<void *>(&version), &counter, sizeof counter);
    return version;
  }

 private:
  c10::weak_intrusive_ptr<Target> counter_;
};

// What is known of a storage.
struct Stored {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  Counter counter;  // of versions: several tensors on a storage may each have their own, see `.data`
  uint32_t seen;    // the version that it had last
  int32_t state;
  size_t nbytes;
  bool has_others;
};

struct Other {
  Counter counter;
  uint32_t seen;
};

// Storages by address. The weak reference keeps an address from being used again.
class Storages {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;

  uint32_t find(const c10::StorageImpl *storage) const {
    if (slots_.empty()) return kNone;
    for (size_t slot = place(storage);; slot = (slot + 1) & (slots_.size() - 1)) {
      if (slots_[slot] == kNone) return kNone;
      if (all_[slots_[slot]].storage._unsafe_get_target() == storage) return slots_[slot];
    }
  }

  uint32_t add(Stored stored) {
    if (2 * (all_.size() + 1) > slots_.size()) grow();
    const auto index = uint32_t(all_.size());
    put(stored.storage._unsafe_get_target(), index);
    all_.push_back(std::move(stored));
    return index;
  }

  Stored &operator[](uint32_t index) { return all_[index]; }
  const Stored &operator[](uint32_t index) const { return all_[index]; }
  std::unordered_map<uint32_t, std::vector<Other>> others;

 private:
  size_t place(const c10::StorageImpl *storage) const {
    return (uintptr_t(storage) >> 4) * 0x9E3779B97F4A7C15ull >> 20 & (slots_.size() - 1);
  }

  void put(const c10::StorageImpl *storage, uint32_t index) {
    size_t slot = place(storage);
    while (slots_[slot] != kNone) slot = (slot + 1) & (slots_.size() - 1);
    slots_[slot] = index;
  }

  void grow() {
    slots_.assign(std::max<size_t>(256, 2 * slots_.size()), kNone);
    for (uint32_t index = 0; index < all_.size(); ++index) put(all_[index].storage._unsafe_get_target(), index);
  }

  std::vector<Stored> all_;
  std::vector<uint32_t> slots_;
};

// The bytes of a storage on the host, in one state.
struct Constant {
  int32_t state;
  std::vector<char> bytes;
};

struct Record {
  std::vector<Call> calls;
  std::vector<Use> uses;
  std::vector<Drawn> drawn;
  Storages storages;
  int32_t foreign = 0;  // states that no call of ours made, so far; these count down
  // What Python's numbers became, by storage: nobody else keeps it, once a tensor is filled with it.
  std::unordered_map<uint32_t, Constant> constants;
  bool is_broken = false;  // some of what ran is not in it, or is in it and did not run so
};

uint32_t version_of(const c10::TensorImpl &tensor) {
  const auto &version = tensor.version_counter();
  return version.enabled() ? version.current_version() : kNoVersion;
}

// What has no storage to ask for, or one that is not where its bytes are.
constexpr c10::DispatchKeySet kWrappers({c10::DispatchKey::Python, c10::DispatchKey::Functionalize,
                                         c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::FuncTorchGradWrapper,
                                         c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr,
                                         c10::DispatchKey::MkldnnCPU, c10::DispatchKey::ZeroTensor});

c10::StorageImpl *storage_of(const at::Tensor &tensor) {
  const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
  if (impl.key_set().has_any(kWrappers) || !impl.has_storage()) return nullptr;
  return impl.unsafe_storage().unsafeGetStorageImpl();
}

}  // namespace
