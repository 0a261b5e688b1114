"""Tests of loads and their reports, and of the state of the models in memory."""

from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from pydantic import TypeAdapter, ValidationError

from lmx_lab.errors import ArgumentError
from lmx_lab.values.engine import COUNTERS, EngineSnapshot, TokenTotals
from lmx_lab.values.models import ECHO, LoadOptions, LoadReport, LoadSpec
from lmx_lab.wire.admin import load_spec
from lmx_lab.wire.errors import invalid_request
from tests.support.models import in_memory

MINILM = replace(ECHO, id="minilm", path=Path("minilm"), kind="embedding")


def test_the_state_of_the_main_model_and_the_sums_of_all():
    now = in_memory(ECHO, MINILM, memory_bytes=5, context_length=7, slots=2, active_requests=1, prefix_cache_bytes=6)
    assert (now.model, now.model_memory_bytes, now.context_length, now.slots) == ("echo", 5, 7, 2)
    assert [each.entry.id for each in now.pinned] == ["minilm"]
    assert (now.active_requests, now.queued_requests, now.requests, now.prefix_cache_bytes) == (1, 0, 1, 6)
    busy = replace(now, models=tuple(replace(each, queued_requests=2) for each in now.models))
    assert (busy.queued_requests, busy.requests) == (4, 5)


def test_without_a_main_model_it_has_no_properties():
    now = in_memory(None, MINILM)
    assert (now.model, now.entry, now.model_memory_bytes, now.context_length, now.slots) == (None, None, 0, None, None)


def test_a_model_is_stalled_only_while_it_has_requests():
    waiting = in_memory(ECHO, active_requests=1, progress_at=10.0)
    assert (waiting.stalled(30.0, 20.0), waiting.stalled(30.1, 20.0)) == (False, True)
    assert not in_memory(ECHO, progress_at=10.0).stalled(1000.0, 20.0)


def test_totals_are_added():
    totals = TokenTotals(**{name: 3 + at for at, name in enumerate(COUNTERS)})
    totals.add(replace(totals))
    assert totals == TokenTotals(**{name: 2 * (3 + at) for at, name in enumerate(COUNTERS)})


def test_a_model_is_idle_only_if_it_was_unloaded_because_of_that():
    idle = EngineSnapshot(unloaded_model="tiny", unload_cause="idle")
    assert idle.idle_model == "tiny"
    assert replace(idle, unload_cause="requested").idle_model is None
    assert replace(idle, main=in_memory(ECHO).main).idle_model is None


def test_only_options_that_were_changed_are_sent():
    assert load_spec("tiny", {"engine": "mlx"}).options == {"engine": "mlx"}
    assert load_spec("tiny", {"engine": "auto"}) == LoadSpec(model="tiny")
    assert LoadSpec(model="tiny").options == {}


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("adapters", TypeError, "'adapters'.* are model, engine"),
        ("engin", ArgumentError, r"'engin'; did you mean 'engine'\?"),
    ],
)
def test_an_unknown_option_of_a_load_is_refused_with_the_known_ones(name, error, message):
    with pytest.raises(error, match=message):
        load_spec("tiny", {name: "chat"})


def test_numbers_of_numpy_and_paths_are_options_of_a_load():
    given = {"context_length": np.int64(4096), "deterministic": np.True_, "draft": Path("models/small")}
    assert load_spec("tiny", given).options == {"context_length": 4096, "deterministic": True, "draft": "models/small"}


def test_the_report_of_a_load_is_a_sentence():
    report = LoadReport(model="tiny", load_time_ms=1250.0, vram_gb=0.27)
    assert (report.load_s, report.memory_bytes) == (1.25, 270_000_000)
    assert repr(report) == "tiny loaded in 1.2 s, 270 MB of memory"
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
        ({"model": "tiny", "pin": "chat"}, "pin: Input should be a valid boolean"),
        ({"model": "tiny", "ttl_s": -1}, "ttl_s: Input should be greater than or equal to 0"),
        ({"model": "tiny", "ttl_s": "soon"}, 'ttl_s: must be a number of seconds, or "never"'),
        ({"model": "tiny", "ttl_s": True}, "ttl_s: must be a number of seconds"),
        ({"model": ""}, "model: String should have at least 1 character"),
        ({"model": "tiny", "deterministic": 1}, "deterministic: Input should be a valid boolean (given: 1)"),
        ({"model": "tiny", "context_length": "5"}, "context_length: Input should be a valid integer (given: '5')"),
        ({"model": "tiny", "context_length": 0}, "context_length: Input should be greater than or equal to 1"),
        ({"model": "tiny", "dtype": "float16"}, "dtype: is not a field of this request"),
        ({"model": "tiny", "engine": "vllm"}, "engine: Input should be 'auto', 'mlx' or 'llama.cpp' (given: 'vllm')"),
        ({"model": "tiny", "kv_cache_dtype": "q3_0"}, "kv_cache_dtype: Input should be "),
        ({}, "model: Field required"),
        (dict.fromkeys(map(str, range(300)), 1), "body: has 300 members, the limit is 256; send only"),
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
