"""Train linear classifiers on the activations of each layer, and show how well they predict labels."""

from __future__ import annotations

import bisect
import copy
import html
import math
import operator
import shutil
import tempfile
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from lmx_lab.errors import InvalidRequestError, StorageFullError
from lmx_lab.extras import import_optional
from lmx_lab.instrument.traces import integer
from lmx_lab.results.frames import make_table
from lmx_lab.values.outputs import Vectors
from lmx_lab.values.tensors import encode_header

if TYPE_CHECKING:
    import pandas as pd

MEMORY_BYTES = 2**28
"""Maximum size of activations in memory; larger ones are stored in a temporary file."""
FOLDS = 5
SEED = 0
MAX_STEPS = 1000
COLUMNS = {"layer": "int64", "accuracy": "float64", "std": "float64", "baseline": "float64"}
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 28, 40
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
PADDING = 8
MAX_LAYER_NAMES = 16
COLOR, BASELINE_COLOR = "#2b7bc4", "#c2621b"
"""Colours with enough contrast on white and on dark backgrounds."""


class LayerActivations:
    """One vector for each text at each layer, in memory or in a temporary safetensors file.

    Args:
        layers: The indices of the layers.
        memory_bytes: Maximum size in memory; larger vectors are stored in a file.

    Attributes:
        texts: The indices of the texts whose vectors are stored, in ascending order.

    Raises:
        StorageFullError: the disk has too little space for the file.
    """

    def __init__(self, texts: int, layers: Sequence[int], width: int, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self.layers = list(layers)
        self.texts: list[int] = []
        self.path: Path | None = None
        """The file; None if the vectors are in memory."""
        self._shape = shape = (len(self.layers), texts, width)
        self._values: Vectors
        self._file: BinaryIO | None = None
        if (size := 4 * math.prod(shape)) <= memory_bytes:
            self._values = np.zeros(shape, dtype=np.float32)
            return
        folder = tempfile.TemporaryDirectory(prefix="lmx-lab-probe-")
        weakref.finalize(self, folder.cleanup)
        if (free := shutil.disk_usage(folder.name).free) < size:
            raise self._full(f"{free / 1e9:.2f} GB are free")
        self.path = Path(folder.name) / "activations.safetensors"
        head = encode_header({f"blocks.{layer}.hook_resid_post": ("F32", shape[1:]) for layer in self.layers}, {})
        self._start = len(head)
        self._file = self.path.open("w+b")
        weakref.finalize(self, self._file.close)
        self._file.write(head)
        self._file.truncate(len(head) + size)
        self._file.flush()
        self._values = np.memmap(self.path, dtype="<f4", mode="r", offset=len(head), shape=shape)

    def put(self, text: int, vectors: Sequence[Vectors]) -> None:
        """Store the vectors of a text, one for each layer.

        Raises:
            StorageFullError: the disk is full.
        """
        if (file := self._file) is None:
            self._values[:, text] = vectors
        else:
            # Not written through the memory map, because a full disk would then terminate the process (SIGBUS).
            try:
                for at, vector in enumerate(vectors):
                    file.seek(self._start + 4 * self._shape[2] * (at * self._shape[1] + text))
                    file.write(np.asarray(vector, dtype="<f4").tobytes())
                file.flush()
            except OSError as exc:
                raise self._full(exc.strerror or str(exc)) from exc
        bisect.insort(self.texts, text)

    @property
    def total(self) -> int:
        """Number of texts, including those whose vectors are not stored."""
        return self._shape[1]

    def _full(self, reason: str) -> StorageFullError:
        size = 4 * math.prod(self._shape) / 1e9
        return StorageFullError(
            f"the activations of {self._shape[1]} texts at {self._shape[0]} layers take {size:.2f} GB in "
            f"{tempfile.gettempdir()}: {reason}; pass fewer texts or layers, or set TMPDIR to another folder"
        )

    def of(self, layer: int) -> Vectors:
        """Return the vectors at a layer, with one row for each of ``texts``.

        Raises:
            InvalidRequestError: this layer is not stored.
        """
        if layer not in self.layers:
            raise InvalidRequestError(
                f"layer is {layer!r:.40}; the activations are those of {', '.join(map(str, self.layers))}",
                param="layer",
            )
        values = self._values[self.layers.index(layer)]
        return np.asarray(values if len(self.texts) == len(values) else values[self.texts])


class ProbeRun:
    """Trains the probes of all layers, one after the other.

    Args:
        texts: The texts. Equal texts are in the same fold.
        labels: The class of each text.
        folds: Number of cross-validation folds, each of which is predicted by a probe that was not trained on it.

    Raises:
        InvalidRequestError: a label is missing, or a class has too few texts.
        MissingPackageError: scikit-learn is not installed.
    """

    def __init__(self, texts: Sequence[str], labels: Sequence[Any], *, folds: int = FOLDS) -> None:
        if (count := integer(folds)) is None or count < 2:
            raise InvalidRequestError(f"folds is {folds!r:.40}; it must be an integer, 2 or more", param="folds")
        self._folds = count
        self._texts, self._labels = list(texts), list(labels)
        classes: dict[Any, set[str]] = {}
        for at, (text, label) in enumerate(zip(self._texts, self._labels, strict=True)):
            try:
                hash(label)
                is_class = label is not None and bool(operator.eq(label, label))
            except (TypeError, ValueError):  # Also raised by ``bool(pandas.NA == pandas.NA)``.
                is_class = False
            if not is_class:
                raise InvalidRequestError(
                    f"labels has {label!r:.80} at index {at}; pass a class for each text, such as a text or an integer",
                    param="labels",
                )
            classes.setdefault(label, set()).add(text)
        if len(classes) < 2:
            only = "".join(map(repr, classes))
            raise InvalidRequestError(f"all labels are {only:.80}; pass texts of at least two classes", param="labels")
        label = min(classes, key=lambda each: len(classes[each]))
        if (fewest := len(classes[label])) < count:
            raise InvalidRequestError(
                f"the label {label!r:.80} has too few different texts: {fewest}, and each of the {count} folds needs "
                "one; pass more texts, or fewer folds",
                param="labels",
            )
        codes = {each: at for at, each in enumerate(classes)}
        self._classes = np.array([codes[each] for each in self._labels])
        self.baseline = float(np.bincount(self._classes).max() / len(self._classes))
        """The accuracy of always predicting the most frequent label."""
        self._pipeline, self._linear, self._preprocessing, self._selection = (
            import_optional(f"sklearn.{module}", "probe")
            for module in ("pipeline", "linear_model", "preprocessing", "model_selection")
        )

    @property
    def order(self) -> list[int]:
        """The indices of the texts in an order in which the classes alternate."""
        ranks: list[int] = []
        seen: Counter[int] = Counter()
        for each in self._classes.tolist():
            ranks.append(seen[each])
            seen[each] += 1
        return sorted(range(len(ranks)), key=ranks.__getitem__)

    def of(self, texts: Sequence[int]) -> ProbeRun | None:
        """Return a run with the texts at these indices; None if there are too few texts for the folds."""
        try:
            return ProbeRun([self._texts[at] for at in texts], [self._labels[at] for at in texts], folds=self._folds)
        except InvalidRequestError:
            return None

    def shuffled(self, seed: int) -> ProbeRun:
        """Return a run with the same labels in random order."""
        run = copy.copy(self)
        run._classes = np.random.default_rng(seed).permutation(self._classes)
        return run

    def accuracies(self, vectors: Vectors) -> list[float]:
        """Return the accuracy of a logistic regression on standardized vectors for each fold."""
        probe = self._pipeline.make_pipeline(
            self._preprocessing.StandardScaler(), self._linear.LogisticRegression(max_iter=MAX_STEPS)
        )
        is_grouped = len(set(self._texts)) < len(self._texts)
        kind = self._selection.StratifiedGroupKFold if is_grouped else self._selection.StratifiedKFold
        folds = kind(self._folds, shuffle=True, random_state=SEED)
        groups = self._texts if is_grouped else None
        scores = self._selection.cross_val_score(probe, vectors, self._classes, cv=folds, groups=groups)
        return [float(score) for score in scores]


class Probe:
    """The accuracy of a linear probe at each layer. Notebooks display it as a chart.

    Attributes:
        accuracies: The accuracies on the folds, by layer.
        baseline: The accuracy of always predicting the most frequent label.
        activations: The vectors on which the probes were trained.
    """

    def __init__(self, accuracies: Mapping[int, Sequence[float]], run: ProbeRun, activations: LayerActivations) -> None:
        self.accuracies = dict(accuracies)
        self.baseline = run.baseline
        self.activations = activations
        self._run = run

    def control(self, seed: int = 0) -> Probe:
        """Return a probe of the same activations that is trained on shuffled labels.

        It shows the accuracy that is reached by chance (Hewitt and Liang, arXiv 1909.03368). No text is traced again.
        """
        if integer(seed) is None:
            raise InvalidRequestError(f"seed is {seed!r:.40}; it must be an integer", param="seed")
        run, layers = self._run.shuffled(seed), self.accuracies
        return Probe({layer: run.accuracies(self.activations.of(layer)) for layer in layers}, run, self.activations)

    @property
    def best(self) -> int:
        """The layer with the highest mean accuracy; the first of them if several layers have it."""
        return max(self.accuracies, key=lambda layer: float(np.mean(self.accuracies[layer])))

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each layer: the mean and the standard deviation of the accuracy over the folds,
        and the accuracy of always predicting the most frequent label.

        Raises:
            MissingPackageError: pandas is not installed.
        """
        rows = [(at, float(np.mean(of)), float(np.std(of)), self.baseline) for at, of in self.accuracies.items()]
        frame: pd.DataFrame = make_table(rows, COLUMNS)
        frame.attrs["interrupted"] = self.interrupted
        return frame

    @property
    def interrupted(self) -> bool:
        """Whether texts or layers are missing, because the call was interrupted."""
        return bool(self._missing)

    @property
    def _missing(self) -> str:
        """The numbers of complete texts and layers for messages; empty if none is missing."""
        stored, texts, layers = len(self.activations.texts), self.activations.total, len(self.activations.layers)
        if (stored, len(self.accuracies)) == (texts, layers):
            return ""
        return f"interrupted: {stored} of {texts} texts, {len(self.accuracies)} of {layers} layers"

    def __repr__(self) -> str:
        accuracy = float(np.mean(self.accuracies[self.best]))
        return (
            f"<Probe of {len(self.accuracies)} layers: best layer {self.best}, accuracy {accuracy:.3f}, "
            f"baseline {self.baseline:.3f}{self._missing and f'; {self._missing}'}>"
        )

    def _repr_html_(self) -> str:
        return self.svg() + (self._missing and f"<div>The probe was {self._missing}.</div>")

    def svg(self) -> str:
        """Return the chart: the mean accuracy over the layers, its standard deviation, and the baseline."""
        base, title = _y(self.baseline), html.escape(repr(self), quote=True)
        grid = [
            f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{tick:g}</text>'
            for tick, y in zip(TICKS, map(_y, TICKS), strict=True)
        ]
        layers, points, places = list(self.accuracies), list[str](), list[str]()
        step, span = -(-len(layers) // MAX_LAYER_NAMES), max(1, layers[-1] - layers[0])
        for at, (layer, folds) in enumerate(self.accuracies.items()):
            x = LEFT + PADDING + (layer - layers[0]) / span * (WIDTH - LEFT - RIGHT - 2 * PADDING)
            mean, deviation = float(np.mean(folds)), float(np.std(folds))
            places.append(f"{x:.1f},{_y(mean):.1f}")
            points.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(mean - deviation):.1f}" y2="{_y(mean + deviation):.1f}" '
                f'stroke="{COLOR}"/><circle cx="{x:.1f}" cy="{_y(mean):.1f}" r="3" fill="{COLOR}">'
                f"<title>layer {layer}: {mean:.3f} ± {deviation:.3f}</title></circle>"
            )
            if at % step == 0:
                points.append(
                    f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="currentColor">{layer}</text>'
                )
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
                f'aria-label="{title}" style="max-width:100%;height:auto;font:12px system-ui,sans-serif">',
                f'<text x="{LEFT}" y="16" fill="currentColor">accuracy: mean and deviation over folds</text>',
                *grid,
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}" stroke="{BASELINE_COLOR}" '
                'stroke-dasharray="6 4"/>',
                # Above the axes, where it covers no point.
                f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end" fill="{BASELINE_COLOR}">'
                "- - most frequent label</text>",
                *points,
                f'<polyline points="{" ".join(places)}" fill="none" stroke="{COLOR}" stroke-width="2"/>',
                f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle" fill="currentColor">'
                "layer</text></svg>",
            ]
        )


def _y(accuracy: float) -> float:
    return TOP + (1 - min(1.0, max(0.0, accuracy))) * (HEIGHT - TOP - BOTTOM)
