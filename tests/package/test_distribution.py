"""Test the wheel and the source distribution of this checkout, and use the wheel outside of it."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from dataclasses import dataclass
from email import message_from_bytes
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
class Distributions:
    wheel: Path
    sdist: Path

    @property
    def files(self):
        return contents(self.wheel)

    @property
    def metadata_folder(self):
        """Name of the folder with the metadata."""
        return f"{'-'.join(self.wheel.name.split('-')[:2])}.dist-info"

    @property
    def metadata(self):
        return message_from_bytes(self.files[f"{self.metadata_folder}/METADATA"])


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def hatchling(root, kind, target):
    """Build a distribution, as ``python -m build --no-isolation`` does."""
    before = set(target.glob("*"))
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)
    (distribution,) = set(target.glob("*")) - before
    return distribution


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    target = tmp_path_factory.mktemp("dist")
    return Distributions(wheel=hatchling(ROOT, "wheel", target), sdist=hatchling(ROOT, "sdist", target))


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(built):
    here = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "lmx_lab").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = {name for name in built.files if ".dist-info/" not in name}
    assert packed == here
    assert {"lmx_lab/py.typed", "lmx_lab/panels/built/chat.js", "lmx_lab/panels/uplot/uPlot.iife.min.js"} <= packed
    # No files for the folders of JupyterLab or other programs.
    assert {name.split("/")[0] for name in built.files} == {"lmx_lab", built.metadata_folder}


def test_the_license_of_vendored_code_is_included(built):
    assert b"Leon Sorokin" in built.files["lmx_lab/panels/uplot/LICENSE"]
    licenses = built.metadata.get_all("License-File") or []
    assert {"LICENSE", "lmx_lab/panels/uplot/LICENSE"} <= set(licenses)
    assert all(f"{built.metadata_folder}/licenses/{name}" in built.files for name in licenses)


def test_the_source_distribution_builds_the_same_wheel(built, tmp_path):
    with tarfile.open(built.sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (root,) = tmp_path.iterdir()
    again = hatchling(root, "wheel", tmp_path)
    assert contents(again) == built.files


def test_a_package_index_accepts_the_metadata(built):
    metadata = built.metadata
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload(decode=True) == (ROOT / "README.md").read_bytes()
    assert metadata["License-Expression"] == "MIT"
    assert set(metadata.get_all("Classifier") or []) <= classifiers
    extras = set(metadata.get_all("Provides-Extra") or [])
    assert extras == {"lab", "gguf", "lan", "otel", "cuda", "ray"}
    for line in metadata.get_all("Requires-Dist") or []:
        marker = str(Requirement(line).marker or "")
        assert "extra" not in marker or any(f'extra == "{extra}"' in marker for extra in extras), line


def test_the_wheel_serves_and_chats_outside_of_the_repository(built, tiny_home, tmp_path):
    bin_folder = install(built.wheel, tmp_path / "env")
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONPATH"}
    version = subprocess.run(
        [bin_folder / "lmx-lab", "--version"], cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    assert version.stdout == f"lmx-lab {built.metadata['Version']}\n"
    used = subprocess.run(
        [bin_folder / "python", "-c", SMOKE, tiny_home, tmp_path / "env"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert used.returncode == 0, used.stderr
    assert used.stdout.endswith("3 tokens\n")


def install(wheel, environment):
    """Install the wheel in a new environment that uses this environment's dependencies; return its scripts folder."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel],
        check=True,
    )  # fmt: skip
    paths = sysconfig.get_paths(vars={"base": str(environment), "platbase": str(environment)})
    # Python does not read .pth files in folders that a .pth file adds, so an editable install is not used.
    (Path(paths["purelib"]) / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment / "bin"
