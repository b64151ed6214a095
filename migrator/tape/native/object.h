// Python's objects here. PyTorch has such helpers, too; its headers for them take twenty seconds to compile.
#pragma once

#include <torch/csrc/Export.h>
#include <torch/csrc/python_headers.h>

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/core/Tensor.h>

#include <exception>
#include <memory>
#include <string>
#include <vector>

// `torch.Tensor`. Its header takes fifteen seconds to compile.
TORCH_PYTHON_API extern PyObject *THPVariableClass;

namespace {

struct Drop {
  void operator()(PyObject *object) const { Py_DECREF(object); }
};

using Object = std::unique_ptr<PyObject, Drop>;

// Python knows what went wrong.
struct InPython : std::exception {};

Object checked(PyObject *object) {
  if (!object) throw InPython();
  return Object(object);
}

Object borrowed(PyObject *object) {
  Py_INCREF(object);
  return Object(object);
}

Object none() { return borrowed(Py_None); }
Object number(int64_t value) { return checked(PyLong_FromLongLong(value)); }
Object number(uint64_t value) { return checked(PyLong_FromUnsignedLongLong(value)); }
Object truth(bool value) { return checked(PyBool_FromLong(value)); }
Object text(const std::string &value) { return checked(PyUnicode_FromStringAndSize(value.data(), value.size())); }

template <typename... Parts>
Object tuple(const Parts &...parts) {
  return checked(PyTuple_Pack(sizeof...(parts), parts.get()...));
}

Object tuple_of(std::vector<Object> &items) {
  Object made = checked(PyTuple_New(Py_ssize_t(items.size())));
  for (size_t index = 0; index < items.size(); ++index)
    PyTuple_SET_ITEM(made.get(), Py_ssize_t(index), items[index].release());
  return made;
}

template <typename Range, typename Make>
Object list_of(const Range &range, Make &&make) {
  Object list = checked(PyList_New(0));
  for (const auto &each : range)
    if (PyList_Append(list.get(), make(each).get())) throw InPython();
  return list;
}

// Do something with the interpreter's lock, which this thread need not have. Nothing once the interpreter has ended.
template <typename Function>
void with_interpreter(Function &&function) {
  if (!Py_IsInitialized()) return;
  const PyGILState_STATE state = PyGILState_Ensure();
  function();
  PyGILState_Release(state);
}

// What Python raised in the main thread, as of a signal's handler, comes there once what is under way has returned.
void raise_later() {
  struct Raised {
    PyObject *type, *value, *trace;
  };
  auto held = std::make_unique<Raised>();
  PyErr_Fetch(&held->type, &held->value, &held->trace);
  const auto raise = [](void *of) {
    const std::unique_ptr<Raised> again(static_cast<Raised *>(of));
    PyErr_Restore(again->type, again->value, again->trace);
    return -1;
  };
  if (Py_AddPendingCall(raise, held.get()) == 0) {
    (void)held.release();
  } else {  // dozens of others are to come
    PyErr_Restore(held->type, held->value, held->trace);
    PyErr_WriteUnraisable(nullptr);
  }
}

// What Python raised, as a text; it is forgotten.
std::string raised() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  std::string text = "an error without a text";
  if (PyObject *said = value ? PyObject_Str(value) : nullptr) {
    if (const char *characters = PyUnicode_AsUTF8(said)) text = characters;
    Py_DECREF(said);
  }
  PyErr_Clear();
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return text;
}

int64_t integer_of(PyObject *object) {
  const long long value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw InPython();
  return value;
}

// What a function of the module does; an exception becomes one of Python's.
template <typename Function>
PyObject *answer(Function &&function) {
  try {
    return Object(function()).release();
  } catch (const InPython &) {
  } catch (const c10::Error &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what_without_backtrace());
  } catch (const std::exception &error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

// The tensor in an object of Python's.
at::Tensor tensor_of(PyObject *object) {
  static PyObject *name = PyUnicode_InternFromString("_cdata");
  TORCH_CHECK(PyObject_TypeCheck(object, reinterpret_cast<PyTypeObject *>(THPVariableClass)), "a tensor is wanted");
  // A subclass of the program's is not asked.
  const auto state = at::impl::PythonTorchFunctionTLS::get_disabled_state();
  at::impl::PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED);
  PyObject *address = PyObject_GetAttr(object, name);
  at::impl::PythonTorchFunctionTLS::set_disabled_state(state);
  Object held = checked(address);
  auto *impl = static_cast<c10::TensorImpl *>(PyLong_AsVoidPtr(held.get()));
  return at::Tensor(c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(impl));
}

}  // namespace
