"""Test ``lab.embed_frame`` and ``lab.search``: rows, errors, the cache, and rerankers."""

import asyncio
import math

import numpy as np
import pandas as pd
import pytest

import lmx_lab
from lmx_lab.batch.search import CHARACTERS_AT_ONCE, TEXTS_AT_ONCE, divide_texts, matrix_of, most_similar
from lmx_lab.errors import BatchStoppedError, EngineError, InvalidRequestError, NotLoadedError, QueueFullError
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.settings import Settings
from tests.support.models import write_tiny_bert
from tests.support.waiting import interrupt

FIRST = [f"one {number}" for number in range(TEXTS_AT_ONCE)]
"""The texts of the first request."""


@pytest.fixture
def sent(monkeypatch):
    """Return the texts of each request."""
    bodies = []
    embed = LocalBackend.embed

    async def recorded(backend, body):
        bodies.append(body.input)
        return await embed(backend, body)

    monkeypatch.setattr(LocalBackend, "embed", recorded)
    return bodies


def test_vectors_have_the_index_of_their_rows_and_errors_are_in_their_rows(lab, sent):
    frame = pd.DataFrame({"text": ["sea", None, "hill", math.nan, 7, "", "sea"], "n": range(7)}, index=list("aabcdef"))
    vectors = lab.embed_frame(frame, "text")
    assert sent == [["sea", "hill"]]
    assert list(vectors.index) == list("aabcdef")
    assert vectors["error"].isna().tolist() == [True, False, True, False, False, False, True]
    expected = lab.embed(["sea", "hill"])
    assert np.array_equal(vectors["embedding"].iloc[0], expected[0])
    assert np.array_equal(vectors["embedding"].iloc[6], expected[0])
    assert "7" in vectors["error"].iloc[4]
    matrix = matrix_of(vectors["embedding"])
    assert (matrix.dtype, matrix.shape) == (np.float32, (7, len(expected[0])))
    assert np.isnan(matrix).all(axis=1).tolist() == [False, True, False, True, True, True, False]
    with pytest.raises(InvalidRequestError, match=r"'a'.*missing"):
        lab.embed_frame(frame, "text", errors="raise")
    assert len(lab.embed_frame([])) == 0


def test_a_text_that_is_too_long_has_an_error_and_the_others_have_vectors(lab):
    texts = ["sea", "x " * 40_000, "hill"]
    vectors = lab.embed_frame(texts)
    assert vectors["embedding"].isna().tolist() == [False, True, False]
    assert "tokens" in vectors["error"][1]
    with pytest.raises(InvalidRequestError, match="tokens"):
        lab.embed_frame(texts, errors="raise")
    assert lab.embed_frame(texts, truncate=True)["error"].isna().all()


def test_only_missing_vectors_are_computed(lab, sent, tmp_path):
    first = lab.embed_frame(["sea", "hill"], cache=tmp_path / "v.db")
    second = lab.embed_frame(pd.Series(["hill", "sand", "sea"]), cache=tmp_path / "v.db")
    assert sent == [["sea", "hill"], ["sand"]]
    for at, other in ((0, 2), (1, 0)):
        assert np.array_equal(first["embedding"][at], second["embedding"][other])
    lab.embed_frame(["sea"], truncate=True, cache=tmp_path / "v.db")
    assert sent[2:] == [["sea"]]


def test_texts_are_divided_into_requests_and_sent_again_to_a_full_server(lab, monkeypatch):
    assert [len(each) for each in divide_texts(map(str, range(TEXTS_AT_ONCE + 1)))] == [TEXTS_AT_ONCE, 1]
    assert [len(each) for each in divide_texts(["x" * CHARACTERS_AT_ONCE, "y", "z"])] == [1, 2]
    embed, refused = LocalBackend.embed, []

    async def full_at_first(backend, body):
        if not refused:
            refused.append(body)
            raise QueueFullError("full", retry_after_s=0.01)
        return await embed(backend, body)

    monkeypatch.setattr(LocalBackend, "embed", full_at_first)
    assert lab.embed_frame(["sea"])["error"].isna().all()
    assert len(refused) == 1


@pytest.mark.parametrize("error", [NotLoadedError("gone"), EngineError("out of memory")])
def test_a_run_that_fails_keeps_its_vectors(lab, monkeypatch, error):
    embed = LocalBackend.embed

    async def fail(backend, body):
        if "two" in body.input:
            raise error
        return await embed(backend, body)

    monkeypatch.setattr(LocalBackend, "embed", fail)
    with pytest.raises(BatchStoppedError, match=f"{TEXTS_AT_ONCE} vectors.*{error.message}") as stopped:
        lab.embed_frame([*FIRST, "two", "three"])
    assert stopped.value.frame["embedding"].notna().tolist() == [True] * TEXTS_AT_ONCE + [False, False]
    with pytest.raises(type(error), match=error.message):
        lab.embed_frame(["two"])


def test_an_interrupt_returns_the_vectors_so_far(lab, monkeypatch):
    embed = LocalBackend.embed

    async def interrupted(backend, body):
        if "two" in body.input:
            interrupt()
            await asyncio.Event().wait()
        return await embed(backend, body)

    assert lab.search(["one"], "one").attrs["interrupted"] is False
    monkeypatch.setattr(LocalBackend, "embed", interrupted)
    vectors = lab.embed_frame([*FIRST, "two", "three"])
    assert vectors.attrs["interrupted"] is True
    assert vectors["embedding"].notna().tolist() == [True] * TEXTS_AT_ONCE + [False, False]
    assert vectors["error"].isna().tolist() == [True] * TEXTS_AT_ONCE + [False, False]
    found = lab.search([*FIRST, "two"], "one 7", top_n=TEXTS_AT_ONCE + 1)
    assert sorted(found["text"]) == sorted(FIRST)
    assert found.attrs["interrupted"] is True


def test_bad_arguments_are_refused_before_the_first_text(lab, sent):
    frame = pd.DataFrame({"a": ["x"], "b": ["y"]})
    for arguments in (
        {"frame": frame},
        {"frame": frame, "column": "c"},
        {"frame": iter("ab")},
        {"frame": frame, "column": "a", "errors": "no"},
        {"frame": frame, "column": "a", "dimensions": 0},
        {"frame": frame, "column": "a", "input_type": "other"},
    ):
        rows = arguments.pop("frame")
        with pytest.raises(InvalidRequestError):
            lab.embed_frame(rows, **arguments)
    with pytest.raises(NotLoadedError, match="other"):
        lab.embed_frame(frame, "a", model="other")
    with pytest.raises(InvalidRequestError, match="top_n"):
        lab.search(frame, "x", "a", top_n=0)
    with pytest.raises(InvalidRequestError, match="query is None; it must be one text"):
        lab.search(frame, None, "a")
    with pytest.raises(InvalidRequestError, match="score"):
        lab.search(frame.assign(score=1), "x", "a")
    with pytest.raises(NotLoadedError, match="reranker"):
        lab.search(frame, "x", "a", rerank=True)
    assert sent == []


def test_search_returns_the_most_similar_rows_with_their_labels(lab):
    frame = pd.DataFrame({"text": ["hill", "sea", None, "the sea", "sand"], "n": range(5)}, index=list("abcde"))
    found = lab.search(frame, "sea", "text", top_n=2)
    assert list(found.columns) == ["text", "n", "similarity", "score"]
    assert found.index[0] == "b"
    assert found["similarity"].iloc[0] == pytest.approx(1, abs=1e-5)
    assert found["score"].is_monotonic_decreasing
    assert len(lab.search(frame["text"], "sea", top_n=100)) == 4
    assert list(lab.search(["hill", "sea"], "sea", top_n=1).index) == [1]
    assert len(lab.search([], "sea")) == 0
    rows = [{"text": "sea", "id": 2**60 + 1, "far": True}, {"text": "hill", "id": None, "far": None}]
    exact = lab.search(rows, "sea", "text")
    assert exact["id"].tolist() == [2**60 + 1, pd.NA]
    assert exact["far"].tolist() == [True, pd.NA]


def test_equal_and_zero_vectors_are_in_order():
    vectors = np.array([[0, 0], [1, 1], [np.nan, 1], [2, 2], [-1, 0]], dtype=np.float32)
    found = most_similar(vectors, np.array([1, 1], dtype=np.float32), 10)
    assert [at for at, _ in found] == [1, 3, 0, 4]
    # Without a limit, rounding makes the similarity of this vector with itself larger than 1.
    unit = np.array([-0.4472136, 0.8944272], dtype=np.float32)
    assert most_similar(unit[None], unit, 1) == [(0, 1.0)]
    assert matrix_of([]).shape == (0, 0)


@pytest.mark.slow
def test_a_reranker_orders_the_most_similar_rows(tmp_path):
    for name, labels in (("embedder", {}), ("reranker", {"labels": 1})):
        write_tiny_bert(tmp_path / "models" / name, **labels)
    settings = Settings(home=tmp_path, port=0, embedder="embedder", reranker="reranker")
    texts = [f"text {number}" for number in range(60)]
    with lmx_lab.Lab(settings, loop="thread") as lab, lmx_lab.attach(f"http://127.0.0.1:{lab.server.port}") as attached:
        found, plain = lab.search(texts, "text 5", top_n=3), lab.search(texts, "text 5", top_n=60, rerank=False)
        candidates = plain["text"].tolist()[:50]
        ranking = lab.rerank("text 5", candidates, top_n=3)
        assert found["text"].tolist() == [row.document for row in ranking]
        assert found["score"].tolist() == pytest.approx([row.score for row in ranking], abs=1e-6)
        assert plain["score"].equals(plain["similarity"])
        assert attached.search(texts, "text 5", top_n=3)["text"].tolist() == found["text"].tolist()
