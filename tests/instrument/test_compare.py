"""Test comparisons of settings: what is loaded and computed, how a comparison continues, and how it is shown."""

import asyncio
import math

import numpy as np
import pandas as pd
import polars as pl
import pytest

import lmx_lab
from lmx_lab.errors import EngineError, InvalidRequestError, NotLoadedError
from lmx_lab.instrument import load_requests
from lmx_lab.instrument.compare import Comparison
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.settings import Settings
from tests.support.labs import forbid_waits_on_loops, serving

PROMPTS = ["the sea is wide", "one <b>two</b>"]
SETTINGS = {
    "greedy": {"temperature": 0, "max_tokens": 12},
    "sampled": {"temperature": 2.0, "seed": 3, "max_tokens": 6, "ignore_eos": True},
}


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo") as lab:
        yield lab


class Counted:
    """Counts loads and answers of a lab, and interrupts it before an answer."""

    def __init__(self, monkeypatch):
        self.loads = []
        self.answers = 0
        self.interrupt_at = None
        load, answer = LocalBackend.load, LocalBackend.answer

        async def counted_load(backend, spec, **options):
            self.loads.append(spec.model)
            return await load(backend, spec, **options)

        async def counted_answer(backend, request):
            if self.answers == self.interrupt_at:
                raise EngineError("interrupted")
            self.answers += 1
            return await answer(backend, request)

        monkeypatch.setattr(LocalBackend, "load", counted_load)
        monkeypatch.setattr(LocalBackend, "answer", counted_answer)


def test_a_comparison_has_a_grid_frames_scores_and_a_page(lab, tmp_path):
    comparison = lab.compare(PROMPTS, SETTINGS)
    frame = comparison.df
    assert list(frame["setting"]) == ["greedy", "sampled"] * 2
    assert list(frame["text"][frame["setting"] == "greedy"]) == PROMPTS
    assert frame["logprob"].map(math.isfinite).all()
    assert list(frame["first_difference"].isna()) == [True, False, True, False]
    assert {str(frame[name].dtype) for name in ("tokens", "first_difference")} == {"Int64"}
    # Every answer under every setting, because one load serves both.
    assert len(comparison.scores) == 8
    lens = comparison.lens(0, "sampled", under="greedy")
    assert [token.token for token in lens] == list(comparison.answer(0, 1).answer or ())
    assert sum(each.logprob or 0 for each in lens) == pytest.approx(frame["logprob"][1], abs=1e-4)
    kinds = {kind for kind, _, _ in comparison.diff(0, "sampled")}
    assert kinds & {"insert", "replace"}
    assert "".join(text for _, text, _ in comparison.diff(0, "sampled")) == PROMPTS[0]
    page = comparison.save(tmp_path / "page.html").read_text()
    assert "<b>" not in page
    assert "&lt;b&gt;" in page
    assert "<ins>" in page
    assert "logprob/token" in page
    assert "://" not in page
    assert "4 of 4 answers" in repr(comparison)
    assert comparison.requests[0].replay().same


def test_models_are_loaded_once_and_an_interrupted_comparison_continues(lab, tmp_path, monkeypatch):
    settings = {
        "one": {"model": "echo", "max_tokens": 4},
        "two": {"model": "echo", "context_length": 4096, "max_tokens": 4},
        "three": {"model": "echo", "max_tokens": 3},
    }
    counted, path = Counted(monkeypatch), tmp_path / "compare.db"
    counted.interrupt_at = 5
    with pytest.raises(EngineError, match="interrupted"):
        lab.compare(PROMPTS, settings, path=path)
    assert (counted.loads, counted.answers) == (["echo", "echo"], 5)
    assert sum(request.record.outcome != "scored" for request in load_requests(path)) == 5
    counted.interrupt_at = None
    counted.loads.clear()
    comparison = lab.compare(PROMPTS, settings, path=path)
    assert (counted.loads, counted.answers) == (["echo"], 6)
    assert len(comparison.df) == 6
    # Answers of the second model are not scored under the first one, which would need another load.
    with pytest.raises(InvalidRequestError, match="was not scored under one"):
        comparison.lens(0, "two", under="one")
    assert len(comparison.lens(0, "one", under="two")) > 0
    complete = lab.compare(PROMPTS, settings, path=path, all_scores=True)
    assert (counted.loads, counted.answers) == (["echo", "echo"], 6)
    assert len(complete.scores) == 2 * 3 * 3
    again = lab.compare(PROMPTS, settings, path=path, all_scores=True)
    assert (len(counted.loads), counted.answers) == (2, 6)
    assert again.df.equals(complete.df)


def test_a_comparison_can_be_awaited_without_waits_for_the_disk_on_the_callers_loop(lab, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        forbid_waits_on_loops(patched)
        conversation = [{"role": "user", "content": "hello"}]
        comparison = asyncio.run(lab.acompare([conversation], [{}], path=tmp_path / "compare.db"))
        # An error closes the file.
        with pytest.raises(InvalidRequestError):
            asyncio.run(lab.acompare([conversation], [{"logprob_tokens": ["no such token"]}], path=tmp_path / "2.db"))
    assert isinstance(comparison, Comparison)
    assert comparison.settings == ["default"]
    assert "user: hello" in comparison._repr_html_()


@pytest.mark.parametrize("make", [pd.Series, np.array, pl.Series, iter])
def test_columns_arrays_and_iterators_are_prompts(lab, make):
    comparison = lab.compare(make(["one", "two"]), iter([{}, {"max_tokens": 9}]))
    assert comparison.prompts == ["one", "two"]
    # The numbers of ``comparison.df`` are those of NumPy.
    assert comparison.answer(np.int64(1), np.int64(0)).text == "two"
    assert comparison.df["text"].tolist() == ["one", "one", "two", "two"]


def test_invalid_comparisons_are_refused_before_anything_is_loaded(lab, tmp_path, monkeypatch):
    counted = Counted(monkeypatch)
    for settings, message in (
        ([], "no settings"),
        ([{}, {"model": "echo"}], "name a model in all"),
        ([{}, {}], "two settings are equal"),
        ([{"engine": "mlx"}], "also name the model"),
        ({"first": 0.5}, "pass a dictionary"),
        ([{"model": "echo", "engine": "vllm"}], "engine: Input should be 'auto', 'mlx' or 'llama.cpp'"),
        ([{"model": "echo", "context_length": True}], "context_length: Input should be a valid integer"),
        ([{"model": 5}], "model is 5; pass an id"),
        ([{"model": "echo"}, {"model": "echo", "temperature": -1}], "temperature"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            lab.compare(["hello"], settings)
    for prompts in ("hello", [], {"a": "hello"}, None):
        with pytest.raises(InvalidRequestError, match="list of texts"):
            lab.compare(prompts, [{}])
    with pytest.raises(InvalidRequestError, match="prompts is a data frame; pass one of its columns"):
        lab.compare(pd.DataFrame({"text": ["hello"]}), [{}])
    with pytest.raises(InvalidRequestError, match=r"prompts\[1\]: the prompt is nan; pass a text"):
        lab.compare(["hello", math.nan], [{}])
    with pytest.raises(InvalidRequestError, match="settings is None; pass a list of settings"):
        lab.compare(["hello"], None)
    with pytest.raises(InvalidRequestError, match=r"settings\.to_dict\('records'\)"):
        lab.compare(["hello"], pd.DataFrame({"temperature": [0, 1]}))
    with pytest.raises(InvalidRequestError, match="the limit is 10000"):
        lab.compare(["hello"] * 10_001, [{}])
    comparison = lab.compare(["hello"], [{}])
    for wrong in ({"prompt": 1, "setting": 0}, {"prompt": "0", "setting": 0}, {"prompt": 0, "setting": "x"}):
        with pytest.raises(InvalidRequestError, match="there is no"):
            comparison.lens(**wrong)
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        comparison.save(tmp_path / "no folder" / "page.html")
    assert counted.loads == []
    with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread") as empty, pytest.raises(NotLoadedError):
        empty.compare(["hello"], [{}])
