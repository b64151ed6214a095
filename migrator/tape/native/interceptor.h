// Where operators come by: one boxed fallback, for a key that belongs to nobody and lies below autograd, autocast and
// dispatch modes, and above every backend. What it sees is what a dispatch mode sees.
//
// Views do not come by, unless all that runs is to be listed. They compute nothing, and whoever reads one is recorded
// with the storage and the place in it. They are up to two thirds of a program's operators, of a microsecond each.
//
// The key is included in threads that record, or read substitutes, and autograd takes that along to the threads of its
// backward. It is excluded while an operator runs, so nothing that one calls comes by. Where it is not included it
// costs nothing.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string_view>
#include <vector>

#include "clock.h"
#include "key.h"
#include "substitutes.h"

namespace {

// Never taken away, not even at the end: other threads may be in it.
Recorder &recorder() {
  static Recorder &one = *new Recorder;
  return one;
}

// In torch 2.11 a dispatch mode, or a subclass with one of its own, comes below, and nothing that it calls comes by:
// what the operator makes comes from nowhere, and what it writes is written unseen.
void pass(Recorder &to, const c10::OperatorHandle &op, c10::DispatchKeySet below, torch::jit::Stack *stack) {
  const Effects &effects = to.effects(op);
  if (!watches().empty()) watches().before(effects, *stack);
  std::vector<at::Tensor> written;
  const c10::IValue *arguments = stack->data() + (stack->size() - effects.arguments);
  for (size_t index = 0; effects.writes && index < effects.arguments; ++index) {
    if (!effects.is_written(arguments, index)) continue;
    if (arguments[index].isTensor()) written.push_back(arguments[index].toTensor());
    if (arguments[index].isList())
      for (const c10::IValue &each : arguments[index].toListRef())
        if (each.isTensor()) written.push_back(each.toTensor());
  }
  const auto note = [&] {
    for (const at::Tensor &each : written)
      if (const c10::StorageImpl *storage = each.defined() ? storage_of(each) : nullptr) to.unseen(storage);
  };
  try {
    op.redispatchBoxed(below, stack);
  } catch (...) {
    note();  // it may have written some of it
    throw;
  }
  note();
}

// Run it, and time it, with what it is to read in the place of what it was given.
void carry_out(const c10::OperatorHandle &op, c10::DispatchKeySet keys, c10::DispatchKeySet below,
               torch::jit::Stack *stack) {
  // A mode or a subclass below, in torch 2.11, would see the copies.
  if (substitutes().empty() || keys.has_backend(c10::BackendComponent::MetaBit) || keys.has(c10::DispatchKey::Python)) {
    const Timed timed(op, keys);
    op.redispatchBoxed(below, stack);
    return;
  }
  ArgumentSwap swap(recorder().effects(op), *stack);
  const Timed timed(op, keys);  // after that: what the stream waits for a copy is not the operator's
  op.redispatchBoxed(below, stack);
  swap.settle();
}

void intercept(const c10::OperatorHandle &op, c10::DispatchKeySet keys, torch::jit::Stack *stack) {
  const auto below = keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kKey);
  Recorder &to = recorder();
  const bool records = to.recording.load(std::memory_order_relaxed);
  // It was ended in another thread, or is left from a scope that has put back what it found.
  if (!records && !clock_of_operators().on.load(std::memory_order_relaxed) && substitutes().empty()) {
    c10::impl::tls_set_dispatch_key_included(kKey, false);
    op.redispatchBoxed(below, stack);
    return;
  }
  if (records && keys.has(c10::DispatchKey::Python)) {
    const Timed timed(op, keys);
    pass(to, op, below, stack);
    return;
  }
  const c10::impl::ExcludeDispatchKeyGuard guard(kKey);
  if (!records) {
    carry_out(op, keys, below, stack);
    return;
  }
  if (!watches().empty()) watches().before(to.effects(op), *stack);
  Open open;
  // Meta tensors, and fake ones, which run as such, have no bytes.
  if (keys.has_backend(c10::BackendComponent::MetaBit) || !to.enter(op, *stack, open)) {
    carry_out(op, keys, below, stack);
    return;
  }
  try {
    carry_out(op, keys, below, stack);
  } catch (...) {
    to.leave(*stack, open, true);
    throw;
  }
  to.leave(*stack, open, false);
}

// Those that return nothing else than a part of the memory of their argument, whatever that is.
constexpr std::string_view kViews[] = {
    "alias",        "as_strided",       "detach",  "expand",         "permute",      "select.int", "slice.Tensor",
    "split.Tensor", "split_with_sizes", "squeeze", "squeeze.dim",    "squeeze.dims", "t",          "transpose.int",
    "unbind.int",   "unsqueeze",        "view",    "_reshape_alias", "_unsafe_view",
};

// Have views come by, or not, in all threads; at first they do. Not while another thread includes the key: it would
// find what is being registered, and PyTorch takes that for an error of its own.
void show_views(bool on) {
  static auto &passing_by = *new std::vector<c10::RegistrationHandleRAII>;
  if (on) passing_by.clear();
  if (on || !passing_by.empty()) return;
  for (const std::string_view name : kViews) {
    const size_t dot = std::min(name.find('.'), name.size());
    const c10::OperatorName op("aten::" + std::string(name.substr(0, dot)),
                               std::string(name.substr(dot).substr(dot < name.size())));
    passing_by.push_back(c10::Dispatcher::singleton().registerImpl(op, kKey, c10::KernelFunction::makeFallthrough(),
                                                                   std::nullopt, nullptr, "the recorder of operators"));
  }
}

// For the rest of the process.
void install() {
  static bool done = false;
  if (done) return;
  auto &dispatcher = c10::Dispatcher::singleton();
  TORCH_CHECK(!dispatcher.hasBackendFallbackForDispatchKey(kKey), "the key ", kKey, " has a fallback already");
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<&intercept>();
  new c10::RegistrationHandleRAII(dispatcher.registerFallback(kKey, std::move(kernel), "the recorder of operators"));
  done = true;
}

}  // namespace
