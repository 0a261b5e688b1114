"""Make MLX's scalar ``exp`` faster on x86-64, with identical results.

MLX's Linux wheel is compiled for processors without fused multiply-add. Each ``exp`` of float32 therefore calls the C
library six times, and softmax, sigmoid and logsumexp spend nearly all of their time there. The function is replaced by
one with the same arithmetic in AVX and FMA instructions. On a busy core (Zen 3), exp takes 6 ns per number instead of
38 ns, softmax 10 ns instead of 40 ns, and sigmoid 11 ns instead of 43 ns. Attention to 1,400 tokens takes a third of
the time.
"""

from __future__ import annotations

import struct
from pathlib import Path

import mlx.core as mx
import numpy as np

from lmx_lab.engine.cpu_blas import elf, machine_code

SYMBOL = "_ZN3mlx4core4simd3expIfLi1EEENS1_4SimdIT_XT0_EEES5_"
"""``mlx::core::simd::exp<float, 1>``; takes and returns a float in xmm0."""
ENTRY = b"\xf3\x0f\x1e\xfa\x0f\x2e\xc0\x0f"
"""The function's first eight bytes: ``endbr64; ucomiss xmm0, xmm0``, and the beginning of another instruction."""
FLAGS = frozenset({"avx", "fma"})

CODE = (
    b"\xf3\x0f\x1e\xfa"  # endbr64
    b"\xc5\xfa\x59\x0d\x9c\x00\x00\x00"  # vmulss xmm1, xmm0, [log2e]
    b"\xc5\xf2\x5a\xd1"  # vcvtss2sd xmm2, xmm1, xmm1
    b"\xc5\xeb\x58\x15\x88\x00\x00\x00"  # vaddsd xmm2, xmm2, [half]
    b"\xc4\xe3\x69\x0b\xd2\x01"  # vroundsd xmm2, xmm2, xmm2, 1 (down)
    b"\xc5\xeb\x5a\xd2"  # vcvtsd2ss xmm2, xmm2, xmm2
    b"\xc5\xfa\x2c\xc2"  # vcvttss2si eax, xmm2
    b"\xc5\xf2\x5c\xca"  # vsubss xmm1, xmm1, xmm2
    b"\xc5\xfa\x10\x1d\x7a\x00\x00\x00"  # vmovss xmm3, [c6]
    b"\xc4\xe2\x71\xa9\x1d\x75\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c5]
    b"\xc4\xe2\x71\xa9\x1d\x70\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c4]
    b"\xc4\xe2\x71\xa9\x1d\x6b\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c3]
    b"\xc4\xe2\x71\xa9\x1d\x66\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c2]
    b"\xc4\xe2\x71\xa9\x1d\x61\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c1]
    b"\xc4\xe2\x71\xa9\x1d\x5c\x00\x00\x00"  # vfmadd213ss xmm3, xmm1, [c0]
    b"\x83\xc0\x7f"  # add eax, 127
    b"\xc1\xe0\x17"  # shl eax, 23
    b"\xc5\xf9\x6e\xe0"  # vmovd xmm4, eax
    b"\xc5\xe2\x59\xdc"  # vmulss xmm3, xmm3, xmm4
    b"\xc5\xfa\x10\x0d\x4a\x00\x00\x00"  # vmovss xmm1, [infinity]
    b"\xc5\xfa\xc2\x25\x45\x00\x00\x00\x0e"  # vcmpgtss xmm4, xmm0, [largest]
    b"\xc4\xe3\x61\x4a\xd9\x40"  # vblendvps xmm3, xmm3, xmm1, xmm4
    b"\xc5\xfa\xc2\x25\x3a\x00\x00\x00\x05"  # vcmpnltss xmm4, xmm0, [smallest]; true for NaN
    b"\xc5\xe0\x54\xc4"  # vandps xmm0, xmm3, xmm4
    b"\xc3\x90\x90\x90\x90\x90"  # ret, and padding
    # half, log2e, c6 to c0, infinity, largest, smallest: the constants of MLX's mlx/backend/cpu/simd/math.h.
    + struct.pack("<d", 0.5)
    + struct.pack("<f", 1.442695)
    + struct.pack("<3f", 1.535336188319500e-4, 1.339887440266574e-3, 9.618437357674640e-3)
    + struct.pack("<4f", 5.550332471162809e-2, 2.402264791363012e-1, 6.931472028550421e-1, 1.0)
    + struct.pack("<3f", float("inf"), 88.0, -88.0)
)


class Exponential:
    """The replacement of MLX's function. Replace and restore it only while MLX does not compute."""

    def __init__(self, library: elf.Library) -> None:
        """Write the instructions to memory; MLX does not use them yet.

        Raises:
            OSError: this processor, system or build of MLX is not supported.
        """
        if not has_flags(FLAGS):
            raise OSError(f"the processor lacks one of {', '.join(sorted(FLAGS))}")
        address = elf.symbol(library, SYMBOL)
        entry = elf.read(address) if address is not None else 0
        if address is None or address % elf.POINTER.size or entry.to_bytes(8, "little") != ENTRY:
            raise OSError("this build of MLX has another exp function")
        jump = b"\xe9" + (machine_code.place(CODE, near=address) - address - 5).to_bytes(4, "little", signed=True)
        self._original = {address: entry}
        # A single word is replaced, so a thread that calls the function at this time executes the old or the new one.
        self._jump = {address: int.from_bytes(jump + ENTRY[len(jump) :], "little")}

    def replace(self) -> None:
        """Make MLX use the new function.

        Raises:
            OSError: the results differ, or the code of MLX cannot be written; MLX is unchanged.
        """
        ends = np.array([np.inf, -np.inf, np.nan], dtype=np.float32)
        samples = np.concatenate([np.linspace(-100, 100, 4001, dtype=np.float32), ends])
        before = _exp(samples)
        elf.write(self._jump)
        if not np.array_equal(_exp(samples), before, equal_nan=True):
            elf.write(self._original)
            raise OSError("the results differ from those of MLX's exp function")

    def restore(self) -> None:
        """Make MLX use its own function again."""
        elf.write(self._original)


def _exp(values: np.ndarray[tuple[int], np.dtype[np.float32]]) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    with mx.stream(mx.cpu):
        return np.array(mx.exp(mx.array(values)))


def has_flags(flags: frozenset[str], cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether the processor has these features."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    found = next((line for line in lines if line.startswith("flags")), "")
    return flags <= set(found.split())
