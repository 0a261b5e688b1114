"""Probes of the layers: their accuracy, where activations are kept, and what is refused."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lmx_lab
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.probe import LayerActivations
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.values.tensors import decode_tensors

pytestmark = pytest.mark.slow
WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
TEXTS = [f"{word} {end}" for end in ("red", "blue") for word in WORDS]
LABELS = ["red"] * len(WORDS) + ["blue"] * len(WORDS)


@pytest.fixture(scope="module")
def lab(tiny: ModelEntry, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lmx_lab.Lab]:
    with lmx_lab.Lab(Settings(home=tmp_path_factory.mktemp("home"), port=0, threads=1), loop="thread") as lab:
        lab.load(tiny.path)
        yield lab


def test_a_probe_reads_a_property_of_the_token_it_is_trained_on(lab: lmx_lab.Lab) -> None:
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


def test_large_activations_are_kept_in_a_file_until_the_probe_is_deleted() -> None:
    kept = LayerActivations(3, [2, 5], 4, memory_bytes=10)
    values = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    for at, vectors in enumerate(values):
        kept.put(at, vectors)
    path = kept.path
    assert path is not None
    assert (kept.of(5) == values[:, 1]).all()
    arrays, _ = decode_tensors(path.read_bytes())
    assert (arrays["blocks.2.hook_resid_post"] == values[:, 0]).all()
    del kept
    assert not path.exists()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"texts": "text"}, "texts"),
        ({"texts": [], "labels": []}, "texts"),
        ({"texts": [*TEXTS[:-1], 5]}, "texts"),
        ({"labels": LABELS[1:]}, "labels"),
        ({"labels": ["red"] * len(TEXTS)}, "labels"),
        ({"labels": ["red"] * 18 + ["blue"] * 2}, "labels"),
        ({"folds": 1}, "folds"),
        ({"layer": "first"}, "layer"),
        ({"layer": []}, "layer"),
        ({"layer": 2}, "hooks"),
        ({"position": 9}, "positions"),
        ({"position": "first"}, "position"),
    ],
)
def test_invalid_arguments_are_refused(lab: lmx_lab.Lab, changes: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        lab.probe(**{"texts": TEXTS, "labels": LABELS, **changes})
    assert refused.value.param == param


def test_without_scikit_learn_the_error_names_it(lab: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.pipeline", None)
    with pytest.raises(ImportError, match="pip install scikit-learn"):
        lab.probe(TEXTS, LABELS)
