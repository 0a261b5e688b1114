"""Probes of the layers: their accuracy, where activations are kept, and what is refused."""

import shutil
import types
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from lmx_lab.errors import InvalidRequestError, NotLoadedError, StorageFullError
from lmx_lab.instrument import probes
from lmx_lab.instrument.probes import LayerActivations, ProbeRun
from lmx_lab.values.tensors import decode_tensors

pytestmark = pytest.mark.slow
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [f"{word} {end}" for end in ("red", "blue") for word in WORDS]
LABELS = ["red"] * len(WORDS) + ["blue"] * len(WORDS)
FULL = Path("/dev/full")


def test_a_probe_reads_a_property_of_the_token_it_is_trained_on(lab):
    probe = lab.probe(TEXTS, LABELS)
    frame = probe.df
    assert list(frame["layer"]) == [0, 1]
    assert (frame["baseline"] == 0.5).all()
    assert frame["accuracy"][probe.best] > 0.8
    for text in (repr(probe), probe._repr_html_()):
        assert f"best layer {probe.best}" in text
    trace = lab.trace(TEXTS[3], "blocks.1.hook_resid_post", positions=-1)
    assert probe.activations.of(1)[3] == pytest.approx(trace["blocks.1.hook_resid_post"][0], abs=1e-4)
    assert probe.activations.path is None
    control = probe.control()
    assert control.baseline == 0.5
    assert control.df["accuracy"].mean() < frame["accuracy"].max()
    # The first token does not depend on the second one.
    first = lab.probe(TEXTS, LABELS, layer=1, position=0, folds=2)
    assert list(first.accuracies) == [1]
    assert len(first.accuracies[1]) == 2
    assert first.df["accuracy"][0] < 0.8
    # Folds and shuffled labels are the same in each call.
    again = lab.probe(TEXTS, LABELS)
    assert (again.accuracies, again.control().accuracies) == (probe.accuracies, control.accuracies)


@pytest.mark.parametrize(
    ("texts", "labels"),
    [
        (np.array(TEXTS), np.array(LABELS)),
        (pd.Series(TEXTS, index=range(20, 0, -1)), pd.Series(LABELS).astype("category")),
        (iter(TEXTS), [label == "red" for label in LABELS]),
        (tuple(TEXTS), [np.int64(len(label)) for label in LABELS]),
        (TEXTS, pd.Series(LABELS, dtype="string")),
        (TEXTS, [types.SimpleNamespace if label == "red" else None.__class__ for label in LABELS]),
    ],
)
def test_texts_and_labels_of_any_list_type_give_the_same_probe(lab, texts, labels):
    expected = lab.probe(TEXTS, LABELS, layer=1)
    assert lab.probe(texts, labels, layer=np.array([1, -1])).accuracies == expected.accuracies


def test_texts_may_be_messages_token_ids_and_replies(lab):
    replies = [lab.chat(text, max_tokens=2, temperature=0, ignore_eos=True) for text in TEXTS]
    tokens = [[*reply.prompt_ids, *reply.ids] for reply in replies]
    assert lab.probe(replies, LABELS).accuracies == lab.probe(tokens, LABELS).accuracies
    messages = [[{"role": "user", "content": text}] for text in TEXTS]
    assert lab.probe(messages, LABELS, layer=1).accuracies.keys() == {1}
    direction = lab.steering_vector(messages[:10], messages[10:], 1)
    assert (direction.source["positive"], direction.width) == (10, 32)
    with pytest.raises(InvalidRequestError, match=r"positive\[0\]: \{'role'.*cannot be traced"):
        lab.steering_vector(messages[0], messages[1], 1)


def test_equal_texts_are_in_the_same_fold():
    texts = [f"text {at // 2}" for at in range(24)]
    vectors = np.random.default_rng(0).normal(size=(12, 64)).repeat(2, axis=0)
    labels = np.random.default_rng(1).permutation(12).repeat(2) % 2
    # A probe that has seen the same text predicts its label.
    assert np.mean(ProbeRun([str(at) for at in range(24)], labels.tolist(), folds=3).accuracies(vectors)) > 0.9
    assert np.mean(ProbeRun(texts, labels.tolist(), folds=3).accuracies(vectors)) < 0.8


def test_large_activations_are_kept_in_a_file_until_the_probe_is_deleted():
    kept = LayerActivations(3, [2, 5], 4, memory_bytes=10)
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    for at, vectors in enumerate(values):
        kept.put(at, vectors)
    path = kept.path
    assert (kept.of(5) == values[:, 1]).all()
    arrays, _ = decode_tensors(path.read_bytes())
    assert (arrays["blocks.2.hook_resid_post"] == values[:, 0]).all()
    del kept
    assert not path.exists()


def test_a_probe_does_not_depend_on_where_activations_are_kept(lab, monkeypatch):
    expected = lab.probe(TEXTS, LABELS)
    monkeypatch.setattr(probes, "LayerActivations", partial(LayerActivations, memory_bytes=0))
    probe = lab.probe(TEXTS, LABELS)
    assert probe.activations.path is not None
    assert probe.accuracies == expected.accuracies
    assert (probe.activations.of(1) == expected.activations.of(1)).all()


def test_a_full_disk_is_an_error(monkeypatch):
    usage = shutil.disk_usage("/")._replace(free=90)
    monkeypatch.setattr(probes.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageFullError, match=r"3 texts at 2 layers take 0\.00 GB .* set TMPDIR"):
        LayerActivations(3, [2, 5], 4, memory_bytes=10)


@pytest.mark.skipif(not FULL.exists(), reason="this system has no file that is always full")
def test_a_disk_that_becomes_full_ends_the_probe_and_not_the_process(monkeypatch):
    kept = LayerActivations(3, [2, 5], 4, memory_bytes=10)
    kept.put(0, np.ones((2, 4), np.float32))
    with FULL.open("wb", buffering=0) as full, monkeypatch.context() as context:
        context.setattr(kept, "_file", full)
        with pytest.raises(StorageFullError, match="No space left"):
            kept.put(2, np.ones((2, 4), np.float32))
    assert kept.texts == [0]
    assert kept.of(5).tolist() == [[1.0] * 4]


class Interruption:
    """Raises ``KeyboardInterrupt`` instead of one call of a function."""

    def __init__(self, monkeypatch, owner, name, call):
        self._original, self._left = getattr(owner, name), call
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *arguments):
        self._left -= 1
        if not self._left:
            raise KeyboardInterrupt
        return self._original(*arguments)

    def __get__(self, owner, kind):
        return self if owner is None else types.MethodType(self, owner)


def test_an_interrupted_probe_keeps_its_texts(lab, monkeypatch):
    with monkeypatch.context() as context:
        Interruption(context, LayerActivations, "put", 14)
        probe = lab.probe(TEXTS, LABELS, folds=3)
    # The classes alternate, so that both have texts.
    assert probe.activations.texts == [*range(7), *range(10, 16)]
    assert probe.interrupted
    assert probe.df.attrs["interrupted"]
    for text in (repr(probe), probe._repr_html_()):
        assert "interrupted: 13 of 20 texts, 2 of 2 layers" in text
    expected = lab.probe([TEXTS[at] for at in probe.activations.texts], ["red"] * 7 + ["blue"] * 6, folds=3)
    assert not expected.interrupted
    assert probe.accuracies == expected.accuracies
    assert probe.control().interrupted
    # Too few texts for the folds.
    Interruption(monkeypatch, LayerActivations, "put", 3)
    with pytest.raises(KeyboardInterrupt):
        lab.probe(TEXTS, LABELS, folds=3)


def test_an_interrupted_probe_keeps_its_layers(lab, monkeypatch):
    expected = lab.probe(TEXTS, LABELS)
    with monkeypatch.context() as context:
        Interruption(context, ProbeRun, "accuracies", 2)
        probe = lab.probe(TEXTS, LABELS)
    assert probe.accuracies == {0: expected.accuracies[0]}
    assert "interrupted: 20 of 20 texts, 1 of 2 layers" in repr(probe)
    Interruption(monkeypatch, ProbeRun, "accuracies", 1)
    with pytest.raises(KeyboardInterrupt):
        lab.probe(TEXTS, LABELS)


def test_all_texts_are_computed_by_one_model(lab, tiny, monkeypatch):
    original = LayerActivations.put

    def replace_model(kept, text, vectors):
        original(kept, text, vectors)
        lab.load("echo")

    monkeypatch.setattr(LayerActivations, "put", replace_model)
    try:
        with pytest.raises(NotLoadedError, match=r"texts\[10\] cannot be computed, because .*tiny is not loaded"):
            lab.probe(TEXTS, LABELS)
    finally:
        lab.load(tiny.path)


MISSING = (None, float("nan"), np.float32("nan"), pd.NA, pd.NaT, [1, 0], np.eye(2)[0])
INVALID = {
    "labels": [
        *(["red"] * 7 + [label] + ["blue"] * 12 for label in MISSING),
        *("r" * 10 + "b" * 10, dict.fromkeys(TEXTS, 1), 5, np.linspace(0, 1, 20), LABELS[1:]),
        *(["red"] * len(TEXTS), ["red"] * 18 + ["blue"] * 2),
    ],
    "texts": [
        *("text", set(TEXTS), pd.DataFrame({"text": TEXTS}), np.array("text")),
        *([*TEXTS[:-1], text] for text in (None, "", 5)),
    ],
    "folds": [1, True, 5.0],
    "layer": ["first", [], 2, [0, -3], None, 1.0],
    "position": [9, "first", [0]],
}


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        *(({name: value}, name) for name, values in INVALID.items() for value in values),
        ({"texts": TEXTS[:1] * 10 + TEXTS[10:]}, "labels"),
        ({"texts": [], "labels": []}, "texts"),
    ],
)
def test_invalid_arguments_are_refused(lab, changes, param):
    with pytest.raises(InvalidRequestError) as refused:
        lab.probe(**{"texts": TEXTS, "labels": LABELS, **changes})
    assert refused.value.param == param


def test_errors_name_the_text_and_the_layers(lab):
    for arguments, message in (
        ({"texts": [*TEXTS[:-1], "one"], "position": 5}, r"^texts\[0\], 'one red': positions .* tokens"),
        ({"layer": 2}, r"layer is 2; pass an index from 0 to 1, because .*tiny has 2 layers"),
        ({"labels": np.array(["red"] * 20)}, r"all labels are 'red'; pass"),
    ):
        with pytest.raises(InvalidRequestError, match=message):
            lab.probe(**{"texts": TEXTS, "labels": LABELS, **arguments})
    probe = lab.probe(TEXTS, LABELS, layer=1)
    with pytest.raises(InvalidRequestError, match="layer is 0; the activations are those of 1"):
        probe.activations.of(0)
    with pytest.raises(InvalidRequestError, match="seed is 'x'"):
        probe.control("x")
