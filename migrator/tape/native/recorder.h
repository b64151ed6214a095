// Makes one record at a time, of the thread that began it and of the backwards that it runs.
#pragma once

#include <ATen/core/stack.h>
#include <c10/core/GradMode.h>

#include <atomic>
#include <ctime>
#include <deque>
#include <mutex>

#include "search.h"

// Its header takes fifteen seconds to compile.
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}

namespace {

uint64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return uint64_t(time.tv_sec) * 1'000'000'000 + uint64_t(time.tv_nsec);
}

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
  uint64_t entered, before;
  uint32_t call;
};

class Recorder {
 public:
  static constexpr size_t kMostCalls = 1 << 20;

  std::atomic<bool> recording = false;
  std::atomic<uint32_t> module = 0;

  bool begin(bool with_states) {
    std::lock_guard lock(mutex_);
    if (recording) return false;
    record_ = std::make_unique<Record>();
    record_->calls.reserve(known_.size() + known_.size() / 8);
    record_->uses.reserve(uses_before_ + uses_before_ / 8);
    record_->thread = thread_ = this_thread();
    pending_.clear();
    record_->began = now();
    with_states_ = with_states;
    cursor_ = 0;
    module = 0;
    record_->number = ++number_;
    recording = true;
    return true;
  }

  std::unique_ptr<Record> end() {
    std::lock_guard lock(mutex_);
    if (!record_) return nullptr;
    recording = false;
    settle([](const Pending &) { return true; });
    auto record = std::move(record_);
    known_.clear();
    for (Call &call : record->calls) {
      if (!call.step) record->broken = "an operator was under way when it ended";
      known_.push_back(call.step);
    }
    uses_before_ = record->uses.size();
    record->structure = structure_of(*record);
    sweep();
    return record;
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
    open.entered = now();
    Scratch &scratch = scratch_of_thread();
    if (scratch.busy || !is_of_record()) return false;
    std::lock_guard lock(mutex_);
    if (!record_) return false;
    if (record_->calls.size() >= kMostCalls) {  // of a program that does something else than it did: to no end, perhaps
      record_->broken = "it has too many operators";
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
    } catch (...) {
      record_->broken = "an operator's arguments could not be read";
      return false;
    }
    scratch.busy = true;
    open.before = now();
    record_->calls[open.call].before = uint32_t(open.before - open.entered);
    return true;
  }

  void leave(const torch::jit::Stack &stack, const Open &open, bool raised) noexcept {
    const uint64_t ran = now();
    Scratch &scratch = scratch_of_thread();
    scratch.busy = false;
    std::lock_guard lock(mutex_);
    if (!record_ || number_ != open.record) return;
    try {
      note_outputs(scratch, stack, open, raised);
    } catch (...) {
      record_->broken = "an operator's results could not be read";
    }
    if (cursor_ < known_.size()) __builtin_prefetch(known_[cursor_].get());  // what is likely to come next
    Call &call = record_->calls[open.call];
    call.ran = ran - open.before;
    call.after = uint32_t(now() - ran);
  }

  // Which storage, in which state, a tensor that is saved has; none where it has none.
  std::optional<Use> saved(const at::Tensor &tensor) {
    std::lock_guard lock(mutex_);
    if (!record_ || !tensor.defined()) return std::nullopt;
    settle_own();
    Scratch &scratch = scratch_of_thread();
    if (scratch.busy) return std::nullopt;
    scratch.clear();
    c10::StorageImpl *storage = write_tensor(scratch, tensor);
    Use use{kNoStorage, kNoVersion, 0};
    if (storage) use = look(*tensor.unsafeGetTensorImpl(), storage, false);
    record_->saves.push_back(
        {uint32_t(record_->calls.size()), use, uint32_t(record_->save_words.size()), uint32_t(scratch.words.size())});
    record_->save_words.insert(record_->save_words.end(), scratch.words.begin(), scratch.words.end());
    return storage ? std::optional<Use>(use) : std::nullopt;
  }

  void position(int64_t number) {
    std::lock_guard lock(mutex_);
    if (record_) record_->marks.push_back({uint32_t(record_->calls.size()), number, now()});
  }

  // Somebody wrote what no operator has: into the storage of a tensor, or anywhere.
  void unseen(const at::Tensor *tensor) {
    std::lock_guard lock(mutex_);
    if (!record_) return;
    settle_own();
    const c10::StorageImpl *storage = tensor && tensor->defined() ? storage_of(*tensor) : nullptr;
    watches().was_written(storage);
    for (uint32_t index = 0; index < record_->storages.all().size(); ++index)
      if (!tensor || record_->storages[index].storage._unsafe_get_target() == storage) is_foreign(index);
  }

  // Values that somebody promises to have, of this record.
  std::unique_ptr<Stops> stops() {
    std::lock_guard lock(mutex_);
    auto made = std::make_unique<Stops>();
    made->record = record_ ? number_ : 0;
    return made;
  }

  // One more: a tensor as it is now.
  std::optional<Use> promise(Stops &stops, const at::Tensor &tensor) {
    std::lock_guard lock(mutex_);
    if (!record_ || stops.record != number_ || scratch_of_thread().busy) return std::nullopt;
    settle_own();
    c10::StorageImpl *storage = tensor.defined() ? storage_of(tensor) : nullptr;
    if (!storage) return std::nullopt;
    const Use use = look(*tensor.unsafeGetTensorImpl(), storage, false);
    stops.keys.put(key_of(use.storage, use.state), 0);
    return use;
  }

  // What makes tensors again as they are now. In the thread that records, and in its backwards.
  Search::Found closure(const std::vector<at::Tensor> &targets, const Stops *stops,
                        const std::vector<Relative> &relative) {
    const c10::impl::ExcludeDispatchKeyGuard guard(kAbove);
    std::lock_guard lock(mutex_);
    Scratch &scratch = scratch_of_thread();
    if (!record_ || scratch.busy || !is_of_record()) return Refused{"nothing is recorded here"};
    if (stops && stops->record != number_) return Refused{"what is promised is of another record"};
    settle_own();
    Search search(*record_, stops, [this](uint32_t storage) {
      return std::none_of(pending_.begin(), pending_.end(), [&](const auto &each) { return each.storage == storage; });
    });
    for (const at::Tensor &target : targets) {
      scratch.clear();
      c10::StorageImpl *storage = write_tensor(scratch, target);
      if (!search.wants(scratch.words)) return Refused{"it has no strides, or no bytes of its own"};
      search.add(look(*target.unsafeGetTensorImpl(), storage, false), scratch.words);
    }
    return search(relative);
  }

  // Of a record that is over: what is kept with steps is under this lock.
  template <typename Function>
  auto alone(Function &&function) {
    std::lock_guard lock(mutex_);
    return function();
  }

  const Effects &effects(const c10::OperatorHandle &op) {
    std::lock_guard lock(mutex_);
    return table_.of(op);
  }

  // How many steps are known, and the bytes that these take.
  std::pair<size_t, size_t> steps() {
    std::lock_guard lock(mutex_);
    size_t bytes = 0;
    for (const auto &[hash, step] : steps_)
      bytes += sizeof(Step) + 64 + step->words.capacity() * sizeof(uint64_t) +
               step->places.capacity() * sizeof(step->places[0]) + step->arguments.capacity() * sizeof(c10::IValue);
    return {steps_.size(), bytes};
  }

 private:
  // A version that is counted up once what we stand in the middle of is over.
  struct Pending {
    c10::VariableVersion version;
    uint32_t storage, call, thread;
    bool any;
  };

  // ------------------------------------------------------------------------------------- before it runs

  bool write_inputs(const c10::OperatorHandle &op, const torch::jit::Stack &stack, Scratch &scratch, Open &open) {
    if (!pending_.empty()) settle_own();
    const Step *likely = cursor_ < known_.size() ? known_[cursor_].get() : nullptr;
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
      Use use{kNoStorage, kNoVersion, 0};
      if (storage) {
        const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
        const bool written = effects.is_written(arguments, index);
        use = look(impl, storage, written && effects.counts_versions);
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
      uint32_t found = record_->storages.find(storage);
      if (found == Storages::kNone) found = add(storage, {}, kNoVersion, --record_->foreign);
      place(scratch, {found, kNoVersion, record_->storages[found].state}, index, element);
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
    call.step = find_step(scratch, effects, stack);
    call.begun = open.entered;
    call.stream = scratch.stream;
    call.inputs = uses;
    call.graph_task = torch::autograd::get_current_graph_task_id();
    call.module = module.load(std::memory_order_relaxed);
    call.thread = this_thread();
    call.waits = waits(scratch, effects, stack);
    if (effects.lifts) note_constant(stack, uses);
    call.grad = c10::GradMode::is_enabled();
    call.threads = threads();
    call.settings = settings();
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
    record_->drawn.push_back(state_of(generator, with_states_));
    record_->drawn.back().call = call;
    record_->drawn.back().by_default = !is_given;
  }

  void note_constant(const torch::jit::Stack &stack, uint32_t use) {
    constexpr size_t kMost = 256;  // bytes
    const at::Tensor &tensor = stack.back().toTensor();
    const c10::StorageImpl *storage = tensor.defined() && tensor.device().is_cpu() ? storage_of(tensor) : nullptr;
    if (!storage || storage->nbytes() > kMost || record_->uses[use].storage == kNoStorage) return;
    const auto *begin = static_cast<const char *>(storage->data());
    const auto &[index, version, state] = record_->uses[use];
    record_->constants[index] = {state, std::vector<char>(begin, begin + storage->nbytes())};
  }

  // ------------------------------------------------------------------------------------- after it ran

  void note_outputs(Scratch &scratch, const torch::jit::Stack &stack, const Open &open, bool raised) {
    const Effects &effects = *open.effects;
    Call &call = record_->calls[open.call];
    call.raised = raised;
    call.outputs = uint32_t(record_->uses.size());
    if (effects.writes) note_writes(scratch, effects, call, open.call, raised);
    if (!raised) {
      const c10::IValue *results = stack.data() + (stack.size() - effects.returns);
      for (size_t index = 0; index < effects.returns; ++index)
        write_output(scratch, effects, call, results[index], open);
    }
    call.outputs_count = uint32_t(record_->uses.size()) - call.outputs;
    finish_step(scratch, call);
  }

  void note_writes(Scratch &scratch, const Effects &effects, const Call &call, uint32_t number, bool raised) {
    for (size_t index = 0; index < scratch.places.size(); ++index) {
      const Use &use = record_->uses[call.inputs + index];
      if (!effects.is_written(call.step->arguments.data(), scratch.places[index].first) || use.storage == kNoStorage)
        continue;
      Stored &stored = record_->storages[use.storage];
      stored.state = raised ? --record_->foreign : int32_t(number);
      if (const auto alive = stored.storage.lock()) stored.nbytes = alive->nbytes();
    }
    for (auto &[version, storage] : scratch.written) {
      seen(storage, version) = version.current_version();
      pending_.push_back({std::move(version), storage, number, this_thread(), effects.counts_versions});
    }
    scratch.written.clear();
  }

  void write_output(Scratch &scratch, const Effects &effects, const Call &call, const c10::IValue &value,
                    const Open &open) {
    if (value.isTensor()) {
      const at::Tensor &tensor = value.toTensor();
      c10::StorageImpl *storage = write_tensor(scratch, tensor);
      Use use{kNoStorage, kNoVersion, 0};
      if (storage) use = made(*tensor.unsafeGetTensorImpl(), storage, scratch, effects, call, open.call);
      record_->uses.push_back(use);
    } else if (value.isList()) {
      const auto list = value.toListRef();
      scratch.words.push_back(head(kList, list.size()));
      for (const c10::IValue &each : list) write_output(scratch, effects, call, each, open);
    } else {
      scratch.words.push_back(head(kNothing));  // a number that was computed
    }
  }

  Use made(const c10::TensorImpl &impl, c10::StorageImpl *storage, const Scratch &scratch, const Effects &effects,
           const Call &call, uint32_t number) {
    const uint32_t index = record_->storages.find(storage), version = version_of(impl);
    if (index == Storages::kNone) {
      const uint32_t added = add(storage, impl.version_counter(), version, int32_t(number));
      return {added, version, int32_t(number)};
    }
    const Use *input = nullptr;
    for (size_t each = 0; each < scratch.places.size() && !input; ++each)
      if (record_->uses[call.inputs + each].storage == index) input = &record_->uses[call.inputs + each];
    Stored &stored = record_->storages[index];
    if (effects.moves_the_tensor && stored.nbytes != storage->nbytes()) {  // it was resized
      stored.nbytes = storage->nbytes();
      stored.state = int32_t(number);
    }
    if (effects.moves_the_tensor && impl.version_counter().enabled()) {
      seen(index, impl.version_counter()) = version;
      pending_.push_back({impl.version_counter(), index, number, this_thread(), false});
      return {index, version, stored.state};
    }
    // A view counts versions with its base, but not before we are through.
    if (input) return {index, input->version, stored.state};
    stored.state = int32_t(number);
    stored.nbytes = storage->nbytes();
    seen(index, impl.version_counter()) = version;
    return {index, version, stored.state};
  }

  // ------------------------------------------------------------------------------------- steps

  StepPointer find_step(Scratch &scratch, const Effects &effects, const torch::jit::Stack &stack) {
    const Words &words = scratch.words;
    const auto has_these = [&](const Step &step) {
      return step.inputs == words.size() && std::memcmp(step.words.data(), words.data(), words.size() * 8) == 0;
    };
    if (cursor_ < known_.size() && has_these(*known_[cursor_])) {
      ++record_->known;
      return known_[cursor_++];
    }
    const uint64_t hash = hash_of(words, words.size());
    const auto [first, last] = steps_.equal_range(hash);
    for (auto it = first; it != last; ++it) {
      if (!has_these(*it->second)) continue;
      constexpr size_t kAhead = 32;  // operators left out or put in, after which the rest is the same again
      for (size_t at = cursor_; at < std::min(cursor_ + kAhead, known_.size()); ++at)
        if (known_[at] == it->second) {
          cursor_ = at + 1;
          break;
        }
      return it->second;
    }
    auto step = std::make_shared<Step>();
    step->effects = &effects;
    step->name = scratch.name;
    step->inputs = words.size();
    step->words = words;
    step->places = scratch.places;
    step->whole = scratch.whole;
    step->arguments.reserve(effects.arguments);
    for (size_t index = 0; index < effects.arguments; ++index)
      step->arguments.push_back(without_tensors(stack[stack.size() - effects.arguments + index]));
    scratch.fresh = step;
    return step;
  }

  void finish_step(Scratch &scratch, Call &call) {
    const Words &words = scratch.words;
    if (!scratch.fresh) {
      if (call.step->words == words) return;
      // The same inputs, and other results.
      const auto [first, last] = steps_.equal_range(hash_of(words, call.step->inputs));
      for (auto it = first; it != last; ++it)
        if (it->second->words == words) {
          call.step = it->second;
          return;
        }
      scratch.fresh = std::make_shared<Step>(*call.step);
    }
    Step &step = *scratch.fresh;
    step.number = steps_made_++;
    step.words = words;
    step.words.shrink_to_fit();
    step.shape = shape_of(step);
    call.step = scratch.fresh;
    steps_.emplace(hash_of(words, step.inputs), std::move(scratch.fresh));
    scratch.fresh.reset();
  }

  // Forget steps that neither this record nor a tape has, once they are many.
  void sweep() {
    if (steps_.size() < 2 * swept_ + 1024) return;
    std::erase_if(steps_, [](const auto &each) { return each.second.use_count() == 1; });
    swept_ = steps_.size();
  }

  static uint64_t structure_of(const Record &record) {
    uint64_t hash = record.calls.size();
    for (size_t number = 0; number < record.calls.size(); ++number) {
      const Call &call = record.calls[number];
      if (!call.step) continue;
      hash = mix(hash, call.step->shape);
      for (size_t index = 0; index < call.step->places.size(); ++index) {
        const int32_t state = record.uses[call.inputs + index].state;
        hash = mix(hash, state >= 0 ? number - uint64_t(state) : 0);
      }
    }
    return hash;
  }

  // ------------------------------------------------------------------------------------- storages

  uint32_t add(c10::StorageImpl *storage, const c10::VariableVersion &counter, uint32_t version, int32_t state) {
    auto strong = c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(storage);
    return record_->storages.add({c10::weak_intrusive_ptr<c10::StorageImpl>(strong), Counter(counter), version, state,
                                  storage->nbytes(), false});
  }

  // The version that was seen last of one counter. A storage that is an alias of another has its own, which begins at
  // 0.
  uint32_t &seen(uint32_t index, const c10::VariableVersion &version) {
    const void *counter = counter_of(version);
    Stored &stored = record_->storages[index];
    if (stored.counter == counter) return stored.seen;
    stored.has_others = true;
    auto &others = record_->storages.others[index];
    for (Other &other : others)
      if (other.counter == counter) return other.seen;
    constexpr size_t kMost = 8;
    if (others.size() == kMost) others.erase(others.begin());
    others.push_back({Counter(version), 0});
    return others.back().seen;
  }

  int32_t is_foreign(uint32_t index) { return record_->storages[index].state = --record_->foreign; }

  // A tensor as an operator finds it. `counted_before`: its version has been counted up for that operator already.
  Use look(const c10::TensorImpl &impl, c10::StorageImpl *storage, bool counted_before) {
    const uint32_t version = version_of(impl);
    const c10::VariableVersion &counter = impl.version_counter();
    uint32_t index = record_->storages.find(storage);
    if (index == Storages::kNone) {
      index = add(storage, counter, version, --record_->foreign);
      return {index, version, record_->foreign};
    }
    if (version != kNoVersion && version != seen(index, counter)) {
      if (!pending_.empty()) settle([&](const Pending &each) { return each.storage == index; });
      uint32_t &before = seen(index, counter);
      if (version != before && !(counted_before && version == before + 1)) is_foreign(index);
      before = version;
    }
    Stored &stored = record_->storages[index];
    if (stored.nbytes != storage->nbytes()) {
      stored.nbytes = storage->nbytes();
      is_foreign(index);
    }
    return {index, version, stored.state};
  }

  template <typename Which>
  void settle(Which &&which) {
    for (size_t index = 0; index < pending_.size();) {
      Pending &pending = pending_[index];
      if (!which(pending)) {
        ++index;
        continue;
      }
      uint32_t &before = seen(pending.storage, pending.version);
      const uint32_t version = pending.version.current_version();
      if (version != before && version != before + 1 && !pending.any) is_foreign(pending.storage);
      before = version;
      const Call &call = record_->calls[pending.call];
      for (uint32_t each = 0; each < call.outputs_count; ++each) {
        Use &use = record_->uses[call.outputs + each];
        if (use.storage == pending.storage && use.version != kNoVersion) use.version = version;
      }
      pending = std::move(pending_.back());
      pending_.pop_back();
    }
  }

  void settle_own() {
    const uint32_t thread = this_thread();
    settle([&](const Pending &pending) { return pending.thread == thread; });
  }

  std::mutex mutex_;
  std::unique_ptr<Record> record_;
  std::atomic<uint32_t> thread_ = UINT32_MAX;
  uint64_t number_ = 0;
  bool with_states_ = false;
  Table table_;
  std::unordered_multimap<uint64_t, StepPointer> steps_;  // by what they are called with
  uint64_t steps_made_ = 0;
  size_t swept_ = 0;
  std::vector<StepPointer> known_;  // of the record before
  size_t cursor_ = 0, uses_before_ = 0;
  std::vector<Pending> pending_;
};

}  // namespace
