"""The format of a model determines its engine; the choice of another engine is refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from lmx_lab.engine.registry import choose_engine
from lmx_lab.errors import UnusableModelError
from lmx_lab.values.models import ECHO, LoadSpec
from tests.support.models import TINY_ENTRY

GGUF = replace(TINY_ENTRY, id="org/name:Q4_K_M", path=Path("/models/name-q4_k_m.gguf"), format="gguf")


@pytest.mark.parametrize(
    ("entry", "engine"),
    [(TINY_ENTRY, "auto"), (TINY_ENTRY, "mlx"), (GGUF, "auto"), (GGUF, "llama.cpp"), (ECHO, "auto")],
)
def test_the_engine_of_the_format_is_accepted_by_name(entry, engine):
    choose_engine(entry, LoadSpec(model=entry.id, engine=engine))


@pytest.mark.parametrize(
    ("entry", "engine", "message"),
    [
        (GGUF, "mlx", "has the format gguf, which runs on llama.cpp and not on mlx; leave out engine, or convert"),
        (
            TINY_ENTRY,
            "llama.cpp",
            "has the format mlx, which runs on mlx and not on llama.cpp; leave out engine, or load",
        ),
        (ECHO, "mlx", "has the format echo, which runs on echo and not on mlx; leave out engine, or load another"),
    ],
)
def test_the_engine_of_another_format_is_refused_with_both_names_and_the_next_step(entry, engine, message):
    with pytest.raises(UnusableModelError, match=f"{entry.id} {message}") as refused:
        choose_engine(entry, LoadSpec(model=entry.id, engine=engine))
    assert (refused.value.code, refused.value.param) == ("invalid-request", "engine")
    if entry is GGUF:
        assert refused.value.message.endswith("lmx-lab pull org/name:Q4_K_M --mlx")
