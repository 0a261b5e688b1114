"""Tests of tables of answers, vectors and scores, which are the same for each way to reach a lab."""

import numpy as np
import pytest

from lmx_lab.errors import InvalidRequestError
from lmx_lab.evals import Choice

pytestmark = pytest.mark.anyio
ROWS = ["one", "two", "three"]


async def test_rows_have_typed_columns_which_are_computed_once(lab, tmp_path):
    rows = ['{"days": 1}', "x"]
    for _ in range(2):
        answers = await lab.amap(rows, "{text}", schema={"days": int}, cache=tmp_path / "a.db", n=2)
        assert answers["days"].notna().all()
        assert (answers["prompt_tokens"] > 0).all()
    with pytest.raises(InvalidRequestError):
        await lab.amap(rows, "{text}", schema={"type": "object", "properties": {"a": {"type": "nothing"}}})


async def test_texts_have_the_vectors_of_the_server(lab, served):
    frame = await lab.aembed_frame([*ROWS, ""])
    assert frame["error"].notna().tolist() == [False, False, False, True]
    assert np.array_equal(np.stack(frame["embedding"].dropna()), await served.aembed(ROWS))


async def test_choices_have_the_scores_of_the_server(lab, served):
    rows = [{"text": "sky blue", "right": 1, "options": ["yes, quite", "no, never"]}]
    arguments = {"answer": "right", "metric": Choice("options"), "store": False}
    here, there = [await each.aevaluate(rows, "Is it {text}? ", **arguments) for each in (served, lab)]
    assert there.df["logprobs"][0] == pytest.approx(here.df["logprobs"][0], abs=1e-6)
    assert (await there.alens(0)).logprob == pytest.approx(max(here.df["logprobs"][0]), abs=1e-6)
