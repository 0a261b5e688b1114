"""Tests that a lab, an attached lab and the command line show the engine of each model and the faster engine."""

import re
import sys

import pytest

import lmx_lab
from lmx_lab.engine import engines
from lmx_lab.engine.speeds import Speeds, conditions, store_speeds
from lmx_lab.settings import Settings
from tests.support.commands import run_command

pytestmark = pytest.mark.slow
DETAIL = "for smollm2-135m: MLX 24 tok/s, llama.cpp 110 tok/s; prefer GGUF files (of "


@pytest.fixture(scope="module")
def lab(tmp_path_factory, tiny, tiny_gguf):
    """Run a server with a model for each engine, and stored speeds of both engines."""
    home = tmp_path_factory.mktemp("both")
    (home / "models" / "small-gguf").mkdir(parents=True)
    (home / "models" / "small").symlink_to(tiny.path)
    (home / "models" / "small-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    settings = Settings(home=home, port=0, threads=1)
    speeds = Speeds(
        model="smollm2-135m",
        measured_at=1_760_000_000.0,
        tokens_per_second={"mlx": 24.0, "llama.cpp": 110.0},
        busy_percent=0.0,
        made_with=conditions(settings),
    )
    store_speeds(settings, speeds)
    with lmx_lab.Lab(settings, loop="thread") as lab:
        yield lab


def test_the_list_of_models_shows_the_engine_of_each_model_and_the_faster_engine(lab):
    with lmx_lab.attach(lab.url) as attached:
        for listed in (lab.models(), attached.models()):
            assert {record.id: record.engine for record in listed} == {"small": "mlx", "small-gguf": "llama.cpp"}
            head, first, second, note = repr(listed).splitlines()
            at = head.index("engine")
            assert (first[at:].split()[0], second[at:].split()[0]) == ("mlx", "llama.cpp")
            assert note.startswith(DETAIL)
            assert f"<div>{DETAIL}" in listed._repr_html_()


def test_the_command_lists_the_engines_and_names_a_missing_package(lab, monkeypatch):
    for missing in (False, True):
        if missing:
            # Python then does not find the package, as if it were not installed.
            monkeypatch.setitem(sys.modules, "xllamacpp", None)
        done = run_command(lab.settings.home, "models")
        assert done.status == 0
        rows = {line.split()[0]: line.split() for line in done.stdout.splitlines()}
        assert [rows[name][3] for name in ("id", "small", "small-gguf")] == ["engine", "mlx", "llama.cpp"]
        assert ("is not installed: pip install 'lmx-lab[gguf]'" in done.stderr) is missing


def test_panels_and_snapshots_of_local_and_attached_labs_show_the_faster_engine(lab):
    with lmx_lab.attach(lab.url) as attached:
        for each in (lab, attached):
            shown = each.panel("models").snapshot_html()
            assert DETAIL in shown
            assert re.search("<td[^>]*>gguf</td><td[^>]*>llama.cpp</td>", shown)
            assert each.snapshot().facts()["faster engine"].startswith(DETAIL)
            assert "xllamacpp 20" in each.snapshot().facts()["versions"]


def test_without_llama_cpp_its_models_have_a_problem_and_no_engine_is_preferred(lab, monkeypatch):
    monkeypatch.setattr(engines, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    found = lab.workbench.submit(lab.workbench.backend.models()).result(60)
    assert {engine.name: engine.version for engine in found.engines}["llama.cpp"] is None
    assert found.preference is None
    mlx, gguf = found.models
    assert mlx.problem is None
    assert gguf.problem == "llama.cpp, which runs GGUF files, is not installed: pip install 'lmx-lab[gguf]'"
    assert repr(lab.models()).splitlines()[-1] == gguf.problem
