"""Tests of loads and their reports, and of the states of engines, which are merged into one."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from lmx_lab.errors import ArgumentError
from lmx_lab.values.engine import COUNTERS, BlasReport, EngineSnapshot, PinnedModel, TokenTotals, merged
from lmx_lab.values.models import ECHO, LoadOptions, LoadReport, LoadSpec
from lmx_lab.wire.admin import load_spec
from lmx_lab.wire.errors import invalid_request

BLAS = BlasReport(name="openblas", detail="")
PINNED = PinnedModel(entry=replace(ECHO, id="minilm", path=Path("minilm"), kind="embedding"), memory_bytes=1)


def test_the_main_model_is_that_of_the_first_engine():
    first = EngineSnapshot(state="ready", entry=ECHO, model_memory_bytes=5, context_length=7, slot_free_s=2.0)
    found = merged([first, EngineSnapshot(state="dead", slot_free_s=9.0)])
    assert (found.state, found.model, found.model_memory_bytes, found.context_length) == ("ready", "echo", 5, 7)
    assert found.slot_free_s == 2.0


@pytest.mark.parametrize("name", ["active_requests", "queued_requests", "memory_used_bytes"])
def test_counts_are_added(name):
    snapshots = [replace(EngineSnapshot(), **{name: value}) for value in (3, 4)]
    assert getattr(merged(snapshots), name) == 7


def test_totals_are_added():
    totals = TokenTotals(**{name: 3 + at for at, name in enumerate(COUNTERS)})
    found = merged([EngineSnapshot(totals=totals)] * 2).totals
    assert found == TokenTotals(**{name: 2 * (3 + at) for at, name in enumerate(COUNTERS)})


def test_the_memory_of_the_machine_is_not_added():
    assert merged([EngineSnapshot(memory_total_bytes=value) for value in (3, 4)]).memory_total_bytes == 4


def test_pinned_models_of_all_engines_are_listed():
    other = replace(PINNED, memory_bytes=2)
    assert merged([EngineSnapshot(pinned=(PINNED,)), EngineSnapshot(pinned=(other,))]).pinned == (PINNED, other)


def test_the_blas_is_that_of_the_engine_that_has_one():
    assert merged([EngineSnapshot(), EngineSnapshot(blas=BLAS)]).blas is BLAS


def test_progress_is_that_of_the_slowest_engine_with_requests():
    working = EngineSnapshot(active_requests=1, progress_at=10.0)
    assert merged([EngineSnapshot(progress_at=20.0), working]).progress_at == 10.0
    assert merged([EngineSnapshot(progress_at=20.0), EngineSnapshot(progress_at=10.0)]).progress_at == 20.0


def test_a_merged_state_of_one_engine_is_unchanged():
    snapshot = EngineSnapshot(
        state="ready", entry=ECHO, pinned=(PINNED,), totals=TokenTotals(output_tokens=3), blas=BLAS
    )
    assert merged([snapshot]) == snapshot


def test_a_model_is_idle_only_if_it_was_unloaded_because_of_that():
    idle = EngineSnapshot(unloaded_model="tiny", unload_cause="idle")
    assert idle.idle_model == "tiny"
    assert replace(idle, unload_cause="requested").idle_model is None
    assert replace(idle, entry=ECHO).idle_model is None


def test_only_options_that_were_changed_are_sent():
    assert load_spec("tiny", {"engine": "mlx"}).options == {"engine": "mlx"}
    assert load_spec("tiny", {"engine": "auto"}) == LoadSpec(model="tiny")
    assert LoadSpec(model="tiny", pin="chat").options == {}


@pytest.mark.parametrize("name", ["pin", "adapters"])
def test_an_unknown_option_of_a_load_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=rf"'{name}'.* are model, engine"):
        load_spec("tiny", {name: "chat"})


def test_an_option_that_is_misspelled_is_named():
    with pytest.raises(ArgumentError, match=r"'engin'; did you mean 'engine'\?"):
        load_spec("tiny", {"engin": "mlx"})


def test_numbers_of_numpy_and_paths_are_options_of_a_load():
    given = {"context_length": np.int64(4096), "deterministic": np.True_, "draft": Path("models/small")}
    assert load_spec("tiny", given).options == {
        "context_length": 4096,
        "deterministic": True,
        "draft": "models/small",
    }


def test_the_report_of_a_load_is_a_sentence():
    report = LoadReport(model="tiny", load_time_ms=1250.0, vram_gb=0.27)
    assert (report.load_s, report.memory_bytes) == (1.25, 270_000_000)
    assert repr(report) == "tiny loaded in 1.2 s, 0.27 GB of memory"
    planned = replace(report, slots=8, context_length=5120)
    assert repr(planned) == f"{report!r}; 8 requests at once, of up to 5,120 tokens each"
    assert repr(replace(report, slots=1)) == f"{report!r}; 1 request at once"


def test_requests_have_the_options_of_a_load():
    options = set(LoadOptions.__annotations__)
    assert options <= {field.name for field in fields(LoadSpec)}
    assert set(TypeAdapter(LoadSpec).json_schema()["properties"]) == {"model", *options}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"model": ""}, "model: String should have at least 1 character"),
        ({"model": "tiny", "deterministic": 1}, "deterministic: Input should be a valid boolean (given: 1)"),
        ({"model": "tiny", "context_length": "5"}, "context_length: Input should be a valid integer (given: '5')"),
        (
            {"model": "tiny", "context_length": 0},
            "context_length: Input should be greater than or equal to 1",
        ),
        ({"model": "tiny", "pin": "chat"}, "pin: is not a field of this request"),
        ({"model": "tiny", "dtype": "float16"}, "dtype: is not a field of this request"),
        (
            dict.fromkeys(map(str, range(300)), 1),
            "body: has 300 members, the limit is 256; send only",
        ),
    ],
)
def test_the_body_of_a_load_is_strict(given, problem):
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(LoadSpec).validate_python(given)
    assert invalid_request(caught.value.errors()).message.startswith(problem)


def test_whole_numbers_and_objects_are_bodies_of_a_load():
    read = TypeAdapter(LoadSpec).validate_python
    spec = LoadSpec(model="tiny", context_length=4096)
    assert read({"model": "tiny", "context_length": 4096.0, "draft": None}) == read(spec) == spec
