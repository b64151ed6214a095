// What it takes to make a type of Python's here: C++ members behind Python's header, and references the collector
// knows.
//
// A `Type` has, after its header and references, `own`: the members with constructors. `clear` drops its references,
// `visit` shows them to the collector, and `forget_weak` clears weak ones to it, if there may be any.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <new>

namespace {

// Borrowed references become own ones for as long as Python code runs that may drop the others.
THPObjectPtr own(PyObject *object) {
  Py_INCREF(object);
  return THPObjectPtr(object);
}

// What a function of Python's returned, if it did not raise.
THPObjectPtr checked(PyObject *fresh) {
  if (!fresh) throw python_error();
  return THPObjectPtr(fresh);
}

const at::Tensor &tensor_of(PyObject *object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor is wanted");
  return THPVariable_Unpack(object);
}

template <typename Type>
Type *make(PyTypeObject &type) {
  auto *object = reinterpret_cast<Type *>(type.tp_alloc(&type, 0));
  if (!object) throw python_error();
  new (&object->own) typename Type::Own();
  return object;
}

template <typename Type>
void dealloc(PyObject *self) {
  auto *object = reinterpret_cast<Type *>(self);
  PyObject_GC_UnTrack(self);
  object->forget_weak();
  object->clear();
  object->own.~Own();
  Py_TYPE(self)->tp_free(self);
}

template <typename Type>
int traverse(PyObject *self, visitproc visit, void *arg) {
  return reinterpret_cast<Type *>(self)->visit(visit, arg);
}

template <typename Type>
int clear(PyObject *self) {
  reinterpret_cast<Type *>(self)->clear();
  return 0;
}

void hold(PyObject *&slot, PyObject *object) {
  Py_INCREF(object);
  slot = object;
}

template <typename Type>
bool prepare(PyTypeObject &type, PyMemberDef *members, PyGetSetDef *getters, PyMethodDef *methods) {
  type.tp_flags |= Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_dealloc = dealloc<Type>;
  type.tp_traverse = traverse<Type>;
  type.tp_clear = clear<Type>;
  type.tp_members = members;
  type.tp_getset = getters;
  type.tp_methods = methods;
  return PyType_Ready(&type) == 0;
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

}  // namespace
