"""A lab as of one moment: what it was, what it had in memory, what ran where."""

from __future__ import annotations

import html
import os
import platform
import time
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import psutil

from lmx_lab.backend import ServerState
from lmx_lab.notebook.charts import number
from lmx_lab.wire.admin import ModelRecords, Sample

PACKAGES = ("lmx-lab", "mlx", "mlx-lm", "xllamacpp")
TURNING = frozenset("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""With these a name could show itself backwards."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    platform: str
    cores: int
    memory_gb: float
    """10^9 bytes."""

    def __str__(self) -> str:
        return f"{self.platform}, {self.cores} cores, {self.memory_gb:.1f} GB"


@dataclass(frozen=True, kw_only=True, repr=False)
class Snapshot:
    """A lab as of one moment. Machine and versions are those of the process that looked."""

    at: float
    """Seconds since 1970."""
    server: ServerState
    models: ModelRecords
    sample: Sample | None
    versions: Mapping[str, str]
    machine: Machine

    def facts(self) -> dict[str, str]:
        """What there is to say in a word or two, by name."""
        server, compute, preference = self.server, self.models.compute, self.models.preference
        facts = {
            "at": moment(self.at),
            "server": f"{server.state}, on {server.place}" if server.place else server.state,
            "remark": server.note,
            "address": server.url,
            "LAN address": server.lan_url or "",
            "browser address": server.proxy_url or "",
            "model": server.model or "none loaded",
            "kept beside": ", ".join(server.pinned),
            "models on disk": str(len(self.models.models)),
            "MLX's matrix products": f"{compute.blas}: {compute.detail}" if compute else "",
            "faster engine": preference.detail if preference else "",
            **self._figures(),
            "machine": str(self.machine),
            "versions": ", ".join(f"{name} {number}" for name, number in self.versions.items()),
        }
        return {name: value for name, value in facts.items() if value}

    def _figures(self) -> dict[str, str]:
        now = self.sample
        if now is None:
            return {}
        return {
            "speed": f"{number(now.decode_tokens_per_second)} generated, {number(now.prompt_tokens_per_second)} read, "
            f"{number(now.encoded_tokens_per_second)} encoded tokens/s",
            "requests": f"{now.active_requests} running, {now.queued_requests} waiting",
            "memory": f"{now.memory_active_gb:.2f} GB in use, {now.memory_cache_gb:.2f} GB of it cached prompts, "
            f"{now.memory_peak_gb:.2f} GB at its peak, of {now.memory_total_gb:.1f} GB",
        }

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.facts().items())

    def _repr_html_(self) -> str:
        left = "style='text-align:left'"
        rows = "".join(f"<tr><th {left}>{safe(k)}</th><td {left}>{safe(v)}</td></tr>" for k, v in self.facts().items())
        return f"<table><tbody>{rows}</tbody></table>"


def take_snapshot(server: ServerState, models: ModelRecords, sample: Sample | None) -> Snapshot:
    """The snapshot of now, with this process's machine and versions."""
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
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def moment(at: float) -> str:
    """Local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def safe(text: str) -> str:
    """Text as HTML that shows it; a sign for characters that a page may not contain, or that turn what follows."""
    return html.escape("".join("\N{REPLACEMENT CHARACTER}" if _is_unfit(char) else char for char in text))


def _is_unfit(char: str) -> bool:
    return char in TURNING or (unicodedata.category(char) in ("Cc", "Cs") and char not in "\n\t")
