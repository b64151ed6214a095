// The module `tape`: begins and ends records, and finds closures in them; see `migrator/tape`.
//
// One source, with the parts in headers of its own, since each that includes PyTorch's takes fifteen seconds to
// compile, and somebody waits for that. Everything here runs with the interpreter's lock held; the recorder does not
// need it, and waits for nobody who has it.
#include <pthread.h>
#include <unistd.h>

#include "packs.h"

namespace {

constexpr auto kSubstitutes = "torch_tiers.migrator.tape.substitutes";

std::vector<at::Tensor> tensors_of(PyObject *sequence) {
  const Object items = checked(PySequence_Fast(sequence, "tensors are wanted"));
  std::vector<at::Tensor> tensors;
  for (Py_ssize_t index = 0; index < PySequence_Fast_GET_SIZE(items.get()); ++index)
    tensors.push_back(tensor_of(PySequence_Fast_GET_ITEM(items.get(), index)));
  return tensors;
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

// ------------------------------------------------------------------------------------- functions

// install(): for the rest of the process.
PyObject *install_(PyObject *, PyObject *) {
  return answer([&] {
    install();
    static bool watched = false;
    if (!std::exchange(watched, true))
      pthread_atfork(nullptr, nullptr, [] {
        c10::impl::tls_set_dispatch_key_included(kKey, false);
        recorder().forked();
        substitutes().forked();
        clock_of_operators().forked();
      });
    return none();
  });
}

// show_views(on): whether views come by from now on, of all threads; see `interceptor.h`.
PyObject *show_views_(PyObject *, PyObject *on) {
  return answer([&] {
    show_views(PyObject_IsTrue(on) == 1);
    return none();
  });
}

// begin(): record what this thread does from now on; whether nobody else is recording.
PyObject *begin(PyObject *, PyObject *) {
  return answer([&] {
    const bool begun = recorder().begin();
    if (begun) c10::impl::tls_set_dispatch_key_included(kKey, true);
    return truth(begun);
  });
}

// end(): the record is over, if there is one. Closures that were found stay good.
PyObject *end(PyObject *, PyObject *) {
  return answer([&] {
    c10::impl::tls_set_dispatch_key_included(kKey, clock_of_operators().is_of_this_thread() || !substitutes().empty());
    recorder().end();
    return none();
  });
}

// pause(): record nothing of this thread until `resume` is given what this returns.
PyObject *pause(PyObject *, PyObject *) {
  const bool was = c10::impl::tls_is_dispatch_key_excluded(kKey);
  c10::impl::tls_set_dispatch_key_excluded(kKey, true);
  return PyBool_FromLong(was);
}

PyObject *resume(PyObject *, PyObject *was) {
  c10::impl::tls_set_dispatch_key_excluded(kKey, was == Py_True);
  Py_RETURN_NONE;
}

PyObject *is_recording(PyObject *, PyObject *) { return PyBool_FromLong(recorder().recording); }

// settings(): those of PyTorch that change which kernels run, or how, as one number.
PyObject *settings(PyObject *, PyObject *) {
  return answer([&] { return number(uint64_t(settings())); });
}

// listed(): the operators so far, each with the shapes of what it returned; None where nothing is recorded, or not
// truly.
PyObject *listed(PyObject *, PyObject *) {
  return answer([&] {
    const auto all = recorder().listed();
    if (!all) return none();
    const auto shape = [](const std::vector<int64_t> &sizes) {
      std::vector<Object> numbers;
      for (const int64_t size : sizes) numbers.push_back(number(size));
      return tuple_of(numbers);
    };
    return list_of(*all, [&](const auto &each) { return tuple(text(each.first), list_of(each.second, shape)); });
  });
}

// clock_begin(device, stream): time operators on that stream of a GPU; a number, 0 if others are being timed.
PyObject *clock_begin(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "clock_begin(device, stream)");
    const uint64_t begun = clock_of_operators().begin(c10::DeviceIndex(integer_of(args[0])), integer_of(args[1]));
    if (begun) c10::impl::tls_set_dispatch_key_included(kKey, true);
    return number(begun);
  });
}

// clock_tick(stream): the next stretch begins, in this thread, on that stream.
PyObject *clock_tick(PyObject *, PyObject *stream) {
  return answer([&] {
    clock_of_operators().tick(integer_of(stream));
    c10::impl::tls_set_dispatch_key_included(kKey, true);
    return none();
  });
}

// clock_end(number, is_wanted): the seconds of operators in each stretch, if somebody wants to know; the device must be
// through with them then.
PyObject *clock_end(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "clock_end(number, is_wanted)");
    const std::vector<double> seconds = clock_of_operators().end(uint64_t(integer_of(args[0])), args[1] == Py_True);
    if (!clock_of_operators().on)
      c10::impl::tls_set_dispatch_key_included(kKey, recorder().is_of_this_thread() || !substitutes().empty());
    return list_of(seconds, [](double each) { return checked(PyFloat_FromDouble(each)); });
  });
}

// clock_enter(): something that is no operator launches kernels; what `clock_leave` is to be given once it is through.
PyObject *clock_enter(PyObject *, PyObject *) {
  return answer([&] { return number(int64_t(clock_of_operators().before(nullptr, {}))); });
}

PyObject *clock_leave(PyObject *, PyObject *span) {
  return answer([&] {
    if (const int64_t which = integer_of(span); which >= 0) clock_of_operators().after(which);
    return none();
  });
}

// substitute(tensors, ask, buffer): for as long as somebody has what this returns, operators of threads that have
// called `include_thread` read copies of the storages of these, which begin in `buffer` at the byte that `ask(number,
// written)` returns; the storage itself for -1.
PyObject *substitute(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 3, "substitute(tensors, ask, buffer)");
    auto source = std::make_shared<const CopySource>(CopySource{asks(args[1]), tensor_of(args[2]).storage()});
    auto all = std::make_unique<Substitutes::All>(Substitutes::of(tensors_of(args[0]), source));
    Object capsule = checked(PyCapsule_New(all.get(), kSubstitutes, [](PyObject *of) {
      std::unique_ptr<Substitutes::All> dropped(&held_by<Substitutes::All>(of, kSubstitutes));
      substitutes().remove(*dropped);
    }));
    substitutes().add(*all.release());
    return capsule;
  });
}

// keep(substitutes): operators read these storages themselves from now on.
PyObject *keep(PyObject *, PyObject *handle) {
  return answer([&] {
    substitutes().remove(held_by<Substitutes::All>(handle, kSubstitutes));
    return none();
  });
}

// include_thread(): operators of this thread read substitutes from now on.
PyObject *include_thread(PyObject *, PyObject *) {
  c10::impl::tls_set_dispatch_key_included(kKey, true);
  Py_RETURN_NONE;
}

// readers(substitutes, number): how many operators use the copy of that storage now.
PyObject *readers(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "readers(substitutes, number)");
    const auto &all = held_by<Substitutes::All>(args[0], kSubstitutes);
    return number(int64_t(all.at(size_t(integer_of(args[1])))->readers));
  });
}

// renew(substitutes, number): a copy of that storage begins; the streams on which operators have written it since the
// last one did, as PyTorch numbers them.
PyObject *renew(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "renew(substitutes, number)");
    const auto &all = held_by<Substitutes::All>(args[0], kSubstitutes);
    return list_of(substitutes().renew(*all.at(size_t(integer_of(args[1])))), [](const c10::Stream &each) {
      return tuple(number(int64_t(each.id())), number(int64_t(each.device_index())),
                   number(int64_t(each.device_type())));
    });
  });
}

PyMethodDef functions[] = {
    {"install", install_, METH_NOARGS, nullptr},
    {"show_views", show_views_, METH_O, nullptr},
    {"begin", begin, METH_NOARGS, nullptr},
    {"end", end, METH_NOARGS, nullptr},
    {"pause", pause, METH_NOARGS, nullptr},
    {"resume", resume, METH_O, nullptr},
    {"is_recording", is_recording, METH_NOARGS, nullptr},
    {"listed", listed, METH_NOARGS, nullptr},
    {"clock_begin", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(clock_begin)), METH_FASTCALL, nullptr},
    {"clock_tick", clock_tick, METH_O, nullptr},
    {"clock_end", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(clock_end)), METH_FASTCALL, nullptr},
    {"clock_enter", clock_enter, METH_NOARGS, nullptr},
    {"clock_leave", clock_leave, METH_O, nullptr},
    {"substitute", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(substitute)), METH_FASTCALL, nullptr},
    {"keep", keep, METH_O, nullptr},
    {"include_thread", include_thread, METH_NOARGS, nullptr},
    {"readers", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(readers)), METH_FASTCALL, nullptr},
    {"renew", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(renew)), METH_FASTCALL, nullptr},
    {"settings", settings, METH_NOARGS, nullptr},
    {"names", names, METH_O, nullptr},
    {"is_stale", is_stale, METH_O, nullptr},
    {"packs", packs, METH_NOARGS, nullptr},
    {"forget", forget, METH_O, nullptr},
    {"also", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(also)), METH_FASTCALL, nullptr},
    {"refilled", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(refilled)), METH_FASTCALL, nullptr},
    {"note", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(note)), METH_FASTCALL, nullptr},
    {"find_packed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find_packed)), METH_FASTCALL, nullptr},
    {"make", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_again)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tape", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_tape() { return PyModule_Create(&module); }
