"""The available engines: one row for each format of models.

An engine is imported when its first model comes: MLX with mlx-lm takes two seconds, and many processes use one engine
or none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmx_lab.engine.llama_cpp.process import INSTALL, installed
from lmx_lab.errors import UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.values.models import EngineName, Format, LoadSpec, ModelEntry

if TYPE_CHECKING:
    from lmx_lab.engine.echo.engine import EchoEngine
    from lmx_lab.engine.interface import InferenceEngine
    from lmx_lab.engine.llama_cpp.engine import GgufEngine
    from lmx_lab.engine.mlx.engine import MlxEngine

BesideBytes = Callable[[], int]
"""What other engines take of the memory limit."""


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    name: EngineName
    make: Callable[[Settings, BesideBytes], InferenceEngine]
    problem: Callable[[], str | None] = lambda: None
    """Why models of this format cannot be loaded in this environment, and what to do; None if they can."""


def _mlx(settings: Settings, beside_bytes: BesideBytes) -> MlxEngine:
    from lmx_lab.engine.mlx.engine import MlxEngine

    return MlxEngine(settings, beside_bytes=beside_bytes)


def _gguf(settings: Settings, beside_bytes: BesideBytes) -> GgufEngine:
    from lmx_lab.engine.llama_cpp.engine import GgufEngine

    return GgufEngine(settings, beside_bytes=beside_bytes)


def _gguf_problem() -> str | None:
    return None if installed() else f"llama.cpp, which runs GGUF files, is not installed: {INSTALL}"


def _echo(settings: Settings, _: BesideBytes) -> EchoEngine:
    from lmx_lab.engine.echo.engine import EchoEngine

    return EchoEngine(settings)


ENGINES: Mapping[Format, EngineRow] = {
    "mlx": EngineRow(name="mlx", make=_mlx),
    "gguf": EngineRow(name="llama.cpp", make=_gguf, problem=_gguf_problem),
    "echo": EngineRow(name="echo", make=_echo),
}
"""What runs the models of each format."""

NEXT_STEPS: Mapping[Format, str] = {
    "mlx": "or load a GGUF file of the model, such as org/name:Q4_K_M",
    "gguf": "or convert the file for MLX: lmx-lab pull {model} --mlx",
    "echo": "or load another model",
}
"""How to run a model on another engine, by the format that the model has."""


def check_engine(entry: ModelEntry, spec: LoadSpec) -> None:
    """Check that the engine that the caller chose runs models of this format.

    Raises:
        UnusableModelError: another engine runs them.
    """
    engine = ENGINES[entry.format].name
    if spec.engine not in ("auto", engine):
        raise UnusableModelError(
            f"{entry.id} has the format {entry.format}, which runs on {engine} and not on {spec.engine}; leave out "
            f"engine, {NEXT_STEPS[entry.format].format(model=spec.model)}",
            param="engine",
        )
