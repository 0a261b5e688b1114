"""Writes machine code to executable pages."""

from __future__ import annotations

import ctypes
import mmap
import platform

from lmx_lab.engine.cpu_blas import elf

MACHINE = "x86_64"
MAP_FIXED_NOREPLACE = 0x100000
NEAR_BYTES = 2**30
"""Maximum distance of the page from the address: a jump with a 32-bit offset reaches it."""
SEARCH_BYTES = 2**24


def place(instructions: bytes, *, below: int | None = None) -> int:
    """Write x86-64 instructions to a new executable page and return their address.

    The page is never freed, because MLX may call the function until the process exits.

    Args:
        below: The page is at most ``NEAR_BYTES`` below this address; by default anywhere.

    Raises:
        OSError: the system does not allow executable pages (SELinux), or the processor is not x86-64.
    """
    if platform.machine() != MACHINE:
        raise OSError(f"the instructions are for {MACHINE} only")
    page = _map() if below is None else _map_below(below)
    ctypes.memmove(page, instructions, len(instructions))
    elf.protect(page, elf.PAGE_BYTES, mmap.PROT_READ | mmap.PROT_EXEC)
    return page


def _map_below(address: int) -> int:
    start = address - address % elf.PAGE_BYTES
    for distance in range(SEARCH_BYTES, NEAR_BYTES, SEARCH_BYTES):
        try:
            page = _map(start - distance, MAP_FIXED_NOREPLACE)
        except OSError:
            continue
        # Linux before 4.17 ignores the flag and may choose another address.
        if address - NEAR_BYTES <= page < address:
            return page
    raise OSError(f"no memory is free below {address:#x}")


def _map(address: int | None = None, flags: int = 0) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long)
    writable, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    page = libc.mmap(address, elf.PAGE_BYTES, writable, private | flags, -1, 0)
    if page == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), "mmap failed")
    return int(page)
