// What an engine counts with each tensor that is saved or asked for: the bytes in HBM, the room for them, and how far
// the plan's iteration has come. `offload/occupancy.py` says what Python sees of it.
//
// A model saves a thousand tensors in a step. Where the engine was called for each, a tensor that stays took the host
// twice as long. So the engine is called only where it has something to do.
#pragma once

#include <structmember.h>

#include <algorithm>
#include <limits>

#include "slots.h"

namespace {

enum PaceField { kBirth, kUse, kFromBirth, kFromUse, kPaceFields };  // of `planner/paces.py`

struct Occupancy {
  PyObject_HEAD
  long long resident, limit, position, stayed, used_up, due_at, due_bytes;
  PyObject *leaving, *order;  // the engine's groups: whose copy has been submitted; that are still to come back
  struct Own {
  } own;

  void forget_weak() {}
  void clear() {
    Py_CLEAR(leaving);
    Py_CLEAR(order);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(leaving);
    Py_VISIT(order);
    return 0;
  }

  // Bytes enter HBM, and a site of the plan was saved, if there is one. Whether groups are to be released for them.
  bool enter(long long nbytes, PyObject *pace) {
    bool changed = nbytes != 0;
    if (pace != Py_None) {
      position = number(field(pace, kBirth));
      changed |= set_limit(field(pace, kFromBirth));
    }
    stayed += nbytes;
    resident += nbytes;
    return changed && resident > limit && are_any(leaving);
  }

  // Bytes leave it, as backward has asked for a site of the plan, if there is one. Whether the next group may come
  // back.
  bool leave(long long nbytes, PyObject *pace) {
    bool changed = nbytes != 0;
    // Else it is asked for again, or not in the plan's order.
    if (pace != Py_None && number(field(pace, kUse)) > position) {
      position = number(field(pace, kUse));
      set_limit(field(pace, kFromUse));
      changed = true;
    }
    // What is unpacked twice (retain_graph) leaves twice by this count, but never more than had stayed.
    nbytes = std::min(nbytes, stayed);
    stayed -= nbytes;
    resident -= nbytes;
    used_up += nbytes;
    return changed && position >= due_at && limit - resident >= due_bytes && are_any(order);
  }

  bool set_limit(PyObject *room) {
    if (room == Py_None) return false;
    limit = number(room);
    return true;
  }

  static PyObject *field(PyObject *pace, PaceField which) {
    TORCH_CHECK_TYPE(PyTuple_Check(pace) && PyTuple_GET_SIZE(pace) == kPaceFields, "a Pace is wanted");
    return PyTuple_GET_ITEM(pace, which);
  }

  static bool are_any(PyObject *groups) {
    const Py_ssize_t size = PyObject_Size(groups);
    if (size < 0) throw python_error();
    return size > 0;
  }

  static long long number(PyObject *object) {
    const long long value = PyLong_AsLongLong(object);
    if (value == -1 && PyErr_Occurred()) throw python_error();
    return value;
  }
};

PyMemberDef occupancy_members[] = {
    {"resident", T_LONGLONG, offsetof(Occupancy, resident), 0, nullptr},
    {"limit", T_LONGLONG, offsetof(Occupancy, limit), 0, nullptr},
    {"position", T_LONGLONG, offsetof(Occupancy, position), 0, nullptr},
    {"stayed", T_LONGLONG, offsetof(Occupancy, stayed), 0, nullptr},
    {"used_up", T_LONGLONG, offsetof(Occupancy, used_up), 0, nullptr},
    {"due_at", T_LONGLONG, offsetof(Occupancy, due_at), 0, nullptr},
    {"due_bytes", T_LONGLONG, offsetof(Occupancy, due_bytes), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

template <bool (Occupancy::*count)(long long, PyObject *)>
PyObject *counted(PyObject *self, PyObject *const *args, Py_ssize_t size) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(size == 2, "bytes, and a pace or None, are wanted");
  return PyBool_FromLong((reinterpret_cast<Occupancy *>(self)->*count)(Occupancy::number(args[0]), args[1]));
  END_HANDLE_TH_ERRORS
}

PyMethodDef occupancy_methods[] = {
    {"enter", fast(counted<&Occupancy::enter>), METH_FASTCALL, nullptr},
    {"leave", fast(counted<&Occupancy::leave>), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject occupancy_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Occupancy",
                               sizeof(Occupancy)};

// Occupancy(leaving, order)
PyObject *make_occupancy(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "Occupancy(leaving, order)");
  auto *made = make<Occupancy>(occupancy_type);
  hold(made->leaving, args[0]);
  hold(made->order, args[1]);
  made->position = made->due_at = -1;
  made->due_bytes = std::numeric_limits<long long>::min();
  return reinterpret_cast<PyObject *>(made);
  END_HANDLE_TH_ERRORS
}

THPObjectPtr engine_of(PyObject *mover) {
  THPObjectPtr engine(PyObject_GetAttr(mover, names().engine));
  if (!engine) throw python_error();
  return engine;
}

// Count, and have the engine do what there is to do.
template <bool (Occupancy::*count)(long long, PyObject *)>
void count_for(PyObject *engine, long long nbytes, PyObject *pace, PyObject *to_do) {
  THPObjectPtr hbm(PyObject_GetAttr(engine, names().hbm));
  if (!hbm) throw python_error();
  TORCH_CHECK_TYPE(Py_TYPE(hbm.get()) == &occupancy_type, "an engine has an Occupancy");
  auto &of = *reinterpret_cast<Occupancy *>(hbm.get());
  if ((of.*count)(nbytes, pace) && !THPObjectPtr(PyObject_CallMethodNoArgs(engine, to_do))) throw python_error();
}

// `Engine.enter` and `Engine.leave`.
void enter(PyObject *engine, PyObject *nbytes, PyObject *pace = Py_None) {
  count_for<&Occupancy::enter>(engine, Occupancy::number(nbytes), pace, names().relieve);
}

void leave(PyObject *engine, PyObject *nbytes, PyObject *pace = Py_None) {
  count_for<&Occupancy::leave>(engine, Occupancy::number(nbytes), pace, names().prefetch);
}

}  // namespace
