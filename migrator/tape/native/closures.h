// Closures for Python, and how they run; see `migrator/tape/closure.py`.
#pragma once

#include <algorithm>

#include "interceptor.h"
#include "object.h"
#include "replay.h"

// Its header takes fifteen seconds to compile. Which of the two there is depends on the version; neither has the linker
// take the library along, which `THPVariableClass` does.
__attribute__((weak)) PyObject *THPVariable_Wrap(const at::TensorBase &);
__attribute__((weak)) PyObject *THPVariable_Wrap(at::TensorBase);

namespace {

constexpr auto kClosure = "torch_tiers.migrator.tape.closure";

Object tensor(const at::Tensor &of) {
  const auto by_reference = static_cast<PyObject *(*)(const at::TensorBase &)>(THPVariable_Wrap);
  const auto by_value = static_cast<PyObject *(*)(at::TensorBase)>(THPVariable_Wrap);
  TORCH_CHECK(by_reference || by_value, "this version of PyTorch wraps tensors otherwise");
  return checked(by_reference ? by_reference(of) : by_value(of));
}

template <typename Of>
Of &held_by(PyObject *capsule, const char *name) {
  auto *held = static_cast<Of *>(PyCapsule_GetPointer(capsule, name));
  if (!held) throw InPython();
  return *held;
}

Closure &closure_of(PyObject *capsule) { return held_by<Closure>(capsule, kClosure); }

// Its leaves are watched for as long as anybody has it.
Object capsule_of(std::unique_ptr<Closure> made) {
  Object capsule = checked(PyCapsule_New(made.get(), kClosure, [](PyObject *of) {
    Closure &dropped = closure_of(of);
    watches().remove(*dropped.watch);
    delete &dropped;
  }));
  watches().add(*made.release()->watch);
  return capsule;
}

// The interpreter is somebody else's meanwhile.
class WithoutInterpreter {
 public:
  WithoutInterpreter() : state_(PyEval_SaveThread()) {}
  ~WithoutInterpreter() { PyEval_RestoreThread(state_); }
  WithoutInterpreter(const WithoutInterpreter &) = delete;

 private:
  PyThreadState *state_;
};

// ------------------------------------------------------------------------------------- what it begins with

Buffer buffer_of(const std::vector<char> &constant) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
  Buffer buffer = fresh(constant.size(), c10::Device(c10::DeviceType::CPU));
  std::memcpy(buffer.storage.mutable_data(), constant.data(), constant.size());
  return buffer;
}

// The memory that a leaf is in now, as a tensor tells that is a part of it, from its byte `first` on.
Buffer buffer_of(const Leaf &leaf, const at::Tensor &given, uint64_t first) {
  c10::StorageImpl *storage = given.defined() ? storage_of(given) : nullptr;
  if (!storage || storage->device() != leaf.device) throw Differs("what it is made of is on another device");
  if (leaf.not_on._unsafe_get_target() == storage) throw Differs("what it is made of was written since");
  const uint64_t at = uint64_t(given.storage_offset()) * given.itemsize();
  if (at < first || at - first + leaf.nbytes > storage->nbytes()) throw Differs("what it is made of has another size");
  const Buffer buffer{given.storage(), at - first, leaf.nbytes};
  const auto address = uintptr_t(storage->data()) + buffer.base;
  if (leaf.nbytes && address % leaf.alignment) throw Differs("what it is made of begins at an odd address");
  return buffer;
}

// A leaf as it was before somebody wrote it, if that was copied.
std::optional<Buffer> copy_of(const Closure &of, size_t index) {
  auto copy = of.watch->copy_of(index);
  if (copy && copy->nbytes != of.leaves[index].nbytes) copy.reset();
  return copy;
}

// What it has of a leaf itself.
Buffer own_buffer_of(const Closure &of, size_t index) {
  const Leaf &leaf = of.leaves[index];
  if (auto copy = copy_of(of, index)) return *copy;
  if (!leaf.constant.empty()) return buffer_of(leaf.constant);
  if (!leaf.storage) throw Differs("what it is made of was released");
  if (leaf.storage->nbytes() != leaf.nbytes) throw Differs("what it is made of has another size");
  return {c10::Storage(leaf.storage), 0, leaf.nbytes};
}

// ------------------------------------------------------------------------------------- functions

// names(closure): of its operators, in the order in which they run.
PyObject *names(PyObject *, PyObject *object) {
  return answer([&] {
    return list_of(closure_of(object).calls, [](const Called &each) { return text(each.step->effects->name); });
  });
}

// is_stale(closure): whether a leaf was written since.
PyObject *is_stale(PyObject *, PyObject *object) {
  return answer([&] {
    const auto &all = closure_of(object).watch->all;
    return truth(std::any_of(all.begin(), all.end(), [](const Watched &each) { return each.is_stale(); }));
  });
}

bool is_same_run(const Closure &one, const Closure &other) {
  const auto same_call = [](const Called &a, const Called &b) { return a.number == b.number; };
  const auto same_leaf = [](const Leaf &a, const Leaf &b) {
    return a.use.storage == b.use.storage && a.use.state == b.use.state;
  };
  const auto same_place = [](const Place &a, const Place &b) { return a.input == b.input && a.first == b.first; };
  const auto equal = [](const auto &a, const auto &b, const auto &same) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), same);
  };
  return equal(one.calls, other.calls, same_call) && equal(one.leaves, other.leaves, same_leaf) &&
         equal(one.places, other.places, same_place) && one.wires == other.wires && one.slots == other.slots;
}

// also(closure, before): have it make what another one makes, too, if that runs the same calls; whether it does now.
// Its targets are then those of the other, and its own. Nobody has run it yet.
PyObject *also(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "also(closure, before)");
    Closure &of = closure_of(args[0]);
    const Closure &before = closure_of(args[1]);
    if (!is_same_run(of, before)) return truth(false);
    std::vector<Target> targets;
    for (const Target &each : before.targets) targets.push_back({each.slot, each.words + uint32_t(of.words.size())});
    for (const Target &each : of.targets) targets.push_back(each);
    of.words.insert(of.words.end(), before.words.begin(), before.words.end());
    of.targets = std::move(targets);
    for (Called &call : of.calls) {  // what is a target now is not freed
      const auto first = of.freed.begin() + call.freed, last = first + call.freed_count;
      call.freed_count =
          uint32_t(std::remove_if(first, last,
                                  [&](int32_t slot) {
                                    return std::any_of(of.targets.begin(), of.targets.end(),
                                                       [&](const Target &each) { return each.slot == slot; });
                                  }) -
                   first);
    }
    return truth(true);
  });
}

std::vector<at::Tensor> replayed(const Closure &of, std::vector<Buffer> buffers) {
  std::vector<const Watched *> originals;
  for (size_t leaf = 0; leaf < buffers.size(); ++leaf) {
    const Watched &watched = of.watch->all[leaf];
    if (watched.target() == buffers[leaf].storage.unsafeGetStorageImpl()) originals.push_back(&watched);
  }
  const auto check = [&] {
    for (const Watched *each : originals)
      if (each->is_stale()) throw Differs("what it is made of was written since");
  };
  check();
  auto results = Replay(of, std::move(buffers))();
  check();
  return results;
}

// make(closure, values): its targets, of what its inputs were unpacked to; a text says why they are not what they were.
PyObject *make_again(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "make(closure, values)");
    const Closure &of = closure_of(args[0]);
    const Object values = checked(PySequence_Fast(args[1], "tensors are wanted"));
    const auto buffer = [&](size_t index) {
      const auto &[input, first] = of.places.at(index);
      if (input < 0) return own_buffer_of(of, index);
      if (auto copy = copy_of(of, index)) return *copy;
      TORCH_CHECK(input < PySequence_Fast_GET_SIZE(values.get()), "fewer values than it takes");
      return buffer_of(of.leaves[index], tensor_of(PySequence_Fast_GET_ITEM(values.get(), input)), first);
    };
    try {
      std::vector<Buffer> buffers;
      for (size_t leaf = 0; leaf < of.leaves.size(); ++leaf) buffers.push_back(buffer(leaf));
      std::vector<at::Tensor> results;
      {
        const WithoutInterpreter without;
        results = replayed(of, std::move(buffers));
      }
      return list_of(results, tensor);
    } catch (const Differs &differs) {
      return text(differs.text);
    } catch (const c10::OutOfMemoryError &error) {
      const Object type =
          checked(PyObject_GetAttrString(checked(PyImport_ImportModule("torch")).get(), "OutOfMemoryError"));
      PyErr_SetString(type.get(), error.what_without_backtrace());
      throw InPython();
    }
  });
}

}  // namespace
