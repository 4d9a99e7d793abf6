// kernels/for_each_isa.h: runs a test body once for every instruction set that was compiled and that this machine has.
#pragma once

#include <gtest/gtest.h>

#include "kernels/cpu/targets.h"
// After the list above. Not hwy/highway.h: a file that is compiled per target includes that later itself.
#include "hwy/targets.h"

namespace livequant {

// body(name) with run-time dispatch held to one instruction set; the best one is chosen again afterwards.
template <class Body>
void ForEachIsa(Body&& body) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    body(hwy::TargetName(target));
    if (::testing::Test::HasFailure()) break;
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

}  // namespace livequant
