// `follow` of `recompute/ways.py`: what was packed of a formula's inputs, if the graph answers as it did before.
//
// A shortcut, as the hooks are: what it cannot tell at a glance it has the answer in Python tell, and whatever else is
// asked is asked there. That is a dozen questions for each tensor that is dropped, in a forward for which the device
// may be waiting.
#pragma once

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_cpp_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>
#include <torch/csrc/utils/python_numbers.h>

#include <cstring>

#include "object.h"

namespace {

enum class Told { No, Yes, AskPython };

PyObject *name_of(const char *text) {
  PyObject *name = PyUnicode_InternFromString(text);
  if (!name) throw python_error();
  return name;
}

THPObjectPtr attribute(PyObject *object, PyObject *name) {
  THPObjectPtr value(PyObject_GetAttr(object, name));
  if (!value) throw python_error();
  return value;
}

// The kinds of answers that are known here, and what they and a `Source` are asked for.
struct Ways {
  PyObject *setting, *shapes, *saved, *leaf, *passed, *again, *accumulate, *origin;
  PyObject *holds = name_of("holds"), *unpack = name_of("_unpack"), *began = name_of("_began"),
           *versions = name_of("_versions"), *asked = name_of("_asked"), *unpack_hook = name_of("unpack_hook"),
           *data = name_of("data"), *variable = name_of("variable"), *metadata = name_of("metadata");

  Ways() {
    THPObjectPtr module(PyImport_ImportModule("torch_tiers.migrator.recompute.ways")),
        origins(PyImport_ImportModule("torch_tiers.migrator.recompute.origins"));
    if (!module || !origins) throw python_error();
    const auto of = [&](const char *name) { return attribute(module, name_of(name)).release(); };
    setting = of("Setting"), shapes = of("Shapes"), saved = of("Saved"), leaf = of("Leaf"), passed = of("Passed");
    again = of("Again"), accumulate = of("_Leaf");
    origin = attribute(origins, name_of("_ORIGIN")).release();
  }
};

const Ways &ways() {
  static const Ways all;
  return all;
}

bool is(PyObject *object, PyObject *type) { return reinterpret_cast<PyObject *>(Py_TYPE(object)) == type; }

// One of PyTorch's own nodes, by the name that its type has. Types of nodes written in Python are made while it runs.
bool is_named(PyObject *node, PyObject *name) {
  const PyTypeObject *type = Py_TYPE(node);
  if (PyType_HasFeature(const_cast<PyTypeObject *>(type), Py_TPFLAGS_HEAPTYPE)) return false;
  const char *dot = std::strrchr(type->tp_name, '.');
  return PyUnicode_CompareWithASCIIString(name, dot ? dot + 1 : type->tp_name) == 0;
}

// Of a node that `is_named` knows: those written in Python lie in memory otherwise.
const auto &graph_of(PyObject *node) { return *reinterpret_cast<torch::autograd::THPCppFunction *>(node)->cdata; }

Py_ssize_t number_in(PyObject *answer) { return PyLong_AsSsize_t(PyTuple_GET_ITEM(answer, 0)); }

// The node that made an input, and which of its outputs that is; null if there is none.
THPObjectPtr input_of(PyObject *node, Py_ssize_t k, uint32_t *output) {
  const auto &graph = graph_of(node);
  if (k < 0 || k >= Py_ssize_t(graph.num_outputs())) return THPObjectPtr();
  const auto &edge = graph.next_edge(size_t(k));
  *output = edge.input_nr;
  if (!edge.is_valid()) return THPObjectPtr();
  THPObjectPtr before(torch::autograd::functionToPyObject(edge.function));
  if (!before) throw python_error();
  return before;
}

// What was packed of that output of a node, see `Origins.made_by`; null if nothing was, or it is gone.
THPObjectPtr made_by(PyObject *node, uint32_t output) {
  THPObjectPtr noted = attribute(node, ways().metadata);
  PyObject *entry = PyDict_Check(noted.get()) ? PyDict_GetItem(noted, ways().origin) : nullptr;
  if (!entry || PyLong_AsUnsignedLong(PyTuple_GET_ITEM(entry, 0)) != output) return THPObjectPtr();
  THPObjectPtr held = own(entry), found(PyObject_CallNoArgs(PyTuple_GET_ITEM(entry, 1)));
  if (!found) throw python_error();
  if (found.get() == Py_None) return THPObjectPtr();
  PyObject *rest = PyTuple_GET_ITEM(entry, 2);
  if (rest == Py_None) return found;
  THPObjectPtr packed(PyTuple_New(1 + PyTuple_GET_SIZE(rest)));
  if (!packed) throw python_error();
  PyTuple_SET_ITEM(packed.get(), 0, found.release());
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(rest); ++k) {
    Py_INCREF(PyTuple_GET_ITEM(rest, k));
    PyTuple_SET_ITEM(packed.get(), k + 1, PyTuple_GET_ITEM(rest, k));
  }
  return packed;
}

void add(PyObject *packs, PyObject *packed) {
  if (PyList_Append(packs, packed)) throw python_error();
}

// `ways._is_same`: 1 is not 1.0, and 0.0 not -0.0.
bool is_same(PyObject *one, PyObject *other) {
  if (one == other) return true;
  if (Py_TYPE(one) != Py_TYPE(other)) return false;
  const int equal = PyObject_RichCompareBool(one, other, Py_EQ);
  if (equal < 0) throw python_error();
  const int is_set = equal ? PyObject_IsTrue(one) : 1;
  if (is_set < 0) throw python_error();
  if (is_set) return equal;
  THPObjectPtr text(PyObject_Str(one)), as(PyObject_Str(other));
  if (!text || !as) throw python_error();
  return PyUnicode_Compare(text, as) == 0;
}

bool is_shape(c10::IntArrayRef sizes, PyObject *expected) {
  if (PyTuple_GET_SIZE(expected) != Py_ssize_t(sizes.size())) return false;
  for (size_t k = 0; k < sizes.size(); ++k)
    if (PyLong_AsLongLong(PyTuple_GET_ITEM(expected, Py_ssize_t(k))) != sizes[k]) return false;
  return true;
}

// `ways.shapes`: of what the node made, and of its first inputs.
Told told_shapes(PyObject *answer, PyObject *node) {
  PyObject *expected = PyTuple_GET_ITEM(answer, 0);
  const auto &graph = graph_of(node);
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(expected); ++k) {
    uint32_t output = 0;
    THPObjectPtr before = k ? input_of(node, k - 1, &output) : THPObjectPtr();
    PyObject *then = PyTuple_GET_ITEM(expected, k);
    if (k && !before) {
      if (PyTuple_GET_SIZE(then)) return Told::No;
    } else if (k && is(before, ways().accumulate)) {
      if (!is_shape(tensor_of(attribute(before, ways().variable)).sizes(), then)) return Told::No;
    } else {
      const auto &made = k ? graph.next_edge(size_t(k - 1)).function->input_metadata(output) : graph.input_metadata(0);
      if (made.is_nested_tensor()) return Told::AskPython;
      const auto shape = made.shape_as_dim_vector();
      const auto sizes = c10::asIntArrayRefSlowOpt(shape);
      if (!sizes) return Told::AskPython;
      if (!is_shape(*sizes, then)) return Told::No;
    }
  }
  return Told::Yes;
}

Told told_saved(PyObject *answer, PyObject *node, PyObject *source, PyObject *packs) {
  const Ways &known = ways();
  const bool there = PyTuple_GET_ITEM(answer, 1) == Py_True;
  THPObjectPtr saved(PyObject_GetAttr(node, PyTuple_GET_ITEM(answer, 0)));
  THPObjectPtr hook(saved && saved.get() != Py_None ? PyObject_GetAttr(saved, known.unpack_hook) : nullptr);
  if (saved && saved.get() == Py_None) return there ? Told::No : Told::Yes;
  THPObjectPtr data(hook ? PyObject_GetAttr(saved, known.data) : nullptr);
  if (!data) return PyErr_Clear(), Told::AskPython;  // backward has released it
  const int is_ours = PyObject_RichCompareBool(hook, attribute(source, known.unpack), Py_EQ);
  if (is_ours < 0) throw python_error();
  if (!is_ours) return Told::AskPython;
  add(packs, data);
  return there ? Told::Yes : Told::No;
}

// A parameter that is as it was when the forward began, see `Origins.leaf`.
Told told_leaf(PyObject *answer, PyObject *node, PyObject *source, PyObject *packs) {
  const Ways &known = ways();
  uint32_t output = 0;
  THPObjectPtr before = input_of(node, number_in(answer), &output);
  if (!before || !is(before, known.accumulate)) return Told::No;
  THPObjectPtr leaf = attribute(before, known.variable), versions = attribute(source, known.versions),
               asked = attribute(source, known.asked), id(PyLong_FromVoidPtr(leaf.get()));
  if (!id || PySet_Add(asked, id)) throw python_error();
  PyObject *entry = PyDict_Check(versions.get()) ? PyDict_GetItem(versions, id) : nullptr;
  if (!entry) return Told::AskPython;
  THPObjectPtr version = own(PyTuple_GET_ITEM(entry, 1)), now(PyObject_CallNoArgs(PyTuple_GET_ITEM(entry, 0)));
  if (!now) throw python_error();
  if (now.get() != leaf.get() || tensor_of(leaf)._version() != PyLong_AsLongLong(version)) return Told::AskPython;
  THPObjectPtr kept(PyTuple_Pack(4, leaf.get(), version.get(), Py_None, Py_None));  // `packed.keep` of a leaf
  if (!kept) throw python_error();
  add(packs, kept);
  return Told::Yes;
}

bool holds(PyObject *way, PyObject *node, PyObject *source, uint64_t began, PyObject *packs);

Told tell(PyObject *answer, PyObject *node, PyObject *source, uint64_t began, PyObject *packs) {
  const Ways &known = ways();
  if (is(answer, known.setting)) {
    THPObjectPtr value(PyObject_CallOneArg(PyTuple_GET_ITEM(answer, 0), node));
    if (!value) throw python_error();
    return is_same(value, PyTuple_GET_ITEM(answer, 1)) ? Told::Yes : Told::No;
  }
  if (is(answer, known.shapes)) return told_shapes(answer, node);
  if (is(answer, known.saved)) return told_saved(answer, node, source, packs);
  if (is(answer, known.leaf)) return told_leaf(answer, node, source, packs);
  if (!is(answer, known.passed) && !is(answer, known.again)) return Told::AskPython;
  uint32_t output = 0;
  THPObjectPtr before = input_of(node, number_in(answer), &output);
  if (!before || is(before, known.accumulate)) return Told::No;
  if (is(answer, known.passed)) {
    THPObjectPtr packed = made_by(before, output);
    if (!packed) return Told::No;
    add(packs, packed);
    return Told::Yes;
  }
  const bool again = !output && holds(PyTuple_GET_ITEM(answer, 1), before, source, began, packs);
  return again && !made_by(before, output) ? Told::Yes : Told::No;
}

bool holds(PyObject *way, PyObject *node, PyObject *source, uint64_t began, PyObject *packs) {
  if (!is_named(node, PyTuple_GET_ITEM(way, 0)) || graph_of(node).sequence_nr() < began) return false;
  PyObject *answers = PyTuple_GET_ITEM(way, 1);
  for (Py_ssize_t k = 0; k < PyTuple_GET_SIZE(answers); ++k) {
    PyObject *answer = PyTuple_GET_ITEM(answers, k);
    Told told = tell(answer, node, source, began, packs);
    if (told == Told::AskPython) {
      THPObjectPtr same(PyObject_CallMethodObjArgs(answer, ways().holds, node, source, packs, nullptr));
      if (!same) throw python_error();
      told = same.get() == Py_True ? Told::Yes : Told::No;
    }
    if (told == Told::No) return false;
  }
  return true;
}

// follow(way, node, source)
PyObject *follow(PyObject *, PyObject *const *args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 3 && PyTuple_Check(args[0]), "follow(way, node, source)");
  THPObjectPtr packs(PyList_New(0)), since = attribute(args[2], ways().began);
  if (!packs) return nullptr;
  const uint64_t began = PyLong_AsUnsignedLongLong(since);
  if (PyErr_Occurred()) {  // larger than any node's number: nothing is to be recomputed
    PyErr_Clear();
    Py_RETURN_NONE;
  }
  if (!holds(args[0], args[1], args[2], began, packs)) Py_RETURN_NONE;
  return packs.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
