// base/span2d.h: a row-major matrix that somebody else owns.
#pragma once

#include <cstdint>
#include <type_traits>

#include "base/check.h"

namespace livequant {

// rows x cols values, row r starting at data + r * stride. A plain view: cheap to copy, owns nothing.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0, cols = 0, stride = 0;

  MatrixView() = default;
  MatrixView(T* d, int64_t r, int64_t c) : data(d), rows(r), cols(c), stride(c) {}
  MatrixView(T* d, int64_t r, int64_t c, int64_t s) : data(d), rows(r), cols(c), stride(s) {}
  operator MatrixView<const T>() const
    requires(!std::is_const_v<T>)
  {
    return {data, rows, cols, stride};
  }
  T* row(int64_t r) const { return data + r * stride; }
  T& operator()(int64_t r, int64_t c) const { return data[r * stride + c]; }
};

}  // namespace livequant
