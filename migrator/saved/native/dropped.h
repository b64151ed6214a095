// What backward asks for that was dropped: `Saver.unpack` of `saved/saver.py` for a `Dropped` of
// `saved/dropped.py`, where that is made of what stays or moves. Like `hooks.h` a shortcut, which leaves to Python
// what is not plain.
#pragma once

#include <ATen/autocast_mode.h>

#include <algorithm>

#include "moved.h"
#include "occupancy.h"
#include "slots.h"

namespace {

struct DroppedSlots {
  PyTypeObject *type, *made_type;
  PyObject *look;  // the class `Look` of `saved/packed.py`
  struct {
    Py_ssize_t go, made, record, dtype, size, stride, first, was_used;
  } dropped;
  struct {
    Py_ssize_t base, counter, engine, index, nbytes, replay, tensor, unused, version;
  } made;

  static DroppedSlots find() {
    THPObjectPtr module(PyImport_ImportModule("torch_tiers.migrator.saved.dropped")),
        packed(PyImport_ImportModule("torch_tiers.migrator.saved.packed"));
    THPObjectPtr dropped(module ? PyObject_GetAttrString(module, "Dropped") : nullptr);
    THPObjectPtr made(module ? PyObject_GetAttrString(module, "Recomputed") : nullptr);
    THPObjectPtr look(packed ? PyObject_GetAttrString(packed, "Look") : nullptr);
    if (!dropped || !made || !look) throw python_error();
    const auto of = [](THPObjectPtr &type, const char *name) { return slot_of(type.get(), name); };
    return {reinterpret_cast<PyTypeObject *>(dropped.get()),  // these live as long as their modules
            reinterpret_cast<PyTypeObject *>(made.get()),
            look.get(),
            {of(dropped, "go"), of(dropped, "made"), of(dropped, "record"), of(dropped, "dtype"), of(dropped, "size"),
             of(dropped, "stride"), of(dropped, "first"), of(dropped, "was_used")},
            {of(made, "base"), of(made, "counter"), of(made, "engine"), of(made, "index"), of(made, "nbytes"),
             of(made, "replay"), of(made, "tensor"), of(made, "unused"), of(made, "version")}};
  }
};

int64_t integer_at(PyObject *object, Py_ssize_t slot) { return THPUtils_unpackLong(at(object, slot)); }

Numbers numbers_of(PyObject *tuple) {
  TORCH_CHECK_TYPE(PyTuple_Check(tuple), "a size or strides");
  Numbers numbers;
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(tuple); ++k)
    numbers.push_back(THPUtils_unpackLong(PyTuple_GET_ITEM(tuple, k)));
  return numbers;
}

// Shares a version counter, and the memory of a storage.
at::Tensor with_memory(const at::Tensor &counter, const c10::Storage &storage, caffe2::TypeMeta dtype,
                       c10::IntArrayRef size, c10::IntArrayRef stride, int64_t first) {
  at::Tensor tensor = alias_of(counter);
  c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_and_dtype(storage, dtype);
  impl->set_sizes_and_strides(size, stride, first);
  return tensor;
}

// view(counter, whole, dtype, size, stride, first): a tensor on the memory of `whole`.
PyObject *make_view(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && THPDtype_Check(args[2]), "view(counter, whole, dtype, size, stride, first)");
  const at::ScalarType dtype = reinterpret_cast<THPDtype *>(args[2])->scalar_type;
  return THPVariable_Wrap(with_memory(tensor_of(args[0]), tensor_of(args[1]).storage(),
                                      c10::scalarTypeToTypeMeta(dtype), numbers_of(args[3]), numbers_of(args[4]),
                                      THPUtils_unpackLong(args[5])));
  END_HANDLE_TH_ERRORS
}

// The tensor that was dropped, of all of its storage.
PyObject *part_of(const DroppedSlots &slots, PyObject *packed, PyObject *made, THPObjectPtr whole) {
  const at::Tensor &all = tensor_of(whole.get());
  const Numbers size = numbers_of(at(packed, slots.dropped.size)),
                stride = numbers_of(at(packed, slots.dropped.stride));
  const int64_t first = integer_at(packed, slots.dropped.first);
  auto *wanted = at(packed, slots.dropped.dtype);
  TORCH_CHECK_TYPE(THPDtype_Check(wanted), "a dtype");
  const at::ScalarType dtype = reinterpret_cast<THPDtype *>(wanted)->scalar_type;
  if (all.sizes() == c10::IntArrayRef(size) && all.strides() == c10::IntArrayRef(stride) &&
      all.storage_offset() == first && all.scalar_type() == dtype)
    return whole.release();  // as most are
  return THPVariable_Wrap(with_memory(tensor_of(at(made, slots.made.counter)), all.storage(),
                                      c10::scalarTypeToTypeMeta(dtype), size, stride, first));
}

THPObjectPtr obtain(const DroppedSlots &slots, PyObject *made);

// What a replay begins with, `peek` of `saved/packed.py`; null where it was changed, which is Python's to say.
THPObjectPtr peek(const DroppedSlots &slots, PyObject *packed) {
  if (PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 4) {
    THPObjectPtr alias = own(PyTuple_GET_ITEM(packed, 0));
    const bool as_it_was =
        int64_t(THPVariable_Unpack(alias.get())._version()) == THPUtils_unpackLong(PyTuple_GET_ITEM(packed, 1));
    return as_it_was ? std::move(alias) : THPObjectPtr();
  }
  if (Py_TYPE(packed) == slots.type) {
    THPObjectPtr made = own(at(packed, slots.dropped.made)), whole = obtain(slots, made);
    return whole ? THPObjectPtr(part_of(slots, packed, made, std::move(whole))) : THPObjectPtr();
  }
  TORCH_CHECK_TYPE(Py_TYPE(packed) == &moved_type, "something else was packed");
  const auto &moved = *reinterpret_cast<Moved *>(packed);
  if (!moved.saved || is_changed(moved)) return {};
  PyObject *args[] = {moved.mover, packed, Py_False};
  THPObjectPtr tensor(PyObject_VectorcallMethod(names().restore, args, 2, names().not_counted));
  if (!tensor) throw python_error();
  return tensor;
}

THPObjectPtr inputs_of(PyObject *replay) {
  THPObjectPtr inputs(PyObject_GetAttr(replay, names().inputs));
  if (!inputs) throw python_error();
  TORCH_CHECK_TYPE(PyTuple_CheckExact(inputs.get()), "a replay begins with a tuple");
  return inputs;
}

// Whether all on it is there, or is to be made of what stays, moves, or was dropped in this plain way: not of more than
// `left`, as there may be many ways to each, and not deeper than some, as this calls itself.
bool is_plain_made(const DroppedSlots &slots, PyObject *made, int depth, int &left) {
  if (--left < 0) return false;
  const auto version = int64_t(tensor_of(at(made, slots.made.counter))._version());
  if (version != integer_at(made, slots.made.version)) return false;
  if (at(made, slots.made.tensor) != Py_None) return true;
  if (!depth || !integer_at(made, slots.made.unused)) return false;  // all on it were used: see `Recomputed.over`
  THPObjectPtr inputs = inputs_of(at(made, slots.made.replay));
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(inputs.get()); ++k) {
    PyObject *packed = PyTuple_GET_ITEM(inputs.get(), k);
    if (PyTuple_CheckExact(packed) || Py_TYPE(packed) == &moved_type) continue;
    if (Py_TYPE(packed) != slots.type || !is_plain_made(slots, at(packed, slots.dropped.made), depth - 1, left))
      return false;
  }
  return true;
}

// Whether a dropped tensor is as it was, not recorded, and there or to be made as backward mostly runs.
bool is_plain_one(const DroppedSlots &slots, PyObject *packed) {
  constexpr int kDeep = 8;
  int left = 64;
  if (at(packed, slots.dropped.record) != Py_None || at::GradMode::is_enabled()) return false;
  if (at::autocast::is_autocast_enabled(at::kCUDA) || at::autocast::is_autocast_enabled(at::kCPU)) return false;
  THPObjectPtr made = own(at(packed, slots.dropped.made));
  return is_plain_made(slots, made, kDeep, left);
}

// `Recomputed._take`.
THPObjectPtr take(const DroppedSlots &slots, PyObject *made, PyObject *again) {
  const at::Tensor &bytes = tensor_of(again);
  THPObjectPtr tensor(
      THPVariable_Wrap(with_memory(tensor_of(at(made, slots.made.counter)), bytes.storage(), bytes.dtype(),
                                   bytes.sizes(), bytes.strides(), bytes.storage_offset())));
  if (!tensor) throw python_error();
  if (integer_at(made, slots.made.unused) > 0) {
    put(made, slots.made.tensor, own(tensor.get()));
    enter(at(made, slots.made.engine), at(made, slots.made.nbytes));
  }
  return tensor;
}

// Gives what a replay made besides to whoever will be asked for it.
void give_others(const DroppedSlots &slots, PyObject *replay, PyObject *made, PyObject *results) {
  if (PyList_GET_SIZE(results) == 1) return;  // as of most
  THPObjectPtr makes(PyObject_GetAttr(replay, names().makes));
  if (!makes) throw python_error();
  TORCH_CHECK_TYPE(PyList_CheckExact(makes.get()), "a replay makes a list");
  for (Py_ssize_t index = 0; index < std::min(PyList_GET_SIZE(results), PyList_GET_SIZE(makes.get())); ++index) {
    PyObject *ref = PyList_GET_ITEM(makes.get(), index);
    THPObjectPtr other(ref == Py_None ? own(Py_None).release() : PyObject_CallNoArgs(ref));
    if (!other) throw python_error();
    if (other.get() == Py_None || other.get() == made || at(other, slots.made.tensor) != Py_None) continue;
    const auto version = int64_t(tensor_of(at(other, slots.made.counter))._version());
    if (integer_at(other, slots.made.unused) > 0 && version == integer_at(other, slots.made.version))
      take(slots, other, PyList_GET_ITEM(results, index));
  }
}

// `Recomputed.obtain` and what it counts; null where that is Python's.
THPObjectPtr obtain(const DroppedSlots &slots, PyObject *made) {
  THPObjectPtr known = own(at(made, slots.made.tensor));
  if (known.get() != Py_None) return known;
  THPObjectPtr replay = own(at(made, slots.made.replay));
  THPObjectPtr inputs = inputs_of(replay.get());
  THPObjectPtr values(PyList_New(0));
  if (!values) throw python_error();
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(inputs.get()); ++k) {
    THPObjectPtr value = peek(slots, PyTuple_GET_ITEM(inputs.get(), k));
    if (!value) return {};  // Python says why
    if (PyList_Append(values.get(), value.get())) throw python_error();
  }
  THPObjectPtr again(PyObject_CallMethodOneArg(replay.get(), names().run, values.get()));
  if (!again) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) throw python_error();
    PyErr_Clear();  // Python runs it again, and says more of what is wrong
    return {};
  }
  const int64_t index = integer_at(made, slots.made.index);
  TORCH_CHECK_TYPE(PyList_CheckExact(again.get()) && index < PyList_GET_SIZE(again.get()), "a replay makes a list");
  give_others(slots, replay, made, again);
  return take(slots, made, PyList_GET_ITEM(again.get(), index));
}

// `Dropped.view`; null where what it is made from was changed, which is Python's to say.
PyObject *unpack_dropped(const DroppedSlots &slots, PyObject *packed) {
  THPObjectPtr made = own(at(packed, slots.dropped.made));
  THPObjectPtr whole = obtain(slots, made);
  if (!whole) return nullptr;
  if (at(packed, slots.dropped.was_used) != Py_True) {
    put(packed, slots.dropped.was_used, own(Py_True));
    const int64_t left = integer_at(made, slots.made.unused) - 1;
    put(made, slots.made.unused, number_of(left));
    if (!left && at(made, slots.made.tensor) != Py_None) {
      put(made, slots.made.tensor, own(Py_None));
      leave(at(made, slots.made.engine), at(made, slots.made.nbytes));
    }
  }
  return part_of(slots, packed, made, std::move(whole));
}

}  // namespace
