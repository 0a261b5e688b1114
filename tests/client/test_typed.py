"""Tests of the types of the clients: strict mypy without plugins knows every type."""

import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

FOLDER = Path(__file__).parent / "typed"
# With the cache this takes two seconds, without it half a minute.
CACHE = Path(__file__).parents[2] / ".cache" / "mypy-users"


def test_mypy_accepts_a_users_program_and_finds_its_errors():
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", str(CACHE)]
    done = subprocess.run(
        [*command, "program.py", "wrong.py"], cwd=FOLDER, capture_output=True, text=True, timeout=280, check=False
    )
    found = re.findall(r"^(\S+?):(\d+): error", done.stdout, re.MULTILINE)
    assert done.stderr == ""
    assert [line for name, line in found if name != "wrong.py"] == [], done.stdout
    lines = (FOLDER / "wrong.py").read_text(encoding="utf-8").splitlines()
    wrong = [str(at) for at, line in enumerate(lines, 1) if line.endswith("# wrong")]
    assert sorted({line for _, line in found}, key=int) == wrong, done.stdout


def test_the_package_is_marked_as_typed():
    assert (files("lmx_lab") / "py.typed").is_file()
