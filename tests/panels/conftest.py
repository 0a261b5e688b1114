"""A workbench over a scripted lab, and one over a real lab of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lmx_lab
from lmx_lab.notebook.local import InProcess
from lmx_lab.panels.workbench import Workbench
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from tests.panels.endless_model import write_endless_llama
from tests.panels.scripted_backend import ScriptedSource

CONTEXT = 8192
"""Tokens; at a millisecond each an answer lasts long enough for what is done meanwhile."""


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels look at their lab twenty times a second and show it fifty times; for tests of what they show."""
    monkeypatch.setattr("lmx_lab.panels.workbench.TICK_S", 0.05)
    monkeypatch.setattr("lmx_lab.panels.panel.FRAME_S", 0.02)


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture
def workbench(source: ScriptedSource) -> Iterator[Workbench]:
    workbench = Workbench(source)
    yield workbench
    workbench.rest()


@pytest.fixture(scope="session")
def endless_home(tmp_path_factory: pytest.TempPathFactory, smollm2: ModelEntry) -> Path:
    """A lab's home with ``tiny`` and ``tiny-two``, whose answers last until somebody has done something about them."""
    home = tmp_path_factory.mktemp("endless-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_endless_llama(home / "models" / name, smollm2.path, seed=seed, context=CONTEXT)
    return home


@pytest.fixture(scope="module")
def lab(endless_home: Path) -> Iterator[lmx_lab.Lab]:
    with lmx_lab.Lab(Settings(home=endless_home, port=0), loop="thread") as lab:
        yield lab


@pytest.fixture
def real_workbench(lab: lmx_lab.Lab) -> Iterator[Workbench]:
    workbench = Workbench(InProcess(lab))
    yield workbench
    workbench.rest()
