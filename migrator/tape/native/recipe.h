// How a step is called again: what goes where on the operator's stack, which of its values it reads and which it
// only writes, and whether it can be. Told from the step once, and kept with it.
#pragma once

#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

#include "forms.h"

namespace {

// Whether dimensions, each a stride and a size, have no gaps, and nothing twice; the innermost one's stride is to be
// `unit`.
bool is_dense(std::vector<std::pair<int64_t, int64_t>> dims, int64_t unit) {
  std::sort(dims.begin(), dims.end());
  for (const auto &[stride, size] : dims) {
    if (size == 0) return true;
    if (size == 1) continue;
    if (stride != unit) return false;
    unit *= size;
  }
  return true;
}

// A tensor's form, where a step has it.
struct Form {
  const uint64_t *at;

  Code code() const { return Code(uint8_t(*at)); }
  c10::ScalarType type() const { return c10::ScalarType(uint8_t(*at >> 8)); }
  c10::Device device() const {
    return c10::Device(c10::DeviceType(int8_t(*at >> 16)), c10::DeviceIndex(int8_t(*at >> 24)));
  }
  size_t dims() const { return *at >> 32 & 0xFFFF; }
  uint64_t bits() const { return *at >> 48; }
  uint64_t offset() const { return at[1]; }  // in bytes
  uint64_t nbytes() const { return at[2]; }  // of the storage
  c10::IntArrayRef sizes() const { return {reinterpret_cast<const int64_t *>(at + 3), dims()}; }
  c10::IntArrayRef strides() const { return {reinterpret_cast<const int64_t *>(at + 3) + dims(), dims()}; }

  // The bytes of the storage from its first element to its last one's end.
  std::pair<uint64_t, uint64_t> span() const {
    uint64_t last = 0;
    for (size_t dim = 0; dim < dims(); ++dim) {
      if (sizes()[dim] == 0) return {offset(), offset()};
      last += uint64_t(sizes()[dim] - 1) * uint64_t(strides()[dim]);
    }
    return {offset(), offset() + (last + 1) * c10::elementSize(type())};
  }

  // Whether it has every byte of its span, and each once.
  bool is_dense() const {
    std::vector<std::pair<int64_t, int64_t>> all;
    for (size_t dim = 0; dim < dims(); ++dim) all.emplace_back(strides()[dim], sizes()[dim]);
    return ::is_dense(std::move(all), 1);
  }

  // Whether a tensor can be put on memory again: it is not quantized, has bytes, and does not lie across its elements.
  bool can_be_made() const {
    return !c10::isQIntType(type()) && !device().is_meta() && offset() % c10::elementSize(type()) == 0;
  }

  bool is_all_of_its_storage() const { return span() == std::pair<uint64_t, uint64_t>(0, nbytes()) && is_dense(); }
};

enum class Access : uint8_t {
  kReads,
  kUpdates,     // reads it, and writes it
  kOverwrites,  // all of the tensor's bytes, and reads none
  kCovers,      // all of the storage's bytes, and reads none
  kIgnores,     // nothing else depends on what is there
};

// That write all bytes of the first argument, whatever is there.
constexpr std::string_view kOverwritesSelf[] = {"aten::copy_",       "aten::fill_",        "aten::zero_",
                                                "aten::normal_",     "aten::uniform_",     "aten::bernoulli_",
                                                "aten::log_normal_", "aten::random_",      "aten::cauchy_",
                                                "aten::geometric_",  "aten::exponential_", "aten::_foreach_copy_"};

// Where they train, they read running statistics for nothing but to change them.
constexpr std::string_view kNormalizes[] = {"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                            "aten::miopen_batch_norm", "aten::_native_batch_norm_legit",
                                            "aten::_batch_norm_with_update"};

constexpr std::string_view kMakesEmpty[] = {"aten::empty", "aten::new_empty"};

// Results that are made, and of which some bytes are never written: room for others, seeds that nobody drew.
struct Partly {
  std::string_view base;
  uint32_t results;  // a bit for each
  bool if_no_dropout;
};

constexpr Partly kPartlyWritten[] = {
    {"aten::mkldnn_rnn_layer", 1u << 3, false},
    {"aten::_cudnn_rnn", 1u << 3, false},
    {"aten::cudnn_batch_norm", 1u << 3, false},
    {"aten::_batch_norm_with_update", 1u << 3, false},
    {"aten::_scaled_dot_product_flash_attention", 1u << 7 | 1u << 8, false},
    {"aten::_scaled_dot_product_flash_attention", 1u << 6, true},
    {"aten::_scaled_dot_product_cudnn_attention", 1u << 8, false},
    {"aten::_scaled_dot_product_cudnn_attention", 1u << 6 | 1u << 7, true},
    {"aten::_scaled_dot_product_efficient_attention", 1u << 2 | 1u << 3, true},
    {"aten::_flash_attention_forward", 1u << 3 | 1u << 4, false},
    {"aten::_flash_attention_forward", 1u << 2, true},
    {"aten::_efficient_attention_forward", 1u << 2 | 1u << 3, true},
};

// What they compute depends on what no argument says.
constexpr std::string_view kHidden[] = {"aten::_cudnn_init_dropout_state", "aten::from_file", "aten::_cudnn_ctc_loss",
                                        "aten::_fused_dropout", "aten::miopen_rnn"};

// The recipe of a step, as the step's words, its arguments and its operator's schema have it.
struct Recipe {
  struct Input {
    uint32_t word;  // where its form is
    uint16_t argument;
    Access access;
    bool stored, written;
    at::Tensor number;  // what is no tensor of the program's, if it is that
  };

  struct Output {
    uint32_t word;
    uint16_t result;
    int32_t element;
    bool stored, unset;
  };

  struct Argument {
    enum Kind : uint8_t { kConstant, kValue, kList, kOptionalList } kind = kConstant;
    std::vector<int32_t> inputs;  // their numbers; -1: None
  };

  std::optional<c10::OperatorHandle> op;
  bool can_run = true;  // as far as is known
  std::vector<Argument> arguments;
  std::vector<Input> inputs;
  std::vector<Output> outputs;
  c10::Device device{c10::DeviceType::CPU};
  bool random = false, writes = false;

  explicit Recipe(const Step &step) {
    op = c10::Dispatcher::singleton().findSchema(*step.name);
    can_run = is_told_by_its_arguments(step);
    if (!can_run) return;
    const auto &base = op->schema().name();
    random = step.effects->random;
    dropout_ = number_of(step, "dropout_p");
    if (dropout_ == 0.0 && base.find("attention") != std::string::npos) random = false;
    read_inputs(step);
    if (can_run) read_outputs(step);
  }

 private:
  std::optional<double> dropout_;

  // Whether what it does follows from its arguments, and those were kept.
  bool is_told_by_its_arguments(const Step &step) const {
    const auto &effects = *step.effects;
    if (!op || !effects.is_aten || effects.collective || !step.whole || effects.moves_the_tensor) return false;
    const std::string &base = op->schema().name();
    const bool drops_by_itself = base == "aten::_cudnn_rnn" && number_of(step, "dropout").value_or(0) != 0;
    return !is_among(base, kHidden) && !drops_by_itself;
  }

  const c10::IValue *constant(const Step &step, std::string_view name) const {
    const auto &arguments = op->schema().arguments();
    for (size_t index = 0; index < arguments.size(); ++index)
      if (arguments[index].name() == name) return &step.arguments[index];
    return nullptr;
  }

  std::optional<double> number_of(const Step &step, std::string_view name) const {
    const c10::IValue *value = constant(step, name);
    return value && value->isDouble() ? std::optional(value->toDouble()) : std::nullopt;
  }

  bool is_true(const Step &step, std::string_view name) const {
    const c10::IValue *value = constant(step, name);
    return value && value->isBool() && value->toBool();
  }

  // ------------------------------------------------------------------------------------- inputs

  void read_inputs(const Step &step) {
    size_t word = 1;
    for (size_t index = 0; index < step.effects->arguments; ++index) {
      Argument &argument = arguments.emplace_back();
      const auto code = Code(uint8_t(step.words[word]));
      if (code == kList) {
        read_list(step, argument, uint16_t(index), word);
      } else if (code >= kTensor) {
        argument.kind = Argument::kValue;
        argument.inputs.push_back(read_input(step, uint16_t(index), word));
      } else if (code != kNothing && step.arguments[index].isNone()) {
        can_run = false;  // it cannot be kept
      }
      word += 1 + follows(step.words, word);
    }
    can_run = can_run && inputs.size() == step.places.size();  // else its arguments are too deep
  }

  // Leaves `word` at the last of its elements.
  void read_list(const Step &step, Argument &argument, uint16_t index, size_t &word) {
    const size_t count = step.words[word] >> 8;
    bool has_tensors = false, has_others = false;
    for (size_t each = 0; each < count; ++each) {
      word += 1 + follows(step.words, word);
      const auto code = Code(uint8_t(step.words[word]));
      if (code == kList) can_run = false;  // too deep
      if (!can_run) return;
      has_others |= code != kNothing && code < kTensor;
      has_tensors |= code >= kTensor;
      argument.inputs.push_back(code >= kTensor ? read_input(step, index, word) : -1);
    }
    if (!has_tensors && !step.arguments[index].isNone()) return;  // it is there, as it was
    const auto [is_list, of_optional] = kind_of(op->schema().arguments()[index].type());
    if (has_others || !is_list) can_run = false;  // it cannot be kept
    argument.kind = of_optional ? Argument::kOptionalList : Argument::kList;
  }

  // Whether it is a list of tensors, and whether some of these may be missing.
  static std::pair<bool, bool> kind_of(c10::TypePtr type) {
    if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    const auto list = type->cast<c10::ListType>();
    if (!list) return {false, false};
    const auto optional = list->getElementType()->cast<c10::OptionalType>();
    const auto element = optional ? optional->getElementType() : list->getElementType();
    return {element->isSubtypeOf(*c10::TensorType::get()), bool(optional)};
  }

  int32_t read_input(const Step &step, uint16_t index, size_t word) {
    const Form form{&step.words[word]};
    Input input{uint32_t(word),
                index,
                Access::kReads,
                form.code() == kTensor,
                step.effects->is_written(step.arguments.data(), index),
                {}};
    if (form.code() == kOpaque || form.code() == kShapeless) can_run = false;  // it has no strides
    if (form.code() == kNumber) {
      input.number = at::empty({}, c10::TensorOptions(form.type()));
      std::memcpy(input.number.mutable_data_ptr(), form.at + 1, c10::elementSize(form.type()));
      input.number.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    if (input.written && !input.stored && form.code() != kUndefined) can_run = false;  // it wrote to a number
    if (input.stored) {
      note(form);
      if (input.written) input.access = access(step, index, form);
    }
    writes |= input.stored && input.written;
    inputs.push_back(input);
    return int32_t(inputs.size()) - 1;
  }

  void note(const Form &form) {
    if (!form.can_be_made()) can_run = false;
    if (!form.device().is_cpu() && device.is_cpu()) device = form.device();
  }

  Access access(const Step &step, uint16_t index, const Form &form) const {
    const auto &schema = op->schema();
    const auto &argument = schema.arguments()[index];
    if (is_among(schema.name(), kNormalizes) && argument.name().starts_with("running_") &&
        (is_true(step, "training") || schema.name() == "aten::_batch_norm_with_update"))
      return Access::kIgnores;
    const bool is_noise = schema.name().starts_with("aten::rrelu_with_noise") && argument.name() == "noise";
    const bool is_self = index == 0 && is_among(schema.name(), kOverwritesSelf);
    if (!argument.is_out() && !is_self && !(is_noise && is_true(step, "training"))) return Access::kUpdates;
    return form.is_all_of_its_storage() ? Access::kCovers : Access::kOverwrites;
  }

  // ------------------------------------------------------------------------------------- outputs

  void read_outputs(const Step &step) {
    size_t word = step.inputs;
    const bool makes_empty = begins_with_one_of(op->schema().name(), kMakesEmpty);
    uint32_t unset = 0;
    for (const Partly &each : kPartlyWritten)
      if (op->schema().name() == each.base && (!each.if_no_dropout || dropout_.value_or(0) == 0)) unset |= each.results;
    for (size_t result = 0; result < step.effects->returns && word < step.words.size(); ++result) {
      const bool is_unset = makes_empty || (unset >> result & 1);
      if (Code(uint8_t(step.words[word])) == kList) {
        const size_t count = step.words[word] >> 8;
        for (size_t each = 0; each < count; ++each) {
          word += 1 + follows(step.words, word);
          read_output(step, word, uint16_t(result), int32_t(each), is_unset);
        }
      } else {
        read_output(step, word, uint16_t(result), -1, is_unset);
      }
      word += 1 + follows(step.words, word);
    }
  }

  void read_output(const Step &step, size_t word, uint16_t result, int32_t element, bool unset) {
    const Form form{&step.words[word]};
    if (form.code() < kTensor) return;                                         // a number that was computed
    if (form.code() == kOpaque || form.code() == kShapeless) can_run = false;  // it has no strides
    const bool stored = form.code() == kTensor;
    if (stored) note(form);
    outputs.push_back({uint32_t(word), result, element, stored, unset});
  }
};

// Under the recorder's lock; below whatever may stand in front of the backends.
const Recipe &recipe_of(const Step &step) {
  if (!step.recipe) step.recipe = std::make_shared<const Recipe>(step);
  return *step.recipe;
}

}  // namespace
