// A saved tensor that the plan drops: `Saver.drop` of `saved/saver.py` and `Mover.drop` of `saved/mover.py`, where what
// recomputes it is known to hold. Like `hooks.h` a shortcut, which leaves to Python what is not plain. Python finds
// what was noted by then, or nobody holds it any more.
//
// Unlike `Mover.drop` it takes no lock: nothing of the engine changes, and the rest is this thread's own.
#pragma once

#include "dropped.h"
#include "storages.h"

namespace {

THPObjectPtr attribute(PyObject *of, PyObject *name) { return checked(PyObject_GetAttr(of, name)); }

THPObjectPtr weak(PyObject *object) { return checked(PyWeakref_NewRef(object, nullptr)); }

// What a weak reference is to; null if that is gone, or for None.
THPObjectPtr referent(PyObject *reference) {
  if (!reference || reference == Py_None) return {};
  THPObjectPtr found = own(PyWeakref_GetObject(reference));
  return found.get() == Py_None ? THPObjectPtr() : std::move(found);
}

bool is_in(PyObject *set, PyObject *key) {
  const int found = PySet_Contains(set, key);
  if (found < 0) throw python_error();
  return found == 1;
}

PyObject *found_in(PyObject *dict, PyObject *key) {  // borrowed, null if it is not there
  PyObject *found = PyDict_GetItemWithError(dict, key);
  if (!found && PyErr_Occurred()) throw python_error();
  return found;
}

// `Recomputed(base, replay, index, engine)`.
THPObjectPtr recomputed(const DroppedSlots &slots, PyObject *base, PyObject *replay, PyObject *index,
                        PyObject *engine) {
  THPObjectPtr made = checked(PyType_GenericNew(slots.made_type, nullptr, nullptr));
  const auto fill = [&](Py_ssize_t slot, THPObjectPtr value) { at(made, slot) = value.release(); };
  const at::Tensor &of = THPVariable_Unpack(base);
  const at::Tensor counter = counter_of(of);
  fill(slots.made.base, weak(base));
  fill(slots.made.version, number_of(Py_ssize_t(counter._version())));
  fill(slots.made.counter, checked(THPVariable_Wrap(counter)));
  fill(slots.made.nbytes, number_of(Py_ssize_t(of.nbytes())));
  fill(slots.made.replay, own(replay));
  fill(slots.made.index, own(index));
  fill(slots.made.engine, own(engine));
  fill(slots.made.unused, number_of(0));
  fill(slots.made.tensor, own(Py_None));
  THPObjectPtr makes = attribute(replay, names().makes);
  TORCH_CHECK_TYPE(PyList_CheckExact(makes.get()), "a replay makes a list");
  if (PyList_SetItem(makes, THPUtils_unpackLong(index), weak(made).release())) throw python_error();
  return made;
}

// `Dropped(tensor, made, make, None)`.
THPObjectPtr dropped(const DroppedSlots &slots, PyObject *tensor, PyObject *made, PyObject *make) {
  THPObjectPtr packed = checked(PyType_GenericNew(slots.type, nullptr, nullptr));
  const auto fill = [&](Py_ssize_t slot, THPObjectPtr value) { at(packed, slot) = value.release(); };
  const at::Tensor &of = THPVariable_Unpack(tensor);
  fill(slots.dropped.go, own(make));
  fill(slots.dropped.made, own(made));
  fill(slots.dropped.record, own(Py_None));
  fill(slots.dropped.dtype, own(reinterpret_cast<PyObject *>(torch::getTHPDtype(of.scalar_type()))));
  fill(slots.dropped.size, size_of(of.sizes()));
  fill(slots.dropped.stride, tuple_of(of.strides()));
  fill(slots.dropped.first, number_of(Py_ssize_t(of.storage_offset())));
  fill(slots.dropped.was_used, own(Py_False));
  put(made, slots.made.unused, number_of(Py_ssize_t(integer_at(made, slots.made.unused)) + 1));
  return packed;
}

// `Recomputed.is_of`.
bool is_of(const DroppedSlots &slots, PyObject *made, PyObject *base) {
  return referent(at(made, slots.made.base)).get() == base &&
         integer_at(made, slots.made.version) == int64_t(THPVariable_Unpack(base)._version());
}

struct RecomputeSlots {
  Py_ssize_t mover, pace, key, verified;
};

// What the graph is to hold for the tensor; null where that is Python's to say.
PyObject *drop(const DroppedSlots &slots, const RecomputeSlots &planned, PyObject *saver, PyObject *make,
               PyObject *tensor) {
  PyObject *mover = at(make, planned.mover), *key = at(make, planned.key);
  THPObjectPtr checks = attribute(mover, names().checks), refused = attribute(checks, names().refused),
               replays = attribute(saver, names().replays), known_before = attribute(mover, names().dropped),
               storages = attribute(mover, names().storages);
  if (attribute(mover, names().recorder).get() != Py_None || replays.get() == Py_None || is_in(refused, key))
    return nullptr;
  TORCH_CHECK_TYPE(Py_TYPE(storages.get()) == &storages_type && PyDict_CheckExact(known_before.get()),
                   "a mover has Storages and a dict");
  const at::Tensor &saved = THPVariable_Unpack(tensor);
  THPObjectPtr base = saved.is_view() ? checked(THPVariable_Wrap(saved._base())) : own(tensor);
  THPObjectPtr entry = checked(storages_find(storages, tensor)), cdata = checked(known_cdata(entry, nullptr));
  auto &known = *reinterpret_cast<Known *>(entry.get());
  THPObjectPtr made = referent(known.made);
  if (!made) {  // its neighbour may be dropped: parts of a fused projection are recomputed at once
    THPObjectPtr neighbour = referent(found_in(known_before, cdata));
    if (neighbour && is_of(slots, neighbour, base)) made = std::move(neighbour);
  }
  const bool fresh = !made;
  if (fresh) {
    // What was seen since may be other than what the plan was made with.
    THPObjectPtr all = attribute(mover, names().verified);
    PyObject *seen = found_in(all, key);
    THPObjectPtr verified = own(seen ? seen : at(make, planned.verified));
    THPObjectPtr found =
        checked(PyObject_CallMethodObjArgs(verified, names().find, base.get(), replays.get(), nullptr));
    if (found.get() == Py_None) return nullptr;
    TORCH_CHECK_TYPE(PyTuple_CheckExact(found.get()) && PyTuple_GET_SIZE(found.get()) == 2, "a replay and an index");
    made =
        recomputed(slots, base, PyTuple_GET_ITEM(found.get(), 0), PyTuple_GET_ITEM(found.get(), 1), engine_of(mover));
    if (PyDict_SetItem(known_before, cdata, weak(made))) throw python_error();
  }
  Py_SETREF(known.made, weak(made).release());
  THPObjectPtr packed = dropped(slots, tensor, made, make);
  if (fresh && attribute(checks, names().on).get() == Py_True) {
    checked(PyObject_CallMethodObjArgs(checks, names().look, key, base.get(), made.get(), slots.look, nullptr));
    if (is_in(refused, key)) return nullptr;
  }
  return packed.release();
}

}  // namespace
