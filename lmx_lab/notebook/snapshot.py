"""Take snapshots of a lab: its server, its models, its measurements, the machine and the versions."""

from __future__ import annotations

import html
import os
import platform
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

import psutil

from lmx_lab.backend import ServerState
from lmx_lab.panels.charts import format_number
from lmx_lab.wire.admin import ModelRecords, Sample

PACKAGES = ("lmx-lab", "mlx", "mlx-lm", "xllamacpp")
DIRECTION_MARKS = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the direction of text; a name that contains them could be displayed reversed."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine of this process."""

    platform: str
    """Operating system and processor architecture."""
    cores: int
    memory_gb: float
    """Total memory in units of 10^9 bytes."""

    def __str__(self) -> str:
        return f"{self.platform}, {self.cores} cores, {self.memory_gb:.1f} GB"


@dataclass(frozen=True, kw_only=True, repr=False)
class Snapshot:
    """The state of a lab at one time. Machine and versions are those of the process that took the snapshot."""

    at: float
    """Seconds since 1970."""
    server: ServerState
    models: ModelRecords
    sample: Sample | None
    """The latest measurements; None if there are none."""
    versions: Mapping[str, str]
    """Versions of packages and of Python, by name."""
    machine: Machine

    def facts(self) -> dict[str, str]:
        """Return short descriptions by their names, without empty ones."""
        server, compute, preference = self.server, self.models.compute, self.models.preference
        facts = {
            "time": format_time(self.at),
            "server": f"{server.state}, on {server.place}" if server.place else server.state,
            "note": server.note,
            "address": server.url,
            "LAN address": server.lan_url or "",
            "browser address": server.proxy_url or "",
            "model": ", ".join(map(str, filter(None, (server.model or "none loaded", server.unloading)))),
            "pinned": ", ".join(server.pinned),
            "models on disk": str(len(self.models.models)),
            "MLX matrix multiplication": f"{compute.blas}: {compute.detail}" if compute else "",
            "faster engine": preference.detail if preference else "",
            **self._measurements(),
            "machine": str(self.machine),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
        }
        return {name: value for name, value in facts.items() if value}

    def _measurements(self) -> dict[str, str]:
        now = self.sample
        if now is None:
            return {}
        generated, prompts = format_number(now.decode_tokens_per_second), format_number(now.prompt_tokens_per_second)
        encoded = format_number(now.encoded_tokens_per_second)
        return {
            "tok/s": f"{generated} generated, {prompts} of prompts, {encoded} embedded or scored",
            "requests": f"{now.active_requests} running, {now.queued_requests} waiting",
            "memory": f"{now.memory_active_gb:.2f} GB in use ({now.memory_cache_gb:.2f} GB for cached prompts), "
            f"{now.memory_peak_gb:.2f} GB at the peak, {now.memory_total_gb:.1f} GB in total",
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(
            f"<tr><th {left}>{safe_html(k)}</th><td {left}>{safe_html(v)}</td></tr>" for k, v in self.facts().items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


def take_snapshot(server: ServerState, models: ModelRecords, sample: Sample | None) -> Snapshot:
    """Return a snapshot of the given state, with the current time, this machine and the installed versions."""
    return Snapshot(
        at=time.time(),
        server=server,
        models=models,
        sample=sample,
        versions={**{name: _version(name) for name in PACKAGES}, "python": platform.python_version()},
        machine=Machine(
            platform=f"{platform.system()} {platform.machine()}",
            cores=os.cpu_count() or 1,
            memory_gb=psutil.virtual_memory().total / 1e9,
        ),
    )


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def format_time(at: float) -> str:
    """Format local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def safe_html(text: str) -> str:
    """Escape text for HTML. Characters that a page must not contain, or that change the text's direction, are
    replaced."""
    return html.escape("".join("\N{REPLACEMENT CHARACTER}" if _is_unsafe(char) else char for char in text))


def _is_unsafe(char: str) -> bool:
    return char in DIRECTION_MARKS or (unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t")
