// What an operator is called with, as words that can be compared and hashed at once; see `Code`.
#pragma once

#include "record.h"

namespace {

// What one call is made of while it runs; each thread has its own.
struct Scratch {
  struct Version {
    c10::VariableVersion version;  // not the tensor: what counts its versions
    uint32_t storage;
  };

  Words words;
  std::vector<std::pair<uint16_t, int32_t>> places;
  std::vector<Version> written;
  std::shared_ptr<Step> fresh;  // where no step was the same
  const c10::OperatorName *name = nullptr;
  int64_t stream = 0;
  c10::Device device{c10::DeviceType::CPU};
  uint32_t device_types = 0;
  bool masked = false, meta = false, whole = true;
  bool busy = false;

  void clear() {
    words.clear();
    places.clear();
    written.clear();
    fresh.reset();
    stream = 0;
    device = c10::Device(c10::DeviceType::CPU);
    device_types = 0;
    masked = meta = false;
    whole = true;
  }

  void sees(c10::Device seen) {
    device_types |= 1u << uint32_t(seen.type());
    if (device.is_cpu()) device = seen;
    meta |= seen.type() == c10::DeviceType::Meta;
  }
};

uint64_t bits_of(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

uint64_t head(Code code, uint64_t rest = 0) { return uint64_t(code) | rest << 8; }

uint64_t head(Code code, const c10::TensorImpl &impl, c10::Device device) {
  const auto type = uint64_t(c10::typeMetaToScalarType(impl.dtype()));
  const auto keys = impl.key_set();
  const uint64_t bits = uint64_t(keys.has(c10::DispatchKey::Conjugate)) | uint64_t(keys.has(c10::DispatchKey::Negative))
                                                                              << 1;
  return head(code,
              type | uint64_t(uint8_t(device.type())) << 8 | uint64_t(uint8_t(device.index())) << 16 | bits << 40);
}

bool is_number_alone(const at::Tensor &tensor) {
  const auto &impl = *tensor.unsafeGetTensorImpl();
  return impl.is_wrapped_number() && impl.dim() == 0 && impl.device().is_cpu();
}

// A number in a tensor's clothes; it has no memory that anybody could find again.
void write_number(Scratch &scratch, const at::Tensor &tensor) {
  const auto &impl = *tensor.unsafeGetTensorImpl();
  uint64_t value[2] = {0, 0};
  std::memcpy(value, impl.data(), std::min<size_t>(impl.itemsize(), sizeof value));
  scratch.words.push_back(head(kNumber, impl, c10::Device(c10::DeviceType::CPU)));
  scratch.words.insert(scratch.words.end(), value, value + 2);
}

// Returns the storage, if it has one.
c10::StorageImpl *write_tensor(Scratch &scratch, const at::Tensor &tensor) {
  Words &words = scratch.words;
  if (!tensor.defined()) {
    words.push_back(head(kUndefined));
    return nullptr;
  }
  const c10::TensorImpl &impl = *tensor.unsafeGetTensorImpl();
  c10::StorageImpl *storage = storage_of(tensor);
  if (!storage) {
    words.push_back(head(kShapeless));
    return nullptr;
  }
  if (is_number_alone(tensor)) {
    write_number(scratch, tensor);
    return nullptr;
  }
  const c10::Device device = impl.device();
  scratch.sees(device);
  if (impl.has_symbolic_sizes_strides() || impl.key_set().has(c10::DispatchKey::NestedTensor)) {
    words.push_back(head(kOpaque, impl, device));
    return storage;
  }
  const auto sizes = impl.sizes(), strides = impl.strides();
  const size_t begin = words.size();
  words.resize(begin + 3 + 2 * sizes.size());
  uint64_t *word = &words[begin];
  *word++ = head(kTensor, impl, device) | uint64_t(sizes.size()) << 32;
  *word++ = uint64_t(impl.storage_offset()) * impl.itemsize();
  *word++ = storage->nbytes();
  std::copy(strides.begin(), strides.end(), std::copy(sizes.begin(), sizes.end(), word));
  return storage;
}

// Anything but a tensor; lists go through `element`, for what is in them.
template <typename Element>
void write_other(Scratch &scratch, const c10::IValue &value, Element &&element) {
  Words &words = scratch.words;
  if (value.isNone()) {
    words.push_back(head(kNothing));
  } else if (value.isInt()) {
    words.insert(words.end(), {head(kInt), uint64_t(value.toInt())});
  } else if (value.isDouble()) {
    words.insert(words.end(), {head(kDouble), bits_of(value.toDouble())});
  } else if (value.isBool()) {
    words.push_back(head(kBool, value.toBool()));
  } else if (value.isList()) {
    const auto list = value.toListRef();
    words.push_back(head(kList, list.size()));
    for (const c10::IValue &each : list) element(each);
  } else if (value.isComplexDouble()) {
    const auto number = value.toComplexDouble();
    words.insert(words.end(), {head(kComplex), bits_of(number.real()), bits_of(number.imag())});
  } else if (value.isString()) {
    const auto text = value.toStringView();
    words.push_back(head(kString, text.size()));
    const size_t begin = words.size();
    words.resize(begin + (text.size() + 7) / 8);
    if (!text.empty()) std::memcpy(&words[begin], text.data(), text.size());
  } else if (value.isDevice()) {
    const c10::Device device = value.toDevice();
    scratch.sees(device);
    words.push_back(head(kDevice, uint64_t(uint8_t(device.type())) | uint64_t(uint8_t(device.index())) << 8));
  } else if (value.isStream()) {
    const c10::Stream stream = value.toStream();
    words.insert(words.end(), {head(kStream, uint64_t(uint8_t(stream.device_index()))), uint64_t(stream.id())});
  } else if (value.isGenerator()) {
    words.insert(words.end(), {head(kGenerator), uint64_t(uintptr_t(value.toGenerator().unsafeGetGeneratorImpl()))});
  } else {
    const bool counted = value.isPtrType() && !value.isSymInt() && !value.isSymFloat() && !value.isSymBool();
    words.insert(words.end(), {head(kObject), counted ? uint64_t(uintptr_t(value.internalToPointer())) : 0});
    scratch.whole = false;
  }
}

c10::IValue number_of(const at::Tensor &tensor) {
  const void *data = tensor.unsafeGetTensorImpl()->data();
  switch (tensor.scalar_type()) {
    case at::ScalarType::Double:
      return *static_cast<const double *>(data);
    case at::ScalarType::Long:
      return *static_cast<const int64_t *>(data);
    case at::ScalarType::Bool:
      return *static_cast<const bool *>(data);
    case at::ScalarType::ComplexDouble:
      return *static_cast<const c10::complex<double> *>(data);
    default:
      return {};
  }
}

// What of an argument may be kept: all but tensors, and what may hold them.
c10::IValue without_tensors(const c10::IValue &value) {
  if (value.isTensor()) {
    const at::Tensor &tensor = value.toTensor();
    const bool is_number = tensor.defined() && storage_of(tensor) && is_number_alone(tensor);
    return is_number ? number_of(tensor) : c10::IValue();
  }
  if (value.isNone() || value.isInt() || value.isDouble() || value.isBool() || value.isComplexDouble() ||
      value.isString() || value.isDevice() || value.isStream() || value.isGenerator())
    return value;
  if (!value.isList()) return {};
  for (const c10::IValue &each : value.toListRef())
    if (!each.isInt() && !each.isDouble() && !each.isBool() && !each.isString()) return {};
  return value;
}

uint64_t mix(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9E3779B97F4A7C15ull;
  return hash ^ hash >> 29;
}

uint64_t hash_of(const Words &words, size_t count) {
  uint64_t hash = count;
  for (size_t index = 0; index < count; ++index) hash = mix(hash, words[index]);
  return hash;
}

// How many words follow the one at `index`, those of a list's elements not among them.
size_t follows(const Words &words, size_t index) {
  const uint64_t word = words[index];
  switch (Code(uint8_t(word))) {
    case kInt:
    case kDouble:
    case kStream:
    case kGenerator:
    case kObject:
      return 1;
    case kComplex:
    case kNumber:
      return 2;
    case kString:
      return ((word >> 8) + 7) / 8;
    case kTensor:
      return 2 + 2 * size_t(word >> 32 & 0xFFFF);
    default:
      return 0;
  }
}

}  // namespace
