// Memory that a replay works in.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/TensorOptions.h>

namespace {

// Some memory, of which a value is a part: a storage, or the bytes in one that a leaf was brought to.
struct Buffer {
  c10::Storage storage;
  uint64_t base = 0, nbytes = 0;
};

at::Tensor bytes_of(const Buffer &buffer) {
  const c10::Device device = buffer.storage.device();
  const auto key = c10::computeDispatchKey(at::kByte, c10::kStrided, device);
  at::Tensor tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(buffer.storage), c10::DispatchKeySet(key),
                                                               c10::scalarTypeToTypeMeta(at::kByte));
  const int64_t size = int64_t(buffer.nbytes), stride = 1;
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides({&size, 1}, {&stride, 1}, int64_t(buffer.base));
  return tensor;
}

Buffer fresh(uint64_t nbytes, c10::Device device) {
  const at::Tensor tensor = at::empty({int64_t(nbytes)}, c10::TensorOptions(at::kByte).device(device));
  return {tensor.storage(), 0, nbytes};
}

}  // namespace
