// kernels/cpu/targets.h: the instruction sets that the vector kernels are compiled for. Include before any Highway
// header.
//
// AVX-512 (AVX3), AVX2 + FMA, SSE4 and Highway's baseline on x86; NEON on Arm. AVX3_DL and SSSE3 would compile the same
// code again for no gain.
#pragma once

#if defined(LIVEQUANT_FEW_TARGETS)  // instrumented builds: SSE4 differs from the baseline in instructions, not in code
#define HWY_DISABLED_TARGETS (HWY_AVX3_DL | HWY_SSSE3 | HWY_SSE4)
#else
#define HWY_DISABLED_TARGETS (HWY_AVX3_DL | HWY_SSSE3)
#endif
