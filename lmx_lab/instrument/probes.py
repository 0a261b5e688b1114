"""Compute steering vectors and linear classifiers from the activations of many texts.

A ``Probe`` shows how well the activations of each layer predict labels.
"""

from __future__ import annotations

import bisect
import copy
import json
import math
import operator
import re
import shutil
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, cast

import numpy as np

from lmx_lab.arguments import list_of
from lmx_lab.backend import Backend
from lmx_lab.blocking import in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, ModelNotFoundError, NotLoadedError, StorageFullError, counted
from lmx_lab.extras import import_optional
from lmx_lab.instrument.steering import Steer, mean_difference
from lmx_lab.instrument.traces import HOOKS, HookTable, Traced, What, activation_fields, traced
from lmx_lab.progress import counter
from lmx_lab.results.figures import Picture
from lmx_lab.results.frames import make_table
from lmx_lab.results.pages import html_text
from lmx_lab.values.integers import integer, whole_number
from lmx_lab.values.outputs import Vectors
from lmx_lab.values.tensors import encode_header
from lmx_lab.wire.base import ANY_MODEL

if TYPE_CHECKING:
    import pandas as pd

Position = int | Literal["last", "mean"]
RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_post")
WIDTH, HEIGHT = 640, 260
LEFT, RIGHT, TOP, BOTTOM = 48, 12, 28, 40
TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)
PADDING = 8
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

    def __init__(self, texts: int, layers: Sequence[int], width: int, *, memory_bytes: int = 2**28) -> None:
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
            f"the activations of {counted(self._shape[1], 'text')} at {counted(self._shape[0], 'layer')} take "
            f"{size:.2f} GB in {tempfile.gettempdir()}: {reason}; pass fewer texts or layers, or set TMPDIR to another "
            "folder"
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

    def __init__(self, texts: Sequence[str], labels: Sequence[Any], *, folds: int = 5) -> None:
        self._folds = whole_number(folds, "folds", low=2)
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
        if (fewest := len(classes[label])) < self._folds:
            raise InvalidRequestError(
                f"the label {label!r:.80} has too few different texts: {fewest}, and each of the {self._folds} folds "
                "needs one; pass more texts, or fewer folds",
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
            self._preprocessing.StandardScaler(), self._linear.LogisticRegression(max_iter=1000)
        )
        is_grouped = len(set(self._texts)) < len(self._texts)
        kind = self._selection.StratifiedGroupKFold if is_grouped else self._selection.StratifiedKFold
        folds = kind(self._folds, shuffle=True, random_state=0)
        groups = self._texts if is_grouped else None
        scores = self._selection.cross_val_score(probe, vectors, self._classes, cv=folds, groups=groups)
        return [float(score) for score in scores]


class Probe(Picture):
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
        run, layers = self._run.shuffled(whole_number(seed, "seed")), self.accuracies
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
        frame = make_table(rows, {"layer": "int64", "accuracy": "float64", "std": "float64", "baseline": "float64"})
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
        return (
            f"interrupted: {stored} of {counted(texts, 'text')}, {len(self.accuracies)} of {counted(layers, 'layer')}"
        )

    def __repr__(self) -> str:
        accuracy = float(np.mean(self.accuracies[self.best]))
        return (
            f"<Probe of {counted(len(self.accuracies), 'layer')}: best layer {self.best}, accuracy {accuracy:.3f}, "
            f"baseline {self.baseline:.3f}{self._missing and f'; {self._missing}'}>"
        )

    def _repr_html_(self) -> str:
        return self.svg() + (self._missing and f"<div>The probe was {self._missing}.</div>")

    def svg(self) -> str:
        """Return the chart: the mean accuracy over the layers, its standard deviation, and the baseline."""
        base, title = _y(self.baseline), html_text(repr(self))
        grid = [
            f'<path d="M{LEFT} {y:.1f}L{WIDTH - RIGHT} {y:.1f}" stroke="#8884"/>'
            f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="currentColor">{tick:g}</text>'
            for tick, y in zip(TICKS, map(_y, TICKS), strict=True)
        ]
        layers, points, places = list(self.accuracies), list[str](), list[str]()
        # At most 16 layers are named.
        step, span = -(-len(layers) // 16), max(1, layers[-1] - layers[0])
        for at, (layer, folds) in enumerate(self.accuracies.items()):
            x = LEFT + PADDING + (layer - layers[0]) / span * (WIDTH - LEFT - RIGHT - 2 * PADDING)
            mean, deviation = float(np.mean(folds)), float(np.std(folds))
            places.append(f"{x:.1f} {_y(mean):.1f}")
            points.append(
                f'<path d="M{x:.1f} {_y(mean - deviation):.1f}L{x:.1f} {_y(mean + deviation):.1f}" stroke="{COLOR}"/>'
                # A line of length 0 with round ends is a dot.
                f'<path class="dot" d="M{places[-1]}L{places[-1]}" stroke="{COLOR}" stroke-width="6" '
                'stroke-linecap="round">'
                f"<title>layer {layer}: {mean:.3f} ± {deviation:.3f}</title></path>"
            )
            if at % step == 0:
                points.append(
                    f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" fill="currentColor">{layer}</text>'
                )
        return "".join(
            [
                f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" role="img" '
                f'aria-label="{title}" font-size="12" font-family="system-ui,sans-serif" '
                'style="max-width:100%;height:auto">',
                f'<text x="{LEFT}" y="16" fill="currentColor">accuracy: mean and deviation over folds</text>',
                *grid,
                f'<path d="M{LEFT} {base:.1f}L{WIDTH - RIGHT} {base:.1f}" stroke="{BASELINE_COLOR}" '
                'stroke-dasharray="6 4"/>',
                # Above the axes, where it covers no point.
                f'<text x="{WIDTH - RIGHT}" y="16" text-anchor="end" fill="{BASELINE_COLOR}">'
                "- - most frequent label</text>",
                *points,
                f'<path class="line" d="M{"L".join(places)}" fill="none" stroke="{COLOR}" stroke-width="2"/>',
                f'<text x="{(LEFT + WIDTH) / 2:.0f}" y="{HEIGHT - 4}" text-anchor="middle" fill="currentColor">'
                "layer</text></svg>",
            ]
        )


def _y(accuracy: float) -> float:
    return TOP + (1 - min(1.0, max(0.0, accuracy))) * (HEIGHT - TOP - BOTTOM)


# Methods of a lab


async def steering_vector(
    backend: Backend,
    positive: Iterable[What],
    negative: Iterable[What],
    layer: int,
    *,
    position: Position = "last",
    normalize: bool = True,
) -> Steer:
    """Return the difference between the mean activations of two groups of texts, for ``chat(..., steer=[...])``.

    Args:
        positive: Texts with a property, each as ``what`` in ``trace``.
        negative: Texts without the property.
        layer: Index of the layer whose output is used, starting at 0; negative ones count from the last layer.
        position: The token whose activations are used: ``last``, an index, or ``mean`` for the mean of all tokens.
        normalize: Whether to scale the vector to length 1.

    Raises:
        NotLoadedError: no chat model is loaded.
        InvalidRequestError: an argument is invalid, the model does not have the layer, or both means are equal.
    """
    # In another thread, because recorded requests read their answers from the recording.
    groups = await in_thread(
        lambda: {"positive": _texts(positive, "positive"), "negative": _texts(negative, "negative")}
    )
    residuals = await on_loop(backend.portal, Residuals.of(backend, [layer], position))
    weights = await on_loop(backend.portal, backend.weights_of(residuals.model))
    found: dict[str, list[Vectors]] = {name: [] for name in groups}
    total = sum(map(len, groups.values()))
    with counter("steering vector", backend) as bar:
        for name, texts in groups.items():
            for at, text in enumerate(texts):
                found[name] += await on_loop(backend.portal, residuals.read(text, f"{name}[{at}]"))
                bar.show(f"layer {layer}", sum(map(len, found.values())), total)
    made = mean_difference(residuals.layers[0], **found, normalize=normalize)
    source = {**made.source, "position": residuals.position}
    return replace(made, model=residuals.model, weights=weights, source=source)


async def probe(
    backend: Backend,
    texts: Iterable[What],
    labels: Iterable[Any],
    *,
    layer: int | Sequence[int] | Literal["all"] = "all",
    position: Position = "last",
    folds: int = 5,
) -> Probe:
    """Train a linear classifier on the activations of each layer, and return the accuracies.

    If ``probe`` is interrupted while it computes activations, it trains on the texts that are complete. If it is
    interrupted while it trains, it returns the layers that are complete. ``aprobe`` is cancelled instead.

    Args:
        texts: Texts, or a column of a data frame, each as ``what`` in ``trace``. Equal texts are in the same fold.
        labels: The class of each text.
        layer: Index or indices of the layers whose outputs are used; negative ones count from the last layer, and
            ``all`` uses all layers.
        position: The token whose activations are used: ``last``, an index, or ``mean`` for the mean of all tokens.
        folds: Number of cross-validation folds.

    Raises:
        NotLoadedError: no chat model is loaded.
        InvalidRequestError: an argument is invalid, or a class has too few texts.
        StorageFullError: the activations need more space than the disk has.
        MissingPackageError: scikit-learn is not installed.
    """
    values, classes = await in_thread(lambda: _texts(texts, "texts")), _items(labels, "labels")
    if len(values) != len(classes):
        raise InvalidRequestError(
            f"got {counted(len(values), 'text')} and {counted(len(classes), 'label')}; pass one label for each text",
            param="labels",
        )
    keys = [json.dumps(each.text, sort_keys=True, default=str) for each in values]
    run = ProbeRun(keys, classes, folds=folds)
    residuals = await on_loop(backend.portal, Residuals.of(backend, layer, position))
    activations = LayerActivations(len(values), residuals.layers, residuals.width)
    began = time.monotonic()
    with counter("probe", backend) as bar:
        try:
            for done, at in enumerate(run.order, 1):
                activations.put(at, await on_loop(backend.portal, residuals.read(values[at], f"texts[{at}]")))
                bar.show(f"{done / (time.monotonic() - began):.1f} texts/s", done, len(values))
        except KeyboardInterrupt:
            if (part := run.of(activations.texts)) is None:
                raise
            run = part
    accuracies: dict[int, list[float]] = {}
    with counter("probe", backend) as bar:
        try:
            for trained in activations.layers:
                accuracies[trained] = await in_thread(partial(run.accuracies, activations.of(trained)))
                bar.show(f"layer {trained}", len(accuracies), len(activations.layers))
        except KeyboardInterrupt:
            if not accuracies:
                raise
    return Probe(accuracies, run, activations)


@dataclass(frozen=True, kw_only=True)
class Residuals:
    """Reads the output of layers for many texts, all of them with the same model."""

    backend: Backend
    model: str
    """Id of the model."""
    layers: list[int]
    """The indices of the layers, in ascending order."""
    width: int
    """Number of components of the residual stream."""
    position: Position

    @classmethod
    async def of(cls, backend: Backend, layers: object, position: object) -> Residuals:
        """Return the reader for the loaded model.

        Args:
            layers: One index, several indices, or ``all``; negative indices count from the last layer.

        Raises:
            NotLoadedError: no chat model is loaded.
            InvalidRequestError: the position is invalid, or the model does not have a layer.
        """
        at = position if isinstance(position, str) and position in ("last", "mean") else integer(position)
        if at is None:
            raise InvalidRequestError(
                f"position is {position!r:.40}; pass 'last', 'mean', or the index of a token", param="position"
            )
        hooks = HookTable(await backend.trace(HOOKS))
        shapes = {int(match[1]): hooks[name] for name in hooks if (match := RESIDUAL.fullmatch(name))}
        indices = list(shapes)
        if not (isinstance(layers, str) and layers == "all"):
            is_list = integer(layers) is None and isinstance(layers, Iterable) and not isinstance(layers, str)
            found: set[int] = set()
            for item in layers if is_list else [layers]:  # type: ignore[attr-defined]
                if (layer := integer(item)) is None or not -len(shapes) <= layer < len(shapes):
                    raise InvalidRequestError(
                        f"layer is {item!r:.40}; pass an index from 0 to {len(shapes) - 1}, because {hooks.model} has "
                        f"{counted(len(shapes), 'layer')}",
                        param="layer",
                    )
                found.add(layer % len(shapes))
            if not found:
                raise InvalidRequestError("layer is empty; pass at least one index", param="layer")
            indices = sorted(found)
        width = int(shapes[indices[0]][-1])
        return cls(backend=backend, model=hooks.model, layers=indices, width=width, position=cast("Position", at))

    async def read(self, text: Traced, name: str) -> list[Vectors]:
        """Return the output of each layer at ``position``, or its mean over all tokens.

        Args:
            name: Name of the text in error messages.

        Raises:
            NotLoadedError: the model has been replaced or unloaded.
            InvalidRequestError: the text does not have the position, or is too long.
        """
        at = -1 if self.position == "last" else self.position
        fields = activation_fields(
            [f"blocks.{layer}.hook_resid_post" for layer in self.layers], at if isinstance(at, int) else None
        )
        model = self.model if text.model == ANY_MODEL else text.model
        try:
            trace = await replace(text, model=model).run(self.backend, fields)
        except InvalidRequestError as exc:
            param = "position" if exc.param == "positions" else exc.param
            shown = next(iter(text.text.values()))
            raise type(exc)(f"{name}, {shown!r:.40}: {exc.message}", param=param) from exc
        except ModelNotFoundError as exc:
            raise NotLoadedError(
                f"{name} cannot be computed, because {model} is not loaded, and all texts need the same model; load it "
                "again"
            ) from exc
        return [trace.arrays[hook].mean(axis=0) for hook in fields["hooks"]]


def _items(given: object, name: str) -> list[Any]:
    """Return the items of a list, an array, or a column of a table, in their order.

    Raises:
        InvalidRequestError: the argument is none of these.
    """
    if isinstance(given, Set):
        raise InvalidRequestError(f"{name} is a {type(given).__name__}, which has no order; pass a list", param=name)
    return list_of(given, name, of="labels" if name == "labels" else "texts")


def _texts(given: object, name: str) -> list[Traced]:
    """Return a group of texts as a list.

    Raises:
        InvalidRequestError: the argument is not a list of texts, or is empty.
    """
    found = []
    for at, item in enumerate(_items(given, name)):
        if isinstance(item, str) and not item:
            raise InvalidRequestError(f"{name}[{at}] is empty; pass texts of at least one token", param=name)
        try:
            found.append(traced(item))
        except InvalidRequestError as exc:
            raise InvalidRequestError(f"{name}[{at}]: {exc.message}", param=name) from None
    if not found:
        raise InvalidRequestError(f"{name} is empty; pass at least one text", param=name)
    return found
