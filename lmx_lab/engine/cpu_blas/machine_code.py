"""Replace functions of OpenBLAS and MLX with faster ones, in x86-64 machine code on executable pages."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import mmap
import platform
import struct
from pathlib import Path

import mlx.core as mx
import numpy as np

from lmx_lab.engine.cpu_blas import elf

MACHINE = "x86_64"
MAP_FIXED_NOREPLACE = 0x100000
NEAR_BYTES = 2**31 - 2**20
"""Maximum distance of the page from the address: a jump with a signed 32-bit offset reaches it."""

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


def place(instructions: bytes, *, near: int | None = None) -> int:
    """Write x86-64 instructions to a new executable page and return their address.

    The page is never freed, because MLX may call the function until the process exits.

    Args:
        near: The page is at most ``NEAR_BYTES`` from this address; by default anywhere.

    Raises:
        OSError: the system does not allow executable pages (SELinux), or the processor is not x86-64.
    """
    if platform.machine() != MACHINE:
        raise OSError(f"the instructions are for {MACHINE} only")
    page = _map() if near is None else _map_near(near)
    ctypes.memmove(page, instructions, len(instructions))
    elf.protect(page, elf.PAGE_BYTES, mmap.PROT_READ | mmap.PROT_EXEC)
    return page


def _map_near(address: int) -> int:
    # The first and the last page of each gap between two mappings.
    gaps = [(before.end, after.start) for before, after in itertools.pairwise(elf.mappings())]
    free = [page for end, start in gaps if end < start for page in (end, start - elf.PAGE_BYTES)]
    near = [page for page in free if abs(page - address) <= NEAR_BYTES]
    for wanted in sorted(near, key=lambda page: abs(page - address)):
        # Another thread may have used the memory in the meantime.
        with contextlib.suppress(OSError):
            page = _map(wanted, MAP_FIXED_NOREPLACE)
            # Linux before 4.17 ignores the flag and may choose another address.
            if abs(page - address) <= NEAR_BYTES:
                return page
    raise OSError(f"no memory is free near {address:#x}")


def _map(address: int | None = None, flags: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    writable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(address, elf.PAGE_BYTES, writable, private | flags, -1, 0)
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(page)


def processor_facts(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return what the system reports about the first processor, such as ``flags``; empty if it reports nothing."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


# Products with a single row


def build_sgemm(sgemm: int, sgemv: int) -> int:
    """Write a ``cblas_sgemm`` that calls ``cblas_sgemv`` for products with a single row, and return its address.

    Decoding one token of one request multiplies a single row by each weight matrix. OpenBLAS' gemm packs the matrix
    first, which costs more than it gains for a single row. On arm64 OpenBLAS calls gemv itself (its pull request 4814),
    on x86-64 it does not. sgemm against sgemv in microseconds on two cores (Zen 4), weights stored as (N, K): K 576,
    N 1,536: 231 and 127; K 1,536, N 576: 170 and 96; K 576, N 49,152: 7,991 and 3,929. With two rows or more, gemm is
    at least as fast over all layers of a model.

    Both functions take their first integers in registers and the rest in the caller's argument area on the stack. The
    System V ABI lets the callee overwrite this area; sgemv needs less of it, so it is rewritten in place and the jump
    is a tail call, with the stack aligned by the caller. alpha and beta stay in xmm0 and xmm1.

    sgemm(edi order, esi transA, edx transB, ecx M, r8d N, r9d K, [8] A, [16] lda, [24] B, [32] ldb, [40] C, [48] ldc)
    sgemv(edi order, esi trans,  edx rows,   ecx columns, r8 A, r9d lda, [8] x, [16] incx, [24] y, [32] incy)

    Args:
        sgemm, sgemv: Addresses of the functions of OpenBLAS.

    Raises:
        OSError: see ``place``.
    """
    forward = (
        b"\xb8\xdf\x00\x00\x00"  # mov  eax, 223             NoTrans is 111, Trans 112: the one of B gives
        b"\x29\xd0"  # sub  eax, edx             the opposite one of sgemv's matrix
        b"\x89\xc6"  # mov  esi, eax
        b"\x44\x89\xc9"  # mov  ecx, r9d             columns = K
        b"\x83\xfa\x70"  # cmp  edx, 112
        b"\x44\x89\xc2"  # mov  edx, r8d             rows = N
        b"\x74\x02"  # je   +2                   B is stored as (N, K)
        b"\x87\xca"  # xchg edx, ecx             B is stored as (K, N)
        b"\x4c\x8b\x44\x24\x18"  # mov  r8, [rsp+24]         the matrix = B
        b"\x44\x8b\x4c\x24\x20"  # mov  r9d, [rsp+32]        its row length = ldb
        b"\x48\x8b\x44\x24\x28"  # mov  rax, [rsp+40]        y = C; x = A is in place
        b"\x48\x89\x44\x24\x18"  # mov  [rsp+24], rax
        b"\xc7\x44\x24\x20\x01\x00\x00\x00" + _jump(sgemv)  # mov  dword [rsp+32], 1    incy
    )
    row = (  # Reached with eax = transA - 111. A transposed A with one row is a column with stride lda.
        b"\x85\xc0"  # test eax, eax
        b"\x75\x08"  # jne  +8
        b"\xc7\x44\x24\x10\x01\x00\x00\x00"  # mov  dword [rsp+16], 1    incx
    )
    body = row + forward
    conditions = (  # Each is followed by a jump to sgemm, which also reports invalid arguments.
        (b"\x83\xff\x65", b"\x0f\x85"),  # cmp  edi, 101 (RowMajor);  jne
        (b"\x83\xf9\x01", b"\x0f\x85"),  # cmp  ecx, 1;               jne
        (b"\x45\x85\xc0", b"\x0f\x8e"),  # test r8d, r8d;             jle
        (b"\x45\x85\xc9", b"\x0f\x8e"),  # test r9d, r9d;             jle
        (b"\x8d\x42\x91\x83\xf8\x01", b"\x0f\x87"),  # lea eax, [rdx-111]; cmp eax, 1;  ja
        (b"\x8d\x46\x91\x83\xf8\x01", b"\x0f\x87"),  # lea eax, [rsi-111]; cmp eax, 1;  ja
    )
    for test, jump in reversed(conditions):
        body = test + jump + len(body).to_bytes(4, "little") + body
    return place(b"\xf3\x0f\x1e\xfa" + body + _jump(sgemm))  # endbr64


def _jump(target: int) -> bytes:
    return b"\x48\xb8" + target.to_bytes(8, "little") + b"\xff\xe0"  # movabs rax, target; jmp rax


# exp


class Exponential:
    """A faster replacement of MLX's scalar ``exp`` with identical results.

    Replace and restore it only while MLX does not compute.

    MLX's Linux wheel is compiled for processors without fused multiply-add. Each ``exp`` of float32 therefore calls the
    C library six times, and softmax, sigmoid and logsumexp spend nearly all of their time there. The function is
    replaced by one with the same arithmetic in AVX and FMA instructions. On a busy core (Zen 3), exp takes 6 ns per
    number instead of 38 ns, softmax 10 ns instead of 40 ns, and sigmoid 11 ns instead of 43 ns. Attention to 1,400
    tokens takes a third of the time.
    """

    def __init__(self, library: elf.Library) -> None:
        """Write the instructions to memory; MLX does not use them yet.

        Raises:
            OSError: this processor, system or build of MLX is not supported.
        """
        if not set(processor_facts().get("flags", "").split()) >= FLAGS:
            raise OSError(f"the processor lacks one of {', '.join(sorted(FLAGS))}")
        address = elf.symbol(library, SYMBOL)
        entry = elf.read(address) if address is not None else 0
        if address is None or address % elf.POINTER.size or entry.to_bytes(8, "little") != ENTRY:
            raise OSError("this build of MLX has another exp function")
        jump = b"\xe9" + (place(CODE, near=address) - address - 5).to_bytes(4, "little", signed=True)
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
