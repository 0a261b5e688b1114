"""A workbench over a scripted lab, and one over a real lab of this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import lmx_lab
from lmx_lab.lab.inprocess import InProcess
from lmx_lab.panels.workbench import Workbench
from lmx_lab.settings import Settings
from tests.panels.standins import ScriptedSource


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource()


@pytest.fixture
def workbench(source: ScriptedSource) -> Iterator[Workbench]:
    workbench = Workbench(source)
    yield workbench
    workbench.rest()


@pytest.fixture(scope="module")
def lab(tiny_home: Path) -> Iterator[lmx_lab.Lab]:
    with lmx_lab.Lab(Settings(home=tiny_home, port=0), loop="thread") as lab:
        yield lab


@pytest.fixture
def real_workbench(lab: lmx_lab.Lab) -> Iterator[Workbench]:
    workbench = Workbench(InProcess(lab))
    yield workbench
    workbench.rest()
