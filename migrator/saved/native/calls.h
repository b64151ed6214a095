// What runs as a module is called and as it returns: `Saver.enter` and `Saver.leave` of `saved/saver.py`, for a module
// that is called within another.
//
// A shortcut in front of `runtime/entry.py`. A model calls hundreds of modules in a step, and a host that issues small
// kernels is held up by each. What is not that plain goes to the functions in Python: an outermost module, one that has
// no name yet, an iteration that is recorded.
#pragma once

#include "hooks.h"

// The header that declares it takes seconds to compile.
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState> &getTracingState();
}  // namespace torch::jit::tracer

namespace {

// The saver of one thread, in that thread's own dictionary.
struct Armed {
  PyObject_HEAD
  PyObject *calls;       // of its session
  PyObject *optimizers;  // the session's
  PyObject *saver;       // a weak reference: a thread owns its saver, and takes it along
  struct Own {
    PyObject *place = nullptr, *stack = nullptr, *nodes = nullptr;  // the saver's, for as long as that is there
    Slots slots;
  } own;

  void forget_weak() {}
  void clear() {
    Py_CLEAR(calls);
    Py_CLEAR(optimizers);
    Py_CLEAR(saver);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(calls);
    Py_VISIT(optimizers);
    Py_VISIT(saver);
    return 0;
  }
};

PyTypeObject armed_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Armed", sizeof(Armed)};

struct Calls {
  PyObject_HEAD
  PyObject *enter, *leave;  // in Python
  struct Own {
  } own;

  void forget_weak() {}
  void clear() {
    Py_CLEAR(enter);
    Py_CLEAR(leave);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(enter);
    Py_VISIT(leave);
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

// What this thread was armed with; null if it was not, or by another session.
Armed *armed_here(PyObject *calls) {
  PyObject *of_thread = PyThreadState_GetDict();
  PyObject *found = of_thread ? PyDict_GetItemWithError(of_thread, names().calls) : nullptr;
  if (!found && PyErr_Occurred()) throw python_error();
  auto *armed = reinterpret_cast<Armed *>(found);
  return armed && armed->calls == calls ? armed : nullptr;
}

// The saver; null if there is none. What else is known of it is there as long as this is held.
THPObjectPtr saver_of(const Armed *armed) {
  if (!armed) return {};
  THPObjectPtr saver = own(PyWeakref_GetObject(armed->saver));
  return saver.get() == Py_None ? THPObjectPtr() : std::move(saver);
}

// `Saver._bypass_or_not`.
void bypass_or_not(const Armed &armed, PyObject *saver) {
  const auto &[place, stack, nodes, slots] = armed.own;
  PyObject *bypass = at(place, slots.place.bypass);
  const bool bypassed = is_true(saver, names().bypassed);
  if (!bypassed && !PyDict_GET_SIZE(bypass)) return;
  if (is_true(saver, names().paused) || torch::autograd::get_current_graph_task_id() != -1) return;
  PyObject *wanted = Py_False;
  if (at(place, slots.place.in_backward) == Py_False) {
    PyObject *path = at(at(place, slots.place.here), slots.node.path);
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
  const Spent spent(kCalls);
  if (torch::jit::tracer::getTracingState()) Py_RETURN_FALSE;  // see `_enter` of `runtime/entry.py`
  Armed *armed = armed_here(self);
  THPObjectPtr saver = saver_of(armed);
  if (saver && is_true(saver, names().resting)) {
    // The first module of the allocator's period is told of.
    if (!is_true(armed->optimizers, names().period_due)) Py_RETURN_FALSE;
  } else if (saver && PyList_GET_SIZE(armed->own.stack)) {
    const auto &[place, stack, nodes, slots] = armed->own;
    const bool recording = at(place, slots.place.recording) != Py_False;
    THPObjectPtr id(PyLong_FromVoidPtr(module));
    PyObject *node = id && !recording ? PyDict_GetItemWithError(nodes, id) : nullptr;
    if (node) {
      if (PyList_Append(stack, at(place, slots.place.here))) throw python_error();
      put(place, slots.place.here, own(node));
      bypass_or_not(*armed, saver);
      Py_RETURN_TRUE;
    }
    if (PyErr_Occurred()) throw python_error();
  }
  const Spent not_here(kKinds);  // it counts its own time
  return PyObject_CallOneArg(reinterpret_cast<Calls *>(self)->enter, module);
  END_HANDLE_TH_ERRORS
}

// leave(): it returns, or raises.
PyObject *calls_leave(PyObject *self, PyObject *) {
  HANDLE_TH_ERRORS
  const Spent spent(kCalls);
  Armed *armed = armed_here(self);
  THPObjectPtr saver = saver_of(armed);
  const bool is_on = saver && !is_true(saver, names().resting);
  if (!is_on || PyList_GET_SIZE(armed->own.stack) == 1) {  // an outermost module's call ends
    const Spent not_here(kKinds);
    return PyObject_CallNoArgs(reinterpret_cast<Calls *>(self)->leave);
  }
  const auto &[place, stack, nodes, slots] = armed->own;
  if (const Py_ssize_t depth = PyList_GET_SIZE(stack)) {
    put(place, slots.place.here, own(PyList_GET_ITEM(stack, depth - 1)));
    if (PyList_SetSlice(stack, depth - 1, depth, nullptr)) throw python_error();
  }
  bypass_or_not(*armed, saver);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// arm(saver, modules, optimizers): have calls in this thread take the shortcut; `modules` is the saver's.
PyObject *calls_arm(PyObject *self, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "arm(saver, modules, optimizers)");
  THPObjectPtr place(PyObject_GetAttrString(args[1], "place")), stack(PyObject_GetAttrString(args[1], "stack")),
      nodes(PyObject_GetAttrString(args[1], "nodes")), saver(PyWeakref_NewRef(args[0], nullptr));
  if (!place || !stack || !nodes || !saver) throw python_error();
  TORCH_CHECK_TYPE(PyList_CheckExact(stack.get()) && PyDict_CheckExact(nodes.get()), "a list and a dict");
  const Slots slots = slots_of(place);
  auto *armed = make<Armed>(armed_type);
  THPObjectPtr held(reinterpret_cast<PyObject *>(armed));
  armed->saver = saver.release();
  hold(armed->calls, self);
  hold(armed->optimizers, args[2]);
  armed->own = {place.get(), stack.get(), nodes.get(), slots};
  PyObject *of_thread = PyThreadState_GetDict();
  if (!of_thread || PyDict_SetItem(of_thread, names().calls, held)) throw python_error();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef calls_methods[] = {
    {"enter", calls_enter, METH_O, nullptr},
    {"leave", calls_leave, METH_NOARGS, nullptr},
    {"arm", fast(calls_arm), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// calls(enter, leave): that shortcut, for threads that are armed.
PyObject *make_calls(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "calls(enter, leave)");
  auto *calls = make<Calls>(calls_type);
  hold(calls->enter, args[0]);
  hold(calls->leave, args[1]);
  return reinterpret_cast<PyObject *>(calls);
  END_HANDLE_TH_ERRORS
}

}  // namespace
