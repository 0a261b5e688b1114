"""List the available engines, one row each, and create those of a manager.

An engine is imported when its first model is loaded: MLX with mlx-lm takes two seconds to import, and many processes
use one engine or none. A new engine needs a package with its class, and a row here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmx_lab.engine.llama_cpp.process import PACKAGE, missing_part
from lmx_lab.engine.memory import total_bytes
from lmx_lab.engine.model import Engine, EngineHost, EngineMemory
from lmx_lab.engine.tokenizing.worker import keep_descriptor_limit
from lmx_lab.errors import UnusableModelError
from lmx_lab.extras import installed_version
from lmx_lab.settings import Settings
from lmx_lab.values.engine import BlasReport
from lmx_lab.values.models import EngineName, Format, LoadSpec, ModelEntry

if TYPE_CHECKING:
    from lmx_lab.engine.model import LoadedModel

Factory = Callable[[Settings, EngineHost], Engine]


@dataclass(frozen=True, kw_only=True)
class EngineRow:
    """Properties of one engine that are known without importing it."""

    name: EngineName
    title: str
    """Name of the engine in messages."""
    formats: tuple[Format, ...]
    """Formats of the models that the engine runs."""
    make: Factory
    package: str | None = None
    """Installed package whose version is the engine's; None for the built-in engine."""
    files: str = ""
    """The name of its models in messages, such as ``GGUF files``."""
    good_for: str = ""
    """When to choose the engine, for lists of models."""
    is_measured: bool = False
    """Whether ``lmx-lab doctor --measure`` measures its speed."""
    alternative: str = "or load another model"
    """How to run one of its models on another engine, for messages; may contain ``{model}``."""
    problem: Callable[[], str | None] = lambda: None
    """Returns why the engine cannot run in this environment, and the next step; None if it can run."""

    @property
    def version(self) -> str | None:
        """Version of the package; None if it is not installed."""
        return installed_version(self.package) if self.package is not None and self.problem() is None else None


def _llama_cpp_problem() -> str | None:
    missing = missing_part()
    return None if missing is None else f"llama.cpp, which runs GGUF files, {missing}"


# The imports are inside functions because each engine is slow to import and may not be used.


def _make_mlx(settings: Settings, host: EngineHost) -> Engine:
    with keep_descriptor_limit():
        from lmx_lab.engine.mlx.engine import MlxEngine

    return MlxEngine(settings, host)


def _make_llama_cpp(settings: Settings, host: EngineHost) -> Engine:
    from lmx_lab.engine.llama_cpp.engine import LlamaCppEngine

    return LlamaCppEngine(settings, host)


def _make_echo(settings: Settings, host: EngineHost) -> Engine:
    from lmx_lab.engine.echo.engine import EchoEngine

    return EchoEngine(settings, host)


ENGINES: Mapping[EngineName, EngineRow] = {
    row.name: row
    for row in (
        EngineRow(
            name="mlx",
            title="MLX",
            formats=("mlx",),
            make=_make_mlx,
            package="mlx",
            files="MLX folders",
            good_for="fast on a GPU, and scores prompts fast",
            is_measured=True,
            alternative="or load a GGUF file of the model, such as org/name:Q4_K_M",
        ),
        EngineRow(
            name="llama.cpp",
            title="llama.cpp",
            formats=("gguf",),
            make=_make_llama_cpp,
            package=PACKAGE,
            files="GGUF files",
            good_for="fast on a CPU",
            is_measured=True,
            alternative="or convert the file for MLX: lmx-lab pull {model} --mlx",
            problem=_llama_cpp_problem,
        ),
        EngineRow(name="echo", title="echo", formats=("echo",), make=_make_echo),
    )
}


def engine_for(format: Format) -> EngineRow:
    """Return the engine that runs models of this format."""
    return next(row for row in ENGINES.values() if format in row.formats)


def choose_engine(entry: ModelEntry, spec: LoadSpec) -> EngineRow:
    """Return the engine that runs a model.

    Raises:
        UnusableModelError: the caller chose an engine that does not run models of this format.
    """
    row = engine_for(entry.format)
    if spec.engine not in ("auto", row.name):
        raise UnusableModelError(
            f"{entry.id} has the format {entry.format}, which runs on {row.name} and not on {spec.engine}; leave out "
            f"engine, {row.alternative.format(model=spec.model)}",
            param="engine",
        )
    return row


def share_memory(engine: Engine, other: Engine) -> bool:
    """Return whether the models of two engines use the same memory. Models of MLX may be in the memory of a GPU."""
    return engine is other or not (engine.memory.is_of_device or other.memory.is_of_device)


class Engines:
    """The engines of one manager, each of which is created with its first model. May be used on any thread.

    Args:
        make: Functions that make the engines, by name. Engines that are missing are made as in ``ENGINES``.
    """

    def __init__(self, settings: Settings, host: EngineHost, make: Mapping[EngineName, Factory] | None = None) -> None:
        self._settings = settings
        self._host = host
        self._make = {name: row.make for name, row in ENGINES.items()} | dict(make or {})
        self._created: dict[EngineName, Engine] = {}
        self._lock = threading.Lock()
        self._machine_bytes = total_bytes()
        self._peaks: dict[EngineName, int] = {}

    def get(self, name: EngineName) -> Engine:
        """Return an engine, which is imported and created first if necessary. Blocks in that case."""
        if (known := self._created.get(name)) is not None:
            return known
        with self._lock:
            if name not in self._created:
                self._created[name] = self._make[name](self._settings, self._host)
            return self._created[name]

    def of(self, entry: ModelEntry) -> Engine:
        """Return the engine that runs a model; see ``get``."""
        return self.get(engine_for(entry.format).name)

    def room_bytes(self, entry: ModelEntry, models: Iterable[LoadedModel[Any]]) -> int:
        """Return the memory that a model may use next to these models."""
        engine = self.of(entry)
        return engine.memory.limit - sum(it.memory_bytes for it in models if share_memory(engine, self.of(it.entry)))

    def memory(self, models: Iterable[LoadedModel[Any]]) -> EngineMemory:
        """Return the memory of all engines together, including the memory of a GPU.

        Args:
            models: The models in memory.
        """
        total, limit, used = self._machine_bytes, 0, 0
        for name, engine in list(self._created.items()):
            memory = engine.memory
            engine_used = memory.used
            if engine_used is None:
                engine_used = sum(it.memory_bytes for it in models if engine_for(it.entry.format).name == name)
            self._peaks[name] = max(self._peaks.get(name, 0), engine_used, memory.peak or 0)
            total, limit, used = max(total, memory.total), max(limit, memory.limit), used + engine_used
        peak = sum(list(self._peaks.values()))
        return EngineMemory(total=total, limit=limit, used=used, peak=peak)

    @property
    def blas(self) -> BlasReport | None:
        """The BLAS of the first engine that has one."""
        return next((engine.blas for engine in list(self._created.values()) if engine.blas is not None), None)

    def stop(self) -> None:
        """Stop the engines, the newest first. Blocks."""
        for engine in reversed(list(self._created.values())):
            engine.stop()
