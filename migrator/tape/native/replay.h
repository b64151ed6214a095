// Runs a closure: its operators, one after the other, below all that stands in front of the backends.
#pragma once

#include <c10/core/DeviceGuard.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>

#include "closure.h"
#include "key.h"
#include "substitutes.h"

namespace {

// What came out, or would have, is not what it was.
struct Differs : std::exception {
  explicit Differs(std::string of) : text(std::move(of)) {}
  const char *what() const noexcept override { return text.c_str(); }
  std::string text;
};

at::Tensor tensor_on(const Buffer &buffer, const Form &form) {
  const size_t itemsize = c10::elementSize(form.type());
  const uint64_t offset = buffer.base + form.offset();
  if (offset % itemsize) throw Differs("what it is made of lies across its elements");
  const auto key = c10::computeDispatchKey(form.type(), c10::kStrided, form.device());
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage), c10::DispatchKeySet(key),
                                                               c10::scalarTypeToTypeMeta(form.type()));
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(form.sizes(), form.strides(), int64_t(offset / itemsize));
  if (form.bits() & 1) tensor._set_conj(true);
  if (form.bits() & 2) tensor._set_neg(true);
  return tensor;
}

// A generator for one operator: it is given ours, if it takes one, or finds the device's own where that was.
class Draws {
 public:
  // Puts ours on the stack, or what the default one is to be in it. That is swapped only while an operator runs that
  // takes no other: whoever draws from it in another thread meanwhile draws what the operator would have.
  Draws(const Drawn &drawn, const Called &call, torch::jit::Stack &stack) : drawn_(drawn) {
    const c10::Device device(c10::DeviceType(drawn.device_type), drawn.device_index);
    default_ = at::globalContext().defaultGenerator(device);
    const int at = call.step->effects->generator;
    if (at >= 0) {
      at::Generator ours;
      {
        std::lock_guard<std::mutex> lock(default_.mutex());
        ours = default_.clone();
      }
      set(ours);
      stack[size_t(at)] = ours;
      default_ = at::Generator();
      return;
    }
    std::lock_guard<std::mutex> lock(default_.mutex());
    if (device.is_cpu()) {
      before_.state = default_.get_state();
    } else {
      before_.seed = default_.current_seed();
      before_.offset = default_.get_offset();
    }
    set(default_);
  }

  Draws(const Draws &) = delete;
  Draws &operator=(const Draws &) = delete;

  ~Draws() {
    if (!default_.defined()) return;
    std::lock_guard<std::mutex> lock(default_.mutex());
    if (before_.state.defined()) {
      default_.set_state(before_.state);
    } else {
      default_.set_current_seed(before_.seed);
      default_.set_offset(before_.offset);
    }
  }

 private:
  void set(at::Generator &generator) const {
    if (drawn_.state.defined()) {
      generator.set_state(drawn_.state);
    } else {
      generator.set_current_seed(drawn_.seed);  // sets the offset to 0
      generator.set_offset(drawn_.offset);
    }
  }

  const Drawn &drawn_;
  at::Generator default_;
  Drawn before_;
};

// One run. The lock of the interpreter is not needed, and not held.
class Replay {
 public:
  // `leaves`: a buffer each, in the order of the closure's.
  Replay(const Closure &closure, std::vector<Buffer> leaves) : closure_(closure), buffers_(size_t(closure.slots)) {
    for (size_t leaf = 0; leaf < leaves.size(); ++leaf)
      buffers_[size_t(closure.leaf_slots[leaf])] = std::move(leaves[leaf]);
  }

  std::vector<at::Tensor> operator()() {
    std::optional<c10::InferenceMode> normal;  // what it makes may be saved
    if (c10::InferenceMode::is_enabled()) normal.emplace(false);
    const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
    const c10::AutoGradMode as_it_was(c10::GradMode::is_enabled());
    const c10::OptionalDeviceGuard device(closure_.device.is_cpu() ? std::nullopt : std::optional(closure_.device));
    if (const Guard *of = closure_.device.is_cpu() ? nullptr : guard_of(closure_.device))
      if (is_capturing(*of, of->getStream(closure_.device))) throw Differs("the stream is being captured");
    if (settings() != closure_.settings) throw Differs("PyTorch's settings are others than they were");
    const AsTheHostDid host(closure_.threads);
    for (const Called &call : closure_.calls) run(call);
    std::vector<at::Tensor> results;
    for (const Target &target : closure_.targets) {
      const Form form{&closure_.words[target.words]};
      const Buffer &buffer = buffers_[size_t(target.slot)];
      if (buffer.nbytes != form.nbytes()) throw Differs("a result has a storage of another size");
      results.push_back(tensor_on(buffer, form));
    }
    return results;
  }

 private:
  [[noreturn]] static void differ(const Called &call, const std::string &what) {
    throw Differs(call.step->effects->name + ": " + what);
  }

  void run(const Called &call) {
    prepare(call);
    push(call);
    {
      std::optional<Draws> draws;
      if (call.drawn >= 0) draws.emplace(closure_.drawn[size_t(call.drawn)], call, stack_);
      c10::GradMode::set_enabled(call.grad);
      ArgumentSwap swap(*call.step->effects, stack_);
      call.recipe->op->callBoxed(stack_);
      swap.settle();
    }
    take(call);
    stack_.clear();
    for (uint32_t each = 0; each < call.freed_count; ++each)
      buffers_[size_t(closure_.freed[call.freed + each])] = Buffer();
  }

  void prepare(const Called &call) {
    for (uint32_t each = 0; each < call.fresh_count; ++each) {
      const Fresh &of = closure_.fresh[call.fresh + each];
      buffers_[size_t(of.slot)] = fresh(of.nbytes, of.device);
    }
    for (uint32_t each = 0; each < call.writes_count; ++each) {
      const Write &write = closure_.writes[call.writes + each];
      Buffer &from = buffers_[size_t(write.from)], &to = buffers_[size_t(write.to)];
      if (write.copies) {
        to = fresh(from.nbytes, from.storage.device());
        if (from.nbytes) bytes_of(to).copy_(bytes_of(from), /*non_blocking=*/true);
      } else {
        to = std::move(from);
      }
    }
  }

  at::Tensor input(const Called &call, int32_t number) const {
    const Recipe::Input &of = call.recipe->inputs[size_t(number)];
    if (!of.stored) return of.number;
    const Form form{&call.step->words[of.word]};
    const Buffer &buffer = buffers_[size_t(closure_.wires[call.inputs + size_t(number)])];
    if (buffer.nbytes != form.nbytes()) differ(call, "it would be given a storage of another size");
    return tensor_on(buffer, form);
  }

  void push(const Called &call) {
    const Recipe &recipe = *call.recipe;
    for (size_t index = 0; index < recipe.arguments.size(); ++index) {
      const Recipe::Argument &argument = recipe.arguments[index];
      switch (argument.kind) {
        case Recipe::Argument::kConstant:
          stack_.push_back(call.step->arguments[index]);
          break;
        case Recipe::Argument::kValue:
          stack_.emplace_back(input(call, argument.inputs[0]));
          break;
        case Recipe::Argument::kList: {
          c10::List<at::Tensor> list;
          for (const int32_t number : argument.inputs) list.push_back(input(call, number));
          stack_.emplace_back(std::move(list));
          break;
        }
        case Recipe::Argument::kOptionalList: {
          c10::List<std::optional<at::Tensor>> list;
          for (const int32_t number : argument.inputs)
            list.push_back(number < 0 ? std::nullopt : std::optional(input(call, number)));
          stack_.emplace_back(std::move(list));
          break;
        }
      }
    }
  }

  // ------------------------------------------------------------------------------------- after it ran

  void take(const Called &call) {
    const Recipe &recipe = *call.recipe;
    if (stack_.size() != call.step->effects->returns) differ(call, "it returned another number of results");
    for (size_t each = 0; each < recipe.outputs.size(); ++each) {
      const Recipe::Output &of = recipe.outputs[each];
      const at::Tensor &result = result_of(call, of);
      const Form form{&call.step->words[of.word]};
      if (form.code() == kUndefined && result.defined()) differ(call, "it returned what it did not return before");
      if (!of.stored) continue;
      c10::StorageImpl *storage = result.defined() ? storage_of(result) : nullptr;
      if (!storage) differ(call, "it returned no tensor");
      const int32_t slot = closure_.wires[call.outputs + each];
      Buffer &buffer = buffers_[size_t(slot)];
      const bool is_new = !buffer.storage;
      if (is_new) {
        if (is_on_input(call, storage)) differ(call, "it returned a view");
        buffer = {result.storage(), 0, storage->nbytes()};
      } else {
        if (buffer.storage.unsafeGetStorageImpl() != storage) differ(call, "it returned no view");
        if (buffer.base == 0) buffer.nbytes = storage->nbytes();
      }
      compare(call, form, result, buffer);
    }
  }

  const at::Tensor &result_of(const Called &call, const Recipe::Output &of) {
    const c10::IValue &value = stack_[of.result];
    if (of.element < 0) {
      if (!value.isTensor()) differ(call, "it returned no tensor");
      return value.toTensor();
    }
    if (!value.isList() || value.toListRef().size() <= size_t(of.element)) differ(call, "it returned fewer tensors");
    const c10::IValue &element = value.toListRef()[size_t(of.element)];
    if (!element.isTensor()) differ(call, "it returned no tensor");
    return element.toTensor();
  }

  bool is_on_input(const Called &call, const c10::StorageImpl *storage) const {
    for (size_t input = 0; input < call.recipe->inputs.size(); ++input) {
      const int32_t slot = closure_.wires[call.inputs + input];
      if (slot >= 0 && buffers_[size_t(slot)].storage.unsafeGetStorageImpl() == storage) return true;
    }
    return false;
  }

  void compare(const Called &call, const Form &form, const at::Tensor &result, const Buffer &buffer) const {
    const c10::TensorImpl &impl = *result.unsafeGetTensorImpl();
    if (impl.layout() != c10::kStrided || impl.has_symbolic_sizes_strides()) differ(call, "it returned no strides");
    if (c10::typeMetaToScalarType(impl.dtype()) != form.type()) differ(call, "its result is of another type");
    if (impl.device() != form.device()) differ(call, "its result is on another device");
    if (impl.sizes() != form.sizes()) differ(call, "its result has another shape");
    if (impl.strides() != form.strides()) differ(call, "its result has other strides");
    if (uint64_t(impl.storage_offset()) * impl.itemsize() != buffer.base + form.offset())
      differ(call, "its result lies elsewhere in its storage");
    if (buffer.nbytes != form.nbytes()) differ(call, "its result has a storage of another size");
    if (result.is_conj() != bool(form.bits() & 1) || result.is_neg() != bool(form.bits() & 2))
      differ(call, "its result is to be read otherwise");
  }

  const Closure &closure_;
  std::vector<Buffer> buffers_;
  torch::jit::Stack stack_;
};

}  // namespace
