"""What importing brings along, by name: a time would depend on the machine."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Each takes longer to import than the whole package may, 150 ms, or starts something.
HEAVY = {
    *(
        "IPython",
        "anywidget",
        "anyio",
        "fastapi",
        "httpx2",
        "huggingface_hub",
        "ipywidgets",
        "llguidance",
        "matplotlib",
    ),
    *("mcp", "mlx", "mlx_lm", "nest_asyncio2", "numpy", "pandas", "prometheus_client", "pydantic", "starlette"),
    *("tokenizers", "transformers", "uvicorn", "xllamacpp"),
}


def brought_by(statement: str) -> set[str]:
    """The modules that a fresh process has after it and had not before."""
    told = "print(json.dumps(sorted(set(sys.modules) - before)))"
    code = f"import json, sys; before = set(sys.modules); {statement}; {told}"
    asked = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert asked.returncode == 0, asked.stderr
    return set(json.loads(asked.stdout))


def test_importing_the_package_brings_nothing_but_itself_and_the_standard_library() -> None:
    brought = brought_by("import lmx_lab")
    assert {name for name in brought if name.split(".")[0] == "lmx_lab"} == {"lmx_lab"}
    assert {name.split(".")[0] for name in brought} - sys.stdlib_module_names == {"lmx_lab"}


def test_the_packages_public_names_are_there_before_they_are_imported() -> None:
    brought = brought_by("import lmx_lab; assert {'launch', 'attach', 'Lab'} <= set(dir(lmx_lab))")
    assert "lmx_lab.notebook" not in brought


@pytest.mark.parametrize("module", ["lmx_lab.settings", "lmx_lab.errors", "lmx_lab.urls", "lmx_lab.cli"])
def test_what_everybody_reads_first_brings_nothing_heavy(module: str) -> None:
    assert not {name.split(".")[0] for name in brought_by(f"import {module}")} & HEAVY


def test_the_name_of_an_error_is_had_without_an_engine() -> None:
    assert not {name.split(".")[0] for name in brought_by("from lmx_lab import LabError, Settings")} & HEAVY
