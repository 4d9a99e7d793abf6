// python/arrays.h: rows that come from Python and arrays that go there, by the buffer protocol and by DLPack. Nothing
// here knows numpy: what it shares, every array library shares.
//
// Values are never converted: rows are float32, or the call is refused with what was given.
#pragma once

#include <pybind11/pybind11.h>
#include <livequant/livequant.hpp>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace livequant::python {

namespace py = pybind11;

// Ends the call with lq::Error, LQ_INVALID_ARGUMENT.
[[noreturn]] inline void Refuse(const std::string& message) { throw lq::Error(LQ_INVALID_ARGUMENT, message); }

// What one value is: its name, its struct code in buffers (bfloat16 has none and goes as uint16), its DLPack code.
struct ValueType {
  const char* name;
  const char* format;
  uint8_t dl_code;
  int bytes;
};
const ValueType& TypeOf(lq_dtype dtype);

// A row-major array, of its own or somebody else's memory; the Python class `Array`.
class Array {
 public:
  // Zeros.
  static Array Make(lq_dtype dtype, std::vector<int64_t> shape);
  // Takes `bytes`. REQUIRES as many as the shape has.
  static Array Of(lq_dtype dtype, std::vector<int64_t> shape, std::vector<std::byte> bytes);
  // A view of any object with __dlpack__, in host memory. Throws lq::Error: a dtype or device that is not read.
  static Array FromDlpack(const py::object& object);

  const ValueType& type() const { return *type_; }
  const std::vector<int64_t>& shape() const { return shape_; }
  int64_t size() const;
  std::byte* data() const { return data_; }
  py::buffer_info Buffer() const;
  // A capsule "dltensor" that keeps the memory. `copy`: of a copy.
  py::capsule Dlpack(bool copy) const;

 private:
  const ValueType* type_ = nullptr;
  std::vector<int64_t> shape_, strides_;  // strides in values
  std::byte* data_ = nullptr;
  std::shared_ptr<void> owner_;
  bool dense_ = true;
};

// [rows][width] float32 that lives as long as this object. Destroy it with the GIL.
struct RowsView {
  py::buffer_info buffer;        // or
  std::shared_ptr<void> dlpack;  // what holds the memory
  float* data = nullptr;
  int64_t rows = 0, width = 0, stride = 0;
};
// `object`: [rows, width] or [rows, heads, head_dim], by the buffer protocol, else by __dlpack__. Rows may lie at any
// stride of whole values that is at least a row; inside a row there are no gaps. Throws lq::Error(LQ_INVALID_ARGUMENT)
// that names `name`, what was given and what is needed. writable: refuses read-only memory.
RowsView ViewRows(const py::object& object, const char* name, bool writable);

}  // namespace livequant::python
