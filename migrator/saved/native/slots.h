// Attributes of classes with `__slots__` that Python declares, read and written from here; and the names of others.
#pragma once

#include <torch/csrc/utils/python_compat.h>
#include <torch/csrc/utils/python_numbers.h>

#include "object.h"

namespace {

// Where a class with `__slots__` keeps an attribute. The classes are declared in Python, once; here they are read.
Py_ssize_t slot_of(PyObject *type, const char *name) {
  THPObjectPtr member(PyObject_GetAttrString(type, name));
  if (!member) throw python_error();
  TORCH_CHECK_TYPE(Py_TYPE(member.get()) == &PyMemberDescr_Type, name, " is no slot");
  return reinterpret_cast<PyMemberDescrObject *>(member.get())->d_member->offset;
}

PyObject *&at(PyObject *object, Py_ssize_t slot) {
  return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + slot);
}

void put(PyObject *object, Py_ssize_t slot, THPObjectPtr value) { Py_SETREF(at(object, slot), value.release()); }

THPObjectPtr number_of(Py_ssize_t value) {
  THPObjectPtr number(PyLong_FromSsize_t(value));
  if (!number) throw python_error();
  return number;
}

struct Names {
  PyObject *engine = PyUnicode_InternFromString("engine"), *compute = PyUnicode_InternFromString("compute"),
           *capturing = PyUnicode_InternFromString("capturing"), *hbm = PyUnicode_InternFromString("hbm"),
           *relieve = PyUnicode_InternFromString("relieve"), *prefetch = PyUnicode_InternFromString("prefetch"),
           *take = PyUnicode_InternFromString("take"), *restore = PyUnicode_InternFromString("restore"),
           *drop = PyUnicode_InternFromString("drop"), *note = PyUnicode_InternFromString("note"),
           *nothing = PyUnicode_InternFromString(""), *no_bytes = PyLong_FromLong(0),
           *inputs = PyUnicode_InternFromString("inputs"), *run = PyUnicode_InternFromString("run"),
           *makes = PyUnicode_InternFromString("makes"), *checks = PyUnicode_InternFromString("checks"),
           *refused = PyUnicode_InternFromString("refused"), *replays = PyUnicode_InternFromString("replays"),
           *packs = PyUnicode_InternFromString("packs"), *dropped = PyUnicode_InternFromString("dropped"),
           *storages = PyUnicode_InternFromString("storages"), *recorder = PyUnicode_InternFromString("recorder"),
           *verified = PyUnicode_InternFromString("verified"), *find = PyUnicode_InternFromString("find"),
           *on = PyUnicode_InternFromString("on"), *look = PyUnicode_InternFromString("look"),
           *resting = PyUnicode_InternFromString("resting"), *bypassed = PyUnicode_InternFromString("bypassed"),
           *bypass = PyUnicode_InternFromString("bypass"), *period_due = PyUnicode_InternFromString("period_due"),
           *paused = PyUnicode_InternFromString("paused"), *calls = PyUnicode_InternFromString("torch_tiers.calls"),
           *not_counted = PyTuple_Pack(1, THPObjectPtr(PyUnicode_InternFromString("count")).get());
};

const Names &names() {
  static const Names all;
  return all;
}

}  // namespace
