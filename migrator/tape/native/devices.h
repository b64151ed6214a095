// What is asked of a device, and of PyTorch's settings, while an operator is recorded, by the interfaces that do
// without the device's headers: the stream that it runs on, whether that is captured into a graph, and where its random
// numbers are.
#pragma once

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include <mutex>

namespace {

using Guard = c10::impl::DeviceGuardImplInterface;

const Guard *guard_of(c10::Device device) {
  return c10::impl::device_guard_impl_registry[size_t(device.type())].load();
}

// torch 2.11 has no way to ask this of any device: the symbols of CUDA's own are looked up. They are there, if a CUDA
// stream is.
struct Captures {
  using Native = void *(*)(const c10::Stream *);  // c10::cuda::CUDAStream::stream, which holds nothing but a stream
  using Ask = int (*)(void *, int *);             // cudaStreamIsCapturing
  Native native = nullptr;
  Ask ask = nullptr;

  Captures() {
    for (const char *library : {"libc10_cuda.so", "libc10_hip.so"})
      if (void *handle = dlopen(library, RTLD_LAZY | RTLD_NOLOAD)) {
        native = reinterpret_cast<Native>(dlsym(handle, "_ZNK3c104cuda10CUDAStream6streamEv"));
        ask = reinterpret_cast<Ask>(dlsym(handle, "cudaStreamIsCapturing"));  // of what it was linked to
        if (native && ask) return;
      }
  }

  // Where it cannot be told, it may be: what is captured must not be taken for what ran.
  bool operator()(const c10::Stream &stream) const {
    int status = 0;
    return !native || !ask || ask(native(&stream), &status) != 0 || status != 0;
  }
};

template <typename Interface>
bool is_capturing(const Interface &guard, const c10::Stream &stream) {
  if (stream.id() == 0) return false;  // nobody may capture the default stream
  if constexpr (requires { guard.isStreamCapturing(stream); }) {
    return guard.isStreamCapturing(stream);
  } else {
    static const Captures captures;
    return stream.device_type() == c10::DeviceType::CUDA && captures(stream);
  }
}

// How exactly float32 is computed with: others in each version of PyTorch. Where we cannot ask for it without more ado,
// it is not among the settings.
template <typename Precision, typename Context, typename Backend, typename Operation>
uint32_t precision_of(const Context &context, Precision (Context::*ask)(Backend, Operation) const) {
  if constexpr (std::is_enum_v<Precision> && std::is_enum_v<Backend> && std::is_enum_v<Operation>) {
    uint32_t all = 0;
    for (int backend = 1; backend <= 2; ++backend)          // CUDA, oneDNN
      for (int operation = 1; operation <= 3; ++operation)  // convolutions, recurrent layers, products
        all = all << 3 | uint32_t((context.*ask)(Backend(backend), Operation(operation)));
    return all;
  } else {
    return 0;
  }
}

// Of those settings that change which kernels run, or how: equal, if they are the same.
uint32_t settings() {
  const auto &context = at::globalContext();
  uint32_t all = precision_of(context, &at::Context::float32Precision);
  for (const bool each : {context.userEnabledCuDNN(), context.userEnabledMkldnn(), context.benchmarkCuDNN(),
                          context.deterministicCuDNN(), context.deterministicMkldnn(),
                          context.deterministicAlgorithms(), context.deterministicFillUninitializedMemory()})
    all = all << 1 | uint32_t(each);
  return all;
}

// How the host computes: sums depend on how many threads make them, and a bit tells whether tiny numbers are zero. It
// is another matter in each thread of the host.
constexpr uint8_t kFlushes = 128;

uint8_t threads() {
  auto all = uint8_t(std::min(at::get_num_threads(), kFlushes - 1));
#if defined(__x86_64__)
  if (_mm_getcsr() & 0x8040) all |= kFlushes;  // flush to zero, denormals are zeros
#endif
  return all;
}

// Has the host compute as it did, for as long as this lives.
class AsTheHostDid {
 public:
  explicit AsTheHostDid(uint8_t was) : before_(threads()) { change(before_, now_ = was ? was : before_); }
  ~AsTheHostDid() { change(now_, before_); }
  AsTheHostDid(const AsTheHostDid &) = delete;
  AsTheHostDid &operator=(const AsTheHostDid &) = delete;

 private:
  static void change(uint8_t from, uint8_t to) {
    const uint8_t differ = from ^ to;
    if (differ & ~kFlushes) at::set_num_threads(to & ~kFlushes);
    if (differ & kFlushes) at::globalContext().setFlushDenormal(to & kFlushes);
  }

  uint8_t before_, now_;
};

// Where a generator is before an operator draws from it.
struct Drawn {
  uint32_t call = 0;
  int8_t device_type = 0, device_index = -1;
  uint64_t seed = 0, offset = 0;
  at::Tensor state;  // of a generator on the host, whose seed and offset do not tell where it is
};

Drawn state_of(const at::Generator &generator) {
  Drawn drawn;
  const c10::Device device = generator.device();
  drawn.device_type = int8_t(device.type());
  drawn.device_index = device.index();
  at::Generator &own = const_cast<at::Generator &>(generator);
  std::lock_guard<std::mutex> lock(own.mutex());
  drawn.seed = own.current_seed();
  if (device.is_cpu()) {
    drawn.state = own.get_state();
  } else {
    drawn.offset = own.get_offset();
  }
  return drawn;
}

}  // namespace
