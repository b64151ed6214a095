// What the hooks do with every tensor that is saved: `tensors.py` again, line by line, at a tenth of the host's time.
//
// Every call of PyTorch's from Python takes a microsecond or half of one, and a tensor that moves needs twenty. Here they
// are reads of fields. Compiled once against the torch that is installed, and only where there is a compiler: what is
// decided, and all that happens once a group, stays in Python. Everything here runs with the interpreter's lock held.
//
// References are the same as in Python, and the collector sees them: a group refers to its members, and they to it.
//
// One file, since each that includes these headers takes fifteen seconds to compile, and somebody waits for that.
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/python_numbers.h>

#include <c10/util/SmallVector.h>
#include <structmember.h>

#include <algorithm>
#include <new>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using Numbers = c10::SmallVector<int64_t, 6>;
using WeakTensor = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

constexpr int64_t kSlot = 512;  // `lanes.SLOT`
constexpr size_t kSweep = 4096;

const at::Tensor &tensor_of(PyObject *object) {
  TORCH_CHECK_TYPE(THPVariable_Check(object), "a tensor is wanted");
  return THPVariable_Unpack(object);
}

// Shares memory and version counter, knows of no graph, and may be given other memory.
at::Tensor alias_of(const at::Tensor &tensor) {
  return at::Tensor(tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(
      torch::autograd::impl::version_counter(tensor), /*allow_tensor_metadata_change=*/true));
}

// What all types here have in common: C++ members behind Python's header, and references the collector knows.
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

// ------------------------------------------------------------------------------------------------- Saved

struct Saved {
  PyObject_HEAD
  PyObject *group;
  int64_t version, low, nbytes, offset;
  struct Own {
    at::Tensor alias;
  } own;

  void forget_weak() {}
  void clear() { Py_CLEAR(group); }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(group);
    return 0;
  }
};

PyMemberDef saved_members[] = {
    {"group", T_OBJECT, offsetof(Saved, group), READONLY, nullptr},
    {"version", T_LONGLONG, offsetof(Saved, version), READONLY, nullptr},
    {"low", T_LONGLONG, offsetof(Saved, low), READONLY, nullptr},
    {"nbytes", T_LONGLONG, offsetof(Saved, nbytes), READONLY, nullptr},
    {"offset", T_LONGLONG, offsetof(Saved, offset), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *saved_alias(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  return THPVariable_Wrap(reinterpret_cast<Saved *>(self)->own.alias);
  END_HANDLE_TH_ERRORS
}

int saved_set_alias(PyObject *self, PyObject *value, void *) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(value, "there is always an alias");
  reinterpret_cast<Saved *>(self)->own.alias = tensor_of(value);
  return 0;
  END_HANDLE_TH_ERRORS_RET(-1)
}

PyGetSetDef saved_getters[] = {
    {"alias", saved_alias, saved_set_alias, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject saved_type = {PyVarObject_HEAD_INIT(nullptr, 0) "migrator.native.Saved", sizeof(Saved)};

// Saved(group, tensor, low, nbytes)
PyObject *make_saved(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 4, "Saved(group, tensor, low, nbytes)");
  const at::Tensor &tensor = tensor_of(args[1]);
  at::Tensor alias = alias_of(tensor);
  const int64_t version = tensor._version(), low = THPUtils_unpackLong(args[2]), nbytes = THPUtils_unpackLong(args[3]);
  auto *saved = make<Saved>(saved_type);  // from here on nothing throws
  hold(saved->group, args[0]);
  saved->own.alias = std::move(alias);
  saved->version = version;
  saved->low = low;
  saved->nbytes = nbytes;
  saved->offset = -1;
  return reinterpret_cast<PyObject *>(saved);
  END_HANDLE_TH_ERRORS
}

// let_go(members, empty): the aliases live on without memory. `empty(dtype)` makes a tensor without memory.
PyObject *let_go(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2 && PyList_Check(args[0]), "let_go(members, empty)");
  THPObjectPtr nothing;
  for (Py_ssize_t k = 0; k < PyList_GET_SIZE(args[0]); ++k) {
    PyObject *member = PyList_GET_ITEM(args[0], k);
    TORCH_CHECK_TYPE(Py_TYPE(member) == &saved_type, "a member of another kind");
    const at::Tensor &alias = reinterpret_cast<Saved *>(member)->own.alias;
    if (!nothing) {
      THPObjectPtr dtype(PyObject_GetAttrString(PyImport_AddModule("torch"), "uint8"));
      nothing = dtype ? PyObject_CallOneArg(args[1], dtype.get()) : nullptr;
      if (!nothing) throw python_error();
    }
    c10::TensorImpl *impl = alias.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(tensor_of(nothing.get()).storage());
    impl->set_sizes_contiguous(c10::IntArrayRef(int64_t{0}));
    impl->set_storage_offset(0);
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// ------------------------------------------------------------------------------------------------- Known

struct Known {
  PyObject_HEAD
  PyObject *saved, *made;
  Known *before;
  int64_t ident, low, high, version;
  struct Own {
    // Weak: they keep addresses from being used again, not memory.
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;
    std::optional<WeakTensor> base;
  } own;

  bool freed() const { return own.storage->expired(); }

  void forget_weak() {}
  void clear() {
    Py_CLEAR(saved);
    Py_CLEAR(made);
    Py_CLEAR(before);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(saved);
    Py_VISIT(made);
    Py_VISIT(before);
    return 0;
  }
};

PyMemberDef known_members[] = {
    {"saved", T_OBJECT, offsetof(Known, saved), 0, nullptr},
    {"made", T_OBJECT, offsetof(Known, made), 0, nullptr},
    {"ident", T_LONGLONG, offsetof(Known, ident), READONLY, nullptr},
    {"low", T_LONGLONG, offsetof(Known, low), READONLY, nullptr},
    {"high", T_LONGLONG, offsetof(Known, high), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyObject *known_cdata(PyObject *self, void *) {
  return PyLong_FromVoidPtr(reinterpret_cast<Known *>(self)->own.storage->_unsafe_get_target());
}

PyGetSetDef known_getters[] = {
    {"cdata", known_cdata, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyObject *known_freed(PyObject *self, PyObject *) {
  return PyBool_FromLong(reinterpret_cast<Known *>(self)->freed());
}

PyMethodDef known_methods[] = {
    {"freed", known_freed, METH_NOARGS, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyTypeObject known_type = {PyVarObject_HEAD_INIT(nullptr, 0) "migrator.native.Known", sizeof(Known)};

// ---------------------------------------------------------------------------------------------- Storages

struct Storages {
  PyObject_HEAD
  int64_t count;
  size_t sweep_at;
  struct Own {
    std::unordered_map<c10::StorageImpl *, Known *> known;  // by address, the last that was found there
  } own;

  void forget_weak() {}
  void clear() {
    // Whatever dies with an entry may lead back here.
    auto known = std::exchange(own.known, {});
    for (auto &[key, entry] : known) Py_DECREF(entry);
  }
  int visit(visitproc visit, void *arg) {
    for (auto &[key, entry] : own.known) Py_VISIT(entry);
    return 0;
  }
};

PyTypeObject storages_type = {PyVarObject_HEAD_INIT(nullptr, 0) "migrator.native.Storages", sizeof(Storages)};

PyObject *make_storages(PyObject *, PyObject *) {
  HANDLE_TH_ERRORS
  auto *storages = make<Storages>(storages_type);
  storages->count = 0;
  storages->sweep_at = kSweep;
  return reinterpret_cast<PyObject *>(storages);
  END_HANDLE_TH_ERRORS
}

void sweep(Storages &storages) {
  std::vector<Known *> freed;
  for (auto it = storages.own.known.begin(); it != storages.own.known.end();) {
    if (it->second->freed()) {
      freed.push_back(it->second);
      it = storages.own.known.erase(it);
    } else {
      ++it;
    }
  }
  storages.sweep_at = std::max(kSweep, 2 * storages.own.known.size());
  for (Known *entry : freed) Py_DECREF(entry);
}

// The bytes of a storage to move for a tensor on it; see `tensors.reach`.
std::pair<int64_t, int64_t> reach(const at::Tensor &tensor, int64_t nbytes) {
  const int64_t size = int64_t(tensor.itemsize());
  if (tensor.numel() * size == nbytes) return {0, nbytes};
  int64_t elements = 1;
  for (int64_t k = 0; k < tensor.dim(); ++k) elements += (tensor.size(k) - 1) * tensor.stride(k);
  const int64_t low = tensor.storage_offset() * size, high = low + elements * size;
  if (tensor.is_view() && 2 * (high - low) >= nbytes) return {0, nbytes};
  return {low - low % kSlot, high};
}

// find(tensor): what is known of the bytes that it needs; made on first sight.
PyObject *storages_find(PyObject *self, PyObject *argument) {
  HANDLE_TH_ERRORS
  auto &storages = *reinterpret_cast<Storages *>(self);
  const at::Tensor &tensor = tensor_of(argument);
  if (storages.own.known.size() >= storages.sweep_at) sweep(storages);
  const at::TensorBase base = tensor.is_view() ? tensor._base() : tensor;
  const c10::Storage &storage = tensor.storage();
  const auto [low, high] = reach(tensor, int64_t(storage.nbytes()));
  const int64_t version = tensor._version();
  const auto found = storages.own.known.find(storage.unsafeGetStorageImpl());
  Known *last = found == storages.own.known.end() ? nullptr : found->second;
  for (Known *entry = last; entry; entry = entry->before) {
    if (entry->version == version && entry->low <= low && high <= entry->high &&
        entry->own.base->_unsafe_get_target() == base.unsafeGetTensorImpl()) {
      Py_INCREF(entry);
      return reinterpret_cast<PyObject *>(entry);
    }
  }
  auto *known = make<Known>(known_type);
  hold(known->saved, Py_None);
  hold(known->made, Py_None);
  known->ident = storages.count++;
  known->low = low;
  known->high = high;
  known->version = version;
  known->own.storage = storage.getWeakStorageImpl();
  known->own.base = WeakTensor(base.getIntrusivePtr());
  storages.own.known[storage.unsafeGetStorageImpl()] = known;
  known->before = last;  // with the reference that the map had
  Py_INCREF(known);
  return reinterpret_cast<PyObject *>(known);
  END_HANDLE_TH_ERRORS
}

PyMethodDef storages_methods[] = {
    {"find", storages_find, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

bool is_plain(const at::Tensor &tensor) {
  using c10::DispatchKey;
  constexpr c10::DispatchKeySet other({DispatchKey::Conjugate, DispatchKey::Negative, DispatchKey::ZeroTensor,
                                       DispatchKey::FuncTorchBatched, DispatchKey::FuncTorchGradWrapper,
                                       DispatchKey::Functionalize, DispatchKey::Python});
  return tensor.layout() == at::kStrided && !tensor.is_nested() && !tensor.key_set().has_any(other);
}

// memory_of(tensor, least): see `tensors.memory_of`.
PyObject *memory_of(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "memory_of(tensor, least)");
  if (Py_TYPE(args[0]) != reinterpret_cast<PyTypeObject *>(THPVariableClass)) return PyLong_FromLong(0);
  const at::Tensor &tensor = THPVariable_Unpack(args[0]);
  if (!is_plain(tensor) || !tensor.numel()) return PyLong_FromLong(0);
  const c10::Storage &storage = tensor.storage();
  if (int64_t(storage.nbytes()) < THPUtils_unpackLong(args[1])) return PyLong_FromLong(0);
  if (tensor.is_view()) {
    THPObjectPtr base(THPVariable_Wrap(tensor._base()));
    const int is_parameter = base ? PyObject_IsInstance(base.get(), ParameterClass) : -1;
    if (is_parameter < 0) throw python_error();
    if (is_parameter) return PyLong_FromLong(0);
  }
  return PyLong_FromVoidPtr(storage.unsafeGetStorageImpl());
  END_HANDLE_TH_ERRORS
}

// ------------------------------------------------------------------------------------------------- Moved

struct Moved {
  PyObject_HEAD
  PyObject *weak, *mover, *claim, *go, *record;
  Saved *saved;
  char was_used;
  struct Own {
    caffe2::TypeMeta dtype;
    Numbers size, stride;
    int64_t first = 0;  // in elements
  } own;

  void forget_weak() {
    if (weak) PyObject_ClearWeakRefs(reinterpret_cast<PyObject *>(this));
  }
  void clear() {
    Py_CLEAR(mover);
    Py_CLEAR(saved);
    Py_CLEAR(claim);
    Py_CLEAR(go);
    Py_CLEAR(record);
  }
  int visit(visitproc visit, void *arg) {
    Py_VISIT(mover);
    Py_VISIT(saved);
    Py_VISIT(claim);
    Py_VISIT(go);
    Py_VISIT(record);
    return 0;
  }
};

PyMemberDef moved_members[] = {
    {"mover", T_OBJECT, offsetof(Moved, mover), READONLY, nullptr},
    {"saved", T_OBJECT, offsetof(Moved, saved), READONLY, nullptr},
    {"go", T_OBJECT, offsetof(Moved, go), READONLY, nullptr},
    {"record", T_OBJECT, offsetof(Moved, record), READONLY, nullptr},
    {"was_used", T_BOOL, offsetof(Moved, was_used), 0, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyTypeObject moved_type = {PyVarObject_HEAD_INIT(nullptr, 0) "migrator.native.Moved", sizeof(Moved)};

// Moved(tensor, mover, saved, claim, go, record)
PyObject *make_moved(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 6 && Py_TYPE(args[2]) == &saved_type, "Moved(tensor, mover, saved, claim, go, record)");
  const at::Tensor &tensor = tensor_of(args[0]);
  const c10::IntArrayRef size = tensor.sizes(), stride = tensor.strides();
  auto *moved = make<Moved>(moved_type);  // from here on nothing throws but for want of memory
  hold(moved->mover, args[1]);
  Py_INCREF(args[2]);
  moved->saved = reinterpret_cast<Saved *>(args[2]);
  hold(moved->claim, args[3]);
  hold(moved->go, args[4]);
  hold(moved->record, args[5]);
  moved->own.dtype = tensor.dtype();
  moved->own.size.assign(size.begin(), size.end());
  moved->own.stride.assign(stride.begin(), stride.end());
  moved->own.first = tensor.storage_offset();
  return reinterpret_cast<PyObject *>(moved);
  END_HANDLE_TH_ERRORS
}

// The collector may have cleared it, if anybody still asks then.
const Saved &saved_of(const Moved &moved) {
  TORCH_CHECK(moved.saved, "the saved tensor is gone");
  return *moved.saved;
}

PyObject *moved_changed(PyObject *self, PyObject *) {
  HANDLE_TH_ERRORS
  const Saved &saved = saved_of(*reinterpret_cast<Moved *>(self));
  return PyBool_FromLong(int64_t(saved.own.alias._version()) != saved.version);
  END_HANDLE_TH_ERRORS
}

// view(buffer): the tensor, on the buffer of its group or, with None, on the program's own memory.
PyObject *moved_view(PyObject *self, PyObject *buffer) {
  HANDLE_TH_ERRORS
  const Moved &moved = *reinterpret_cast<Moved *>(self);
  const Saved &saved = saved_of(moved);
  at::Tensor tensor = alias_of(saved.own.alias);
  c10::TensorImpl *impl = tensor.unsafeGetTensorImpl();
  int64_t first = moved.own.first;
  if (buffer == Py_None) {
    impl->set_storage_and_dtype(saved.own.alias.storage(), moved.own.dtype);
  } else {
    impl->set_storage_and_dtype(tensor_of(buffer).storage(), moved.own.dtype);
    first += (saved.offset - saved.low) / int64_t(moved.own.dtype.itemsize());  // both are multiples of a slot
  }
  impl->set_sizes_and_strides(moved.own.size, moved.own.stride, first);
  return THPVariable_Wrap(std::move(tensor));
  END_HANDLE_TH_ERRORS
}

PyObject *moved_size(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  const Numbers &size = reinterpret_cast<Moved *>(self)->own.size;
  THPObjectPtr numbers(PyTuple_New(Py_ssize_t(size.size())));
  if (!numbers) return nullptr;
  for (size_t k = 0; k < size.size(); ++k)
    PyTuple_SET_ITEM(numbers.get(), Py_ssize_t(k), THPUtils_packInt64(size[k]));
  return PyObject_CallMethod(PyImport_AddModule("torch"), "Size", "(O)", numbers.get());
  END_HANDLE_TH_ERRORS
}

PyObject *moved_dtype(PyObject *self, void *) {
  HANDLE_TH_ERRORS
  const at::ScalarType type = c10::typeMetaToScalarType(reinterpret_cast<Moved *>(self)->own.dtype);
  auto *dtype = reinterpret_cast<PyObject *>(torch::getTHPDtype(type));
  Py_INCREF(dtype);
  return dtype;
  END_HANDLE_TH_ERRORS
}

PyGetSetDef moved_getters[] = {
    {"size", moved_size, nullptr, nullptr, nullptr},
    {"dtype", moved_dtype, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyMethodDef moved_methods[] = {
    {"changed", moved_changed, METH_NOARGS, nullptr},
    {"view", moved_view, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// ------------------------------------------------------------------------------------------------ module

template <typename Type>
bool prepare(PyTypeObject &type, PyMemberDef *members, PyGetSetDef *getters, PyMethodDef *methods) {
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
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

PyMethodDef functions[] = {
    {"Saved", fast(make_saved), METH_FASTCALL, nullptr},
    {"Moved", fast(make_moved), METH_FASTCALL, nullptr},
    {"Storages", make_storages, METH_NOARGS, nullptr},
    {"memory_of", fast(memory_of), METH_FASTCALL, nullptr},
    {"let_go", fast(let_go), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "tensors", nullptr, -1, functions};

}  // namespace

PyMODINIT_FUNC PyInit_tensors() {
  moved_type.tp_weaklistoffset = offsetof(Moved, weak);
  const bool ready = prepare<Saved>(saved_type, saved_members, saved_getters, nullptr) &&
                     prepare<Known>(known_type, known_members, known_getters, known_methods) &&
                     prepare<Storages>(storages_type, nullptr, nullptr, storages_methods) &&
                     prepare<Moved>(moved_type, moved_members, moved_getters, moved_methods);
  return ready ? PyModule_Create(&module) : nullptr;
}
