// Closures for Python; see `migrator/tape/closure.py`.
#pragma once

#include <torch/csrc/Device.h>
#include <unistd.h>

#include "interceptor.h"
#include "object.h"
#include "replay.h"

// Its header takes fifteen seconds to compile. Which of the two there is depends on the version.
__attribute__((weak)) PyObject *THPVariable_Wrap(const at::TensorBase &);
__attribute__((weak)) PyObject *THPVariable_Wrap(at::TensorBase);

namespace {

constexpr auto kRecord = "torch_tiers.migrator.tape.record";
constexpr auto kClosure = "torch_tiers.migrator.tape.closure";
constexpr auto kSubstitutes = "torch_tiers.migrator.tape.substitutes";
constexpr auto kStops = "torch_tiers.migrator.tape.stops";

Object tensor(const at::Tensor &of) {
  const auto by_reference = static_cast<PyObject *(*)(const at::TensorBase &)>(THPVariable_Wrap);
  const auto by_value = static_cast<PyObject *(*)(at::TensorBase)>(THPVariable_Wrap);
  TORCH_CHECK(by_reference || by_value, "this version of PyTorch wraps tensors otherwise");
  return checked(by_reference ? by_reference(of) : by_value(of));
}

Object use(const std::optional<Use> &found) {
  if (!found) return none();
  return tuple(number(int64_t(found->storage)), number(int64_t(int32_t(found->version))),
               number(int64_t(found->state)));
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

std::vector<at::Tensor> tensors_of(PyObject *sequence) {
  const Object items = checked(PySequence_Fast(sequence, "tensors are wanted"));
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index)
    tensors.push_back(tensor_of(PySequence_Fast_GET_ITEM(items.get(), index)));
  return tensors;
}

std::vector<Relative> relative_of(PyObject *sequence) {
  const Object items = checked(PySequence_Fast(sequence, "pairs of numbers are wanted"));
  std::vector<Relative> all;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index) {
    unsigned before, output;
    if (!PyArg_ParseTuple(PySequence_Fast_GET_ITEM(items.get(), index), "II", &before, &output)) throw InPython();
    all.emplace_back(before, output);
  }
  return all;
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

// ------------------------------------------------------------------------------------- functions

// stops(): values that somebody promises to have; of the record under way.
PyObject *stops(PyObject *, PyObject *) {
  return answer([&] {
    auto made = recorder().stops();
    Object capsule = checked(PyCapsule_New(
        made.get(), kStops, [](PyObject *of) { delete static_cast<Stops *>(PyCapsule_GetPointer(of, kStops)); }));
    (void)made.release();
    return capsule;
  });
}

// promise(stops, tensor): one more, as it is now; its storage, version and state, or None.
PyObject *promise(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "promise(stops, tensor)");
    return use(recorder().promise(held_by<Stops>(args[0], kStops), tensor_of(args[1])));
  });
}

Search::Found of_tape(const Record &record, const std::vector<at::Tensor> &targets, const Stops *stops,
                      const std::vector<Relative> &relative) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
  if (record.broken) return Refused{record.broken};
  if (stops && stops->record != record.number) return Refused{"what is promised is of another record"};
  Search search(record, stops, [](uint32_t) { return true; });
  Scratch scratch;
  for (const at::Tensor &target : targets) {
    scratch.clear();
    (void)write_tensor(scratch, target);
    if (!search.wants(scratch.words)) return Refused{"it has no strides, or no bytes of its own"};
    const auto found = record.find(target);
    if (!found) return Refused{"it is not as this tape left it"};
    search.add(*found, scratch.words);
  }
  return recorder().alone([&] { return search(relative); });
}

// closure(record, targets, stops, relative): what makes the targets again, or why it cannot be. `record`: None is the
// one that is recorded; `stops`: or None.
PyObject *closure(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 4, "closure(record, targets, stops, relative)");
    const auto targets = tensors_of(args[1]);
    const Stops *stops = args[2] == Py_None ? nullptr : &held_by<Stops>(args[2], kStops);
    const auto relative = relative_of(args[3]);
    auto found = args[0] == Py_None ? recorder().closure(targets, stops, relative)
                                    : of_tape(held_by<Record>(args[0], kRecord), targets, stops, relative);
    if (const auto *refused = std::get_if<Refused>(&found)) return text(refused->reason);
    return capsule_of(std::move(std::get<std::unique_ptr<Closure>>(found)));
  });
}

// settings(): those of PyTorch that change which kernels run, or how, as one number.
PyObject *settings(PyObject *, PyObject *) {
  return answer([&] { return number(uint64_t(settings())); });
}

// described(closure): its signature, the number of its operators, whether one of them draws random numbers, its device,
// its stream; PyTorch's settings, as they were.
PyObject *described(PyObject *, PyObject *object) {
  return answer([&] {
    const Closure &of = closure_of(object);
    return tuple(number(of.signature), number(uint64_t(of.calls.size())), truth(!of.drawn.empty()),
                 checked(THPDevice_New(of.device)), number(of.stream), number(uint64_t(of.settings)));
  });
}

// begins_with(closure): of each leaf: storage, state, bytes, device; which output of how many operators before, or
// None; whether it is some numbers of Python's.
PyObject *begins_with(PyObject *, PyObject *object) {
  return answer([&] {
    return list_of(closure_of(object).leaves, [](const Leaf &each) {
      const auto &at = each.relative;
      return tuple(number(int64_t(each.use.storage)), number(int64_t(each.use.state)), number(each.nbytes),
                   checked(THPDevice_New(each.device)),
                   at ? tuple(number(uint64_t(at->first)), number(uint64_t(at->second))) : none(),
                   truth(!each.constant.empty()));
    });
  });
}

// names(closure): of its operators, in the order in which they run.
PyObject *names(PyObject *, PyObject *object) {
  return answer([&] {
    return list_of(closure_of(object).calls, [](const Called &each) { return text(each.step->effects->name); });
  });
}

// numbers(closure): of its operators on their tape.
PyObject *numbers_(PyObject *, PyObject *object) {
  return answer([&] {
    return list_of(closure_of(object).calls, [](const Called &each) { return number(uint64_t(each.number)); });
  });
}

// leaves(closure): the bytes of each leaf's storage, as a tensor on it; None where it holds none.
PyObject *leaves(PyObject *, PyObject *object) {
  return answer([&] {
    return list_of(closure_of(object).leaves, [](const Leaf &each) {
      return each.storage ? tensor(bytes_of({c10::Storage(each.storage), 0, each.nbytes})) : none();
    });
  });
}

// is_stale(closure): whether a leaf was written since.
PyObject *is_stale(PyObject *, PyObject *object) {
  return answer([&] {
    const auto &all = closure_of(object).watch->all;
    return truth(std::any_of(all.begin(), all.end(), [](const Watched &each) { return each.is_stale(); }));
  });
}

// Somebody's function, which is called, and let go of, in any thread.
std::shared_ptr<PyObject> function_of(PyObject *object) {
  return {borrowed(object).release(), [](PyObject *of) { with_interpreter([&] { Py_DECREF(of); }); }};
}

// What `function(number, written)` returns. What it raises in the main thread comes after the operator, which reads the
// storage; in others, the operator raises.
CopySource::Ask asks(PyObject *object) {
  return [function = function_of(object)](size_t number, bool written) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
    int64_t start = -1;
    std::optional<std::string> error;
    with_interpreter([&] {
      PyObject *result = PyObject_CallFunction(function.get(), "nO", Py_ssize_t(number), written ? Py_True : Py_False);
      if (result) start = PyLong_AsLongLong(result);
      if (PyErr_Occurred()) {
        start = -1;
        if (gettid() == getpid())
          raise_later();
        else
          error = raised();
      }
      Py_XDECREF(result);
    });
    if (error) throw std::runtime_error(*error);
    return start;
  };
}

// watch(closure, function): call it with a leaf's number before that is written, or None: do not any more.
PyObject *watch(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "watch(closure, function)");
    std::shared_ptr<PyObject> function;
    if (args[1] != Py_None) function = function_of(args[1]);
    std::shared_ptr<const Watch::Warn> warn;
    if (function)
      warn = std::make_shared<const Watch::Warn>([=](size_t leaf) {
        const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
        with_interpreter([&] {
          PyObject *result = PyObject_CallFunction(function.get(), "n", Py_ssize_t(leaf));
          if (!result) PyErr_WriteUnraisable(function.get());
          Py_XDECREF(result);
        });
      });
    watches().on_write(*closure_of(args[0]).watch, std::move(warn));
    return none();
  });
}

Buffer buffer_of(const std::vector<char> &constant) {
  const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
  Buffer buffer = fresh(constant.size(), c10::Device(c10::DeviceType::CPU));
  std::memcpy(buffer.storage.mutable_data(), constant.data(), constant.size());
  return buffer;
}

// The memory that a leaf is in now: all of a storage, or so many bytes of one. A tensor that was a part of the leaf,
// from its byte `first` on, tells where that is.
Buffer buffer_of(const Leaf &leaf, const at::Tensor &given, std::optional<uint64_t> first) {
  c10::StorageImpl *storage = given.defined() ? storage_of(given) : nullptr;
  if (!storage || storage->device() != leaf.device) throw Differs("what it is made of is on another device");
  if (leaf.not_on._unsafe_get_target() == storage) throw Differs("what it is made of was written since");
  const c10::TensorImpl &impl = *given.unsafeGetTensorImpl();
  const uint64_t at = uint64_t(impl.storage_offset()) * impl.itemsize();
  Buffer buffer{given.storage(), 0, leaf.nbytes};
  if (first) {
    if (at < *first || at - *first + leaf.nbytes > storage->nbytes())
      throw Differs("what it is made of has another size");
    buffer.base = at - *first;
  } else if (storage->nbytes() != leaf.nbytes) {
    const bool is_bytes = given.scalar_type() == at::kByte && impl.dim() == 1 && impl.is_contiguous();
    if (!is_bytes || uint64_t(impl.numel()) != leaf.nbytes) throw Differs("what it is made of has another size");
    buffer.base = at;
  }
  const auto address = uintptr_t(storage->data()) + buffer.base;
  if (leaf.nbytes && address % leaf.alignment) throw Differs("what it is made of begins at an odd address");
  return buffer;
}

Buffer buffer_of(const Leaf &leaf, PyObject *given) {
  if (!PyTuple_Check(given)) return buffer_of(leaf, tensor_of(given), std::nullopt);
  TORCH_CHECK(PyTuple_GET_SIZE(given) == 2, "a tensor and its first byte are wanted");
  return buffer_of(leaf, tensor_of(PyTuple_GET_ITEM(given, 0)), uint64_t(integer_of(PyTuple_GET_ITEM(given, 1))));
}

// A leaf as it was before somebody wrote it, if that was copied.
std::optional<Buffer> copy_of(const Closure &of, size_t index) {
  if (!of.copies) return std::nullopt;
  const Leaf &leaf = of.leaves[index];
  std::lock_guard lock(of.copies->mutex);
  const auto copy = of.copies->of.find(index);
  if (copy == of.copies->of.end() || copy->second.nbytes() != leaf.nbytes) return std::nullopt;
  return Buffer{copy->second, 0, leaf.nbytes};
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

std::vector<at::Tensor> replayed(const Closure &of, std::vector<Buffer> buffers, std::optional<uint8_t> poison) {
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
  auto results = Replay(of, std::move(buffers), poison)();
  check();
  return results;
}

// The targets, made again of one buffer a leaf; a text says why they are not what they were.
template <typename BufferOf>
Object rerun(const Closure &of, std::optional<uint8_t> poison, BufferOf &&buffer_of) {
  try {
    std::vector<Buffer> buffers;
    for (size_t leaf = 0; leaf < of.leaves.size(); ++leaf) buffers.push_back(buffer_of(leaf));
    std::vector<at::Tensor> results;
    {
      const WithoutInterpreter without;
      results = replayed(of, std::move(buffers), poison);
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
}

// run(closure, leaves, poison): the targets, made again; a text says why they are not what they were. `leaves`: None,
// or for each a tensor on a storage that has its bytes, or None; `poison`: what empty memory is filled with, or -1.
PyObject *run(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 3, "run(closure, leaves, poison)");
    const Closure &of = closure_of(args[0]);
    const int64_t poison = integer_of(args[2]);
    const Object given = args[1] == Py_None ? nullptr : checked(PySequence_Fast(args[1], "tensors are wanted"));
    if (given && size_t(PySequence_Fast_GET_SIZE(given.get())) != of.leaves.size())
      return text("it is made of more, or of less");
    return rerun(of, poison < 0 ? std::nullopt : std::optional(uint8_t(poison)), [&](size_t leaf) {
      PyObject *each = given ? PySequence_Fast_GET_ITEM(given.get(), Py_ssize_t(leaf)) : Py_None;
      return each == Py_None ? own_buffer_of(of, leaf) : buffer_of(of.leaves[leaf], each);
    });
  });
}

// is_same(one, other): whether two tensors are of one form, and have the same bytes. The host waits for the device.
PyObject *is_same(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "is_same(one, other)");
    const at::Tensor one = tensor_of(args[0]), other = tensor_of(args[1]);
    bool is_same;
    {
      const WithoutInterpreter without;
      is_same = has_same_bytes(one, other);
    }
    return truth(is_same);
  });
}

}  // namespace
