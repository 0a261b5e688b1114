"""Tests of readiness in states that are hard to produce with a real engine."""

import math

import pytest

from lmx_lab.http.errors import status_of
from lmx_lab.server.health import problem
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from tests.support.models import TINY_ENTRY

SETTINGS = Settings(idle_unload_s=300, stall_limit_s=60)


@pytest.mark.parametrize(
    ("now", "code", "part"),
    [
        (EngineSnapshot(), "no-model-loaded", "POST /admin/models/load"),
        (EngineSnapshot(state="loading"), "no-model-loaded", "the engine is loading"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="requested"), "no-model-loaded", "the engine is empty"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="idle"), "no-model-loaded", "no request came for 300 s"),
        (EngineSnapshot(unloaded_model="tiny", unload_cause="memory"), "oom-unloaded", "load it again, or a smaller"),
        # While a model is loading, the earlier state is not mentioned.
        (
            EngineSnapshot(state="loading", unloaded_model="tiny", unload_cause="memory"),
            "no-model-loaded",
            "the engine is loading",
        ),
        (EngineSnapshot(state="dead"), "internal-error", "the engine has died"),
        (EngineSnapshot(state="ready", active_requests=1, progress_at=-math.inf), "internal-error", "has made no step"),
    ],
)
def test_each_reason_has_its_code_and_names_the_next_step(now, code, part):
    error = problem(now, settings=SETTINGS)
    assert error is not None
    assert (status_of(error), error.code) == (503, code)
    assert part in error.message


def test_a_loaded_model_is_ready_only_while_its_engine_runs():
    now = EngineSnapshot(state="ready", entry=TINY_ENTRY)
    assert problem(now, settings=SETTINGS) is None
    assert problem(now, settings=SETTINGS, alive=False) is not None
