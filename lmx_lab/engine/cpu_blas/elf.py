"""Finds, reads and writes the import slots and the functions of a loaded shared library. 64-bit Linux only.

A library calls a function of another library through a slot in its own memory, which the dynamic linker fills
("relocates") with the address of the function. See the System V gABI, chapter 5, and the processor supplements for the
types of relocations.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# R_*_GLOB_DAT, R_*_JUMP_SLOT: both contain the plain address of a symbol.
SLOT_TYPES: Mapping[str, tuple[int, int]] = {"x86_64": (6, 7), "aarch64": (1025, 1026)}
# R_*_RELATIVE: an address within the library itself.
RELATIVE_TYPES: Mapping[str, int] = {"x86_64": 8, "aarch64": 1027}
PT_LOAD, PT_DYNAMIC = 1, 2
PROGRAM_HEADER = struct.Struct("<IIQQQQQQ")
"""Type, flags, offset in the file, virtual address, physical address, two sizes, and alignment."""
DT_PLTRELSZ, DT_STRTAB, DT_SYMTAB, DT_RELA, DT_RELASZ, DT_JMPREL = 2, 5, 6, 7, 8, 23
ADDRESS_TAGS = {DT_STRTAB, DT_SYMTAB, DT_RELA, DT_JMPREL}
DYNAMIC_ENTRY = struct.Struct("<qQ")
RELA_ENTRY = struct.Struct("<QQq")
SHT_SYMTAB = 2
SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
SYMBOL = struct.Struct("<IHHQQ")
"""Index of the name, type, section, value and size."""
SYMBOL_BYTES = SYMBOL.size
POINTER = struct.Struct("<Q")
PAGE_BYTES = mmap.PAGESIZE
MAPS = Path("/proc/self/maps")
PROT = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}


@dataclass(frozen=True, kw_only=True)
class Library:
    """A loaded library: its file, its load address, and the address of its dynamic section."""

    path: str
    base: int
    dynamic: int


class _AddressInfo(ctypes.Structure):
    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


@dataclass(frozen=True)
class MemoryRange:
    """A range of addresses of this process, and the file that it is mapped from."""

    start: int
    end: int
    permissions: str
    offset: int
    path: str
    """Empty if no file is mapped."""


def mappings() -> Iterator[MemoryRange]:
    """Iterate over the mappings of this process, in the order of their addresses."""
    for line in MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        span, permissions, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(address, 16) for address in span.split("-"))
        yield MemoryRange(start, end, permissions, int(offset, 16), path[0] if path else "")


def libraries() -> list[Library]:
    """List the loaded libraries that have ``.so`` in their file names, from the mappings of this process.

    ``dl_iterate_phdr(3)`` is not used: it holds the lock of the dynamic linker while Python code runs, and a thread
    that imports an extension module waits for that lock while it holds the interpreter's.
    """
    found = []
    for mapping in mappings():
        # The first mapping of a library contains the headers of its file.
        is_first = mapping.permissions.startswith("r") and mapping.offset == 0
        if not is_first or ".so" not in os.path.basename(mapping.path):
            continue
        header = ctypes.string_at(mapping.start, 64)
        if not header.startswith(b"\x7fELF\x02"):
            continue
        (offset,), (count,) = struct.unpack_from("<Q", header, 0x20), struct.unpack_from("<H", header, 0x38)
        headers = ctypes.string_at(mapping.start + offset, count * PROGRAM_HEADER.size)
        parts = [(kind, virtual) for kind, _, _, virtual, *_ in PROGRAM_HEADER.iter_unpack(headers)]
        base = mapping.start - next((virtual for kind, virtual in parts if kind == PT_LOAD), 0)
        dynamic = next((virtual for kind, virtual in parts if kind == PT_DYNAMIC), None)
        if dynamic is not None:
            found.append(Library(path=mapping.path, base=base, dynamic=base + dynamic))
    return found


def slots(library: Library, names: Collection[str], machine: str) -> dict[str, list[int]]:
    """The addresses of the slots through which a library calls each of the names.

    Names that the library does not import are left out.

    Raises:
        ValueError: the relocation types of ``machine`` are unknown.
    """
    encoded = {name.encode() for name in names}
    tags = _tags(library)
    found: dict[str, list[int]] = {}
    for offset, info, _ in _relocations(tags):
        if info & 0xFFFF_FFFF in _types_of(machine, SLOT_TYPES):
            symbol = ctypes.string_at(tags[DT_SYMTAB] + (info >> 32) * SYMBOL_BYTES, 4)
            name = ctypes.string_at(tags[DT_STRTAB] + int.from_bytes(symbol, "little"))
            if name in encoded:
                found.setdefault(name.decode(), []).append(library.base + offset)
    return found


def symbol(library: Library, name: str) -> int | None:
    """The address of a function in the symbol table of the library's file, which also contains functions that it does
    not export; ``None`` if the file has no such table or no such function.
    """
    with open(library.path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as image:
        (headers,), (count,) = struct.unpack_from("<Q", image, 0x28), struct.unpack_from("<H", image, 0x3C)
        sections = [SECTION_HEADER.unpack_from(image, headers + at * SECTION_HEADER.size) for at in range(count)]
        for _, kind, _, _, offset, size, strings, *_ in sections:
            if kind != SHT_SYMTAB:
                continue
            names, names_bytes = sections[strings][4:6]
            at = image.find(b"\0" + name.encode() + b"\0", names, names + names_bytes) + 1 - names
            for index, _, _, value, _ in SYMBOL.iter_unpack(image[offset : offset + size]):
                if index == at > 0:
                    return int(library.base + value)
    return None


def handle(library: Library, machine: str) -> int | None:
    """The address by which the C library identifies this library (``__dso_handle``): a pointer that points to itself.

    Returns:
        ``None`` if there is not exactly one such pointer.

    Raises:
        ValueError: the relocation types of ``machine`` are unknown.
    """
    relative = _types_of(machine, RELATIVE_TYPES)
    found = [
        library.base + offset
        for offset, info, value in _relocations(_tags(library))
        if info == relative and offset == value
    ]
    return found[0] if len(found) == 1 else None


_Types = TypeVar("_Types")


def _types_of(machine: str, types: Mapping[str, _Types]) -> _Types:
    if machine not in types:
        raise ValueError(f"the relocation types of {machine} are unknown; known are those of {', '.join(types)}")
    return types[machine]


def _tags(library: Library) -> dict[int, int]:
    """The dynamic section, with absolute addresses: glibc has added the load address in place, musl has not."""
    tags: dict[int, int] = {}
    entry = library.dynamic
    while True:
        tag, value = DYNAMIC_ENTRY.unpack(ctypes.string_at(entry, DYNAMIC_ENTRY.size))
        if not tag:
            return tags
        tags[tag] = value + library.base if tag in ADDRESS_TAGS and value < library.base else value
        entry += DYNAMIC_ENTRY.size


def _relocations(tags: Mapping[int, int]) -> Iterator[tuple[int, int, int]]:
    """Offset, symbol and type, and addend of each relocation."""
    for table, size in ((DT_RELA, DT_RELASZ), (DT_JMPREL, DT_PLTRELSZ)):
        if tags.get(size):
            yield from RELA_ENTRY.iter_unpack(ctypes.string_at(tags[table], tags[size]))


def owner(address: int) -> str | None:
    """The file of the library that contains this address, by ``dladdr(3)``; ``None`` if there is none."""
    info = _AddressInfo()
    found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), ctypes.byref(info))
    return os.fsdecode(info.file) if found and info.file else None


def read(address: int) -> int:
    """Read the pointer in a slot."""
    return int(POINTER.unpack(ctypes.string_at(address, POINTER.size))[0])


def write(values: Mapping[int, int]) -> None:
    """Write pointers to slots, all or none. Read-only pages (RELRO) are read-only again afterwards.

    Args:
        values: Slot address to pointer.

    Raises:
        OSError: a page cannot be made writable; nothing was written.
    """
    pages = sorted({address - address % PAGE_BYTES for address in values})
    changed: list[tuple[int, int]] = []
    try:
        for page in pages:
            protection = _protection(page)
            if not protection & mmap.PROT_WRITE:
                protect(page, PAGE_BYTES, protection | mmap.PROT_WRITE)
                changed.append((page, protection))
        for address, value in values.items():
            # A single aligned store: a thread that calls through the slot now reads the old or the new pointer.
            ctypes.c_uint64.from_address(address).value = value
    finally:
        for page, protection in changed:
            # A page that remains writable is harmless.
            with suppress(OSError):
                protect(page, PAGE_BYTES, protection)


def protect(address: int, size: int, protection: int) -> None:
    """Call ``mprotect(2)``.

    Raises:
        OSError: the call failed.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), protection):
        code = ctypes.get_errno()
        raise OSError(code, f"mprotect: {os.strerror(code)}")


def _protection(page: int) -> int:
    for mapping in mappings():
        if mapping.start <= page < mapping.end:
            return sum(bit for flag, bit in PROT.items() if flag in mapping.permissions)
    raise OSError(f"no memory is mapped at {page:#x}")
