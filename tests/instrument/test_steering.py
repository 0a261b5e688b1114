"""Steering vectors as values, in chats, records and comparisons, over HTTP, and from activations."""

import array
import copy
import math
import pickle

import httpx2
import mlx.core as mx
import numpy as np
import pandas as pd
import pytest

import lmx_lab
from lmx_lab import Steer
from lmx_lab.errors import InvalidRequestError

pytestmark = pytest.mark.slow
WIDTH = 32
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


def steer(scale=3.0, **changes):
    return Steer(0, np.random.default_rng(0).normal(size=WIDTH), scale, **changes)


def test_a_vector_is_saved_with_its_model_and_read_again(tmp_path):
    made = 2 * steer(0.5, model="tiny", weights="0" * 64, source={"positive": 3})
    path = made.save(tmp_path / "vector.safetensors")
    read = Steer.load(path)
    assert (read.layer, read.scale, read.width, read.model, read.weights) == (0, 1.0, WIDTH, "tiny", "0" * 64)
    assert read.source == {"positive": 3}
    assert (read.vector == made.vector).all()
    assert repr(read) == repr(made)
    assert repr(steer()) != repr(Steer(0, np.zeros(WIDTH), 3.0))
    for content in (b"", path.read_bytes()[:-1], b"{}" * 40):
        path.write_bytes(content)
        with pytest.raises(InvalidRequestError):
            Steer.load(path)
    with pytest.raises(InvalidRequestError):
        made.save(tmp_path / "missing" / "vector.safetensors")
    with path.open("wb") as file:
        # The weights of a model are not read into memory.
        file.truncate(2**40)
    with pytest.raises(InvalidRequestError, match="it has 1099511627776 bytes"):
        Steer.load(path)
    with pytest.raises(InvalidRequestError, match="source cannot be written as JSON"):
        steer(source={"positive": np.int64(3)}).save(path)


@pytest.mark.parametrize(
    "values",
    [
        (0.5, -1.0),
        array.array("d", [0.5, -1.0]),
        np.array([0.5, -1.0], dtype=np.float16),
        np.array([1.0, 0.5, -2.0, -1.0])[1::2],
        pd.Series([0.5, -1.0], index=["a", "b"]),
        mx.array([0.5, -1.0]),
        mx.array([0.5, -1.0], dtype=mx.bfloat16),
    ],
)
def test_vectors_of_any_type_are_copied_to_float32(values):
    made = Steer(np.int64(1), values, np.float32(2.0))
    assert (made.layer, made.vector.tolist(), made.vector.dtype, made.scale) == (1, [0.5, -1.0], np.float32, 2.0)
    for same in (made, pickle.loads(pickle.dumps(made)), copy.deepcopy(made)):
        assert repr(same) == repr(made)
        with pytest.raises(ValueError, match="read-only"):
            same.vector[0] = 1.0


@pytest.mark.parametrize("path", [None, 3, b"a.safetensors", "a\0b", "~nobody-of-that-name/a"])
def test_values_that_are_not_paths_are_refused(path):
    for use in (Steer.load, Steer(0, [1.0]).save):
        with pytest.raises(InvalidRequestError, match="is not a path of a file"):
            use(path)


def test_vectors_are_multiplied_by_numbers():
    made = steer(3.0)
    for product, scale in (
        (2 * made, 6.0),
        (made * 2, 6.0),
        (np.float64(2) * made, 6.0),
        (np.int32(2) * made, 6.0),
        (made / 2, 1.5),
        (-made, -3.0),
    ):
        assert isinstance(product, Steer)
        assert product.scale == scale
        assert product.vector is not None
    assert repr(1.0000001 * made) != repr(made)
    for wrong in (np.ones(2), math.inf):
        with pytest.raises(InvalidRequestError, match="scale is"):
            wrong * made
    with pytest.raises(TypeError):
        "2" * made


INVALID = {
    "vector": [
        *([[1.0]], [], ["a"], [1.0, float("nan")], [1.0, None], ["1.0"], np.array([1j]), [1e39], [[1.0], [1.0, 2.0]]),
        *(np.zeros(65_537), 1.0),
    ],
    "layer": [1.0, -1, True],
    "scale": [10**400, True, float("inf"), "1"],
}


@pytest.mark.parametrize(("param", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_vectors_are_refused(param, value):
    with pytest.raises(InvalidRequestError) as refused:
        Steer(**{"layer": 0, "vector": [1.0], param: value})
    assert refused.value.param == param


def test_a_steered_reply_is_recorded_repeated_continued_and_scored_with_its_vectors(lab):
    plain = lab.chat("hello", **GREEDY)
    reply = lab.chat("hello", steer=[steer()], logprobs=2, **GREEDY)
    assert reply.ids != plain.ids
    assert lab.chat("hello", steer=0 * steer(), **GREEDY).ids == plain.ids
    assert lab.chat("hello", steer=None, **GREEDY).ids == plain.ids
    item = {"layer": 0, "vector": steer().vector, "scale": np.float32(3.0)}
    assert lab.chat("hello", steer=item, **GREEDY).ids == reply.ids
    lab.chat("hello", steer=steer(), **GREEDY)
    record = lab.requests[-1].record
    assert [(each["layer"], each["scale"]) for each in record.request["steer"]] == [(0, 3.0)]
    assert lab.requests[-1].replay().same
    scored = lab.requests[-1].lens()
    assert scored.source == "scoring"
    assert [it.logprob for it in scored] == pytest.approx([it.logprob for it in reply.lens()], abs=1e-4)
    assert reply.branch(4, reply.ids[4]).ids == reply.ids
    with pytest.raises(InvalidRequestError, match="was steered"):
        lab.trace(reply, "blocks.0.hook_resid_post")


def test_settings_with_vectors_are_compared_and_scored(lab, tmp_path):
    settings = {f"scale {scale}": {"steer": [scale * steer()], **GREEDY} for scale in (0, 1, 2)}
    comparison = lab.compare(["hello"], settings, path=tmp_path / "compare.db")
    texts = [comparison.answer(0, at).text for at in range(3)]
    assert len(set(texts)) == 3
    scores = comparison.scores.set_index(["answer", "under"])["logprob"]
    for name in settings:
        # A greedy answer is more probable under its own vectors.
        assert scores[name, name] == max(scores[name])
    again = lab.compare(["hello"], settings, path=tmp_path / "compare.db")
    assert [again.answer(0, at).text for at in range(3)] == texts


@pytest.mark.parametrize("wrong", ["happy.safetensors", np.ones(WIDTH), [None], [np.ones(WIDTH)], 1.0])
def test_other_values_than_vectors_are_refused(lab, wrong):
    with pytest.raises(InvalidRequestError, match=r"type (str|ndarray|NoneType|float); pass a list of") as refused:
        lab.chat("hello", steer=wrong)
    assert refused.value.param == "steer"


def test_rows_and_trees_are_steered(lab, tmp_path):
    given = {**GREEDY, "steer": [steer()]}
    expected = lab.chat("hello", **given).text
    for vector in (steer(), -steer()):
        answers = lab.map(["hello"], "{text}", cache=tmp_path / "answers.db", **{**given, "steer": vector})
        # The vectors are part of the key of an answer in the cache.
        assert (answers["answer"][0] == expected) == (vector.scale > 0)
    assert lab.explore("hello", width=1, depth=2, **given)["1-1"].text == expected


def test_programs_on_this_machine_may_steer_over_http(lab):
    expected = lab.chat("hello", steer=[steer()], **GREEDY)
    item = steer().to_json()
    body = {"messages": [{"role": "user", "content": "hello"}], **GREEDY}
    with httpx2.Client(base_url=lab.url) as client:
        for vector in (item["vector"], steer().vector.tolist()):
            sent = {**body, "steer": [{**item, "vector": vector}]}
            answer = client.post("/v1/chat/completions", json=sent).raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == expected.text
        for wrong, reason in (
            ({**item, "vector": [1.0] * 31}, "components; the residual stream of"),
            ({**item, "vector": "AADAfwAAwH8="}, "is nan"),
            ({**item, "vector": [1e39]}, "steer.0.vector"),
            ({**item, "layer": 2}, "has 2 layers"),
            ({**item, "weights": "1" * 64}, "SHA-256"),
            ({**item, "scale": "1"}, "steer.0.scale"),
        ):
            refused = client.post("/v1/chat/completions", json={**body, "steer": [wrong]})
            assert (refused.status_code, reason in refused.text) == (400, True), refused.text
        refused = client.post("/v1/chat/completions", json={**body, "steer": [item] * 17})
        assert (refused.status_code, "the limit is 16" in refused.text) == (400, True)
    with lmx_lab.attach(lab.url) as other:
        assert other.chat("hello", steer=[steer()], **GREEDY).text == expected.text


def test_a_vector_is_made_of_two_groups_of_texts(lab, tiny):
    positive, negative = ["one two", "three"], ["four five six"]
    made = lab.steering_vector(positive, negative, 1)
    assert np.linalg.norm(made.vector) == pytest.approx(1)
    assert (made.layer, made.scale, made.model) == (1, 1.0, lab.requests[-1].record.provenance.model)
    assert made.weights == lab.backend.portal.run(lab.backend.weights_of(made.model))
    assert made.source["positive"] == 2
    raw = lab.steering_vector(positive, negative, 1, normalize=False)
    assert raw.vector / made.source["length"] == pytest.approx(made.vector, abs=1e-5)
    mean = lab.steering_vector(positive, negative, 1, position="mean")
    assert np.abs(mean.vector - made.vector).max() > 1e-3
    assert lab.chat("hello", steer=[20 * made], **GREEDY).ids
    for arguments, param in (
        (("text", negative, 1), "positive"),
        ((positive, [], 1), "negative"),
        ((positive, positive, 1), "positive"),
        # The same texts in another order differ by rounding only.
        ((["one", "two", "three", "four five"], ["four five", "two", "one", "three"], 1), "positive"),
        ((positive, negative, -3), "layer"),
        ((positive, negative, 2), "layer"),
        ((positive, negative, [0, 1]), "layer"),
        ((positive, negative, "all"), "layer"),
        (({"one": 1}, negative, 1), "positive"),
    ):
        with pytest.raises(InvalidRequestError) as refused:
            lab.steering_vector(*arguments)
        assert refused.value.param == param
    with pytest.raises(InvalidRequestError, match="position is 'first'"):
        lab.steering_vector(positive, negative, 1, position="first")
    with pytest.raises(InvalidRequestError, match=r"^positive\[1\], 'three': positions"):
        lab.steering_vector(positive, negative, 1, position=1)
