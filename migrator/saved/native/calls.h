// What runs as a module is called and as it returns: `Saver.enter` and `Saver.leave` of `saved/saver.py`, for a module
// that is called within another, in the thread of one saver.
//
// A shortcut in front of `runtime/entry.py`. A model calls hundreds of modules in a step, and a host that issues small
// kernels is held up by each. What is not that plain goes to the functions in Python: an outermost module, one that has
// no name yet, an iteration that is recorded, another thread.
#pragma once

#include "hooks.h"

// The header that declares it takes seconds to compile.
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState> &getTracingState();
}  // namespace torch::jit::tracer

namespace {

struct Calls {
  PyObject_HEAD
  PyObject *saver;                  // a weak reference: a thread owns its saver, and takes it along
  PyObject *place, *stack, *nodes;  // of the saver's `Modules`
  PyObject *enter, *leave;          // in Python
  unsigned long thread;
  struct Own {
    Slots slots;
  } own;

  void forget_weak() {}
  void clear() {
    for (PyObject **each : {&saver, &place, &stack, &nodes, &enter, &leave}) Py_CLEAR(*each);
  }
  int visit(visitproc visit, void *arg) {
    for (PyObject *each : {saver, place, stack, nodes, enter, leave}) Py_VISIT(each);
    return 0;
  }
};

PyTypeObject calls_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Calls", sizeof(Calls)};

bool is_true(PyObject *of, PyObject *name) {
  THPObjectPtr answer(PyObject_GetAttr(of, name));
  const int is = answer ? PyObject_IsTrue(answer) : -1;
  if (is < 0) throw python_error();
  return is == 1;
}

// The saver, if its hooks are on and this is its thread; null if not.
THPObjectPtr saver_here(const Calls &calls) {
  if (!calls.place || PyThread_get_thread_ident() != calls.thread) return {};
  THPObjectPtr saver = own(PyWeakref_GetObject(calls.saver));
  return saver.get() == Py_None || is_true(saver, names().resting) ? THPObjectPtr() : std::move(saver);
}

// `Saver._bypass_or_not`.
void bypass_or_not(const Calls &calls, PyObject *saver) {
  const auto &slots = calls.own.slots.place;
  PyObject *bypass = at(calls.place, slots.bypass);
  const bool bypassed = is_true(saver, names().bypassed);
  if (!bypassed && !PyDict_GET_SIZE(bypass)) return;
  PyObject *wanted = Py_False;
  if (at(calls.place, slots.in_backward) == Py_False) {
    PyObject *path = at(at(calls.place, slots.here), calls.own.slots.node.path);
    PyObject *found = PyDict_GetItemWithError(bypass, path);
    if (!found && PyErr_Occurred()) throw python_error();
    if (found) wanted = found;
  }
  if (wanted == Py_None || (wanted == Py_True) == bypassed) return;
  if (!THPObjectPtr(PyObject_CallMethodOneArg(saver, names().bypass, wanted))) throw python_error();
}

// enter(module): a module is called; whether `leave` is to be called after that.
PyObject *calls_enter(PyObject *self, PyObject *module) {
  HANDLE_TH_ERRORS
  const auto &calls = *reinterpret_cast<Calls *>(self);
  const Spent spent(kCalls);
  const auto &slots = calls.own.slots.place;
  THPObjectPtr saver = saver_here(calls);
  if (torch::jit::tracer::getTracingState()) Py_RETURN_FALSE;  // see `_enter` of `runtime/entry.py`
  if (saver && PyList_GET_SIZE(calls.stack) && at(calls.place, slots.recording) == Py_False) {
    THPObjectPtr id(PyLong_FromVoidPtr(module));
    PyObject *node = id ? PyDict_GetItemWithError(calls.nodes, id) : nullptr;
    if (node) {
      if (PyList_Append(calls.stack, at(calls.place, slots.here))) throw python_error();
      put(calls.place, slots.here, own(node));
      bypass_or_not(calls, saver);
      Py_RETURN_TRUE;
    }
    if (PyErr_Occurred()) throw python_error();
  }
  const Spent not_here(kKinds);  // it counts its own time
  return PyObject_CallOneArg(calls.enter, module);
  END_HANDLE_TH_ERRORS
}

// leave(): it returns, or raises.
PyObject *calls_leave(PyObject *self, PyObject *) {
  HANDLE_TH_ERRORS
  const auto &calls = *reinterpret_cast<Calls *>(self);
  const Spent spent(kCalls);
  THPObjectPtr saver = saver_here(calls);
  if (!saver) {
    const Spent not_here(kKinds);
    return PyObject_CallNoArgs(calls.leave);
  }
  if (const Py_ssize_t depth = PyList_GET_SIZE(calls.stack)) {
    put(calls.place, calls.own.slots.place.here, own(PyList_GET_ITEM(calls.stack, depth - 1)));
    if (PyList_SetSlice(calls.stack, depth - 1, depth, nullptr)) throw python_error();
  }
  bypass_or_not(calls, saver);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef calls_methods[] = {
    {"enter", calls_enter, METH_O, nullptr},
    {"leave", calls_leave, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// calls(saver, modules, enter, leave): that shortcut, for the thread that asks for it.
PyObject *make_calls(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "calls(saver, modules, enter, leave)");
  THPObjectPtr place(PyObject_GetAttrString(args[1], "place")), stack(PyObject_GetAttrString(args[1], "stack")),
      nodes(PyObject_GetAttrString(args[1], "nodes")), saver(PyWeakref_NewRef(args[0], nullptr));
  if (!place || !stack || !nodes || !saver) throw python_error();
  TORCH_CHECK_TYPE(PyList_CheckExact(stack.get()) && PyDict_CheckExact(nodes.get()), "a list and a dict");
  const Slots slots = slots_of(place);
  auto *calls = make<Calls>(calls_type);
  calls->own.slots = slots;
  calls->thread = PyThread_get_thread_ident();
  hold(calls->enter, args[2]);
  hold(calls->leave, args[3]);
  calls->saver = saver.release();
  calls->stack = stack.release();
  calls->nodes = nodes.release();
  calls->place = place.release();
  return reinterpret_cast<PyObject *>(calls);
  END_HANDLE_TH_ERRORS
}

}  // namespace
