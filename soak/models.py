"""Write the tiny models that the programs serve, for each engine: two-layer llamas with random weights."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, get_args

from benchmarks.models import minilm
from benchmarks.paths import ROOT
from soak.report import Row, Soak
from tests.support.gguf import kept, starter_gguf, with_values, write_minilm_gguf, write_reranker_gguf, write_tiny_gguf
from tests.support.models import teach_thinking, write_tiny_bert, write_tiny_llama

Engine = Literal["MLX", "llama.cpp"]
ENGINES: tuple[Engine, ...] = get_args(Engine)


def is_installed(engine: Engine) -> bool:
    return engine == "MLX" or find_spec("xllamacpp") is not None


def on_each_engine(soak: Soak, part: str, rows: list[Row]) -> Iterator[tuple[Engine, Path]]:
    """Yield the installed engines and the tiny model of each; add a row for an engine that is not installed."""
    for engine in ENGINES:
        if is_installed(engine):
            yield engine, tiny(soak, engine)
        else:
            rows.append(Row(part=f"{part}, {engine}", notes=f"skipped: {engine} is not installed"))


def tiny(soak: Soak, engine: Engine) -> Path:
    """Return the tiny model of an engine: a folder, or a GGUF file with the same context length."""
    if engine == "MLX":
        return soak.folder
    context = json.loads((soak.folder / "config.json").read_text())["max_position_embeddings"]
    short = _tiny_gguf(soak)

    def write(target: Path) -> None:
        with_values(short, target, {"llama.context_length": context})

    return kept(_home(), f"tiny-{context}-tokens", write)


def write_models(folder: Path, soak: Soak, engine: Engine) -> None:
    """Write the models that requests name: ``tiny``, ``tiny-two``, ``tiny-embedder`` and ``tiny-reranker``."""
    if engine == "MLX":
        for seed, name in enumerate(("tiny", "tiny-two")):
            write_tiny_llama(folder / name, soak.folder, seed=seed)
        teach_thinking(folder / "tiny")
        write_tiny_bert(folder / "tiny-embedder")
        write_tiny_bert(folder / "tiny-reranker", labels=1)
        return
    files = {
        "tiny": _tiny_gguf(soak),
        "tiny-two": _tiny_gguf(soak, seed=1),
        "tiny-embedder": kept(_home(), "minilm", lambda target: write_minilm_gguf(target, minilm())),
        "tiny-reranker": kept(_home(), "reranker", lambda target: write_reranker_gguf(target, minilm())),
    }
    for name, file in files.items():
        (folder / name).mkdir(parents=True)
        shutil.copy(file, folder / name)


def _tiny_gguf(soak: Soak, *, seed: int = 0) -> Path:
    starter = starter_gguf(_home())
    name = f"tiny-{seed}" if seed else "tiny"
    return kept(_home(), name, lambda target: write_tiny_gguf(target, starter, soak.folder, seed=seed))


def _home() -> Path:
    """Return the home that the tests keep between runs."""
    return Path(os.environ.get("LMX_LAB_TEST_HOME", ROOT / ".cache" / "test-home")).absolute()
