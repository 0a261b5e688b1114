"""Which installed modules belong to which extras of the package."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_MAKE_LAB = ("lab", "gguf")
"""The extras that ``make lab`` and ``make demo`` install; ``tests/package/test_install.py`` tests that they do."""


def names(requirements: Iterable[str]) -> set[str]:
    """Return the names of the required packages."""
    return {canonicalize_name(Requirement(each).name) for each in requirements}


def with_dependencies(requirements: Sequence[str]) -> set[str]:
    """Return the names of required packages and of all that they require on this machine."""
    found: dict[str, frozenset[str]] = {}
    waiting = [each for each in map(Requirement, requirements) if is_needed(each)]
    while waiting:
        requirement = waiting.pop()
        name, before = canonicalize_name(requirement.name), found.get(canonicalize_name(requirement.name))
        extras = (before or frozenset()) | requirement.extras
        if extras == before:
            continue
        found[name] = extras
        try:
            further = [Requirement(each) for each in requires(requirement.name) or ()]
        except PackageNotFoundError:
            continue
        waiting += [each for each in further if any(is_needed(each, extra) for extra in ("", *extras))]
    return set(found)


def is_needed(requirement: Requirement, extra: str = "") -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


@functools.cache
def packages_of_modules() -> Mapping[str, list[str]]:
    """Return the installed packages of each top-level module. Reading them takes a second."""
    return {module: list(map(canonicalize_name, packages)) for module, packages in packages_distributions().items()}


@functools.cache
def modules_outside(*extras: str) -> frozenset[str]:
    """Return the installed top-level modules that these extras of the package do not install."""
    installed = with_dependencies([*PROJECT["dependencies"], *(each for extra in extras for each in EXTRAS[extra])])
    return frozenset(
        module
        for module, packages in packages_of_modules().items()
        if not installed.intersection(packages) and module not in {"lmx_lab", "pip", "tests"}
    )
