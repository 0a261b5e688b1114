"""Test typed columns and the cache with models: on MLX and on llama.cpp."""

import random
import subprocess
import sys
from typing import Annotated, Literal

import pandas as pd
import pytest
from pydantic import BaseModel, Field

import lmx_lab
from lmx_lab.errors import InvalidRequestError
from lmx_lab.settings import Settings
from tests.batch.stored import stored_answers
from tests.support.labs import serving

pytestmark = pytest.mark.slow
COLUMNS = {"days": Annotated[int, Field(ge=0, le=99)], "far": bool, "kind": Literal["sea", "hills"]}


@pytest.fixture(params=["mlx", "gguf"])
def lab(request, tiny, tiny_gguf, tmp_path):
    paths = {"mlx": tiny.path, "gguf": tiny_gguf}
    with serving(tmp_path, paths[request.param], slots=4, threads=1) as lab:
        yield lab


def test_sampled_answers_have_typed_columns_and_are_computed_once(lab, tmp_path):
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


class Trip(BaseModel):
    city: str = Field(max_length=8)
    days: int = Field(ge=0, le=99)
    price: float = Field(ge=0, le=100)
    far: bool
    kind: Literal["sea", "hills"]
    stops: list[Annotated[int, Field(ge=0, le=9)]] = Field(max_length=3)
    guide: Literal["Ann", "Bob"] | None


@pytest.mark.long
def test_sampled_answers_have_valid_columns(lab):
    """``make bench`` computes 1,000 rows with each engine."""
    frame = pd.DataFrame({"text": [f"Row {number}" for number in range(100)]})
    answers = lab.map(frame, "{text}", schema=Trip, temperature=1.0, seed=3, max_tokens=400)
    assert answers["error"].isna().all(), answers["error"].dropna().tolist()[:3]
    columns = answers[list(Trip.model_fields)].astype(object).where(lambda found: found.notna(), None)
    for text, values in zip(answers["answer"], columns.to_dict("records"), strict=True):
        assert Trip.model_validate_json(text) == Trip.model_validate(values)
    assert answers["answer"].nunique() > 90


KILLED = """
import os, sys
import lmx_lab
from lmx_lab.notebook.remote import RemoteBackend

url, cache, log, rows = sys.argv[1:]
generate, begun = RemoteBackend.generate, os.open(log, os.O_WRONLY | os.O_APPEND)

async def logged(backend, request, *, batch=False):
    os.write(begun, f"{request.messages[0].content}\\n".encode())
    return await generate(backend, request, batch=batch)

RemoteBackend.generate = logged
with lmx_lab.attach(url) as lab:
    lab.map([f"Row {number}" for number in range(int(rows))], "{text}", temperature=0, max_tokens=24, cache=cache)
"""
SLOTS, ROWS, KILLS = 4, 500, 20


@pytest.mark.long
def test_after_kills_at_random_moments_the_frame_is_that_of_an_undisturbed_run(tiny, tmp_path):
    cache, log, moments = tmp_path / "a.db", tmp_path / "log", random.Random(20)
    log.touch()
    stored = begun = 0
    rows = [f"Row {number}" for number in range(ROWS)]
    settings = Settings(home=tmp_path, port=0, slots=SLOTS, threads=1)
    with lmx_lab.Lab(settings, loop="thread") as lab, lmx_lab.attach(lab.url) as attached:
        lab.load(tiny.path)
        for _ in range(KILLS):
            goal = stored + moments.randrange(12)
            child = subprocess.Popen([sys.executable, "-c", KILLED, lab.url, str(cache), str(log), str(ROWS)])
            try:
                while stored_answers(cache) < goal:
                    assert child.poll() is None
            finally:
                child.kill()
                child.wait()
            new, started = stored_answers(cache) - stored, len(log.read_text().splitlines()) - begun
            # The started rows are those that were stored, and those that were being answered.
            assert new <= started <= new + SLOTS + 2
            stored, begun = stored + new, begun + started
        assert 0 < stored < ROWS
        resumed, whole = (
            attached.map(rows, "{text}", temperature=0, max_tokens=24, cache=path)
            for path in (cache, tmp_path / "b.db")
        )
    compared = ["answer", "finish_reason", "error", "prompt_tokens", "output_tokens"]
    pd.testing.assert_frame_equal(resumed[compared], whole[compared])
    assert stored_answers(cache) == ROWS
