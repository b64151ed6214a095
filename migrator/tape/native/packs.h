// What was packed of the values that were promised: a closure that is found here says at once in which of it its leaves
// are, and holds the others itself. All of it once a saved tensor, for which the device may be waiting.
#pragma once

#include <algorithm>
#include <unordered_map>

#include "closures.h"

namespace {

constexpr auto kPacks = "torch_tiers.migrator.tape.packs";

Object call(const Object &function, const Object &argument) {
  return checked(PyObject_CallFunctionObjArgs(function.get(), argument.get(), nullptr));
}

Object item(PyObject *tuple, Py_ssize_t index) { return borrowed(PyTuple_GET_ITEM(tuple, index)); }

// What was packed of one tensor, without keeping that alive.
struct Pack {
  Object ref, rest;    // a weak reference; of what stays, to the first of a tuple, of which this is the rest
  uint64_t first = 0;  // the byte of the storage at which the tensor begins
  Object key;          // the site
  // Whether the tensor is a view of a part: nobody says of the rest that it stays as it is, and who writes that by way
  // of `unsafe_chunk` or `set_` changes no version of this one's.
  bool is_view_of_part = false;

  // What was weakly held of it; null if the graph has released that.
  Object held() const {
    if (!ref) return nullptr;  // to remember it failed
    Object found = checked(PyObject_CallNoArgs(ref.get()));
    if (found.get() == Py_None) return nullptr;
    return found;
  }

  // What was packed; null likewise.
  Object get() const {
    Object found = held();
    if (!found || !rest) return found;
    return checked(PySequence_Concat(tuple(found).get(), rest.get()));
  }
};

// Of one record.
struct Packs {
  Stops stops;
  std::unordered_map<uint64_t, Pack> all;
};

// Whether what was packed is a parameter's, or too small to move.
bool stays(PyObject *packed) {
  if (!PyTuple_CheckExact(packed) || PyTuple_GET_ITEM(packed, 3) == Py_None) return false;
  return checked(PyObject_GetAttrString(PyTuple_GET_ITEM(packed, 3), "known")).get() == Py_None;
}

// Whether what is packed of this tensor may not hold all bytes of its storage. Two cases: it is offloaded, and only a
// part of the storage moves (`reach` in `saved/native/storages.h`); or it is one of several tensors on the storage that
// have version counters of their own (`unsafe_chunk`, as in the CPU's GRU), and a write to the others does not change
// its version.
bool is_part(const at::Tensor &tensor) {
  const c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
  if (!storage || tensor.layout() != c10::kStrided) return true;
  const uint64_t all = storage->nbytes(), own = tensor.nbytes();
  if (own == all) return false;
  if (!tensor.is_view() || tensor._base().nbytes() != all) return true;
  int64_t elements = 1;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) elements += (tensor.size(dim) - 1) * tensor.stride(dim);
  const uint64_t spans = uint64_t(elements) * tensor.itemsize();
  const uint64_t low = uint64_t(tensor.storage_offset()) * tensor.itemsize();
  const bool all_of_it = 2 * spans >= all;
  constexpr uint64_t kSlot = 512;  // `streams/pieces.py`, `SLOT`
  return !all_of_it && (low >= kSlot || low + spans != all);
}

// ------------------------------------------------------------------------------------- functions

// packs(): none yet; of the record under way.
PyObject *packs(PyObject *, PyObject *) {
  return answer([&] {
    auto made = std::make_unique<Packs>();
    made->stops = recorder().stops();
    Object capsule = checked(PyCapsule_New(
        made.get(), kPacks, [](PyObject *of) { delete static_cast<Packs *>(PyCapsule_GetPointer(of, kPacks)); }));
    (void)made.release();
    return capsule;
  });
}

// refilled(packs, addresses): of storages as `Stops` has them; more than there were.
PyObject *refilled(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "refilled(packs, addresses)");
    const Object addresses = checked(PySequence_Fast(args[1], "addresses are wanted"));
    for (Py_ssize_t each = 0; each < PySequence_Fast_GET_SIZE(addresses.get()); ++each) {
      const int64_t address = integer_of(PySequence_Fast_GET_ITEM(addresses.get(), each));
      held_by<Packs>(args[0], kPacks).stops.refilled.insert(reinterpret_cast<c10::StorageImpl *>(uintptr_t(address)));
    }
    return none();
  });
}

// note(packs, tensor, packed, key): what was packed of a tensor at a site; of a tuple the first is held weakly.
PyObject *note(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 4, "note(packs, tensor, packed, key)");
    Packs &packs = held_by<Packs>(args[0], kPacks);
    const at::Tensor tensor = tensor_of(args[1]);
    if (is_part(tensor)) return none();
    const auto use = recorder().promise(packs.stops, tensor);
    if (!use) return none();
    Pack &pack = packs.all[key_of(use->storage, use->state)];
    if (pack.ref && pack.get()) return none();
    const bool is_kept = PyTuple_CheckExact(args[2]);
    pack.ref = checked(PyWeakref_NewRef(is_kept ? PyTuple_GET_ITEM(args[2], 0) : args[2], nullptr));
    pack.rest = is_kept ? checked(PyTuple_GetSlice(args[2], 1, PyTuple_GET_SIZE(args[2]))) : nullptr;
    pack.first = uint64_t(tensor.storage_offset()) * tensor.itemsize();
    pack.key = borrowed(args[3]);
    pack.is_view_of_part = tensor.nbytes() != storage_of(tensor)->nbytes();
    return none();
  });
}

// forget(packs): what the graph has released, and what was held with that.
PyObject *forget(PyObject *, PyObject *of) {
  return answer([&] {
    auto &all = held_by<Packs>(of, kPacks).all;
    std::vector<Pack> gone;  // destroyed last: whoever is released may call us
    for (auto entry = all.begin(); entry != all.end();) {
      const bool lives = entry->second.held() != nullptr;  // which makes no object: nothing may be noted meanwhile
      if (!lives) gone.push_back(std::move(entry->second));
      entry = lives ? std::next(entry) : all.erase(entry);
    }
    return none();
  });
}

// find(packs, tensor, settings, is_fixed): what makes all of a tensor's storage again. Returns its signature, the
// packed inputs, their sites, the number of the last call, whether a leaf is refilled, and the closure; None if there
// is none under these `settings` of PyTorch's. `is_fixed`: whether nobody but operators writes a storage of the host's,
// by its address.
PyObject *find_packed(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 4, "find(packs, tensor, settings, is_fixed)");
    const Packs &packs = held_by<Packs>(args[0], kPacks);
    const Object is_fixed = borrowed(args[3]);
    const at::Tensor target = tensor_of(args[1]);
    const c10::StorageImpl *storage = storage_of(target);
    if (!storage || target.storage_offset() || target.nbytes() != storage->nbytes()) return none();
    auto found = recorder().closure(target, packs.stops);
    if (!found) return none();
    Object capsule = capsule_of(std::move(found));
    Closure &closure = closure_of(capsule.get());
    if (closure.settings == kAnySettings) closure.settings = uint32_t(integer_of(args[2]));
    if (int64_t(closure.settings) != integer_of(args[2])) return none();
    std::vector<Object> inputs, keys;
    closure.places.resize(closure.leaves.size());
    for (size_t index = 0; index < closure.leaves.size(); ++index) {
      Leaf &leaf = closure.leaves[index];
      const auto noted = packs.all.find(key_of(leaf.use.storage, leaf.use.state));
      const Pack *pack = noted == packs.all.end() ? nullptr : &noted->second;  // which Python may add to meanwhile
      Object packed = pack ? pack->get() : nullptr;
      const auto lasts = [&] {
        const auto address = uint64_t(uintptr_t(leaf.storage.get()));
        return !leaf.device.is_cpu() || call(is_fixed, number(address)).get() == Py_True;
      };
      const bool is_own =
          leaf.refilled || (leaf.storage && leaf.use.state < 0 && (!packed || stays(packed.get())) && lasts());
      if (is_own || !packed) {
        if (!is_own && leaf.constant.empty()) return none();
        // Else the graph has it, and changed it is an error there.
        closure.watch->all[index].is_copied = is_own && !packed && !leaf.refilled;
        continue;
      }
      if (pack->is_view_of_part) {
        if (leaf.not_on._unsafe_get_target()) return none();  // it has been written since
        closure.watch->all[index].is_copied = true;
      }
      leaf.storage.reset();
      closure.places[index] = {int32_t(inputs.size()), pack->first};
      inputs.push_back(std::move(packed));
      keys.push_back(borrowed(pack->key.get()));
    }
    const uint64_t last = closure.calls.back().number;
    const bool refilled =
        std::any_of(closure.leaves.begin(), closure.leaves.end(), [](const Leaf &each) { return each.refilled; });
    return tuple(number(closure.signature), tuple_of(inputs), tuple_of(keys), number(last), truth(refilled), capsule);
  });
}

}  // namespace
