"""What the server's process does with the memory that it has freed."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import ctypes, sys
from lmx_lab.cli.memory import give_back_large_blocks

class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
give_back_large_blocks()
libc.free(libc.malloc(20 * 2**20))
before = libc.mallinfo2().hblks
libc.malloc(int(sys.argv[1]))
print(libc.mallinfo2().hblks - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="this is about glibc")
@pytest.mark.parametrize(
    ("environ", "size", "mapped"),
    [
        ({}, 2**21, 1),
        ({}, 2**19, 0),
        ({"MALLOC_MMAP_THRESHOLD_": str(2**22)}, 2**21, 0),
        ({"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={2**22}"}, 2**21, 0),
        # glibc's own 128 KiB, which a choice of the other threshold fixes.
        ({"MALLOC_TRIM_THRESHOLD_": str(2**22)}, 2**19, 1),
        ({"GLIBC_TUNABLES": f"glibc.malloc.trim_threshold={2**22}"}, 2**19, 1),
    ],
    ids=str,
)
def test_large_blocks_come_from_the_system_and_go_back_to_it_unless_the_environment_chooses(
    environ: dict[str, str], size: int, mapped: int
) -> None:
    command = [sys.executable, "-c", CODE, str(size)]
    unset = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(command, env=unset | environ, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == (f"{mapped}\n", "")
