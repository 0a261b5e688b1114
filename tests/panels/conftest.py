"""Workbenches over a scripted backend and over a real lab in this process."""

import pytest

import lmx_lab
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.settings import Settings
from tests.support.models import ENDLESS_CONTEXT, write_endless_llama
from tests.support.panels import Reader, ScriptedBackend, panels_of


@pytest.fixture
def backend():
    return ScriptedBackend()


@pytest.fixture
def workbench(backend):
    with panels_of(backend) as workbench:
        yield workbench


@pytest.fixture(scope="session")
def endless_home(tmp_path_factory, smollm2):
    """A lab's home with ``tiny`` and ``tiny-two``, whose answers last until a test stops them."""
    home = tmp_path_factory.mktemp("endless-home")
    for seed, name in enumerate(("tiny", "tiny-two")):
        write_endless_llama(home / "models" / name, smollm2.path, seed=seed, context=ENDLESS_CONTEXT)
    return home


@pytest.fixture(scope="module")
def lab(endless_home):
    with lmx_lab.Lab(Settings(home=endless_home, port=0), loop="thread") as lab:
        yield lab


@pytest.fixture
def real_workbench(lab):
    with panels_of(LocalBackend(lab.server)) as workbench:
        yield workbench


@pytest.fixture
def reader(request, workbench):
    """A reader of the panel that the module's constant ``PANEL`` names."""
    return Reader(request.module.PANEL(workbench))
