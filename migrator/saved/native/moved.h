// What a group holds of the program's memory, and what the graph holds in place of a tensor that moves.
#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/python_numbers.h>

#include <c10/util/SmallVector.h>
#include <structmember.h>

#include <utility>
#include <vector>

#include "object.h"

namespace {

constexpr int64_t kSlot = 512;  // `streams/pieces.py`, `SLOT`

using Numbers = c10::SmallVector<int64_t, 6>;

// Shares memory and version counter, knows of no graph, and may be given other memory.
at::Tensor alias_of(const at::Tensor &tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/true));
}

void leave_memory(const at::Tensor &alias) {
  c10::TensorImpl *impl = alias.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(c10::Storage({}, 0, at::DataPtr(nullptr, alias.device()), nullptr, false));
  impl->set_sizes_contiguous(c10::IntArrayRef(int64_t{0}));
  impl->set_storage_offset(0);
}

// Shares the version counter alone.
at::Tensor counter_of(const at::Tensor &tensor) {
  at::Tensor counter = alias_of(tensor);
  leave_memory(counter);
  return counter;
}

// counter(tensor): has no memory.
PyObject *make_counter(PyObject *, PyObject *tensor) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(counter_of(tensor_of(tensor)));
  END_HANDLE_TH_ERRORS
}

// A storage, or the part of one, that moves: which of its bytes, and where they lie within its group.
struct Saved {
  PyObject_HEAD
  PyObject *group;
  int64_t low, nbytes;  // which bytes of the storage
  int64_t offset;       // in the group; -1 until that leaves
  struct Own {
    at::Tensor alias;  // holds the program's memory until that is released
  } own;

  void forget_weak() {}
  void clear() { Py_CLEAR(group); }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(group);
    return 0;
  }
};

PyMemberDef saved_members[] = {
    {"group", T_OBJECT, offsetof(Saved, group), READONLY, nullptr},
    {"low", T_LONGLONG, offsetof(Saved, low), READONLY, nullptr},
    {"nbytes", T_LONGLONG, offsetof(Saved, nbytes), READONLY, nullptr},
    {"offset", T_LONGLONG, offsetof(Saved, offset), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *saved_alias(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(reinterpret_cast<Saved *>(self)->own.alias);
  END_HANDLE_TH_ERRORS
}

int saved_set_alias(PyObject *self, PyObject *value, void *) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(value, "there is always an alias");
  reinterpret_cast<Saved *>(self)->own.alias = tensor_of(value);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyGetSetDef saved_getters[] = {
    {"alias", saved_alias, saved_set_alias, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject saved_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Saved", sizeof(Saved)};

// Saved(group, tensor, low, nbytes)
PyObject *make_saved(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "Saved(group, tensor, low, nbytes)");
  const at::Tensor &tensor = tensor_of(args[1]);
  at::Tensor alias = alias_of(tensor);
  const int64_t low = THPUtils_unpackLong(args[2]), nbytes = THPUtils_unpackLong(args[3]);
  auto *saved = make<Saved>(saved_type);  // from here on nothing throws
  hold(saved->group, args[0]);
  saved->own.alias = std::move(alias);
  saved->low = low;
  saved->nbytes = nbytes;
  saved->offset = -1;
  return reinterpret_cast<PyObject *>(saved);
  END_HANDLE_TH_ERRORS
}

// The list of members that a function was given.
Saved *member_of(PyObject *list, Py_ssize_t k) {
  PyObject *member = PyList_GET_ITEM(list, k);
  TORCH_CHECK_TYPE(Py_TYPE(member) == &saved_type, "a member of another kind");
  return reinterpret_cast<Saved *>(member);
}

// arrange(members): gives each its place in the group, one after the other; the bytes of all.
PyObject *arrange(PyObject *, PyObject *members) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_Check(members), "arrange(members)");
  int64_t offset = 0;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(members); ++k) {
    Saved *saved = member_of(members, k);
    saved->offset = offset;
    offset = (offset + saved->nbytes + kSlot - 1) / kSlot * kSlot;
  }
  return THPUtils_packInt64(offset);
  END_HANDLE_TH_ERRORS
}

// spans(members, address): where each goes in a block, where from, and its bytes.
PyObject *spans(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyList_Check(args[0]), "spans(members, address)");
  const uint64_t address = THPUtils_unpackUInt64(args[1]);
  std::vector<uint64_t> numbers;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(args[0]); ++k) {
    const Saved &saved = *member_of(args[0], k);
    const auto memory = reinterpret_cast<uint64_t>(saved.own.alias.storage().data());
    numbers.insert(numbers.end(), {address + saved.offset, memory + saved.low, uint64_t(saved.nbytes)});
  }
  const auto *bytes = reinterpret_cast<const char *>(numbers.data());
  return PyBytes_FromStringAndSize(bytes, Py_ssize_t(numbers.size() * sizeof(uint64_t)));
  END_HANDLE_TH_ERRORS
}

// release(members): their memory.
PyObject *release(PyObject *, PyObject *members) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(PyList_Check(members), "release(members)");
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(members); ++k) leave_memory(member_of(members, k)->own.alias);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// What the graph holds in place of a saved tensor that moves.
struct Moved {
  PyObject_HEAD
  PyObject *weak, *mover;
  PyObject *claim;  // keeps the group from being forgotten; held, and never looked at
  PyObject *go, *record;
  Saved *saved;
  int64_t version;  // what the counter said when it was saved
  char was_used;
  struct Own {
    // Without memory. Shares the saved tensor's version counter: of tensors that `saved` stands for each may have its
    // own.
    at::Tensor counter;
    caffe2::TypeMeta dtype;
    Numbers size, stride;
    int64_t first = 0;  // in elements
  } own;

  void forget_weak() {
    if (weak) PyObject_ClearWeakRefs(reinterpret_cast<PyObject *>(this));
  }
  void clear() {
    Py_CLEAR(mover);
    Py_CLEAR(saved);
    Py_CLEAR(claim);
    Py_CLEAR(go);
    Py_CLEAR(record);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(mover);
    Py_VISIT(saved);
    Py_VISIT(claim);
    Py_VISIT(go);
    Py_VISIT(record);
    return 0;
  }
};

PyMemberDef moved_members[] = {
    {"mover", T_OBJECT, offsetof(Moved, mover), READONLY, nullptr},
    {"saved", T_OBJECT, offsetof(Moved, saved), READONLY, nullptr},
    {"go", T_OBJECT, offsetof(Moved, go), READONLY, nullptr},
    {"record", T_OBJECT, offsetof(Moved, record), READONLY, nullptr},
    {"version", T_LONGLONG, offsetof(Moved, version), READONLY, nullptr},
    {"was_used", T_BOOL, offsetof(Moved, was_used), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject moved_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Moved", sizeof(Moved)};

// Moved(tensor, mover, saved, claim, go, record)
PyObject *make_moved(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && Py_TYPE(args[2]) == &saved_type, "Moved(tensor, mover, saved, claim, go, record)");
  const at::Tensor &tensor = tensor_of(args[0]);
  const c10::IntArrayRef size = tensor.sizes(), stride = tensor.strides();
  at::Tensor counter = counter_of(tensor);
  const int64_t version = tensor._version();
  auto *moved = make<Moved>(moved_type);  // from here on nothing throws but for want of memory
  hold(moved->mover, args[1]);
  Py_INCREF(args[2]);
  moved->saved = reinterpret_cast<Saved *>(args[2]);
  hold(moved->claim, args[3]);
  hold(moved->go, args[4]);
  hold(moved->record, args[5]);
  moved->version = version;
  moved->own.counter = std::move(counter);
  moved->own.dtype = tensor.dtype();
  moved->own.size.assign(size.begin(), size.end());
  moved->own.stride.assign(stride.begin(), stride.end());
  moved->own.first = tensor.storage_offset();
  return reinterpret_cast<PyObject *>(moved);
  END_HANDLE_TH_ERRORS
}

// The collector may have cleared it, if anybody still asks then.
const Saved &saved_of(const Moved &moved) {
  TORCH_CHECK(moved.saved, "the saved tensor is gone");
  return *moved.saved;
}

bool is_changed(const Moved &moved) { return int64_t(moved.own.counter._version()) != moved.version; }

PyObject *moved_changed(PyObject *self, PyObject *) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(is_changed(*reinterpret_cast<Moved *>(self)));
  END_HANDLE_TH_ERRORS
}

PyObject *moved_counter(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(reinterpret_cast<Moved *>(self)->own.counter);
  END_HANDLE_TH_ERRORS
}

// view(buffer): the tensor, on the buffer of its group or, with None, on the program's own memory.
PyObject *moved_view(PyObject *self, PyObject *buffer) {
  HANDLE_TH_ERRORS
  const Moved &moved = *reinterpret_cast<Moved *>(self);
  const Saved &saved = saved_of(moved);
  at::Tensor tensor = alias_of(moved.own.counter);
  c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  int64_t first = moved.own.first;
  if (buffer == Py_None) {
    impl->set_storage_and_dtype(saved.own.alias.storage(), moved.own.dtype);
  } else {
    impl->set_storage_and_dtype(tensor_of(buffer).storage(), moved.own.dtype);
    first += (saved.offset - saved.low) / int64_t(moved.own.dtype.itemsize());  // both are multiples of a slot
  }
  impl->set_sizes_and_strides(moved.own.size, moved.own.stride, first);
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

THPObjectPtr tuple_of(c10::IntArrayRef numbers) {
  THPObjectPtr all = checked(PyTuple_New(Py_ssize_t(numbers.size())));
  for (size_t k = 0; k < numbers.size(); ++k)
    PyTuple_SET_ITEM(all.get(), Py_ssize_t(k), checked(THPUtils_packInt64(numbers[k])).release());
  return all;
}

// As `Tensor.size()` returns it.
THPObjectPtr size_of(c10::IntArrayRef size) {
  return checked(PyObject_CallOneArg(reinterpret_cast<PyObject *>(&THPSizeType), tuple_of(size)));
}

PyObject *moved_size(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  return size_of(reinterpret_cast<Moved *>(self)->own.size).release();
  END_HANDLE_TH_ERRORS
}

PyObject *moved_dtype(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  const at::ScalarType type = c10::typeMetaToScalarType(reinterpret_cast<Moved *>(self)->own.dtype);
  auto *dtype = reinterpret_cast<PyObject *>(torch::getTHPDtype(type));
  Py_INCREF(dtype);
  return dtype;
  END_HANDLE_TH_ERRORS
}

PyGetSetDef moved_getters[] = {
    {"counter", moved_counter, nullptr, nullptr, nullptr},
    {"size", moved_size, nullptr, nullptr, nullptr},
    {"dtype", moved_dtype, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef moved_methods[] = {
    {"changed", moved_changed, METH_NOARGS, nullptr},
    {"view", moved_view, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
