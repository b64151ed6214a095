// What an operator does besides making its outputs: what it writes, whether it draws random numbers, whether the host
// waits for it. Told from its schema and its tags, once, and kept with the operator.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace {

// When the host waits for the device, or reads what that has computed.
enum class Waits : uint8_t { kNever, kAlways, kIfMasked, kIfItCopiesBetweenDevices };

struct Effects {
  std::string name;  // "aten::add.Tensor"
  size_t arguments = 0, returns = 0;
  std::vector<bool> written;  // for each argument, whether the bytes of its tensors change
  bool writes = false;        // whether one of them is
  bool reads_copies = false;  // whether copies would do of the tensors that it only reads, and it reads them as a whole
  bool is_aten = false;       // PyTorch's own, which nobody takes away and defines anew
  bool random = false, collective = false;
  // Whether PyTorch's settings may change how it computes: not of views, nor of what takes each element by itself.
  bool heeds_settings = true;
  // A view of the kind that changes its own argument: the tensor lies elsewhere afterwards, and no byte has changed.
  bool moves_the_tensor = false;
  // Kernels of others may bump a version as often as they like.
  bool counts_versions = false;
  Waits waits = Waits::kNever;
  bool lifts = false;                     // makes a tensor of the program's of what Python's numbers became
  int non_blocking = -1, generator = -1;  // where these arguments are; -1: there is none
  int training = -1;                      // of those that write for no other reason

  // Whether the bytes of an argument's tensors change where it is called with these.
  bool is_written(const c10::IValue *given, size_t index) const {
    if (!written[index] || training < 0) return written[index];
    return !given[training].isBool() || given[training].toBool();
  }
};

template <size_t size>
bool is_among(std::string_view name, const std::string_view (&names)[size]) {
  return std::find(std::begin(names), std::end(names), name) != std::end(names);
}

bool begins_with_one_of(std::string_view name, const auto &prefixes) {
  return std::any_of(std::begin(prefixes), std::end(prefixes),
                     [&](std::string_view prefix) { return name.starts_with(prefix); });
}

// Their running statistics change where they train, and their schemas do not say so.
constexpr std::string_view kWritesStatistics[] = {"aten::native_batch_norm", "aten::cudnn_batch_norm",
                                                  "aten::miopen_batch_norm", "aten::_batch_norm_impl_index"};

// What their schemas say is written is not: it is looked at, or lent to a stream.
constexpr std::string_view kWritesNothing[] = {"aten::record_stream", "aten::rename_", "aten::_fw_primal"};

// That read on the host what was computed, and have no tag that says so.
constexpr std::string_view kReads[] = {"aten::_linalg_check_errors", "aten::_nested_tensor_storage_offsets"};

constexpr std::string_view kTakesMasks[] = {"aten::index", "aten::index_put", "aten::index_put_",
                                            "aten::_index_put_impl_", "aten::_unsafe_index"};

constexpr std::string_view kCopies[] = {"aten::copy_", "aten::_to_copy", "aten::_copy_from"};

// What weights are for, and casts of them: of what they are given these write `out` alone, return and hold on to
// nothing else, and look at no more of it than its elements. Others have exceptions to each of that which their schemas
// do not tell. Composite ones come by where there is inference mode.
constexpr std::string_view kReadsCopies[] = {
    "aten::mm", "aten::addmm", "aten::_addmm_activation", "aten::bmm", "aten::baddbmm", "aten::mv", "aten::addmv",
    "aten::matmul", "aten::linear", "aten::_int_mm", "aten::_scaled_mm", "aten::_grouped_mm",
    "aten::_scaled_grouped_mm", "aten::_weight_int8pack_mm", "aten::_weight_int4pack_mm", "aten::convolution",
    "aten::convolution_backward", "aten::convolution_overrideable", "aten::_convolution", "aten::conv1d",
    "aten::conv2d", "aten::conv3d", "aten::conv_transpose1d", "aten::conv_transpose2d", "aten::conv_transpose3d",
    "aten::_to_copy",
    // Version 0.50 was read for it. It launches them on the current stream.
    "bitsandbytes::gemm_4bit", "bitsandbytes::gemv_4bit", "bitsandbytes::dequantize_4bit",
    "bitsandbytes::dequantize_blockwise", "bitsandbytes::int8_scaled_mm", "bitsandbytes::int8_mixed_scaled_mm",
    "bitsandbytes::int8_linear_matmul"};

constexpr std::string_view kCollectives[] = {
    "c10d::", "_c10d_functional::", "_c10d_functional_autograd::", "c10d_functional::", "symm_mem::"};

// The schemas of collectives do not say what is written: all that is no input, and no version is counted up.
bool is_received(std::string_view base, const c10::Argument &argument) {
  return base.starts_with("c10d::") && base.ends_with("_") && !argument.name().starts_with("input") &&
         argument.type()->str().starts_with("Tensor") && !argument.type()->str().ends_with("?");
}

Effects effects_of(const c10::OperatorHandle &op) {
  const auto &schema = op.schema();
  const std::string base = schema.name();
  Effects effects;
  effects.name = schema.overload_name().empty() ? base : base + "." + schema.overload_name();
  effects.arguments = schema.arguments().size();
  effects.returns = schema.returns().size();
  effects.is_aten = base.starts_with("aten::");
  effects.counts_versions = !effects.is_aten;
  effects.collective = begins_with_one_of(base, kCollectives);
  effects.lifts = base == "aten::lift_fresh";
  effects.random = op.hasTag(at::Tag::nondeterministic_seeded);
  effects.moves_the_tensor = op.hasTag(at::Tag::inplace_view);
  const bool writes_nothing = effects.moves_the_tensor || is_among(base, kWritesNothing);
  const bool keeps_statistics = is_among(base, kWritesStatistics);
  effects.written.resize(effects.arguments);
  for (size_t index = 0; index < effects.arguments; ++index) {
    const auto &argument = schema.arguments()[index];
    const auto *alias = argument.alias_info();
    const bool is_statistics = keeps_statistics && argument.name().starts_with("running_");
    effects.written[index] =
        (alias && alias->isWrite() && !writes_nothing) || is_statistics || is_received(base, argument);
    effects.writes |= effects.written[index];
    if (keeps_statistics && argument.name() == "training") effects.training = int(index);
    if (argument.name() == "non_blocking") effects.non_blocking = int(index);
    if (argument.type()->str().find("Generator") != std::string::npos) effects.generator = int(index);
  }
  const auto &returns = schema.returns();
  const bool is_view = !returns.empty() && std::all_of(returns.begin(), returns.end(), [](const auto &each) {
    return each.alias_info() && !each.alias_info()->isWrite();
  });
  effects.heeds_settings = !(effects.is_aten && (is_view || op.hasTag(at::Tag::pointwise)));
  effects.reads_copies = is_among(base, kReadsCopies);
  effects.random |= effects.generator >= 0;
  if (is_among(base, kTakesMasks))
    effects.waits = Waits::kIfMasked;
  else if (is_among(base, kCopies))
    effects.waits = Waits::kIfItCopiesBetweenDevices;
  else if (op.hasTag(at::Tag::data_dependent_output) || op.hasTag(at::Tag::dynamic_output_shape) ||
           is_among(base, kReads))
    effects.waits = Waits::kAlways;
  return effects;
}

// Effects by operator. Used under the recorder's lock.
class Table {
 public:
  const Effects &of(const c10::OperatorHandle &op) {
    auto &known = known_[&op.operator_name()];
    if (!known || !holds(*known, op)) {
      if (known) outdated_.push_back(std::move(known));  // a record or a closure may still name it
      known = std::make_unique<Effects>(effects_of(op));
    }
    return *known;
  }

  // Whether they are still those of the operator that is at this address: a library of the program's may be gone, and
  // have been made anew.
  static bool holds(const Effects &effects, const c10::OperatorHandle &op) {
    if (effects.is_aten) return true;
    const auto &schema = op.schema();
    const std::string &base = schema.name(), &overload = schema.overload_name();
    const size_t size = base.size() + (overload.empty() ? 0 : overload.size() + 1);
    return effects.arguments == schema.arguments().size() && effects.returns == schema.returns().size() &&
           effects.name.size() == size && effects.name.starts_with(base) && effects.name.ends_with(overload);
  }

 private:
  std::unordered_map<const c10::OperatorName *, std::unique_ptr<Effects>> known_;
  std::vector<std::unique_ptr<Effects>> outdated_;
};

}  // namespace
