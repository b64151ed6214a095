// Which bytes of which storages an iteration has saved so far: what has been saved before is not saved again.
//
// A storage is known by the address of its C++ object for as long as a weak reference to it is held: the reference
// keeps that address, not the memory, from being used again. The address of the *data* is no key: a freed storage's
// comes back within the same step.
#pragma once

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/python_numbers.h>

#include <structmember.h>

#include <algorithm>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "moved.h"
#include "object.h"

namespace {

using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

// Storages; an iteration without backward (an evaluation that forgot `no_grad`) must not grow for ever.
constexpr size_t kSweep = 4096;
// Entries of one storage that are looked at: of thousands of slices each would look at all before it.
constexpr int kNear = 64;

// The bytes [low, high) of a storage, as they were at one version of a version counter, or of several.
//
// It is freed as graphs are, where no function of Python's may be called: what a signal's handler raises in one,
// Ctrl-C's for one, Python drops there. So the weak references to storages and tensors are C++'s own, which
// are released without any.
struct Known {
  PyObject_HEAD
  PyObject *saved;  // where it moves, if it does
  PyObject *made;   // how it is made again, if it is dropped: a weak reference of Python's
  Known *before;    // the one of the same storage that was found before it
  int64_t ident, low, high, version;
  int64_t operation;  // which saved the part of a buffer that it was taken for; see `saved/parts.py`
  struct Own {
    // Weak: they keep addresses from being used again, not memory.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    // Whose version counter it is: the tensor of which the saved one is a view; of several the first.
    std::optional<WeakTensor> base;
  } own;

  bool freed() const { return own.storage->expired(); }

  void forget_weak() {}
  void clear() {
    Py_CLEAR(saved);
    Py_CLEAR(made);
    Py_CLEAR(before);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(saved);
    Py_VISIT(made);
    Py_VISIT(before);
    return 0;
  }
};

PyMemberDef known_members[] = {
    {"saved", T_OBJECT, offsetof(Known, saved), 0, nullptr},
    {"made", T_OBJECT, offsetof(Known, made), 0, nullptr},
    {"ident", T_LONGLONG, offsetof(Known, ident), READONLY, nullptr},
    {"low", T_LONGLONG, offsetof(Known, low), READONLY, nullptr},
    {"high", T_LONGLONG, offsetof(Known, high), READONLY, nullptr},
    {"operation", T_LONGLONG, offsetof(Known, operation), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *known_cdata(PyObject *self, void *) {
  return PyLong_FromVoidPtr(reinterpret_cast<Known *>(self)->own.storage->_unsafe_get_target());
}

PyGetSetDef known_getters[] = {
    {"cdata", known_cdata, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject *known_freed(PyObject *self, PyObject *) { return PyBool_FromLong(reinterpret_cast<Known *>(self)->freed()); }

PyMethodDef known_methods[] = {
    {"freed", known_freed, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject known_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Known", sizeof(Known)};

struct Storages {
  PyObject_HEAD
  int64_t count;
  size_t sweep_at;
  struct Own {
    std::unordered_map<c10::StorageImpl *, Known *> known;  // by address, the last that was found there
  } own;

  void forget_weak() {}
  void clear() {
    // Whatever dies with an entry may lead back here.
    auto known = std::exchange(own.known, {});
    for (auto &[key, entry] : known) Py_DECREF(entry);
  }
  int visit(visitproc visit, void *arg) {
    for (auto &[key, entry] : own.known) Py_VISIT(entry);
    return 0;
  }
};

PyTypeObject storages_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Storages",
                              sizeof(Storages)};

PyObject *make_storages(PyObject *, PyObject *) {
  HANDLE_TH_ERRORS
  auto *storages = make<Storages>(storages_type);
  storages->count = 0;
  storages->sweep_at = kSweep;
  return reinterpret_cast<PyObject *>(storages);
  END_HANDLE_TH_ERRORS
}

// Forget storages that are freed: nobody can save them again.
void sweep(Storages &storages) {
  std::vector<Known *> freed;
  for (auto it = storages.own.known.begin(); it != storages.own.known.end();) {
    if (it->second->freed()) {
      freed.push_back(it->second);
      it = storages.own.known.erase(it);
    } else {
      ++it;
    }
  }
  storages.sweep_at = std::max(kSweep, 2 * storages.own.known.size());
  for (Known *entry : freed) Py_DECREF(entry);
}

// The bytes of a storage of `nbytes` to move for a tensor on it: its span, or all if that is half of them or more.
//
// Parts of one storage often interleave (those of a fused projection): all of it moves once, then. A part without gaps
// that is no view has a version counter of its own, as its neighbours have: it moves alone.
std::pair<int64_t, int64_t> reach(const at::Tensor &tensor, int64_t nbytes) {
  const int64_t size = int64_t(tensor.itemsize());
  if (tensor.numel() * size == nbytes) return {0, nbytes};
  int64_t elements = 1;
  for (int64_t k = 0; k < tensor.dim(); ++k) elements += (tensor.size(k) - 1) * tensor.stride(k);
  const int64_t low = tensor.storage_offset() * size, high = low + elements * size;
  if (2 * (high - low) >= nbytes && (tensor.is_view() || tensor.numel() * size < high - low)) return {0, nbytes};
  return {low - low % kSlot, high};
}

// Whether a tensor over the bytes of an entry, found for another, may do with those, though both count for themselves.
//
// Inductor hands the parts of a fused projection out as tensors of their own, and each would move the whole. Neither
// has a graph, and there is no replay, which would make one of them as it was; and the bytes have not left. What will
// leave is what is there then, for whomever: who changes it by one counter is noticed there, and by `.data` plain
// PyTorch does not notice either. Whether the copy waits for the stream that wrote it is for the mover to see.
bool is_beside(const Known &entry, const at::Tensor &tensor) {
  if (tensor.is_view() || tensor.requires_grad() || entry.made != Py_None) return false;
  if (entry.saved != Py_None &&
      (Py_TYPE(entry.saved) != &saved_type || reinterpret_cast<Saved *>(entry.saved)->offset >= 0))
    return false;
  const at::Tensor of(entry.own.base->lock());
  return of.defined() && !of.requires_grad();
}

// Take out of a chain what cannot be found again: earlier versions of `base`, and of tensors that are gone. A buffer
// that is filled anew in each step of a loop without backward, as when somebody serves and forgot `no_grad`, would have
// one entry a step. Who calls releases what is returned, once nothing here is half done: that may lead back here.
std::vector<Known *> outdated(Known *&chain, const c10::TensorImpl *base, int64_t version) {
  std::vector<Known *> found;
  int near = kNear;
  for (Known **link = &chain; near && *link; --near) {
    Known *entry = *link;
    if (!entry->own.base->expired() && (entry->own.base->_unsafe_get_target() != base || entry->version == version)) {
      link = &entry->before;
      continue;
    }
    *link = std::exchange(entry->before, nullptr);
    found.push_back(entry);
  }
  return found;
}

// find(tensor): what is known of the bytes that it needs; made on first sight.
PyObject *storages_find(PyObject *self, PyObject *argument) {
  HANDLE_TH_ERRORS
  auto &storages = *reinterpret_cast<Storages *>(self);
  const at::Tensor &tensor = tensor_of(argument);
  if (storages.own.known.size() >= storages.sweep_at) sweep(storages);
  // Views share the counter of their base, and its version speaks for all the bytes of the base. A tensor over the same
  // memory that is no view (`unsafe_chunk`, `.data`) has a counter, and so a count, of its own; but see `is_beside`.
  const at::TensorBase base = tensor.is_view() ? tensor._base() : tensor;
  const c10::Storage &storage = tensor.storage();
  const auto [low, high] = reach(tensor, int64_t(storage.nbytes()));
  const int64_t version = tensor._version();
  const auto found = storages.own.known.find(storage.unsafeGetStorageImpl());
  int near = kNear;
  Known *same = nullptr, *beside = nullptr;
  for (Known *entry = found == storages.own.known.end() ? nullptr : found->second; entry && near && !same;
       entry = entry->before, --near) {
    // Another version is other content: a storage saved before and after an in-place operation (ReLU(inplace=True) on a
    // normalisation's output) is two.
    if (entry->version != version || entry->low > low || high > entry->high) continue;
    if (entry->own.base->_unsafe_get_target() == base.unsafeGetTensorImpl())
      same = entry;
    else if (!beside && is_beside(*entry, tensor))
      beside = entry;
  }
  if (Known *entry = same ? same : beside) {
    Py_INCREF(entry);
    return reinterpret_cast<PyObject *>(entry);
  }
  auto *known = make<Known>(known_type);  // the collector may run now, and somebody's finalizer come here, too
  hold(known->saved, Py_None);
  hold(known->made, Py_None);
  known->ident = storages.count++;
  known->low = low;
  known->high = high;
  known->version = version;
  known->operation = -1;  // `ANY` of `saved/parts.py`
  known->own.storage = storage.getWeakStorageImpl();
  known->own.base = WeakTensor(base.getIntrusivePtr());
  // With the reference that the map had.
  known->before = std::exchange(storages.own.known[storage.unsafeGetStorageImpl()], known);
  Py_INCREF(known);
  for (Known *entry : outdated(known->before, base.unsafeGetTensorImpl(), version)) Py_DECREF(entry);
  return reinterpret_cast<PyObject *>(known);
  END_HANDLE_TH_ERRORS
}

PyMethodDef storages_methods[] = {
    {"find", storages_find, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Whether a tensor is nothing but strided memory.
bool is_plain(const at::Tensor &tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet other({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
                                       DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                       DispatchKey::Functionalize, DispatchKey::Python});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.is_quantized() &&
         !tensor.key_set().has_any(other);
}

// The storage of a tensor that may move: one of at least so many bytes; null if it may not. The tensor must be nothing
// but strided memory, and no view of a parameter.
const c10::StorageImpl *memory(PyObject *object, int64_t least) {
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject *>(THPVariableClass)) return nullptr;
  const at::Tensor &tensor = THPVariable_Unpack(object);
  if (!is_plain(tensor) || !tensor.numel()) return nullptr;
  const c10::Storage &storage = tensor.storage();
  if (int64_t(storage.nbytes()) < least) return nullptr;
  if (tensor.is_view()) {
    THPObjectPtr base(THPVariable_Wrap(tensor._base()));
    if (!base) throw python_error();
    // What else is a parameter is of another type; to ask for that calls Python.
    const bool is_tensor = Py_TYPE(base.get()) == reinterpret_cast<PyTypeObject *>(THPVariableClass);
    const int is_parameter = is_tensor ? 0 : PyObject_IsInstance(base.get(), ParameterClass);
    if (is_parameter < 0) throw python_error();
    if (is_parameter) return nullptr;
  }
  return storage.unsafeGetStorageImpl();
}

// memory_of(tensor, least): the identity of that storage, or 0.
PyObject *memory_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "memory_of(tensor, least)");
  return PyLong_FromVoidPtr(const_cast<c10::StorageImpl *>(memory(args[0], THPUtils_unpackLong(args[1]))));
  END_HANDLE_TH_ERRORS
}

}  // namespace
