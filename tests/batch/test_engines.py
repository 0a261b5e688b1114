"""Test typed columns and the cache with models: on MLX and on llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
import pytest
from pydantic import Field

import lmx_lab
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from lmx_lab.values.models import Format, ModelEntry

pytestmark = pytest.mark.slow
COLUMNS = {"days": Annotated[int, Field(ge=0, le=99)], "far": bool, "kind": Literal["sea", "hills"]}


@pytest.fixture(params=["mlx", "gguf"])
def lab(request: pytest.FixtureRequest, tiny: ModelEntry, tiny_gguf: Path, tmp_path: Path) -> Iterator[lmx_lab.Lab]:
    paths: dict[Format, Path] = {"mlx": tiny.path, "gguf": tiny_gguf}
    with lmx_lab.Lab(Settings(home=tmp_path, port=0, slots=4, threads=1), loop="thread") as lab:
        lab.load(paths[request.param])
        yield lab


def test_sampled_answers_have_typed_columns_and_are_computed_once(lab: lmx_lab.Lab, tmp_path: Path) -> None:
    frame = pd.DataFrame({"text": [f"Row {number}" for number in range(6)]})
    first, second = [
        lab.map(frame, "{text}", schema=COLUMNS, temperature=1.0, seed=7, max_tokens=100, cache=tmp_path / "a.db")
        for _ in range(2)
    ]
    assert first["error"].isna().all(), first["error"].tolist()
    assert first["days"].between(0, 99).all()
    assert first["far"].notna().all()
    assert first["kind"].isin(["sea", "hills"]).all()
    assert [str(first[name].dtype) for name in ("days", "far")] == ["Int64", "boolean"]
    assert first["output_tokens"].gt(0).all()
    pd.testing.assert_frame_equal(second, first)
    with pytest.raises(InvalidRequestError):
        lab.map(frame, "{text}", schema={"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}})
