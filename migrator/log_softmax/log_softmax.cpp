// Log-softmax's backward, before PyTorch's own kernel, which does the work in any case: with the gradient's own memory
// for what it makes, if nobody else has that gradient; and as it would have been called, if anybody may.
//
// PyTorch's kernels add up a row of the gradient, and then write where they have just read, number by number: with one
// memory for both they make the same bits. That nobody else has it is told as autograd tells it where it adds up
// gradients in place: there is one reference, that of the node whose backward this is. An object of Python's is one
// more, and stays for as long as the tensor: where a hook has seen this very one, it is left alone, whatever that did.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_log_softmax_backward_data.h>
#include <ATen/ops/empty.h>
#include <c10/util/strides.h>
#include <torch/csrc/autograd/function.h>
#include <torch/library.h>

#include <array>
#include <atomic>
#include <optional>
#include <string>

namespace {

constexpr auto kOperation = "aten::_log_softmax_backward_data";
constexpr auto kNode = "LogSoftmaxBackward0";
constexpr size_t kLeast = 1 << 20;  // bytes of a gradient that are worth a look

std::atomic<bool> on = false;
std::atomic<uint64_t> written_over = 0;

// PyTorch's slot for the object in Python has had two forms.
template <typename Slot>
bool is_taken(const Slot &slot) {
  if constexpr (requires { slot.load_pyobj(); }) {
    return slot.load_pyobj() != nullptr;
  } else {
    return slot._unchecked_untagged_pyobj() != nullptr;
  }
}

// A weak reference counts, too: those to storages are how CUDA graphs know whose memory is whose.
bool has_one_owner(const at::Tensor &grad) {
  const auto &storage = grad.storage();
  return grad.use_count() == 1 && grad.weak_use_count() == 1 && storage.use_count() == 1 &&
         storage.getWeakStorageImpl().weak_use_count() == 2 &&  // all owners together, and this very one
         !is_taken(*grad.unsafeGetTensorImpl()->pyobj_slot()) &&
         !is_taken(*storage.unsafeGetStorageImpl()->pyobj_slot());
}

// Whether autograd's node calls, with nothing to differentiate later. Others may need it once more after the call.
bool is_called_by_its_node() {
  const auto node = torch::autograd::get_current_node();
  return node && node->name() == kNode && !c10::GradMode::is_enabled();
}

bool may_write_over(const at::Tensor &grad, at::ScalarType type) {
  return on && grad.nbytes() >= kLeast && has_one_owner(grad) && grad.scalar_type() == type &&
         grad.storage().nbytes() == grad.nbytes() && grad.storage().resizable() &&  // else it is another library's
         grad.strides() == c10::IntArrayRef(c10::contiguous_strides(grad.sizes())) && is_called_by_its_node();
}

// What stood there before, for one kind of device.
struct Kernel {
  c10::OperatorHandle operation;
  c10::SafeKernelFunction plain;
  torch::Library registration;
};

// Never taken away again, not even at the end: other threads may be calling them.
auto &kernels = *new std::array<std::optional<Kernel>, 2>;

template <size_t index>
at::Tensor backward(c10::DispatchKeySet keys, const at::Tensor &grad, const at::Tensor &output, int64_t dim,
                    at::ScalarType type) {
  if (may_write_over(grad, type)) {
    // Another tensor over the same memory: what autograd knows of one is no matter of the other's.
    auto made = at::empty({0}, grad.options());
    made.set_(grad.storage(), 0, grad.sizes(), grad.strides());
    at::_log_softmax_backward_data_out(made, grad, output, dim, type);
    ++written_over;
    return made;
  }
  torch::jit::Stack stack{grad, output, dim, type};
  kernels[index]->plain.callBoxed(kernels[index]->operation, keys, &stack);
  return std::move(stack.front()).toTensor();
}

// Only before PyTorch's own: another one wants to be called with every gradient, and may be gone tomorrow.
template <size_t index>
bool put(c10::DispatchKey key) {
  if (kernels[index]) return true;
  auto operation = c10::Dispatcher::singleton().findSchemaOrThrow(kOperation, "");
  auto plain = operation.getComputedKernelForDispatchKey(key);
  if (plain.debug().find(index ? "RegisterCUDA" : "RegisterCPU") == std::string::npos) return false;
  kernels[index].emplace(operation, std::move(plain),
                         torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__));
  // That it takes the place of another is no news to anybody.
  struct : c10::WarningHandler {
    void process(const c10::Warning &) override {}
  } nothing;
  c10::WarningUtils::WarningHandlerGuard guard(&nothing);
  try {
    kernels[index]->registration.impl(kOperation, torch::dispatch(key, TORCH_FN(backward<index>)));
  } catch (...) {
    kernels[index].reset();
    throw;
  }
  return true;
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// From now on; for tensors of the host, or on CUDA. Whether it could.
EXPORT bool tls_install(bool cuda) {
  try {
    on = cuda ? put<1>(c10::DispatchKey::CUDA) : put<0>(c10::DispatchKey::CPU);
  } catch (const std::exception &) {
    on = false;
  }
  return on;
}

EXPORT void tls_uninstall() { on = false; }

// How many gradients were written over so far.
EXPORT uint64_t tls_written_over() { return written_over; }
