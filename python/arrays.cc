// python/arrays.cc: see arrays.h.
#include "python/arrays.h"

#include <algorithm>
#include <cstring>

#include "python/dlpack_abi.h"

namespace livequant::python {
namespace {

constexpr ValueType kTypes[] = {{"float32", "f", kDlFloat, 4},
                                {"float16", "e", kDlFloat, 2},
                                {"bfloat16", "H", kDlBfloat, 2},
                                {"uint8", "B", kDlUInt, 1}};

std::vector<int64_t> DenseStrides(const std::vector<int64_t>& shape) {
  std::vector<int64_t> strides(shape.size());
  int64_t step = 1;
  for (size_t i = shape.size(); i-- > 0; step *= shape[i]) strides[i] = step;
  return strides;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "[";
  for (size_t i = 0; i < shape.size(); ++i) text += (i == 0 ? "" : ", ") + std::to_string(shape[i]);
  return text + "]";
}

// The tensor of an object's capsule, which is ours from here on.
std::shared_ptr<DlManagedTensor> TakeDlpack(const py::object& object, const char* name) {
  const py::object capsule = object.attr("__dlpack__")();
  if (PyCapsule_IsValid(capsule.ptr(), kDlCapsule) == 0)
    Refuse(std::string(name) + ": __dlpack__() gave no capsule of a tensor");
  auto* tensor = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), kDlCapsule));
  if (PyCapsule_SetName(capsule.ptr(), kDlUsedCapsule) != 0) throw py::error_already_set();
  std::shared_ptr<DlManagedTensor> owned(tensor, [](DlManagedTensor* t) {
    if (t->deleter != nullptr) t->deleter(t);
  });
  const DlTensor& t = tensor->tensor;
  if (t.device.type != kDlCpu && t.device.type != kDlCudaHost)
    Refuse(std::string(name) + " lies on DLPack device type " + std::to_string(t.device.type) +
           "; host memory (1 or 3) is read");
  if (t.dtype.lanes != 1) Refuse(std::string(name) + " has " + std::to_string(t.dtype.lanes) + " lanes; 1 is read");
  return owned;
}

const ValueType* TypeOfDlpack(const DlDataType& dtype) {
  for (const ValueType& type : kTypes)
    if (type.dl_code == dtype.code && type.bytes * 8 == dtype.bits) return &type;
  return nullptr;
}

std::string DlName(const DlDataType& dtype) {
  if (const ValueType* type = TypeOfDlpack(dtype)) return type->name;
  return "DLPack type " + std::to_string(dtype.code) + " of " + std::to_string(dtype.bits) + " bits";
}

// Shape and strides (in bytes) as rows. An axis of one value, or an array without values, may have any stride.
void LayRows(const std::vector<int64_t>& shape, const std::vector<int64_t>& strides, const char* name, RowsView* out) {
  if (shape.size() != 2 && shape.size() != 3)
    Refuse(std::string(name) + " has shape " + ShapeText(shape) +
           "; [rows, width] or [rows, heads, head_dim] is needed");
  const auto value_bytes = static_cast<int64_t>(sizeof(float));
  out->rows = shape[0];
  out->width = 1;
  for (size_t axis = shape.size(); axis-- > 1; out->width *= shape[axis])
    if (shape[axis] > 1 && strides[axis] != out->width * value_bytes)
      Refuse(std::string(name) + ": the values of a row lie apart (axis " + std::to_string(axis) + " has a stride of " +
             std::to_string(strides[axis]) + " bytes); only rows may have gaps between them: copy it first");
  out->stride = out->width;
  if (out->rows > 1) {
    if (strides[0] % value_bytes != 0 || strides[0] < out->width * value_bytes)
      Refuse(std::string(name) + ": rows lie at a stride of " + std::to_string(strides[0]) + " bytes; a row has " +
             std::to_string(out->width * value_bytes));
    out->stride = strides[0] / value_bytes;
  }
}

}  // namespace

const ValueType& TypeOf(lq_dtype dtype) { return kTypes[dtype]; }

int64_t Array::size() const {
  int64_t n = 1;
  for (const int64_t s : shape_) n *= s;
  return n;
}

Array Array::Of(lq_dtype dtype, std::vector<int64_t> shape, std::vector<std::byte> bytes) {
  Array a;
  auto owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
  a.type_ = &TypeOf(dtype);
  a.shape_ = std::move(shape);
  a.strides_ = DenseStrides(a.shape_);
  a.data_ = owner->data();
  a.owner_ = std::move(owner);
  return a;
}

Array Array::Make(lq_dtype dtype, std::vector<int64_t> shape) {
  int64_t n = TypeOf(dtype).bytes;
  for (const int64_t s : shape) n *= s;
  return Of(dtype, std::move(shape), std::vector<std::byte>(static_cast<size_t>(n)));
}

Array Array::FromDlpack(const py::object& object) {
  const std::shared_ptr<DlManagedTensor> tensor = TakeDlpack(object, "the tensor");
  const DlTensor& t = tensor->tensor;
  Array a;
  a.type_ = TypeOfDlpack(t.dtype);
  if (a.type_ == nullptr)
    throw lq::Error(LQ_UNSUPPORTED,
                    "the tensor is " + DlName(t.dtype) + "; float32, float16, bfloat16 and uint8 are read");
  a.shape_.assign(t.shape, t.shape + t.ndim);
  a.strides_ = DenseStrides(a.shape_);
  if (t.strides != nullptr) {
    const std::vector<int64_t> dense = a.strides_;
    a.strides_.assign(t.strides, t.strides + t.ndim);
    for (size_t i = 0; i < a.shape_.size(); ++i) a.dense_ = a.dense_ && (a.shape_[i] == 1 || a.strides_[i] == dense[i]);
  }
  a.data_ = static_cast<std::byte*>(t.data) + t.byte_offset;
  a.owner_ = tensor;
  return a;
}

py::buffer_info Array::Buffer() const {
  std::vector<py::ssize_t> strides;
  for (const int64_t s : strides_) strides.push_back(s * type_->bytes);
  static std::byte nowhere[1];  // an array without values still needs an address
  return {data_ != nullptr ? data_ : nowhere,
          type_->bytes,
          type_->format,
          static_cast<py::ssize_t>(shape_.size()),
          std::vector<py::ssize_t>(shape_.begin(), shape_.end()),
          strides};
}

py::capsule Array::Dlpack(bool copy) const {
  if (copy) {
    if (!dense_) Refuse("copy=True of an array with gaps");
    std::vector<std::byte> bytes(data_, data_ + size() * type_->bytes);
    Array other = *this;
    auto owner = std::make_shared<std::vector<std::byte>>(std::move(bytes));
    other.data_ = owner->data();
    other.owner_ = std::move(owner);
    return other.Dlpack(false);
  }
  struct Exported {
    DlManagedTensor tensor;
    Array array;
  };
  auto* out = new Exported{{}, *this};
  out->tensor.tensor = {.data = data_,
                        .device = {kDlCpu, 0},
                        .ndim = static_cast<int32_t>(shape_.size()),
                        .dtype = {type_->dl_code, static_cast<uint8_t>(type_->bytes * 8), 1},
                        .shape = out->array.shape_.data(),
                        .strides = out->array.strides_.data(),
                        .byte_offset = 0};
  out->tensor.context = out;
  out->tensor.deleter = [](DlManagedTensor* self) { delete static_cast<Exported*>(self->context); };
  PyObject* capsule = PyCapsule_New(&out->tensor, kDlCapsule, [](PyObject* unused) {
    // Nobody took it: a consumer renames the capsule.
    if (PyCapsule_IsValid(unused, kDlCapsule) == 0) return;
    auto* tensor = static_cast<DlManagedTensor*>(PyCapsule_GetPointer(unused, kDlCapsule));
    tensor->deleter(tensor);
  });
  if (capsule == nullptr) {
    delete out;
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::capsule>(capsule);
}

RowsView ViewRows(const py::object& object, const char* name, bool writable) {
  RowsView out;
  if (PyObject_CheckBuffer(object.ptr()) != 0) {
    const int flags = PyBUF_STRIDES | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    auto view = std::make_unique<Py_buffer>();
    if (PyObject_GetBuffer(object.ptr(), view.get(), flags) != 0) {
      if (PyErr_ExceptionMatches(PyExc_BufferError) == 0 && PyErr_ExceptionMatches(PyExc_ValueError) == 0)
        throw py::error_already_set();
      PyErr_Clear();
      Refuse(std::string(name) + (writable ? " is memory that cannot be written" : " is memory that cannot be read"));
    }
    out.buffer = py::buffer_info(view.release());
    const std::string& format = out.buffer.format;
    if (format != "f" && format != "<f" && format != "=f" && format != "@f")
      Refuse(std::string(name) + " has values of struct format \"" + format +
             "\"; float32 (\"f\") is read, nothing is converted");
    LayRows({out.buffer.shape.begin(), out.buffer.shape.end()}, {out.buffer.strides.begin(), out.buffer.strides.end()},
            name, &out);
    out.data = static_cast<float*>(out.buffer.ptr);
    return out;
  }
  if (!py::hasattr(object, "__dlpack__"))
    Refuse(std::string(name) + " is a " + std::string(py::str(py::type::of(object).attr("__name__"))) +
           ", which has neither the buffer protocol nor __dlpack__");
  const std::shared_ptr<DlManagedTensor> tensor = TakeDlpack(object, name);
  const DlTensor& t = tensor->tensor;
  if (t.dtype.code != kDlFloat || t.dtype.bits != 32)
    Refuse(std::string(name) + " is " + DlName(t.dtype) + "; float32 is read, nothing is converted");
  const std::vector<int64_t> shape(t.shape, t.shape + t.ndim);
  std::vector<int64_t> strides = DenseStrides(shape);
  if (t.strides != nullptr) strides.assign(t.strides, t.strides + t.ndim);
  for (int64_t& s : strides) s *= static_cast<int64_t>(sizeof(float));
  LayRows(shape, strides, name, &out);
  out.data = reinterpret_cast<float*>(static_cast<std::byte*>(t.data) + t.byte_offset);
  out.dlpack = tensor;
  return out;
}

}  // namespace livequant::python
