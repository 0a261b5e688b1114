"""Tests of loads and their reports, and of the states of engines, which are merged into one."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from lmx_lab.errors import ArgumentError
from lmx_lab.values.engine import BlasReport, EngineSnapshot, PinnedModel, merged
from lmx_lab.values.models import ECHO, LoadOptions, LoadReport, LoadSpec
from lmx_lab.wire.admin import LoadRequest

BLAS = BlasReport(name="openblas", detail="")
PINNED = PinnedModel(entry=replace(ECHO, id="minilm", path=Path("minilm"), kind="embedding"), memory_bytes=1)


def test_the_main_model_is_that_of_the_first_engine():
    first = EngineSnapshot(state="ready", entry=ECHO, model_memory_bytes=5, context_length=7, slot_free_s=2.0)
    found = merged([first, EngineSnapshot(state="dead", slot_free_s=9.0)])
    assert (found.state, found.model, found.model_memory_bytes, found.context_length) == ("ready", "echo", 5, 7)
    assert found.slot_free_s == 2.0


@pytest.mark.parametrize(
    "name",
    ["active_requests", "queued_requests", "output_tokens", "cached_tokens", "encoded_tokens", "memory_used_bytes"],
)
def test_counts_are_added(name):
    snapshots = [replace(EngineSnapshot(), **{name: value}) for value in (3, 4)]
    assert getattr(merged(snapshots), name) == 7


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
    snapshot = EngineSnapshot(state="ready", entry=ECHO, pinned=(PINNED,), output_tokens=3, progress_at=4.0, blas=BLAS)
    assert merged([snapshot]) == snapshot


def test_a_model_is_idle_only_if_it_was_unloaded_because_of_that():
    idle = EngineSnapshot(unloaded_model="tiny", unload_cause="idle")
    assert idle.idle_model == "tiny"
    assert replace(idle, unload_cause="requested").idle_model is None
    assert replace(idle, entry=ECHO).idle_model is None


def test_only_options_that_were_changed_are_sent():
    assert LoadSpec.with_options("tiny", {"engine": "mlx"}).options == {"engine": "mlx"}
    assert LoadSpec.with_options("tiny", {"engine": "auto"}) == LoadSpec(model="tiny")
    assert LoadSpec(model="tiny", pin="chat", dtype="float16").options == {}


@pytest.mark.parametrize("name", ["pin", "adapters"])
def test_an_unknown_option_of_a_load_is_refused_with_the_known_ones(name):
    with pytest.raises(TypeError, match=rf"'{name}'.* are model, engine"):
        LoadSpec.with_options("tiny", {name: "chat"})


def test_an_option_that_is_misspelled_is_named():
    with pytest.raises(ArgumentError, match=r"'engin'; did you mean 'engine'\?"):
        LoadSpec.with_options("tiny", {"engin": "mlx"})


def test_the_report_of_a_load_is_a_sentence():
    report = LoadReport(model="tiny", load_s=1.25, memory_bytes=270_000_000)
    assert repr(report) == "tiny loaded in 1.2 s, 0.27 GB of memory"
    planned = replace(report, slots=8, context_length=5120)
    assert repr(planned) == f"{report!r}; 8 requests at once, of up to 5,120 tokens each"
    assert repr(replace(report, slots=1)) == f"{report!r}; 1 request at once"


def test_requests_have_the_options_of_a_load():
    options = set(LoadOptions.__annotations__)
    assert options <= {field.name for field in fields(LoadSpec)}
    assert set(LoadRequest.model_fields) == {"model", *options}
