"""Import optional packages, or say in one line which package is missing and which command installs it."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from lmx_lab.errors import MissingPackageError

OPTIONAL: Mapping[str, tuple[str, str | None]] = {
    **{name: (name, "lab") for name in ("anywidget", "ipykernel", "ipywidgets", "jupyterlab", "matplotlib")},
    **{name: (name, "lab") for name in ("openai", "pandas")},
    "sklearn": ("scikit-learn", "lab"),
    "xllamacpp": ("xllamacpp", "gguf"),
    **{name: (name, "lan") for name in ("segno", "zeroconf")},
    "opentelemetry.exporter": ("opentelemetry-exporter-otlp-proto-http", "otel"),
    "opentelemetry.sdk": ("opentelemetry-sdk", "otel"),
    "ray": ("ray", "ray"),
    **{name: (name, None) for name in ("mlflow", "wandb")},
    "inspect_ai": ("inspect-ai", None),
}
"""For each optional module, the package that contains it and the extra that installs it. A package of another project
to which evaluations are copied has no extra."""


def installed_version(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def install_command(module: str) -> str:
    """Return the command that installs an optional module."""
    package, extra = OPTIONAL[module]
    return f"pip install {package}" if extra is None else f"pip install 'lmx-lab[{extra}]'"


@contextlib.contextmanager
def optional_imports(needed_by: str) -> Iterator[None]:
    """Convert the failure to import an optional package in the block to an error that names the next step.

    Other failures are raised unchanged: those of a package that is installed but damaged, for example.

    Args:
        needed_by: What needs the package, as the subject of a sentence.

    Raises:
        MissingPackageError: a package is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as exc:
        module = next((name for name in OPTIONAL if f"{exc.name}.".startswith(f"{name}.")), None)
        if module is None:
            raise
        raise MissingPackageError(
            f"{needed_by} needs {OPTIONAL[module][0]}, which is not installed: {install_command(module)}"
        ) from None


def import_optional(module: str, needed_by: str) -> Any:
    """Import an optional module, which may be a submodule, and return it without its types.

    Args:
        needed_by: As for ``optional_imports``.

    Raises:
        MissingPackageError: its package is not installed.
    """
    with optional_imports(needed_by):
        return importlib.import_module(module)
