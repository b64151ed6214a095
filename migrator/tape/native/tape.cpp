// The module `tape`: begins and ends records, and hands over what they were; see `migrator/tape/tape.py`.
//
// One source, with the parts in headers of its own, since each that includes PyTorch's takes fifteen seconds to
// compile, and somebody waits for that. Everything here runs with the interpreter's lock held; the recorder does not
// need it, and waits for nobody who has it.
#include <pthread.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include "packs.h"

namespace {

// ------------------------------------------------------------------------------------- what a record holds

Object dtype(uint64_t type) { return borrowed(reinterpret_cast<PyObject *>(torch::getTHPDtype(at::ScalarType(type)))); }

Object numbers(const uint64_t *begin, size_t count) {
  Object out = checked(PyTuple_New(Py_ssize_t(count)));
  for (size_t index = 0; index < count; ++index)
    PyTuple_SET_ITEM(out.get(), index, number(int64_t(begin[index])).release());
  return out;
}

// The form of the value at `index`: None, or its offset, sizes, strides (all three None if it has none that count),
// dtype, device, and whether it is conjugated, and negated.
Object form(const Words &words, size_t index) {
  const uint64_t word = words[index];
  const auto code = Code(uint8_t(word));
  if (code != kTensor && code != kOpaque && code != kNumber) return none();
  if (code == kOpaque && word == head(kOpaque)) return none();  // a storage alone
  const size_t dims = code == kTensor ? word >> 32 & 0xFFFF : 0;
  const auto type = c10::DeviceType(int8_t(word >> 16));
  Object device = checked(THPDevice_New(c10::Device(type, c10::DeviceIndex(int8_t(word >> 24)))));
  Object bits = number(int64_t(word >> 48)), of = dtype(uint8_t(word >> 8));
  if (code == kOpaque) return tuple(none(), none(), none(), of, device, bits);
  if (code == kNumber) return tuple(number(int64_t(0)), numbers(nullptr, 0), numbers(nullptr, 0), of, device, bits);
  const uint64_t *sizes = words.data() + index + 3;
  return tuple(number(int64_t(words[index + 1])), numbers(sizes, dims), numbers(sizes + dims, dims), of, device, bits);
}

bool is_value(uint64_t word) { return uint8_t(word) >= kTensor; }

// The forms of the values in some of the words.
Object forms(const Words &words, size_t begin, size_t end) {
  Object list = checked(PyList_New(0));
  for (size_t index = begin; index < end; index += 1 + follows(words, index)) {
    if (!is_value(words[index])) continue;
    Object item = form(words, index);
    if (PyList_Append(list.get(), item.get())) throw InPython();
  }
  return list;
}

Object argument(const c10::IValue &value) {
  if (value.isInt()) return number(value.toInt());
  if (value.isDouble()) return checked(PyFloat_FromDouble(value.toDouble()));
  if (value.isBool()) return truth(value.toBool());
  if (value.isString()) return text(value.toStringRef());
  if (value.isDevice()) return checked(THPDevice_New(value.toDevice()));
  if (value.isComplexDouble()) {
    const auto complex = value.toComplexDouble();
    return checked(PyComplex_FromDoubles(complex.real(), complex.imag()));
  }
  if (value.isList()) return list_of(value.toListRef(), argument);
  return none();
}

Object step(const Step &of) {
  const Effects &effects = *of.effects;
  Object written = checked(PyList_New(0));
  for (size_t index = 0; index < effects.arguments; ++index)
    if (effects.is_written(of.arguments.data(), index) && PyList_Append(written.get(), number(int64_t(index)).get()))
      throw InPython();
  const auto place = [](const std::pair<uint16_t, int32_t> &each) {
    return tuple(number(int64_t(each.first)), number(int64_t(each.second)));
  };
  return tuple(number(of.number), text(effects.name), list_of(of.arguments, argument), list_of(of.places, place),
               forms(of.words, 1, of.inputs), forms(of.words, of.inputs, of.words.size()), written,
               truth(effects.random), truth(effects.collective), truth(of.whole));
}

// As `tape.py` unpacks it.
struct Packed {
  int64_t stream;
  uint32_t step, inputs, inputs_count, outputs, outputs_count, thread;
  uint8_t waits, raised;
  uint16_t nothing;
  uint32_t none;
};
static_assert(sizeof(Packed) == 40 && sizeof(Use) == 12);

template <typename Item>
Object bytes(const std::vector<Item> &items) {
  return checked(PyBytes_FromStringAndSize(reinterpret_cast<const char *>(items.data()), items.size() * sizeof(Item)));
}

size_t nbytes_of(const Record &record) {
  constexpr size_t kStorageImpl = sizeof(c10::StorageImpl);  // what a weak reference keeps of a storage that is gone
  return sizeof(Record) + record.calls.capacity() * sizeof(Call) + record.uses.capacity() * sizeof(Use) +
         record.storages.nbytes() + record.storages.all().size() * kStorageImpl +
         record.drawn.capacity() * sizeof(Drawn);
}

Object contents(const Record &record) {
  std::unordered_map<const Step *, uint32_t> places;
  std::vector<const Step *> steps;
  std::vector<Packed> calls;
  for (const Call &call : record.calls) {
    const auto [found, is_new] = places.emplace(call.step.get(), uint32_t(steps.size()));
    if (is_new) steps.push_back(call.step.get());
    calls.push_back({call.stream, found->second, call.inputs, uint32_t(call.step->places.size()), call.outputs,
                     call.outputs_count, call.thread, call.waits, call.raised, 0, 0});
  }
  std::vector<uint64_t> nbytes;
  for (const Stored &stored : record.storages.all()) nbytes.push_back(stored.nbytes);
  const auto drawn = [](const Drawn &each) {
    const auto *state_bytes = each.state.defined() ? static_cast<const char *>(each.state.const_data_ptr()) : nullptr;
    Object state = state_bytes ? checked(PyBytes_FromStringAndSize(state_bytes, each.state.numel())) : none();
    const c10::Device device(c10::DeviceType(each.device_type), each.device_index);
    return tuple(number(int64_t(each.call)), checked(THPDevice_New(device)), truth(each.by_default), number(each.seed),
                 number(each.offset), state);
  };
  Object parts = checked(PyTuple_New(7));
  size_t next = 0;
  const auto add = [&](Object part) { PyTuple_SET_ITEM(parts.get(), next++, part.release()); };
  add(number(int64_t(record.thread)));
  add(record.broken ? text(record.broken) : none());
  add(bytes(calls));
  add(bytes(record.uses));
  add(bytes(nbytes));
  add(list_of(steps, [](const Step *each) { return step(*each); }));
  add(list_of(record.drawn, drawn));
  return parts;
}

Record &record_of(PyObject *capsule) {
  auto *record = static_cast<Record *>(PyCapsule_GetPointer(capsule, kRecord));
  if (!record) throw InPython();
  return *record;
}

void drop(PyObject *capsule) { delete static_cast<Record *>(PyCapsule_GetPointer(capsule, kRecord)); }

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

// begin(with_states): record what this thread does from now on; whether nobody else is recording.
PyObject *begin(PyObject *, PyObject *with_states) {
  return answer([&] {
    const bool begun = recorder().begin(with_states == Py_True);
    if (begun) c10::impl::tls_set_dispatch_key_included(kKey, true);
    return truth(begun);
  });
}

// end(): the record that is over, as a capsule; None where none was recorded.
PyObject *end(PyObject *, PyObject *) {
  return answer([&] {
    c10::impl::tls_set_dispatch_key_included(kKey, clock_of_operators().is_of_this_thread() || !substitutes().empty());
    auto record = recorder().end();
    if (!record) return none();
    Object capsule = checked(PyCapsule_New(record.get(), kRecord, drop));
    (void)record.release();
    return capsule;
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

// unseen(tensor): what no operator has was written to it; to any of them, if None is given.
PyObject *unseen(PyObject *, PyObject *object) {
  return answer([&] {
    const at::Tensor tensor = object == Py_None ? at::Tensor() : tensor_of(object);
    recorder().unseen(object == Py_None ? nullptr : &tensor);
    return none();
  });
}

// contents(record): all of it, for `tape.py`.
PyObject *contents_(PyObject *, PyObject *record) {
  return answer([&] { return contents(record_of(record)); });
}

// find(record, tensor): its storage, version and state on that tape; None where it is not as it was left.
PyObject *find(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "find(record, tensor)");
    return use(record_of(args[0]).find(tensor_of(args[1])));
  });
}

// is_alive(record, storage): whether anybody still has that storage.
PyObject *is_alive(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2, "is_alive(record, storage)");
    const Record &record = record_of(args[0]);
    const auto index = size_t(integer_of(args[1]));
    TORCH_CHECK(index < record.storages.all().size(), "no such storage");
    return truth(!record.storages[uint32_t(index)].storage.expired());
  });
}

// sizes(record): its calls, its bytes, and the number and the bytes of all steps that are known.
PyObject *sizes(PyObject *, PyObject *object) {
  return answer([&] {
    const Record &record = record_of(object);
    const auto [steps, bytes] = recorder().steps();
    return tuple(number(uint64_t(record.calls.size())), number(uint64_t(nbytes_of(record))), number(uint64_t(steps)),
                 number(uint64_t(bytes)));
  });
}

// effects(name, overload): written arguments, whether it is random, whether it is collective, and when the host waits.
PyObject *effects(PyObject *, PyObject *const *args, Py_ssize_t count) {
  return answer([&] {
    TORCH_CHECK(count == 2 && PyUnicode_Check(args[0]) && PyUnicode_Check(args[1]), "effects(name, overload)");
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow(PyUnicode_AsUTF8(args[0]), PyUnicode_AsUTF8(args[1]));
    const Effects &of = recorder().effects(op);
    std::vector<int64_t> written;
    for (size_t index = 0; index < of.arguments; ++index)
      if (of.written[index]) written.push_back(int64_t(index));
    return tuple(list_of(written, [](int64_t each) { return number(each); }), truth(of.random), truth(of.collective),
                 number(int64_t(of.waits)));
  });
}

PyMethodDef functions[] = {
    {"install", install_, METH_NOARGS, nullptr},
    {"begin", begin, METH_O, nullptr},
    {"end", end, METH_NOARGS, nullptr},
    {"pause", pause, METH_NOARGS, nullptr},
    {"resume", resume, METH_O, nullptr},
    {"is_recording", is_recording, METH_NOARGS, nullptr},
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
    {"unseen", unseen, METH_O, nullptr},
    {"contents", contents_, METH_O, nullptr},
    {"find", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find)), METH_FASTCALL, nullptr},
    {"is_alive", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_alive)), METH_FASTCALL, nullptr},
    {"sizes", sizes, METH_O, nullptr},
    {"effects", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(effects)), METH_FASTCALL, nullptr},
    {"stops", stops, METH_NOARGS, nullptr},
    {"promise", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(promise)), METH_FASTCALL, nullptr},
    {"closure", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(closure)), METH_FASTCALL, nullptr},
    {"settings", settings, METH_NOARGS, nullptr},
    {"described", described, METH_O, nullptr},
    {"begins_with", begins_with, METH_O, nullptr},
    {"names", names, METH_O, nullptr},
    {"numbers", numbers_, METH_O, nullptr},
    {"leaves", leaves, METH_O, nullptr},
    {"is_stale", is_stale, METH_O, nullptr},
    {"watch", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(watch)), METH_FASTCALL, nullptr},
    {"run", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(run)), METH_FASTCALL, nullptr},
    {"packs", packs, METH_NOARGS, nullptr},
    {"forget", forget, METH_O, nullptr},
    {"also", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(also)), METH_FASTCALL, nullptr},
    {"refilled", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(refilled)), METH_FASTCALL, nullptr},
    {"note", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(note)), METH_FASTCALL, nullptr},
    {"find_packed", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(find_packed)), METH_FASTCALL, nullptr},
    {"make", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(make_again)), METH_FASTCALL, nullptr},
    {"is_same", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_same)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tape", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_tape() { return PyModule_Create(&module); }
