"""Tests of the check for llama.cpp and for the speed of the engines."""

import json
import shutil
import time
from pathlib import Path

import pytest

from lmx_lab.doctor import engines
from lmx_lab.doctor.engines import check_copies, check_engines, describe_import_failure
from lmx_lab.engine import engines as engines_module
from lmx_lab.engine import speeds as speeds_module
from lmx_lab.engine.llama_cpp.process import missing_part
from lmx_lab.engine.speeds import Speeds, conditions, preferred_engine
from lmx_lab.settings import Settings
from tests.support.commands import run_command
from tests.support.gguf import LOSSY, store_copy

ENVIRON = {"HF_HUB_OFFLINE": "1", "LMX_LAB_THREADS": "1", "LMX_LAB_PORT": "0"}


def line_about(topic, output):
    (line,) = [line for line in output.splitlines() if line[5:].startswith(f"{topic}:")]
    return line


@pytest.fixture(scope="module")
def home(tmp_path_factory, tiny, tiny_gguf):
    """A home folder where ``tiny`` has the names of the starter models."""
    home = tmp_path_factory.mktemp("starters")
    (home / "models" / "smollm2-135m-gguf").mkdir(parents=True)
    (home / "models" / "smollm2-135m").symlink_to(tiny.path)
    (home / "models" / "smollm2-135m-gguf" / "tiny.gguf").symlink_to(tiny_gguf)
    return home


@pytest.mark.long
def test_each_engine_is_measured_once_and_later_runs_report_the_same_speeds(home):
    result = run_command(home, "doctor", "--measure", environ=ENVIRON)
    assert (result.status, result.stderr) == (0, "")
    assert line_about("llama.cpp", result.stdout).startswith("ok   llama.cpp: 20")
    first = line_about("engines", result.stdout)
    assert "on this machine, for smollm2-135m: MLX " in first
    assert "(measured just now" in first
    kept = (home / speeds_module.FILE).read_bytes()
    rates = json.loads(kept)["tokens_per_second"]
    # A model with two layers of width 32 decodes a token in about a millisecond on any machine.
    assert set(rates) == {"mlx", "llama.cpp"}
    assert min(rates.values()) > 5
    _, again = check_engines(Settings(home=home, threads=1))
    assert again.text.partition(" (")[0] == first[5:].partition(": ")[2].partition(" (")[0]
    assert (home / speeds_module.FILE).read_bytes() == kept


def test_speeds_are_measured_on_request_only_and_a_busy_machine_gives_no_verdict(home, tmp_path, monkeypatch):
    (tmp_path / "models").symlink_to(home / "models")
    settings = Settings(home=tmp_path)
    speeds = Speeds(
        model="smollm2-135m",
        measured_at=time.time() - 3 * 86_400,
        tokens_per_second={"mlx": 8.0, "llama.cpp": 16.0},
        busy_percent=80,
        made_with=conditions(settings),
    )
    measured = []

    def fake_measure(_, models):
        measured.append(" ".join(f"{entry.id} {entry.format}" for entry in models.values()))
        return speeds

    monkeypatch.setattr(engines, "measure_speeds", fake_measure)
    _, unknown = check_engines(settings)
    assert (unknown.verdict, unknown.remedy.partition(" (")[0]) == ("note", "lmx-lab doctor --measure")
    assert measured == []
    for measure in (True, False):
        _, found = check_engines(settings, measure=measure)
        assert found.verdict == "note"
        assert "80 % of the processors busy" in found.text
        assert "(measured 3 days ago)" in found.text
    assert measured == ["smollm2-135m mlx smollm2-135m gguf"]


def test_without_both_formats_of_the_starter_nothing_is_measured_and_the_remedy_gets_them(tmp_path, tiny):
    _, nothing = check_engines(Settings(home=tmp_path))
    assert nothing.verdict == "note"
    assert "fix: lmx-lab pull smollm2-135m --mlx && lmx-lab doctor --measure" in nothing.text
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2-135m").symlink_to(tiny.path)
    _, half = check_engines(Settings(home=tmp_path), measure=True)
    assert half.remedy.startswith("lmx-lab pull smollm2-135m-gguf && ")
    assert not (tmp_path / speeds_module.FILE).exists()


def test_a_missing_system_library_is_bad_and_the_remedy_installs_it(home, tmp_path):
    (tmp_path / "xllamacpp.py").write_text(
        "raise ImportError('libgomp.so.1: cannot open shared object file: No such file or directory')"
    )
    result = run_command(home, "doctor", environ={**ENVIRON, "PYTHONPATH": str(tmp_path)})
    assert result.status == 1
    line = line_about("llama.cpp", result.stdout)
    assert line.startswith("bad ")
    assert (
        "the system library libgomp.so.1 is missing; on Debian or Ubuntu: apt-get install libgomp1 libstdc++6" in line
    )
    assert "engines:" not in result.stdout


def test_an_engine_that_is_not_installed_is_a_note(home, monkeypatch):
    monkeypatch.setattr(engines, "installed_version", lambda package: None)
    monkeypatch.setattr(engines_module, "missing_part", lambda: "is not installed: pip install 'lmx-lab[gguf]'")
    (found,) = check_engines(Settings(home=home), measure=True)
    assert (found.topic, found.verdict) == ("llama.cpp", "note")
    assert "pip install 'lmx-lab[gguf]'" in found.text


def test_an_engine_without_its_system_library_is_bad_and_mlx_runs_its_models(home, monkeypatch):
    missing = missing_part(("libabsent.so.9",))
    assert missing.startswith("lacks the system library libabsent.so.9; on Debian or Ubuntu: apt-get")
    monkeypatch.setattr(engines_module, "missing_part", lambda: missing)
    (found,) = check_engines(Settings(home=home))
    assert (found.topic, found.verdict) == ("llama.cpp", "bad")
    assert missing in found.text
    assert preferred_engine(None).name == "mlx"


@pytest.mark.parametrize(
    ("status", "stderr", "failure"),
    [
        (0, "a warning", None),
        (-4, "", "the import was ended by SIGILL; its wheel was built for newer processors; MLX models still work"),
        (-11, "", "the import was ended by SIGSEGV; MLX models still work"),
        (1, "Traceback\nImportError: no such symbol\n", "ImportError: no such symbol"),
        (3, "", "the import ended with exit status 3"),
    ],
)
def test_a_failed_import_of_the_bindings_is_explained(status, stderr, failure):
    assert describe_import_failure(status, stderr) == failure


def test_copies_are_reported_and_offered_for_weights_without_fast_kernels(tmp_path, tiny_gguf):
    folder = tmp_path / "files"
    folder.mkdir()
    original = Path(shutil.copy(tiny_gguf, folder / "tiny.gguf"))
    settings = Settings(home=tmp_path, model_folders=(folder,))
    (offer,) = [found for found in check_copies(settings) if found.found.startswith("tiny.gguf")]
    assert (offer.verdict, offer.remedy) == ("note", "lmx-lab quantize tiny.gguf")
    store_copy(tmp_path, original, LOSSY)
    (made,) = [found for found in check_copies(settings) if found.found.startswith("tiny.gguf")]
    assert (made.verdict, made.remedy) == ("fine", "")
    assert made.found.endswith("loaded only as tiny.gguf:Q4_0")
