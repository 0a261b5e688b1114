"""What ``lmx-lab doctor`` says of the engines."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from lmx_lab.doctor import examine_engines, import_failure
from lmx_lab.engine import measure as measure_module
from lmx_lab.engine import registry
from lmx_lab.engine import speeds as speeds_module
from lmx_lab.engine.speeds import Speeds, conditions
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, ModelEntry
from tests.command_line import run_command

ENVIRON = {"HF_HUB_OFFLINE": "1", "LMX_LAB_THREADS": "1", "LMX_LAB_PORT": "0"}


def finding(said: str, topic: str) -> str:
    (line,) = [line for line in said.splitlines() if line[5:].startswith(f"{topic}:")]
    return line


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny: ModelEntry, tiny_gguf: Path) -> Path:
    """A home whose starters are ``tiny`` under their names."""
    home = tmp_path_factory.mktemp("starters")
    (home / "models" / "smollm2-135m-gguf").mkdir(parents=True)
    (home / "models" / "smollm2-135m").symlink_to(tiny.path)
    (home / "models" / "smollm2-135m-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    return home


@pytest.mark.long
def test_each_engine_is_measured_once_and_shown_from_then_on(home: Path) -> None:
    result = run_command(home, "doctor", "--measure", environ=ENVIRON)
    assert (result.status, result.stderr) == (0, "")
    assert finding(result.stdout, "llama.cpp").startswith("ok   llama.cpp: 20")
    first = finding(result.stdout, "engines")
    assert "on this machine, for smollm2-135m: MLX " in first
    assert "(measured just now" in first
    kept = (home / speeds_module.FILE).read_bytes()
    rates = json.loads(kept)["tokens_per_second"]
    # Two layers of width 32 take a millisecond on anything.
    assert set(rates) == {"mlx", "llama.cpp"}
    assert min(rates.values()) > 5
    _, again = examine_engines(Settings(home=home, threads=1))
    assert again.text.partition(" (")[0] == first[5:].partition(": ")[2].partition(" (")[0]
    assert (home / speeds_module.FILE).read_bytes() == kept


def test_what_was_never_measured_is_measured_when_asked_and_a_busy_machine_is_no_verdict(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").symlink_to(home / "models")
    settings = Settings(home=tmp_path)
    speeds = Speeds(
        model="smollm2-135m",
        measured_at=time.time() - 3 * 86_400,
        tokens_per_second={"mlx": 8.0, "llama.cpp": 16.0},
        busy_percent=80,
        made_with=conditions(settings),
    )
    asked: list[str] = []

    def measured(_: Settings, models: Mapping[Format, ModelEntry]) -> Speeds:
        asked.append(" ".join(entry.id for entry in models.values()))
        return speeds

    monkeypatch.setattr(measure_module, "measure_speeds", measured)
    _, unknown = examine_engines(settings)
    assert (unknown.verdict, unknown.remedy.partition(" (")[0]) == ("note", "lmx-lab doctor --measure")
    assert asked == []
    for measure in (True, False):
        _, found = examine_engines(settings, measure=measure)
        assert found.verdict == "note"
        assert "80 % of the processors busy" in found.text
        assert "(measured 3 days ago)" in found.text
    assert asked == ["smollm2-135m smollm2-135m-gguf"]


def test_without_the_starters_nothing_is_measured_and_the_command_that_fetches_them_is_named(
    tmp_path: Path, tiny: ModelEntry
) -> None:
    _, nothing = examine_engines(Settings(home=tmp_path))
    assert nothing.verdict == "note"
    assert (
        "mend it: lmx-lab pull smollm2-135m && lmx-lab pull smollm2-135m-gguf && lmx-lab doctor --measure"
        in nothing.text
    )
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(tiny.path)
    _, half = examine_engines(Settings(home=tmp_path), measure=True)
    assert half.remedy.startswith("lmx-lab pull smollm2-135m-gguf && ")
    assert not (tmp_path / speeds_module.FILE).exists()


def test_bindings_that_lack_a_library_of_the_system_are_bad_and_the_remedy_is_named(home: Path, tmp_path: Path) -> None:
    (tmp_path / "xllamacpp.py").write_text(
        "raise ImportError('libgomp.so.1: cannot open shared object file: No such file or directory')"
    )
    result = run_command(home, "doctor", environ={**ENVIRON, "PYTHONPATH": str(tmp_path)})
    assert result.status == 1
    said = finding(result.stdout, "llama.cpp")
    assert said.startswith("bad ")
    assert "has no libgomp.so.1; on Debian or Ubuntu: apt-get install libgomp1 libstdc++6" in said
    assert "engines:" not in result.stdout


def test_an_engine_that_is_not_installed_is_no_fault(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "is_installed", lambda: False)
    (found,) = examine_engines(Settings(home=home), measure=True)
    assert (found.topic, found.verdict) == ("llama.cpp", "note")
    assert "pip install 'lmx-lab[gguf]'" in found.text


@pytest.mark.parametrize(
    ("code", "said", "failure"),
    [
        (0, "a warning", None),
        (-4, "", "it is ended by SIGILL; its wheel was made for newer processors; MLX models run all the same"),
        (-11, "", "it is ended by SIGSEGV; MLX models run all the same"),
        (1, "Traceback\nImportError: no such symbol\n", "ImportError: no such symbol"),
        (3, "", "it ends with 3"),
    ],
)
def test_what_the_bindings_died_of_is_said(code: int, said: str, failure: str | None) -> None:
    assert import_failure(code, said) == failure
