// Two devices in host memory. Each operation runs on the CPU, once all of its tensors are found on one device.

#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <cstring>

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr c10::DeviceIndex kCount = 2;
thread_local c10::DeviceIndex current = 0;
std::array<std::atomic<int64_t>, kCount> held, peak;

struct Block {
  void* data;
  int64_t size;
  c10::DeviceIndex device;
};

void release(void* context) {
  auto* block = static_cast<Block*>(context);
  held[block->device] -= block->size;
  std::free(block->data);
  delete block;
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    auto* block = new Block{std::malloc(size ? size : 1), static_cast<int64_t>(size), current};
    const int64_t now = held[current] += block->size;
    if (now > peak[current]) peak[current] = now;
    return {block->data, block, &release, c10::Device(kType, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t size) const override { std::memcpy(to, from, size); }
};

Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

struct Guard final : c10::impl::DeviceGuardImplInterface {
  Guard() = default;
  explicit Guard(c10::DeviceType) {}
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const auto before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < kCount, "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current = device.index();
  }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return getStream(stream.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kCount; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kCount; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex device) const override { Guard().setDevice({kType, device}); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    return Guard().exchangeDevice({kType, device}).index();
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchangeDevice(device); }
};

const bool hooked = [] {
  static Hooks hooks;
  at::RegisterPrivateUse1HooksInterface(&hooks);
  return true;
}();

at::Tensor empty(
    c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator, keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device> device, std::optional<bool>) {
  const c10::DeviceGuard guard(device.value_or(c10::Device(kType, current)));
  const c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator, keys, c10::dtype_or_default(dtype));
}

// The same memory, as a tensor of the CPU.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (tensor.is_cpu()) return tensor;
  auto same = at::from_blob(
      tensor.data_ptr(), tensor.sizes(), tensor.strides(), at::TensorOptions().dtype(tensor.dtype()));
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  if (to.numel()) on_cpu(to).copy_(on_cpu(from));
  return to;
}

const at::Tensor& resize(
    const at::Tensor& tensor, at::SymIntArrayRef size, std::optional<c10::MemoryFormat> format) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (tensor.sizes() == sizes) return tensor;  // with its strides
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto wanted =
      at::detail::computeStorageNbytesContiguous(sizes, tensor.dtype().itemsize(), tensor.storage_offset());
  if (wanted > storage->nbytes()) {
    const c10::DeviceGuard guard(tensor.device());
    auto data = allocator.allocate(wanted);
    std::memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(wanted);
  }
  tensor.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  if (format && *format != c10::MemoryFormat::Preserve) {
    tensor.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return tensor;
}

at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  resize(to, c10::fromIntArrayRefSlow(from.sizes()), std::nullopt);
  return copy_from(from, to, false);
}

// As on CUDA, numbers without dimensions and indices may be on the CPU, all else is on one device.
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<c10::Device> first;
  const auto check = [&](const at::Tensor& tensor, bool index) {
    if (!tensor.defined() || (tensor.is_cpu() && (index || tensor.dim() == 0))) return;
    if (!first) first = tensor.device();
    TORCH_CHECK(
        *first == tensor.device(), op.schema().name(), ": expected all tensors to be on the same device, found ",
        *first, " and ", tensor.device());
  };
  const auto name = op.schema().name();
  for (const auto& given : torch::jit::last(*stack, op.schema().arguments().size())) {
    if (given.isTensor()) {
      check(given.toTensor(), false);
    } else if (given.isTensorList()) {
      for (const auto& tensor : given.toTensorVector()) check(tensor, false);
    } else if (given.isOptionalTensorList()) {
      for (const auto& tensor : given.toOptionalTensorVector()) if (tensor) check(*tensor, true);
    } else if (given.isGenerator()) {
      TORCH_CHECK(!first, name, ": expected a generator of ", *first, ", found one of the CPU");
    }
  }
  TORCH_CHECK(name != "aten::linalg_lstsq" || !first, name, ": only the CPU has every driver of it");
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("resize_", TORCH_FN(resize));
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("view", TORCH_FN(at::native::view));
  m.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  m.impl("unfold", TORCH_FN(at::native::unfold));
  m.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  m.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
  KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
}

// The copy sees to a lazy conjugate itself; else that would be copied first, and so on.
TORCH_LIBRARY_IMPL(aten, Conjugate, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, m) { m.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  m.def("held", [](int device) { return held[device].load(); });
  m.def("peak", [](int device) { return peak[device].load(); });
}
