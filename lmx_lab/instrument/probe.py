"""Train linear classifiers on the activations of each layer, and show how well they predict labels."""

from __future__ import annotations

import html
import importlib
import math
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lmx_lab.errors import InvalidRequestError
from lmx_lab.frames import pandas_for
from lmx_lab.values.encoding import Vectors
from lmx_lab.values.tensors import encode_header

if TYPE_CHECKING:
    import pandas as pd

MEMORY_BYTES = 2**28
"""Maximum size of activations in memory; larger ones are stored in a temporary file."""
FOLDS = 5
SEED = 0
MAX_STEPS = 1000
COLUMNS = ("layer", "accuracy", "std", "baseline")
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
    """

    def __init__(self, texts: int, layers: Sequence[int], width: int, *, memory_bytes: int = MEMORY_BYTES) -> None:
        self.layers = list(layers)
        shape = (len(self.layers), texts, width)
        self.path: Path | None = None
        """The file; None if the vectors are in memory."""
        self._values: Vectors
        if 4 * math.prod(shape) <= memory_bytes:
            self._values = np.zeros(shape, dtype=np.float32)
            return
        folder = tempfile.TemporaryDirectory(prefix="lmx-lab-probe-")
        weakref.finalize(self, folder.cleanup)
        self.path = Path(folder.name) / "activations.safetensors"
        head = encode_header({f"blocks.{layer}.hook_resid_post": ("F32", shape[1:]) for layer in self.layers}, {})
        with self.path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + 4 * math.prod(shape))
        self._values = np.memmap(self.path, dtype="<f4", mode="r+", offset=len(head), shape=shape)

    def put(self, text: int, vectors: Sequence[Vectors]) -> None:
        """Store the vectors of a text, one for each layer."""
        for at, vector in enumerate(vectors):
            self._values[at, text] = vector

    def of(self, layer: int) -> Vectors:
        """Return the vectors of all texts at a layer."""
        return np.asarray(self._values[self.layers.index(layer)])


class ProbeRun:
    """Trains the probes of all layers, one after the other.

    Args:
        labels: The class of each text.
        folds: Number of cross-validation folds, each of which is predicted by a probe that was not trained on it.

    Raises:
        InvalidRequestError: a class has too few texts.
        ImportError: scikit-learn is not installed.
    """

    def __init__(self, labels: Sequence[Any], *, folds: int = FOLDS) -> None:
        self._labels = np.asarray(labels)
        classes, counts = np.unique(self._labels, return_counts=True)
        if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
            raise InvalidRequestError(f"folds is {folds!r:.40}; it must be an integer, 2 or more", param="folds")
        if len(classes) < 2:
            raise InvalidRequestError(
                f"all labels are {classes[0]!r}; pass texts of at least two classes"
                if len(classes)
                else "there are no labels; pass one for each text",
                param="labels",
            )
        if (fewest := counts.min()) < folds:
            raise InvalidRequestError(
                f"the label {classes[counts.argmin()]!r} has {fewest} texts, but each of the {folds} folds needs one; "
                "pass more texts, or fewer folds",
                param="labels",
            )
        self.baseline = float(counts.max() / counts.sum())
        """The accuracy of always predicting the most frequent label."""
        self._pipeline, self._linear = _sklearn("pipeline"), _sklearn("linear_model")
        self._preprocessing, self._selection = _sklearn("preprocessing"), _sklearn("model_selection")
        self._folds = folds

    def shuffled(self, seed: int) -> ProbeRun:
        """Return a run with the same labels in random order."""
        return ProbeRun(np.random.default_rng(seed).permutation(self._labels).tolist(), folds=self._folds)

    def accuracies(self, vectors: Vectors) -> list[float]:
        """Return the accuracy of a logistic regression on standardized vectors for each fold."""
        probe = self._pipeline.make_pipeline(
            self._preprocessing.StandardScaler(), self._linear.LogisticRegression(max_iter=MAX_STEPS)
        )
        folds = self._selection.StratifiedKFold(self._folds, shuffle=True, random_state=SEED)
        scores = self._selection.cross_val_score(probe, vectors, self._labels, cv=folds)
        return [float(score) for score in scores]


def _sklearn(module: str) -> Any:
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as exc:
        raise ImportError("probe needs scikit-learn, which is not installed: pip install scikit-learn") from exc


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

        It shows the accuracy that a probe reaches by chance (Hewitt and Liang, arXiv 1909.03368). Traces nothing.
        """
        run, layers = self._run.shuffled(seed), self.accuracies
        return Probe({layer: run.accuracies(self.activations.of(layer)) for layer in layers}, run, self.activations)

    @property
    def best(self) -> int:
        """The layer with the highest mean accuracy; the first one if several are equal."""
        return max(self.accuracies, key=lambda layer: float(np.mean(self.accuracies[layer])))

    @property
    def df(self) -> pd.DataFrame:
        """A data frame with one row for each layer: the mean and the standard deviation of the accuracy over the folds,
        and the accuracy of always predicting the most frequent label.

        Raises:
            ImportError: pandas is not installed.
        """
        rows = [(at, float(np.mean(of)), float(np.std(of)), self.baseline) for at, of in self.accuracies.items()]
        frame: pd.DataFrame = pandas_for("df").DataFrame(rows, columns=list(COLUMNS))
        return frame

    def __repr__(self) -> str:
        accuracy = float(np.mean(self.accuracies[self.best]))
        return (
            f"<Probe of {len(self.accuracies)} layers: best layer {self.best}, accuracy {accuracy:.3f}, "
            f"baseline {self.baseline:.3f}>"
        )

    def _repr_html_(self) -> str:
        return self.svg()

    def svg(self) -> str:
        """Return the chart: the mean accuracy over the layers, its standard deviation, and the baseline."""
        base, title = _y(self.baseline), html.escape(repr(self), quote=True)
        return "".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
                f'aria-label="{title}" style="max-width:100%;height:auto;font:12px system-ui,sans-serif">',
                f'<text x="{LEFT}" y="16" fill="currentColor">accuracy: mean and deviation over folds</text>',
                *(_grid_line(tick) for tick in TICKS),
                f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{base:.1f}" y2="{base:.1f}" stroke="{BASELINE_COLOR}" '
                'stroke-dasharray="6 4"/>',
                f'<text x="{WIDTH - RIGHT}" y="{base - 5:.1f}" text-anchor="end" fill="{BASELINE_COLOR}">'
                "most frequent label</text>",
                *self._points(),
                f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle" fill="currentColor">'
                "layer</text></svg>",
            ]
        )

    def _points(self) -> Iterator[str]:
        """Yield for each layer its point, its standard deviation and its name, and then the line."""
        layers = list(self.accuracies)
        step, span = -(-len(layers) // MAX_LAYER_NAMES), max(1, layers[-1] - layers[0])
        places = []
        for at, (layer, folds) in enumerate(self.accuracies.items()):
            x = LEFT + PADDING + (layer - layers[0]) / span * (WIDTH - LEFT - RIGHT - 2 * PADDING)
            mean, deviation = float(np.mean(folds)), float(np.std(folds))
            places.append(f"{x:.1f},{_y(mean):.1f}")
            yield (
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_y(mean - deviation):.1f}" y2="{_y(mean + deviation):.1f}" '
                f'stroke="{COLOR}"/><circle cx="{x:.1f}" cy="{_y(mean):.1f}" r="3" fill="{COLOR}">'
                f"<title>layer {layer}: {mean:.3f} ± {deviation:.3f}</title></circle>"
            )
            if at % step == 0:
                yield f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="currentColor">{layer}</text>'
        yield f'<polyline points="{" ".join(places)}" fill="none" stroke="{COLOR}" stroke-width="2"/>'


def _y(accuracy: float) -> float:
    return TOP + (1 - min(1.0, max(0.0, accuracy))) * (HEIGHT - TOP - BOTTOM)


def _grid_line(tick: float) -> str:
    y = _y(tick)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8884"/>'
        f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{tick:g}</text>'
    )
