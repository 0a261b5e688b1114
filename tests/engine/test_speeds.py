"""An engine is preferred if it is clearly faster, and measurements are valid while their conditions are unchanged."""

import json
from dataclasses import replace

import pytest

from lmx_lab.engine import memory
from lmx_lab.engine import speeds as speeds_module
from lmx_lab.engine.measure import measure_speeds
from lmx_lab.engine.speeds import FILE, age_in_words, conditions, read_speeds, store_speeds
from lmx_lab.errors import EngineError, OutOfMemoryError
from lmx_lab.settings import Settings
from tests.support.engines import SPEEDS


@pytest.mark.parametrize(
    ("mlx", "llama", "busy", "preferred", "part"),
    [
        (24.2, 110.4, 3, "llama.cpp", "for smollm2-135m: MLX 24 tok/s, llama.cpp 110 tok/s; prefer GGUF files"),
        (90.0, 9.04, 3, "mlx", "for smollm2-135m: MLX 90 tok/s, llama.cpp 9.0 tok/s; prefer MLX folders"),
        (100.0, 119.0, 3, None, "neither is clearly faster"),
        (
            8.2,
            110.0,
            97,
            None,
            "other programs kept 97 % of the processors busy; run lmx-lab doctor --measure when they use less",
        ),
    ],
)
def test_an_engine_is_preferred_if_it_is_clearly_faster_and_the_machine_was_quiet(mlx, llama, busy, preferred, part):
    speeds = replace(SPEEDS, tokens_per_second={"mlx": mlx, "llama.cpp": llama}, busy_percent=busy)
    assert speeds.preferred == preferred
    assert part in str(speeds)


def test_figures_are_valid_until_something_changes_that_they_depend_on(tmp_path, monkeypatch):
    settings = Settings(home=tmp_path / "new", threads=1)
    assert read_speeds(settings) is None
    speeds = replace(SPEEDS, made_with=conditions(settings))
    store_speeds(settings, replace(speeds, busy_percent=50))
    store_speeds(settings, speeds)
    assert [path.name for path in settings.home.iterdir()] == [FILE]
    assert read_speeds(settings) == speeds
    assert read_speeds(replace(settings, port=1)) == speeds
    assert read_speeds(replace(settings, threads=2)) is None
    assert read_speeds(replace(settings, dtype="keep")) is None
    monkeypatch.setattr(speeds_module, "versions", lambda: {"mlx": "1.0", "llama.cpp": None})
    assert read_speeds(settings) is None


def test_a_damaged_file_is_ignored(tmp_path):
    settings = Settings(home=tmp_path)
    path = store_speeds(settings, replace(SPEEDS, made_with=conditions(settings)))
    whole = json.loads(path.read_text())
    for damaged in ("", "[]", "null", "\x00", json.dumps({**whole, "tokens_per_second": {"mlx": 1}}), "1" * 100_000):
        path.write_text(damaged)
        assert read_speeds(settings) is None
    path.write_text(json.dumps(whole))
    assert read_speeds(settings) is not None


@pytest.mark.parametrize(
    ("seconds", "words"), [(-5, "just now"), (59, "just now"), (61, "1 minute ago"), (7300, "2 hours ago")]
)
def test_an_age_is_written_in_its_largest_unit(monkeypatch, seconds, words):
    monkeypatch.setattr(speeds_module.time, "time", lambda: 1000.0 + seconds)
    assert age_in_words(1000.0) == words


def test_the_error_of_a_model_that_cannot_be_loaded_has_the_reason(tiny, tmp_path):
    models = {"mlx": replace(tiny, path=tmp_path / "gone"), "llama.cpp": tiny}
    with pytest.raises(EngineError, match="gone"):
        measure_speeds(Settings(home=tmp_path, threads=1), models)


def test_nothing_is_measured_if_memory_is_short(tiny, monkeypatch):
    monkeypatch.setattr(memory, "free_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match="unload a model"):
        measure_speeds(Settings(), {"mlx": tiny, "llama.cpp": tiny})
