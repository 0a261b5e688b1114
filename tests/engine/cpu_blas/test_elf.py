"""Import slots are found, read and written, also in read-only pages."""

import ctypes
import struct

import pytest

from lmx_lab.engine.cpu_blas import elf
from tests.engine.cpu_blas.helpers import needs_slots


@needs_slots
def test_read_only_slots_are_written_and_are_read_only_again():
    page = elf.mmap.mmap(-1, elf.PAGE_BYTES)
    slot = ctypes.addressof(ctypes.c_char.from_buffer(page))
    elf.protect(slot, elf.PAGE_BYTES, elf.mmap.PROT_READ)
    elf.write({slot: 1, slot + 8: 2**63})
    assert (elf.read(slot), elf.read(slot + 8)) == (1, 2**63)
    assert elf._protection(slot) == elf.mmap.PROT_READ
    elf.protect(slot, elf.PAGE_BYTES, elf.mmap.PROT_READ | elf.mmap.PROT_WRITE)


@pytest.mark.parametrize(("machine", "types"), list(elf.SLOT_TYPES.items()))
@pytest.mark.parametrize("relocated", [True, False], ids=["glibc", "musl"])
def test_slots_are_found_in_the_relocation_tables_of_a_library(machine, types, relocated):
    names = b"\0puts\0cblas_sgemm\0"
    symbols = b"".join(struct.pack("<I20x", at) for at in (0, 1, 6))
    glob_dat, jump_slot = types
    data = struct.pack("<QQq", 0x100, 2 << 32 | glob_dat, 0) + struct.pack("<QQq", 8, elf.RELATIVE_TYPES[machine], 8)
    calls = b"".join(struct.pack("<QQq", 0x200 + 8 * at, at << 32 | jump_slot, 0) for at in (1, 2))
    parts = {elf.DT_STRTAB: names.ljust(24, b"\0"), elf.DT_SYMTAB: symbols, elf.DT_RELA: data, elf.DT_JMPREL: calls}
    image = b"".join(parts.values())
    memory = ctypes.create_string_buffer(image, 1024)
    base = ctypes.addressof(memory)
    tags = {elf.DT_RELASZ: len(data), elf.DT_PLTRELSZ: len(calls)}
    for tag, part in parts.items():
        tags[tag] = image.index(part) + (base if relocated else 0)
    dynamic = b"".join(struct.pack("<qQ", *entry) for entry in [*tags.items(), (0, 0)])
    memory[512 : 512 + len(dynamic)] = dynamic
    library = elf.Library(path="made.so", base=base, dynamic=base + 512)
    assert elf.slots(library, ["cblas_sgemm", "absent"], machine) == {"cblas_sgemm": [base + 0x100, base + 0x210]}
    assert elf.handle(library, machine) == base + 8
    with pytest.raises(ValueError, match="riscv64"):
        elf.slots(library, ["puts"], "riscv64")
