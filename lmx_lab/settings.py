"""Define ``Settings``. The entry points (``launch`` and the command line) read them once and pass them on."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Self

from lmx_lab.errors import InvalidRequestError, did_you_mean

PREFIX = "LMX_LAB_"
GIB = 2**30
LOG_LEVELS = ("debug", "info", "warning", "error")
CHOICES: dict[str, tuple[str, ...]] = {
    "log_level": LOG_LEVELS,
    "blas": ("auto", "off"),
    "dtype": ("auto", "keep", "float32", "float16", "bfloat16"),
    "record": ("own", "all", "off"),
    "otel": ("off", "spans", "content"),
}
NUMBERS: dict[str, type] = {"int": Integral, "float": Real}
BOOLEANS = {"1": True, "true": True, "0": False, "false": False}
COUNT_OR_AUTO = "int | Literal['auto']"
TYPE_DESCRIPTIONS = {
    "bool": "true or false (1 or 0)",
    "int": "a whole number",
    "float": "a number",
    COUNT_OR_AUTO: "a whole number, or auto",
}
SECRETS = frozenset(
    {f"{PREFIX}{name}" for name in ("API_KEY", "UPSTREAM_API_KEY", "DAEMON_TOKEN", "COMPARE_API_KEY")}
    | {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HUGGINGFACE_HUB_TOKEN"}
)
"""Variables that are removed from the environment of processes which read files of a model."""
DAY_S = 86_400.0
RANGES: dict[str, tuple[float, float]] = {
    "port": (0, 65_535),
    "daemon_port": (0, 65_535),
    "slots": (1, 1024),
    "resident": (1, 64),
    "queue_limit": (0, 100_000),
    "max_body_bytes": (1024, GIB),
    "request_timeout_s": (0.001, DAY_S),
    "slow_client_s": (1, DAY_S),
    "drain_s": (0, DAY_S),
    "stall_limit_s": (1, DAY_S),
    "idle_unload_s": (0.001, 30 * DAY_S),
    "load_timeout_s": (0.001, DAY_S),
    "memory_limit_bytes": (0, 2**50),
    "prefix_cache_bytes": (0, 2**50),
    "prefix_cache_disk_bytes": (0, 2**60),
    "trace_bytes": (0, 2**50),
    "threads": (1, 1024),
    "disk_reserve_bytes": (0, 2**60),
    "echo_tokens_per_s": (0.001, 1e6),
}


def without_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without the variables that contain keys, for a process that does not need them."""
    return {name: value for name, value in environ.items() if name not in SECRETS}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of the server and of the daemon. Names contain the unit.

    Each setting can be set with the environment variable ``LMX_LAB_<NAME>``. Lists are separated by commas, lists of
    folders like ``PATH``. An argument of ``launch()`` or an option of the command line takes precedence over the
    environment.
    """

    home: Path = field(default_factory=lambda: Path.home() / ".lmx-lab")
    """Folder for models, benchmark runs and the state of the daemon."""
    model_folders: tuple[Path, ...] = ()
    """Additional folders. Their sub-folders and ``.gguf`` files are listed as models."""
    other_programs: bool = True
    """Whether the models of Ollama, LM Studio and llama.cpp are listed. They are loaded in place and never changed."""
    downloads: bool = True
    """Whether a load may download a model that is not on disk. Only requests from this machine can do so."""

    host: str = "127.0.0.1"
    """Address on which the server listens. ``0.0.0.0`` makes it available on the LAN."""
    port: int = 8400
    """Port of the server. If it is not set and 8400 is taken, the next free port is used. 0 takes any free port."""
    api_key: str | None = field(default=None, repr=False)
    """Key that clients must send as ``Authorization: Bearer KEY``. By default no key is required."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server, such as ``http://localhost:3000``."""
    allowed_hosts: tuple[str, ...] = ()
    """Additional values of the Host header that are accepted, as ``name`` or ``name:port``."""
    lan_admin: bool = False
    """Whether other machines may load and unload models that are on disk. They can never start a download."""
    announce: bool = False
    """Whether the server is announced on the local network, so that ``lmx-lab discover`` and ``lmx_lab.discover()``
    find it."""
    announce_name: str | None = None
    """Name under which the server is announced. By default that of this machine without its domain."""
    page: bool = True
    """Whether the server's address shows a chat page in a browser. Otherwise it shows the page with links, which is
    also at ``/about``."""
    max_body_bytes: int = 8 * 2**20
    """Maximum size of a request body."""
    log_level: str = "info"
    """Lowest level of the messages that ``lmx-lab serve`` and ``lmx-lab daemon`` log: debug, info, warning or error."""

    daemon_host: str = "127.0.0.1"
    """Address on which the daemon listens. Other machines can reach it on any address other than loopback."""
    daemon_port: int = 8401
    """Port of the daemon. If it is not set and 8401 is taken, the next free port is used. 0 takes any free port."""
    upstream: str | None = None
    """Address of the model server that the daemon calls. By default http://127.0.0.1:8400."""
    upstream_api_key: str | None = field(default=None, repr=False)
    """Key that the daemon sends to the model server."""

    slots: int = 8
    """Number of requests that are decoded at the same time. Other requests wait in order of arrival."""
    queue_limit: int = 64
    """Number of requests that may wait. Further requests are rejected with ``queue-full``."""
    request_timeout_s: float = 600.0
    """Maximum time of a generation, from the arrival of the request to the last token."""
    slow_client_s: float = 10.0
    """Time for which the client of a stream may accept no data before its generation is cancelled and it is
    disconnected."""
    drain_s: float = 30.0
    """Time that running requests have to finish before another model is loaded."""
    stall_limit_s: float = 60.0
    """Time without an engine step, while requests wait, after which ``/readyz`` answers 503."""
    resident: int | Literal["auto"] = 1
    """Number of models that stay in memory, besides pinned ones. A load beyond it unloads the model that was used least
    recently. ``auto``: as many as memory has room for."""
    swap: bool = False
    """Whether a request for another model on disk loads that model. Otherwise the request is rejected."""
    model_aliases: tuple[str, ...] = ()
    """Additional names for models in requests, as ``name=id``, such as ``gpt-4o=smollm2-135m``."""
    any_model: bool = False
    """Whether a request that names a model that is not on disk is answered by the loaded model. Otherwise the request
    is rejected."""
    idle_unload_s: float | None = None
    """Time without requests after which a model is unloaded. By default it stays loaded."""
    load_timeout_s: float | None = None
    """Maximum time to load a model into memory, without the download. By default 60 s plus 1 s for each 20 MB of
    weights."""
    memory_limit_bytes: int | None = None
    """Memory for models and caches together. By default 80 % of the device's memory, or of the container's limit."""
    prefix_cache_bytes: int | None = None
    """Memory for the KV caches of finished requests, which later requests with the same beginning reuse. By default
    10 % of the memory limit. 0 turns this cache off."""
    prefix_cache_dir: Path | None = None
    """Folder in which the KV caches of finished requests are stored as files, so that they can be reused after a
    restart. Several servers may use the same folder. By default they are only in memory."""
    prefix_cache_disk_bytes: int = 10 * GIB
    """Maximum total size of the cache's files in that folder. The least recently used ones are deleted first."""
    trace_bytes: int = 1 * GIB
    """Maximum size of the internal values of a model that one trace returns. Larger traces are refused."""
    embedder: str | None = None
    """Embedding model that stays in memory, in addition to the loaded model."""
    reranker: str | None = None
    """Reranking model that stays in memory, in addition to the loaded model."""
    dtype: str = "auto"
    """Data type of the weights in memory. ``auto``: float32 on a CPU, where quantized weights are dequantized if they
    fit; the type in the files on a GPU. ``keep``: like ``auto``, but quantized weights stay quantized. ``float32``,
    ``float16``, ``bfloat16``: this type for all weights, which are dequantized."""
    blas: str = "auto"
    """``auto``: on Linux CPUs, MLX uses OpenBLAS. ``off``: MLX uses the BLAS that it was installed with."""
    threads: int | None = None
    """Number of threads of OpenBLAS or llama.cpp. By default the number of physical cores this process may use."""
    echo_script: Path | None = None
    """File of JSON lines with the answers of the model ``echo``; see ``docs/echo.md``. Without it, ``echo`` repeats the
    last message."""
    echo_tokens_per_s: float | None = None
    """Speed of each answer of the model ``echo``. By default as fast as possible."""
    record: str = "own"
    """Requests whose tokens, settings and timings are recorded. ``own``: those of the notebook that runs the server, of
    its daemon, and of clients made from ``lab.openai``. ``all``: those of all clients. ``off``: none."""
    record_to: Path | None = None
    """SQLite file in which records are stored. By default the last 200 are kept in memory."""
    otel: str = "off"
    """Whether requests are exported as OpenTelemetry spans to the collector that ``OTEL_EXPORTER_OTLP_ENDPOINT`` names.
    ``off``: not exported. ``spans``: without texts. ``content``: with the texts of prompts and answers."""
    disk_reserve_bytes: int = 1 * GIB // 4
    """Disk space that must remain free after a download, and after a file of the prefix cache is written."""
    wired_memory: bool = False
    """Whether mlx-lm may raise the wired-memory limit of macOS. Off by default: mlx issue 3186 links it to kernel
    panics."""

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if value is None or (name == "resident" and value == "auto"):
                continue
            if not (isinstance(value, int | float) and low <= value <= high):
                other = ", or auto" if name == "resident" else ""
                raise InvalidRequestError(f"{name} is {value!r}; it must be from {low} to {high}{other}", param=name)
        for alias in self.model_aliases:
            if not all(alias.partition("=")):
                raise InvalidRequestError(
                    f"model_aliases has {alias!r}; write each as name=id, such as gpt-4o=smollm2-135m",
                    param="model_aliases",
                )
        names = [alias.partition("=")[0] for alias in self.model_aliases]
        if len({*names}) < len({*self.model_aliases}):
            raise InvalidRequestError(
                f"model_aliases has a name with two ids in {', '.join(self.model_aliases)}; keep one of them",
                param="model_aliases",
            )
        for name in ("host", "daemon_host"):
            if not getattr(self, name).strip():
                raise InvalidRequestError(
                    f"{name} is empty; use 127.0.0.1, or 0.0.0.0 to listen on the LAN", param=name
                )
        for name, choices in CHOICES.items():
            if (chosen := getattr(self, name)) not in choices:
                raise InvalidRequestError(f"{name} is {chosen!r}; it must be one of {', '.join(choices)}", param=name)

    @property
    def ids_by_alias(self) -> dict[str, str]:
        """The ids in ``model_aliases`` by their other names."""
        return {name: id_ for name, _, id_ in (alias.partition("=") for alias in self.model_aliases)}

    @property
    def models_folder(self) -> Path:
        """Folder with downloaded models."""
        return self.home / "models"

    @property
    def quantized_folder(self) -> Path:
        """Folder with quantized copies of models."""
        return self.home / "quantized"

    @property
    def daemon_folder(self) -> Path:
        """Folder with the database, the state file and the log of the daemon."""
        return self.home / "daemon"

    @classmethod
    def read(cls, environ: Mapping[str, str] | None = None, **overrides: Any) -> Self:
        """Read the settings from the environment. An empty variable counts as not set.

        Args:
            environ: Environment variables; by default those of this process.
            **overrides: Settings that take precedence over the environment, unless they are ``None``.

        Raises:
            InvalidRequestError: There is no such setting, or a value has the wrong type or is out of range.
        """
        environ = os.environ if environ is None else environ
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(overrides) - set(fields))
        if unknown:
            remedy = did_you_mean(unknown[0], fields) or f"; the settings are {', '.join(fields)}"
            raise InvalidRequestError(f"unknown setting: {', '.join(unknown)}{remedy}")
        values: dict[str, Any] = {}
        for name, f in fields.items():
            if overrides.get(name) is not None:
                values[name] = _convert(name, str(f.type), overrides[name])
            elif text := environ.get(PREFIX + name.upper()):
                values[name] = _convert(PREFIX + name.upper(), str(f.type), text)
        settings = cls(**values)
        # Only if the caller has given the name: in the environment, it may be meant for other commands.
        if overrides.get("announce_name") is not None and not settings.announce:
            raise InvalidRequestError(
                f"announce_name is {settings.announce_name!r:.80}, but announce is not set; add announce=True or "
                "--announce, or omit the name",
                param="announce_name",
            )
        return settings


def _convert(name: str, kind: str, value: Any) -> Any:
    """Convert a value to the annotated type ``kind`` of a setting. ``name`` is the setting's name in error messages."""
    kind = kind.removesuffix(" | None")
    try:
        if kind == COUNT_OR_AUTO and value == "auto":
            return value
        if kind.startswith("tuple["):
            items = value.split(os.pathsep if "Path" in kind else ",") if isinstance(value, str) else value
            return tuple(Path(item).expanduser() if "Path" in kind else str(item) for item in items if str(item))
        if kind == "bool":
            return value if isinstance(value, bool) else BOOLEANS[value.lower()]
        if kind == "Path":
            return Path(value).expanduser()
        # NumPy's numbers are instances of these classes. A boolean is an integer in Python.
        number = "int" if kind == COUNT_OR_AUTO else kind
        if number in NUMBERS and (isinstance(value, bool) or not isinstance(value, (NUMBERS[number], str))):
            raise TypeError
        return {"int": int, "float": float, "str": str}[number](value)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidRequestError(
            f"{name} is {value!r}; it must be {TYPE_DESCRIPTIONS.get(kind, f'of type {kind}')}"
        ) from None
