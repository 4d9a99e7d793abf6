// python/dlpack_abi.h: the structs of DLPack's C ABI as far as a tensor in host memory needs them; unversioned
// capsules, which every consumer and producer knows. Source: dmlc/dlpack, include/dlpack/dlpack.h.
#pragma once

#include <cstdint>

namespace livequant::python {

inline constexpr int32_t kDlCpu = 1, kDlCudaHost = 3;  // device types whose memory the CPU may read
inline constexpr uint8_t kDlInt = 0, kDlUInt = 1, kDlFloat = 2, kDlBfloat = 4;

struct DlDevice {
  int32_t type;
  int32_t id;
};
struct DlDataType {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
};
struct DlTensor {
  void* data;
  DlDevice device;
  int32_t ndim;
  DlDataType dtype;
  int64_t* shape;
  int64_t* strides;  // in elements; null: row major without gaps
  uint64_t byte_offset;
};
struct DlManagedTensor {
  DlTensor tensor;
  void* context;
  void (*deleter)(DlManagedTensor* self);
};

inline constexpr const char* kDlCapsule = "dltensor";
inline constexpr const char* kDlUsedCapsule = "used_dltensor";

}  // namespace livequant::python
