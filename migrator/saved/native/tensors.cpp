// What the hooks do with every tensor that is saved, and with what is packed in its place: `saved/tensors.py` says
// what of it Python calls.
//
// Every call of PyTorch's from Python takes a microsecond or half of one, and a tensor that moves needs twenty. Here
// they are reads of fields. Compiled once against the torch that is installed. What is decided, and all that happens
// once a group, is in Python. Everything here runs with the interpreter's lock held.
//
// References to Python's objects are seen by its collector: a group refers to its members, and they to it.
//
// One source, with the parts in headers of its own, since each that includes PyTorch's takes fifteen seconds to
// compile, and somebody waits for that.
#include "calls.h"
#include "hooks.h"
#include "moved.h"
#include "occupancy.h"
#include "storages.h"

namespace {

PyMethodDef functions[] = {
    {"Saved", fast(make_saved), METH_FASTCALL, nullptr},
    {"Moved", fast(make_moved), METH_FASTCALL, nullptr},
    {"Storages", make_storages, METH_NOARGS, nullptr},
    {"Occupancy", fast(make_occupancy), METH_FASTCALL, nullptr},
    {"memory_of", fast(memory_of), METH_FASTCALL, nullptr},
    {"arrange", arrange, METH_O, nullptr},
    {"spans", fast(spans), METH_FASTCALL, nullptr},
    {"release", release, METH_O, nullptr},
    {"counter", make_counter, METH_O, nullptr},
    {"view", fast(make_view), METH_FASTCALL, nullptr},
    {"hooks", fast(make_hooks), METH_FASTCALL, nullptr},
    {"calls", fast(make_calls), METH_FASTCALL, nullptr},
    {"spent", spent, METH_NOARGS, nullptr},
    {"charge", charge, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tensors", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_tensors() {
  HANDLE_TH_ERRORS
  moved_type.tp_weaklistoffset = offsetof(Moved, weak);
  hook_type.tp_vectorcall_offset = offsetof(Hook, call);
  hook_type.tp_call = PyVectorcall_Call;
  hook_type.tp_flags = Py_TPFLAGS_HAVE_VECTORCALL;
  const bool ready = prepare<Saved>(saved_type, saved_members, saved_getters, nullptr) &&
                     prepare<Known>(known_type, known_members, known_getters, known_methods) &&
                     prepare<Storages>(storages_type, nullptr, nullptr, storages_methods) &&
                     prepare<Moved>(moved_type, moved_members, moved_getters, moved_methods) &&
                     prepare<Occupancy>(occupancy_type, occupancy_members, nullptr, occupancy_methods) &&
                     prepare<Hook>(hook_type, hook_members, nullptr, nullptr) &&
                     prepare<Armed>(armed_type, nullptr, nullptr, nullptr) &&
                     prepare<Calls>(calls_type, nullptr, nullptr, calls_methods);
  return ready ? PyModule_Create(&module) : nullptr;
  END_HANDLE_TH_ERRORS
}
