// What PyTorch calls for each tensor that it saves, and when backward needs it: `Saver.pack` and `unpack` of
// `saved/saver.py` for what comes again in every iteration: sites of the plan that stay, move or are recomputed.
//
// A shortcut in front of the hooks in Python. Anything that is not plain, planned and in the plan's order goes to
// those, before any state changes except the module's count of sites. The Python hooks are authoritative: where this
// file answers, it must agree with them.
#pragma once

#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/utils/python_compat.h>

#include <chrono>
#include <utility>

#include "drop.h"
#include "dropped.h"
#include "moved.h"
#include "occupancy.h"
#include "slots.h"
#include "storages.h"

namespace {

struct Slots {
  PyTypeObject *stay_type, *go_type, *recompute_type;
  struct {
    Py_ssize_t here, iteration, agenda, recording, in_backward, bypass;
  } place;
  struct {
    Py_ssize_t path, iteration, count, agenda, actions, noted;
  } node;
  struct {
    Py_ssize_t mover, enter, leave, pace;
  } stay;
  struct {
    Py_ssize_t mover, pace;
  } go;
  RecomputeSlots recompute;
  DroppedSlots of_dropped;
};

// One of the two hooks of a thread.
struct Hook {
  PyObject_HEAD
  vectorcallfunc call;
  PyObject *saver, *in_python, *place;
  int64_t least;  // bytes of a storage that may move
  struct Own {
    Slots slots;
  } own;

  void forget_weak() {}
  void clear() {
    Py_CLEAR(saver);
    Py_CLEAR(in_python);
    Py_CLEAR(place);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(saver);
    Py_VISIT(in_python);
    Py_VISIT(place);
    return 0;
  }
};

PyMemberDef hook_members[] = {
    {"__self__", T_OBJECT, offsetof(Hook, saver), READONLY, nullptr},  // as a bound method has it
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject hook_type = {PyVarObject_HEAD_INIT(nullptr, 0) "torch_tiers.migrator.saved.native.Hook", sizeof(Hook)};

enum Kind { kStays, kMoves, kRemade, kGroups, kCalls, kKinds };  // the fields of `timing.HookTime`

// For how long hooks have kept the host so far, by what they did. All threads hold the interpreter's lock when they
// add to that, but may let go of it within a hook: which kind a thread is at, and since when, is its own.
class Spent {
 public:
  explicit Spent(Kind kind) : before_(charge(kind)) {}
  ~Spent() { charge(before_); }
  Spent(const Spent &) = delete;
  Spent &operator=(const Spent &) = delete;

  // What was done so far was of the kind before; which that was.
  static Kind charge(Kind kind) {
    const auto now = Clock::now();
    if (kind_ != kKinds) of_[kind_] += now - since_;
    since_ = now;
    return std::exchange(kind_, kind);
  }

  // What this hook did so far is of that kind, too.
  static void is(Kind kind) { kind_ = kind; }

  static double seconds(Kind kind) { return std::chrono::duration<double>(of_[kind]).count(); }

 private:
  using Clock = std::chrono::steady_clock;
  static inline Clock::duration of_[kKinds]{};
  static inline thread_local Kind kind_ = kKinds;  // in no hook
  static inline thread_local Clock::time_point since_{};
  Kind before_;
};

// spent(): that, as a `HookTime`.
PyObject *spent(PyObject *, PyObject *) {
  THPObjectPtr timing(PyImport_ImportModule("torch_tiers.migrator.model.timing"));
  THPObjectPtr hooks(timing ? PyObject_GetAttrString(timing, "HookTime") : nullptr);
  if (!hooks) return nullptr;
  return PyObject_CallFunction(hooks, "ddddd", Spent::seconds(kStays), Spent::seconds(kMoves), Spent::seconds(kRemade),
                               Spent::seconds(kGroups), Spent::seconds(kCalls));
}

// charge(kind): what this thread does from now on within a hook is of that kind; the one that it was of.
PyObject *charge(PyObject *, PyObject *kind) {
  HANDLE_TH_ERRORS
  const int64_t wanted = THPUtils_unpackLong(kind);
  TORCH_CHECK_VALUE(wanted >= 0 && wanted <= kKinds, "hooks do nothing of kind ", wanted);
  return THPUtils_packInt64(Spent::charge(static_cast<Kind>(wanted)));
  END_HANDLE_TH_ERRORS
}

// Tell a mover's engine that a site was saved, or asked for, and of the bytes that stay or are gone: only where there
// is anything to tell.
template <void (*told)(PyObject *, PyObject *, PyObject *)>
void tell(PyObject *mover, PyObject *nbytes, PyObject *pace) {
  if (pace == Py_None && Occupancy::number(nbytes) == 0) return;
  THPObjectPtr engine = engine_of(mover);
  told(engine, nbytes, pace);
}

bool captures(PyObject *mover, PyObject *tensor) {
  const c10::Device device = THPVariable_Unpack(tensor).device();
  const auto *guard = c10::impl::device_guard_impl_registry[size_t(device.type())].load();
  // Nobody can capture the default stream, and to ask CUDA takes microseconds.
  if (device.is_cuda() && guard && guard->getStream(guard->getDevice()).id() == 0) return false;
  THPObjectPtr engine = engine_of(mover), compute(PyObject_GetAttr(engine, names().compute));
  THPObjectPtr answer(compute ? PyObject_CallMethodNoArgs(compute, names().capturing) : nullptr);
  const int is = answer ? PyObject_IsTrue(answer) : -1;
  if (is < 0) throw python_error();
  return is == 1;
}

// What `Tensor.detach` makes nothing else of than `alias_of`; parameters among them.
bool is_ordinary(PyObject *object) {
  if (Py_TYPE(object) != reinterpret_cast<PyTypeObject *>(THPVariableClass) &&
      Py_TYPE(object) != reinterpret_cast<PyTypeObject *>(ParameterClass))
    return false;
  const at::Tensor &tensor = THPVariable_Unpack(object);
  return tensor.defined() && is_plain(tensor) && !tensor.is_inference();
}

// The plan's action for the tensor that is saved now, if this is the place for it; borrowed, null if not.
PyObject *foreseen(const Hook &hook, PyObject *node) {
  const Slots &slots = hook.own.slots;
  if (at(node, slots.node.iteration) != at(hook.place, slots.place.iteration)) {
    // The first tensor of a module in this iteration: `Node.begin`, where that has nothing to look up.
    if (at(node, slots.node.agenda) != at(hook.place, slots.place.agenda)) return nullptr;
    put(node, slots.node.iteration, own(at(hook.place, slots.place.iteration)));
    put(node, slots.node.count, number_of(0));
  }
  PyObject *actions = at(node, slots.node.actions);
  if (!PyList_CheckExact(actions)) return nullptr;
  const Py_ssize_t number = PyLong_AsSsize_t(at(node, slots.node.count));
  return number < PyList_GET_SIZE(actions) ? PyList_GET_ITEM(actions, number) : nullptr;
}

// The site of the tensor that is saved now, if others are made from that; null if not.
THPObjectPtr noted(const Hook &hook, PyObject *node) {
  const Slots &slots = hook.own.slots;
  PyObject *noted = at(node, slots.node.noted), *count = at(node, slots.node.count);
  const int found = PyAnySet_Check(noted) ? PySet_Contains(noted, count) : 0;
  THPObjectPtr key(found ? PyUnicode_FromFormat("%U:%S", at(node, slots.node.path), count) : nullptr);
  if (found && !key) throw python_error();
  return key;
}

// `Saver.note`.
void note(PyObject *saver, PyObject *tensor, PyObject *packed, PyObject *key) {
  THPObjectPtr replays = attribute(saver, names().replays);
  if (replays.get() == Py_None) return;
  THPObjectPtr packs = attribute(replays, names().packs);
  if (packs.get() == Py_None) return;
  checked(PyObject_CallMethodObjArgs(packs, names().note, tensor, packed, key, nullptr));
}

void count_one(const Hook &hook, PyObject *node) {
  const Py_ssize_t slot = hook.own.slots.node.count;
  put(node, slot, number_of(PyLong_AsSsize_t(at(node, slot)) + 1));
}

PyObject *pack_kept(const Hook &hook, PyObject *node, PyObject *stay, PyObject *tensor) {
  const Slots &slots = hook.own.slots;
  if (!is_ordinary(tensor)) return nullptr;
  count_one(hook, node);
  tell<enter>(at(stay, slots.stay.mover), at(stay, slots.stay.enter), at(stay, slots.stay.pace));
  const at::Tensor &saved = THPVariable_Unpack(tensor);
  // A leaf itself, see `packed.alias_of`.
  const bool is_leaf = saved.is_leaf();
  THPObjectPtr version(THPUtils_packInt64(saved._version())),
      alias(is_leaf ? own(tensor).release() : THPVariable_Wrap(alias_of(saved)));
  PyObject *kept = version && alias ? PyTuple_Pack(4, alias.get(), version.get(), stay, Py_None) : nullptr;
  if (!kept) throw python_error();
  return kept;
}

// One that leaves HBM: its mover takes it, or the saver has it made again.
PyObject *pack_gone(const Hook &hook, PyObject *node, PyObject *action, PyObject *tensor) {
  const Slots &slots = hook.own.slots;
  const bool goes = Py_TYPE(action) == slots.go_type;
  Spent::is(goes ? kMoves : kRemade);
  PyObject *mover = at(action, goes ? slots.go.mover : slots.recompute.mover);
  if (!memory(tensor, hook.least) || captures(mover, tensor)) return nullptr;
  count_one(hook, node);
  tell<enter>(mover, names().no_bytes, at(action, goes ? slots.go.pace : slots.recompute.pace));
  PyObject *gone = goes ? PyObject_CallMethodObjArgs(mover, names().take, tensor, names().nothing, action, nullptr)
                        : drop(slots.of_dropped, slots.recompute, hook.saver, action, tensor);
  if (!gone && !goes) gone = PyObject_CallMethodObjArgs(hook.saver, names().drop, tensor, action, nullptr);
  if (!gone) throw python_error();
  return gone;
}

PyObject *pack(const Hook &hook, PyObject *tensor) {
  const Slots &slots = hook.own.slots;
  if (torch::autograd::get_current_graph_task_id() != -1 || at(hook.place, slots.place.in_backward) != Py_False ||
      at(hook.place, slots.place.recording) != Py_False)
    return nullptr;
  THPObjectPtr node = own(at(hook.place, slots.place.here));
  PyObject *borrowed = foreseen(hook, node);
  if (!borrowed) return nullptr;
  THPObjectPtr action = own(borrowed), key = noted(hook, node);
  const PyTypeObject *kind = Py_TYPE(action.get());
  THPObjectPtr packed;
  if (kind == slots.stay_type) packed = pack_kept(hook, node, action, tensor);
  if (kind == slots.go_type || kind == slots.recompute_type) packed = pack_gone(hook, node, action, tensor);
  if (packed && key) note(hook.saver, tensor, packed, key);
  return packed.release();
}

PyObject *unpack_kept(const Hook &hook, PyObject *packed) {
  const Slots &slots = hook.own.slots;
  PyObject *stay = PyTuple_GET_ITEM(packed, 2);
  if (PyTuple_GET_ITEM(packed, 3) != Py_None) return nullptr;  // it is being recorded
  THPObjectPtr alias = own(PyTuple_GET_ITEM(packed, 0));
  if (THPVariable_Unpack(alias.get())._version() != PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1))) return nullptr;
  if (stay != Py_None) {
    if (at(hook.place, slots.place.in_backward) != Py_True) return nullptr;
    tell<leave>(at(stay, slots.stay.mover), at(stay, slots.stay.leave), at(stay, slots.stay.pace));
  }
  return alias.release();
}

PyObject *unpack_moved(const Hook &hook, PyObject *packed) {
  const Slots &slots = hook.own.slots;
  const auto &moved = *reinterpret_cast<Moved *>(packed);
  if (moved.record != Py_None || !moved.saved || at(hook.place, slots.place.in_backward) != Py_True) return nullptr;
  if (is_changed(moved)) return nullptr;
  if (moved.go != Py_None) tell<leave>(moved.mover, names().no_bytes, at(moved.go, slots.go.pace));
  PyObject *tensor = PyObject_CallMethodOneArg(moved.mover, names().restore, packed);
  if (!tensor) throw python_error();
  return tensor;
}

PyObject *unpack_remade(const Hook &hook, PyObject *packed) {
  const Slots &slots = hook.own.slots;
  if (at(hook.place, slots.place.in_backward) != Py_True || at(hook.place, slots.place.recording) != Py_False)
    return nullptr;
  if (!is_plain_one(slots.of_dropped, packed)) return nullptr;
  THPObjectPtr make = own(at(packed, slots.of_dropped.dropped.go));
  tell<leave>(at(make, slots.recompute.mover), names().no_bytes, at(make, slots.recompute.pace));
  return unpack_dropped(slots.of_dropped, packed);
}

PyObject *unpack(const Hook &hook, PyObject *given) {
  THPObjectPtr packed = own(given);  // whoever asks may hold it by the graph alone, which other threads let go of
  if (PyTuple_CheckExact(given) && PyTuple_GET_SIZE(given) == 4) return unpack_kept(hook, given);
  const bool moved = Py_TYPE(given) == &moved_type;
  Spent::is(moved ? kMoves : kRemade);
  if (moved) return unpack_moved(hook, given);
  return Py_TYPE(given) == hook.own.slots.of_dropped.type ? unpack_remade(hook, given) : nullptr;
}

template <PyObject *(*shortcut)(const Hook &, PyObject *)>
PyObject *call_hook(PyObject *self, PyObject *const *args, size_t flags, PyObject *names) {
  HANDLE_TH_ERRORS
  const Spent spent(kStays);
  const auto &hook = *reinterpret_cast<Hook *>(self);
  TORCH_CHECK_TYPE(PyVectorcall_NARGS(flags) == 1 && !names && hook.place, "a hook takes what is saved, or was packed");
  if (PyObject *answer = shortcut(hook, args[0])) return answer;
  return PyObject_CallOneArg(hook.in_python, args[0]);
  END_HANDLE_TH_ERRORS
}

Slots slots_of(PyObject *place) {
  THPObjectPtr actions(PyImport_ImportModule("torch_tiers.migrator.saved.actions"));
  THPObjectPtr stay(actions ? PyObject_GetAttrString(actions, "Stay") : nullptr);
  THPObjectPtr go(actions ? PyObject_GetAttrString(actions, "Go") : nullptr);
  THPObjectPtr recompute(actions ? PyObject_GetAttrString(actions, "Recompute") : nullptr);
  THPObjectPtr here(PyObject_GetAttrString(place, "here"));
  if (!stay || !go || !recompute || !here) throw python_error();
  PyObject *of = reinterpret_cast<PyObject *>(Py_TYPE(place)),
           *node = reinterpret_cast<PyObject *>(Py_TYPE(here.get()));
  return {
      reinterpret_cast<PyTypeObject *>(stay.get()),  // which live as long as their module
      reinterpret_cast<PyTypeObject *>(go.get()),
      reinterpret_cast<PyTypeObject *>(recompute.get()),
      {slot_of(of, "here"), slot_of(of, "iteration"), slot_of(of, "agenda"), slot_of(of, "recording"),
       slot_of(of, "in_backward"), slot_of(of, "bypass")},
      {slot_of(node, "path"), slot_of(node, "iteration"), slot_of(node, "count"), slot_of(node, "agenda"),
       slot_of(node, "actions"), slot_of(node, "noted")},
      {slot_of(stay, "mover"), slot_of(stay, "enter"), slot_of(stay, "leave"), slot_of(stay, "pace")},
      {slot_of(go, "mover"), slot_of(go, "pace")},
      {slot_of(recompute, "mover"), slot_of(recompute, "pace"), slot_of(recompute, "key"),
       slot_of(recompute, "verified")},
      DroppedSlots::find(),
  };
}

PyObject *make_hook(PyObject *saver, PyObject *place, const char *in_python, vectorcallfunc call, int64_t least) {
  THPObjectPtr method(PyObject_GetAttrString(saver, in_python));
  if (!method) throw python_error();
  const Slots slots = slots_of(place);
  auto *hook = make<Hook>(hook_type);
  hook->call = call;
  hook->least = least;
  hook->own.slots = slots;
  hold(hook->saver, saver);
  hold(hook->place, place);
  hook->in_python = method.release();
  return reinterpret_cast<PyObject *>(hook);
}

// hooks(saver, place, least): what PyTorch is to call for a saver.
PyObject *make_hooks(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3, "hooks(saver, place, least)");
  const int64_t least = THPUtils_unpackLong(args[2]);
  THPObjectPtr out(make_hook(args[0], args[1], "pack", call_hook<pack>, least));
  THPObjectPtr back(make_hook(args[0], args[1], "unpack", call_hook<unpack>, least));
  return PyTuple_Pack(2, out.get(), back.get());
  END_HANDLE_TH_ERRORS
}

}  // namespace
