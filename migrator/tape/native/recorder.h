// Makes one record at a time, of the thread that began it and of the backwards that it runs.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <mutex>

#include "search.h"
#include "states.h"
#include "steps.h"

// Its header takes fifteen seconds to compile.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace {

uint32_t this_thread() {
  static std::atomic<uint32_t> count = 0;
  static thread_local const uint32_t number = count++;
  return number;
}

Scratch &scratch_of_thread() {
  static thread_local Scratch scratch;
  return scratch;
}

// A call under way.
struct Open {
  const Effects *effects;
  uint64_t record;  // its number
  uint32_t call;
};

class Recorder {
 public:
  static constexpr size_t kMostCalls = 1 << 20;

  std::atomic<bool> recording = false;

  bool begin() {
    std::lock_guard lock(mutex_);
    if (recording) return false;
    record_ = std::make_unique<Record>();
    record_->calls.reserve(steps_.before() + steps_.before() / 8);
    record_->uses.reserve(uses_before_ + uses_before_ / 8);
    thread_ = this_thread();
    states_.begin(*record_);
    steps_.begin();
    ++number_;
    recording = true;
    return true;
  }

  void end() {
    std::unique_ptr<Record> ended;  // destroyed once the lock is released
    std::lock_guard lock(mutex_);
    if (!record_) return;
    recording = false;
    ended = std::move(record_);
    states_.end();
    steps_.end(ended->calls);
    uses_before_ = ended->uses.size();
  }

  // The operators so far, each with the shapes of what it returned; none where nothing is recorded, or not truly.
  using Listed = std::vector<std::pair<std::string, std::vector<std::vector<int64_t>>>>;
  std::optional<Listed> listed() {
    std::lock_guard lock(mutex_);
    if (!record_ || record_->is_broken) return std::nullopt;
    Listed all;
    for (const Call &call : record_->calls) {
      const Words &words = call.step->words;
      auto &shapes = all.emplace_back(call.step->effects->name, Listed::value_type::second_type()).second;
      for (size_t word = call.step->inputs; word < words.size(); word += 1 + follows(words, word)) {
        const Form form{&words[word]};
        if (form.code() == kTensor) shapes.push_back(form.sizes().vec());
      }
    }
    return all;
  }

  bool is_of_this_thread() const { return recording && thread_ == this_thread(); }

  // In a fork nobody else is there, and whoever had the lock is not.
  void forked() {
    recording = false;
    new (&mutex_) std::mutex;
    watches().forked();
    (void)record_.release();
  }

  bool is_of_record() const { return this_thread() == thread_ || torch::autograd::get_current_graph_task_id() != -1; }

  // Whether the call is recorded.
  bool enter(const c10::OperatorHandle &op, const torch::jit::Stack &stack, Open &open) noexcept {
    Scratch &scratch = scratch_of_thread();
    if (scratch.busy || !is_of_record()) return false;
    std::lock_guard lock(mutex_);
    if (!record_) return false;
    if (record_->calls.size() >= kMostCalls) {  // of a program that does something else than it did: to no end, perhaps
      record_->is_broken = true;
      recording = false;
      return false;
    }
    scratch.clear();
    const size_t uses = record_->uses.size();
    try {
      if (!write_inputs(op, stack, scratch, open)) {
        record_->uses.resize(uses);
        return false;
      }
      note_call(scratch, stack, open, uint32_t(uses));
    } catch (...) {  // its arguments could not be read
      record_->is_broken = true;
      return false;
    }
    scratch.busy = true;
    return true;
  }

  void leave(const torch::jit::Stack &stack, const Open &open, bool raised) noexcept {
    Scratch &scratch = scratch_of_thread();
    scratch.busy = false;
    std::lock_guard lock(mutex_);
    if (!record_) return;
    // A backward that raises in one thread returns while its other threads are still in an operator: what one of an
    // earlier record has written is nowhere.
    if (number_ != open.record) {
      record_->is_broken = true;
      return;
    }
    try {
      note_outputs(scratch, stack, open, raised);
    } catch (...) {  // its results could not be read
      record_->is_broken = true;
    }
    __builtin_prefetch(steps_.likely());
  }

  // Something that is not recorded wrote into a storage.
  void unseen(const c10::StorageImpl *storage) {
    std::lock_guard lock(mutex_);
    if (!record_) return;
    states_.settle_of(this_thread());
    watches().was_written(storage);
    if (const uint32_t index = record_->storages.find(storage); index != Storages::kNone)
      states_.was_written_unseen(index);
  }

  // Values that somebody promises to have, of this record; none yet.
  Stops stops() {
    std::lock_guard lock(mutex_);
    Stops made;
    made.record = record_ ? number_ : 0;
    return made;
  }

  // One more: a tensor as it is now.
  std::optional<Use> promise(Stops &stops, const at::Tensor &tensor) {
    std::lock_guard lock(mutex_);
    if (!record_ || stops.record != number_ || scratch_of_thread().busy) return std::nullopt;
    states_.settle_of(this_thread());
    c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
    if (!storage) return std::nullopt;
    const Use use = states_.look(tensor, storage);
    stops.keys.put(key_of(use.storage, use.state), 0);
    return use;
  }

  // What makes a tensor again as it is now; null if there is no such thing. In the thread that records, and in its
  // backwards.
  std::unique_ptr<Closure> closure(const at::Tensor &target, const Stops &stops) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
    std::lock_guard lock(mutex_);
    Scratch &scratch = scratch_of_thread();
    if (!record_ || record_->is_broken || scratch.busy || !is_of_record() || stops.record != number_) return nullptr;
    states_.settle_of(this_thread());
    scratch.clear();
    c10::StorageImpl *storage = write_tensor(scratch, target);
    if (!Search::wants(scratch.words)) return nullptr;
    return Search(*record_, states_, stops, states_.look(target, storage), scratch.words)();
  }

  const Effects &effects(const c10::OperatorHandle &op) {
    std::lock_guard lock(mutex_);
    return table_.of(op);
  }

 private:
  // ------------------------------------------------------------------------------------- before it runs

  bool write_inputs(const c10::OperatorHandle &op, const torch::jit::Stack &stack, Scratch &scratch, Open &open) {
    states_.settle_of(this_thread());
    const Step *likely = steps_.likely();
    open.effects = likely && likely->name == &op.operator_name() && Table::holds(*likely->effects, op) ? likely->effects
                                                                                                       : &table_.of(op);
    const Effects &effects = *open.effects;
    scratch.words.push_back(uint64_t(uintptr_t(&effects)));
    scratch.name = &op.operator_name();
    const c10::IValue *arguments = stack.data() + (stack.size() - effects.arguments);
    for (size_t index = 0; index < effects.arguments; ++index)
      write_input(scratch, effects, arguments, arguments[index], uint16_t(index), -1);
    return !scratch.meta && runs_now(scratch);
  }

  // Whether the device is to run it now, and not to capture it.
  static bool runs_now(Scratch &scratch) {
    const Guard *guard = scratch.device.is_cpu() ? nullptr : guard_of(scratch.device);
    if (!guard) return true;
    const c10::Stream stream = guard->getStream(scratch.device.has_index() ? scratch.device : guard->getDevice());
    scratch.stream = stream.id();
    return !is_capturing(*guard, stream);
  }

  void write_input(Scratch &scratch, const Effects &effects, const c10::IValue *arguments, const c10::IValue &value,
                   uint16_t index, int32_t element) {
    if (value.isTensor()) {
      const at::Tensor &tensor = value.toTensor();
      c10::StorageImpl *storage = write_tensor(scratch, tensor);
      const bool written = storage && effects.is_written(arguments, index);
      const Use use = states_.look(tensor, storage, written && effects.counts_versions);
      if (storage) {
        const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
        if (written && impl.version_counter().enabled())
          scratch.written.push_back({impl.version_counter(), use.storage});
        if (element >= 0) {
          const auto type = c10::typeMetaToScalarType(impl.dtype());
          scratch.masked |= type == at::ScalarType::Bool || type == at::ScalarType::Byte;
        }
      }
      place(scratch, use, index, element);
    } else if (value.isStorage()) {
      c10::StorageImpl *storage = value.toStorage().unsafeGetStorageImpl();
      scratch.words.push_back(head(kOpaque));
      place(scratch, states_.look(storage), index, element);
    } else {
      int32_t count = 0;
      write_other(scratch, value, [&](const c10::IValue &each) {
        write_input(scratch, effects, arguments, each, index, element >= 0 ? element : count);
        ++count;
      });
    }
  }

  void place(Scratch &scratch, const Use &use, uint16_t index, int32_t element) {
    scratch.places.emplace_back(index, element);
    record_->uses.push_back(use);
  }

  void note_call(Scratch &scratch, const torch::jit::Stack &stack, Open &open, uint32_t uses) {
    const Effects &effects = *open.effects;
    Call call;
    open.call = uint32_t(record_->calls.size());
    open.record = number_;
    if (effects.random) note_random(scratch, effects, stack, open.call);
    call.step = steps_.find(scratch, effects, stack);
    call.stream = scratch.stream;
    call.inputs = uses;
    call.thread = this_thread();
    call.waits = waits(scratch, effects, stack);
    if (effects.lifts) note_constant(stack, uses);
    call.grad = c10::GradMode::is_enabled();
    call.threads = threads();
    if (effects.heeds_settings) call.settings = settings();  // to ask takes as long as half of the rest
    record_->calls.push_back(std::move(call));
  }

  static const c10::IValue *argument(const Effects &effects, const torch::jit::Stack &stack, int index) {
    return index < 0 ? nullptr : &stack[stack.size() - effects.arguments + size_t(index)];
  }

  static bool waits(const Scratch &scratch, const Effects &effects, const torch::jit::Stack &stack) {
    switch (effects.waits) {
      case Waits::kNever:
        return false;
      case Waits::kAlways:
        return true;
      case Waits::kIfMasked:
        return scratch.masked;
      case Waits::kIfItCopiesBetweenDevices: {
        const c10::IValue *non_blocking = argument(effects, stack, effects.non_blocking);
        const bool blocks = !non_blocking || !non_blocking->isBool() || !non_blocking->toBool();
        return blocks && (scratch.device_types & (scratch.device_types - 1)) != 0;
      }
    }
    return false;
  }

  void note_random(const Scratch &scratch, const Effects &effects, const torch::jit::Stack &stack, uint32_t call) {
    const c10::IValue *given = argument(effects, stack, effects.generator);
    const bool is_given = given && given->isGenerator();
    c10::Device device = scratch.device;
    if (!is_given && !device.is_cpu() && !device.has_index())
      if (const Guard *guard = guard_of(device)) device = guard->getDevice();
    const at::Generator generator = is_given ? given->toGenerator() : at::globalContext().defaultGenerator(device);
    record_->drawn.push_back(state_of(generator));
    record_->drawn.back().call = call;
  }

  void note_constant(const torch::jit::Stack &stack, uint32_t use) {
    constexpr size_t kMost = 256;  // bytes
    const at::Tensor &tensor = stack.back().toTensor();
    const c10::StorageImpl *storage = tensor.defined() && tensor.device().is_cpu() ? storage_of(tensor) : nullptr;
    if (!storage || storage->nbytes() > kMost || record_->uses[use].storage == kNoStorage) return;
    const auto *begin = static_cast<const char *>(storage->data());
    const auto &[index, state] = record_->uses[use];
    record_->constants[index] = {state, std::vector<char>(begin, begin + storage->nbytes())};
  }

  // ------------------------------------------------------------------------------------- after it ran

  void note_outputs(Scratch &scratch, const torch::jit::Stack &stack, const Open &open, bool raised) {
    const Effects &effects = *open.effects;
    Call &call = record_->calls[open.call];
    call.outputs = uint32_t(record_->uses.size());
    if (effects.writes) states_.note_writes(scratch, call, open.call, raised);
    if (!raised) {
      const c10::IValue *results = stack.data() + (stack.size() - effects.returns);
      for (size_t index = 0; index < effects.returns; ++index) write_output(scratch, call, results[index], open);
    }
    steps_.finish(scratch, call);
  }

  void write_output(Scratch &scratch, const Call &call, const c10::IValue &value, const Open &open) {
    if (value.isTensor()) {
      const at::Tensor &tensor = value.toTensor();
      c10::StorageImpl *storage = write_tensor(scratch, tensor);
      record_->uses.push_back(states_.made(tensor, storage, scratch, call, open.call));
    } else if (value.isList()) {
      const auto list = value.toListRef();
      scratch.words.push_back(head(kList, list.size()));
      for (const c10::IValue &each : list) write_output(scratch, call, each, open);
    } else {
      scratch.words.push_back(head(kNothing));  // a number that was computed
    }
  }

  std::mutex mutex_;
  std::unique_ptr<Record> record_;
  std::atomic<uint32_t> thread_ = UINT32_MAX;
  uint64_t number_ = 0;
  Table table_;
  States states_;
  Steps steps_;
  size_t uses_before_ = 0;
};

}  // namespace
