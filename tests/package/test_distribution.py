"""The wheel and the source distribution, built from this checkout, and the wheel used outside of it."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from trove_classifiers import classifiers

ROOT = Path(__file__).parents[2]
SMOKE = """
import sys
from importlib import import_module
from importlib.resources import files
from pathlib import Path

import lmx_lab

home, place = sys.argv[1:]
assert Path(lmx_lab.__file__).is_relative_to(place), lmx_lab.__file__
from lmx_lab.panels.layout import PANELS
assert all(panel._esm for panel in PANELS.values())
lab = lmx_lab.launch("tiny", home=home, port=0)
print(lab.chat("hello", max_tokens=3, ignore_eos=True).usage.completion_tokens, "tokens")
lab.stop()
"""


@dataclass(frozen=True, kw_only=True)
class Built:
    wheel: Path
    sdist: Path

    @property
    def files(self) -> dict[str, bytes]:
        return contents(self.wheel)

    @property
    def facts(self) -> str:
        """The folder of the metadata."""
        return f"{'-'.join(self.wheel.name.split('-')[:2])}.dist-info"

    @property
    def metadata(self) -> Message:
        return message_from_bytes(self.files[f"{self.facts}/METADATA"])


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def hatchling(root: Path, kind: str, target: Path) -> Path:
    """As ``python -m build --no-isolation`` calls it."""
    before = set(target.glob("*"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    (made,) = set(target.glob("*")) - before
    return made


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    target = tmp_path_factory.mktemp("dist")
    return Built(wheel=hatchling(ROOT, "wheel", target), sdist=hatchling(ROOT, "sdist", target))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built: Built) -> None:
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lmx_lab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in built.files if ".dist-info/" not in name}
    assert packed == here
    assert {"lmx_lab/py.typed", "lmx_lab/panels/built/chat.js", "lmx_lab/panels/uplot/uPlot.iife.min.js"} <= packed
    # Nothing that JupyterLab or another program would find in its own folders.
    assert {name.split("/")[0] for name in built.files} == {"lmx_lab", built.facts}


def test_what_others_wrote_comes_with_its_licence(built: Built) -> None:
    assert b"Leon Sorokin" in built.files["lmx_lab/panels/uplot/LICENSE"]
    licences = built.metadata.get_all("License-File") or []
    assert {"LICENSE", "lmx_lab/panels/uplot/LICENSE"} <= set(licences)
    assert all(f"{built.facts}/licenses/{name}" in built.files for name in licences)


def test_the_source_distribution_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    again = hatchling(root, "wheel", tmp_path)
    assert contents(again) == built.files


def test_the_metadata_is_what_an_index_accepts(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Classifier") or []) <= classifiers
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert {"lab", "gguf", "cuda", "dev"} <= extras
    for line in metadata.get_all("Requires-Dist") or []:
        marker = str(Requirement(line).marker or "")
        assert "extra" not in marker or any(f'extra == "{extra}"' in marker for extra in extras), line


def test_the_wheel_serves_and_chats_outside_of_the_repository(built: Built, tiny_home: Path, tmp_path: Path) -> None:
    bin_folder = installed(built.wheel, tmp_path / "env")
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    told = subprocess.run(
        [bin_folder / "lmx-lab", "--version"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert told.stdout == f"lmx-lab {built.metadata['Version']}\n"
    used = subprocess.run(
        [bin_folder / "python", "-c", SMOKE, tiny_home, tmp_path / "env"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert used.stdout.endswith("3 tokens\n")


def installed(wheel: Path, environment: Path) -> Path:
    """The scripts of an environment with the wheel, which borrows the wheel's dependencies from this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )  # fmt: skip
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    # A path in a .pth file does not have its own .pth files read: an editable install stays out.
    (Path(paths["purelib"]) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"
