"""Writes machine code to executable pages."""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Iterator

from lmx_lab.engine.cpu_blas import elf

MACHINE = "x86_64"
MAP_FIXED_NOREPLACE = 0x100000
NEAR_BYTES = 2**31 - 2**20
"""Maximum distance of the page from the address: a jump with a signed 32-bit offset reaches it."""


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
    for free in sorted(_free_pages(), key=lambda page: abs(page - address)):
        if abs(free - address) > NEAR_BYTES:
            break
        try:
            page = _map(free, MAP_FIXED_NOREPLACE)
        except OSError:
            # Another thread has used the memory in the meantime.
            continue
        # Linux before 4.17 ignores the flag and may choose another address.
        if abs(page - address) <= NEAR_BYTES:
            return page
    raise OSError(f"no memory is free near {address:#x}")


def _free_pages() -> Iterator[int]:
    """Yield the first and the last page of each gap between two mappings of this process."""
    end = 0
    for line in elf.MAPS.read_text(encoding="utf-8", errors="replace").splitlines():
        start, _, rest = line.partition("-")
        begin = int(start, 16)
        if 0 < end < begin:
            yield end
            yield begin - elf.PAGE_BYTES
        end = int(rest.split()[0], 16)


def _map(address: int | None = None, flags: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    writable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(address, elf.PAGE_BYTES, writable, private | flags, -1, 0)
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(page)
