"""One frozen ``Settings``: read once at the rim (``launch``, the command line), passed down, never a global."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from lmx_lab.errors import InvalidRequestError

PREFIX = "LMX_LAB_"
GIB = 2**30
LOG_LEVELS = ("debug", "info", "warning", "error")
CHOICES: dict[str, tuple[str, ...]] = {
    "log_level": LOG_LEVELS,
    "blas": ("auto", "off"),
    "dtype": ("auto", "keep", "float32", "float16", "bfloat16"),
}
BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
KINDS = {"bool": "true or false (1 or 0)", "int": "a whole number", "float": "a number"}
SECRETS = frozenset(
    {f"{PREFIX}{name}" for name in ("API_KEY", "UPSTREAM_API_KEY", "DAEMON_TOKEN", "COMPARE_API_KEY")}
    | {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"}
)
"""Variables that no process of ours needs which reads what comes with a model."""
DAY_S = 86_400.0
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "daemon_port": (0, 65_535),
    "slots": (1, 1024),
    "queue_limit": (0, 100_000),
    "max_body_bytes": (1024, GIB),
    "request_timeout_s": (0.001, DAY_S),
    "drain_s": (0, DAY_S),
    "stall_limit_s": (1, DAY_S),
    "idle_unload_s": (0.001, 30 * DAY_S),
    "memory_limit_bytes": (0, 2**50),
    "prefix_cache_bytes": (0, 2**50),
    "threads": (1, 1024),
    "disk_reserve_bytes": (0, 2**60),
    "echo_tokens_per_s": (0.001, 1e6),
}


def _default_home() -> Path:
    return Path.home() / ".lmx-lab"


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment for a process that has no business with keys."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be chosen, with its unit in its name.

    Each field can be set by the environment variable ``LMX_LAB_<NAME>``; lists are separated as ``PATH`` is. An
    argument of ``launch()`` or a flag of the command line wins over the environment.
    """

    home: Path = field(default_factory=_default_home)
    """Where the lab keeps its models and state."""
    model_folders: tuple[Path, ...] = ()
    """Extra folders whose sub-folders (or ``.gguf`` files) are listed as models."""
    downloads: bool = True
    """Whether naming an unknown hub model may download it (from this machine only)."""

    host: str = "127.0.0.1"
    """Where the server listens; ``0.0.0.0`` serves the LAN."""
    port: int = 8400
    """Where nobody has chosen one, it may be the next that is free; 0 takes any."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must send as ``Authorization: Bearer KEY``; by default nothing."""
    cors_origins: tuple[str, ...] = ()
    """Origins of other web pages that may call the server, such as ``http://localhost:3000``."""
    allowed_hosts: tuple[str, ...] = ()
    """Further values of the Host header to accept, ``name`` or ``name:port``."""
    lan_admin: bool = False
    """Whether other hosts may load and unload what is on disk; downloads stay with this machine."""
    max_body_bytes: int = 8 * 2**20
    """The longest request."""
    log_level: str = "info"
    """What ``lmx-lab serve`` prints: debug, info, warning or error."""

    daemon_host: str = "127.0.0.1"
    """Where the daemon listens; any other address than loopback exposes it to other machines."""
    daemon_port: int = 8401
    """As ``port``."""
    upstream: str | None = None
    """The chat-format server that the daemon's turns ask; by default http://127.0.0.1:8400."""
    upstream_api_key: str | None = field(default=None, repr=False)
    """The key of that server."""

    slots: int = 8
    """Requests decoded at the same time; the rest wait in arrival order."""
    queue_limit: int = 64
    """Requests that may wait before new ones are refused with ``queue-full``."""
    request_timeout_s: float = 600.0
    """Deadline of one generation, from arrival to its last token."""
    drain_s: float = 30.0
    """How long running requests may go on when another model is to be loaded."""
    stall_limit_s: float = 60.0
    """No engine step for so long while work waits: readiness turns 503."""
    swap: bool = False
    """Whether a request that names another model on disk loads it, instead of being refused."""
    idle_unload_s: float | None = None
    """Unload the model when no request has come for so long; by default never."""
    memory_limit_bytes: int | None = None
    """What models and caches may take together; by default 80 % of the device's memory, or of what a container leaves
    of it."""
    prefix_cache_bytes: int | None = None
    """What the KV caches of ended requests may take, for requests that begin alike; by default 10 % of the memory
    limit, 0 keeps none."""
    embedder: str | None = None
    """An embedding model that is kept in memory beside the loaded one, whatever that is."""
    reranker: str | None = None
    """The same for a reranker."""
    dtype: str = "auto"
    """Of weights in memory. ``auto``: on a CPU float32, to which quantized weights are expanded if they fit; on a GPU
    as the files have them. ``keep``: the same, but quantized weights stay so. ``float32``, ``float16``, ``bfloat16``:
    all weights, expanded."""
    blas: str = "auto"
    """``auto`` puts OpenBLAS behind MLX on Linux CPUs, ``off`` leaves MLX as it was installed."""
    threads: int | None = None
    """That OpenBLAS or llama.cpp computes with; by default the physical cores that this process may use."""
    echo_script: Path | None = None
    """Answers for the model ``echo``: a file of JSON lines, see ``docs/echo.md``. Without it the last message is
    repeated."""
    echo_tokens_per_s: float | None = None
    """How fast each answer of ``echo`` comes; by default as fast as possible."""
    disk_reserve_bytes: int = 1 * GIB // 4
    """Free disk that a download must leave."""
    wired_memory: bool = False
    """Let mlx-lm raise macOS's wired-memory limit (off: mlx issue 3186 links it to kernel panics)."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and low <= value <= high):
                raise InvalidRequestError(f"{name} is {value!r}; it must be {low} to {high}", param=name)
        for name in ("host", "daemon_host"):
            if not getattr(self, name).strip():
                raise InvalidRequestError(f"{name} is empty; use 127.0.0.1, or 0.0.0.0 to serve the LAN", param=name)
        for name, choices in CHOICES.items():
            if (chosen := getattr(self, name)) not in choices:
                raise InvalidRequestError(f"{name} is {chosen!r}; it can be {', '.join(choices)}", param=name)

    @property
    def models_folder(self) -> Path:
        """The lab's own model store."""
        return self.home / "models"

    @property
    def daemon_folder(self) -> Path:
        """Where the daemon keeps its database, its state file and its log."""
        return self.home / "daemon"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Settings from the environment (empty counts as unset), then from the overrides that are not ``None``.

        Raises:
            InvalidRequestError: an override that is no setting, or a value of the wrong type, by name.
        """
        environ = os.environ if environ is None else environ
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - set(fields))
        if unknown:
            raise InvalidRequestError(f"no such setting: {', '.join(unknown)}; there are {', '.join(fields)}")
        values: dict[str, Any] = {}
        for name, f in fields.items():
            if overrides.get(name) is not None:
                values[name] = _coerce(name, str(f.type), overrides[name])
            elif text := environ.get(PREFIX + name.upper()):
                values[name] = _coerce(PREFIX + name.upper(), str(f.type), text)
        return cls(**values)


def _coerce(name: str, kind: str, value: Any) -> Any:
    kind = kind.removesuffix(" | None")
    try:
        if kind.startswith("tuple["):
            items = value.split(os.pathsep if "Path" in kind else ",") if isinstance(value, str) else value
            return tuple(Path(item).expanduser() if "Path" in kind else str(item) for item in items if str(item))
        if kind == "bool":
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
        if kind == "Path":
            return Path(value).expanduser()
        if kind == "int" and not isinstance(value, int | str):
            raise TypeError
        return {"int": int, "float": float, "str": str}[kind](value)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequestError(f"{name} is {value!r}; it must be {KINDS.get(kind, f'of type {kind}')}") from None
