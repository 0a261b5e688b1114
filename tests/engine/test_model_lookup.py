"""What is said where no model in memory fits a request."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lmx_lab.engine.model_lookup import EMBEDDERS, RERANKERS, refusal
from lmx_lab.errors import NotLoadedError
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import Kind, ModelEntry


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize(("kind", "kinds"), [("chat", ("chat",)), ("embedding", EMBEDDERS), ("embedding", RERANKERS)])
def test_a_model_that_goes_while_it_is_asked_is_not_said_to_be_of_another_kind(
    tiny: ModelEntry, kind: Kind, kinds: tuple[Kind, ...], named: bool
) -> None:
    now = EngineSnapshot(state="ready", entry=replace(tiny, kind=kind))
    error = refusal(now, tiny.id if named else None, kinds)
    assert isinstance(error, NotLoadedError)
    assert error.message.startswith(f"{tiny.id} is being unloaded; load one first")
