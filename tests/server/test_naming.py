"""Models are named by id; programs on this machine may also say where the loaded one lies."""

from __future__ import annotations

import pytest

from lmx_lab.engine import EngineSnapshot
from lmx_lab.server.naming import loaded_id, unknown_model
from tests.server.conftest import ENTRY

READY = EngineSnapshot(state="ready", entry=ENTRY)


@pytest.mark.parametrize(
    ("name", "local", "meant"),
    [
        ("/models/tiny", True, "tiny"),
        ("/models/tiny/", True, "tiny"),
        ("/models//./tiny", True, "tiny"),
        ("/models/tiny", False, "/models/tiny"),
        ("/models/other", True, "/models/other"),
        ("other", True, "other"),
        ("", True, ""),
        ("\0", True, "\0"),
        (None, True, None),
    ],
)
def test_only_the_loaded_models_path_is_a_name_and_only_here(name: str | None, local: bool, meant: str | None) -> None:
    assert loaded_id(name, READY, local=local) == meant


def test_without_a_model_no_path_is_a_name() -> None:
    assert loaded_id("/models/tiny", EngineSnapshot(), local=True) == "/models/tiny"


def test_the_refusal_is_true_of_a_path_that_exists() -> None:
    said = unknown_model("/models/tiny", READY).message
    assert "by id" in said
    assert "tiny is loaded" in said
    assert "none is loaded" in unknown_model("x" * 1000, EngineSnapshot()).message
    assert len(unknown_model("x" * 1000, EngineSnapshot()).message) < 400
