// A closure: the smallest set of operators of a record that makes some tensors again, from values that are there. It
// keeps the record's steps, and not the record.
#pragma once

#include <unordered_set>

#include "keys.h"
#include "recipe.h"
#include "watch.h"

namespace {

// Values that somebody has, or will have when the closure runs.
struct Stops {
  uint64_t record = 0;
  Keys keys;
  // Storages that are emptied and filled again, as FSDP2 does with a parameter's: whoever says so answers for the
  // bytes.
  std::unordered_set<const c10::StorageImpl *> refilled;
};

struct Leaf {
  Use use;
  uint64_t nbytes;
  c10::Device device;
  uint64_t alignment = 1;                        // that its address had; 1 if that is not known
  bool refilled = false;                         // see `Stops`: nobody watches it
  std::vector<char> constant;                    // its bytes, if Python's numbers are all that it is
  c10::intrusive_ptr<c10::StorageImpl> storage;  // until it is released
  // Where it was, if that has been written since: who promised it has it elsewhere.
  c10::weak_intrusive_ptr<c10::StorageImpl> not_on = c10::weak_intrusive_ptr<c10::StorageImpl>::reclaim(nullptr);
};

// Where a leaf's bytes are when the closure runs: in which of the values that it is given, of which the leaf's first
// byte is the one before `first`; in none, if the closure has it.
struct Place {
  int32_t input = -1;
  uint64_t first = 0;
};

struct Write {
  int32_t from, to;
  bool copies;  // somebody else needs what was there
};

// What somebody overwrites anyway: any bytes will do.
struct Fresh {
  int32_t slot;
  uint64_t nbytes;
  c10::Device device;
};

struct Called {
  StepPointer step;
  const Recipe *recipe;
  uint32_t number;                   // in its record
  uint32_t inputs = 0, outputs = 0;  // where its wires begin
  uint32_t fresh = 0, fresh_count = 0, writes = 0, writes_count = 0, freed = 0, freed_count = 0;
  int32_t drawn = -1;
  bool grad = false;
};

struct Target {
  int32_t slot;
  uint32_t words;  // where its form is
};

struct Closure {
  std::vector<Called> calls;
  std::vector<int32_t> wires;  // slots of the inputs and outputs of all calls; -1: no tensor of the program's
  std::vector<Fresh> fresh;
  std::vector<Write> writes;
  std::vector<int32_t> freed;  // slots that nobody needs after a call
  std::vector<Drawn> drawn;
  std::vector<Leaf> leaves;
  std::vector<int32_t> leaf_slots;
  std::vector<Place> places;     // of leaves
  std::shared_ptr<Watch> watch;  // of those leaves that are where they were
  std::vector<Target> targets;
  Words words;
  int32_t slots = 0;
  c10::Device device{c10::DeviceType::CPU};
  int64_t stream = 0;
  uint32_t settings = kAnySettings;
  uint8_t threads = 0;  // that the host computes with, if it does; 0: it does not
  uint64_t signature = 0;
};

// Equal for closures that run the same steps on the same forms, with the same slots.
uint64_t signature_of(const Closure &closure) {
  uint64_t hash = closure.calls.size();
  for (const Called &call : closure.calls) {
    hash = mix(hash, call.step->kind);
    hash = mix(hash, uint64_t(call.writes_count) << 32 | uint64_t(call.grad) << 31 | call.fresh_count);
  }
  for (const int32_t slot : closure.wires) hash = mix(hash, uint64_t(slot));
  for (size_t leaf = 0; leaf < closure.leaves.size(); ++leaf) {
    const c10::Device device = closure.leaves[leaf].device;
    hash = mix(hash, uint64_t(closure.leaf_slots[leaf]));
    hash = mix(hash, closure.leaves[leaf].nbytes);
    for (const char byte : closure.leaves[leaf].constant) hash = mix(hash, uint8_t(byte) + 1u);
    hash = mix(hash, uint64_t(uint8_t(device.type())) << 8 | uint8_t(device.index()));
  }
  for (const Target &target : closure.targets) hash = mix(hash, uint64_t(target.slot));
  for (const uint64_t word : closure.words) hash = mix(hash, word);
  return mix(hash, uint64_t(closure.threads) << 32 | closure.settings);
}

}  // namespace
