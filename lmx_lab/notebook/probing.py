"""Define ``steering_vector`` and ``probe``, the methods of a lab that use the activations of many texts."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, cast

from lmx_lab.backend import Backend, HasBackend
from lmx_lab.blocking import both, in_thread, on_loop
from lmx_lab.errors import InvalidRequestError, ModelNotFoundError, NotLoadedError
from lmx_lab.instrument.probe import FOLDS, LayerActivations, Probe, ProbeRun
from lmx_lab.instrument.steering import Steer, mean_difference
from lmx_lab.instrument.traces import HookTable, Traced, What, activation_fields, integer, trace_body, traced
from lmx_lab.progress import counter
from lmx_lab.values.outputs import Vectors
from lmx_lab.wire.base import ANY_MODEL

Position = int | Literal["last", "mean"]
RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_post")


class ProbeVerbs:
    """The methods of ``Lab`` that use the activations of many texts."""

    async def _steering_vector(
        self: HasBackend,
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
            layer: Index of the layer whose output is used, starting at 0.
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
        residuals = await on_loop(self._portal, Residuals.of(self._backend, [layer], position))
        weights = await on_loop(self._portal, self._backend.weights_of(residuals.model))
        found: dict[str, list[Vectors]] = {name: [] for name in groups}
        total = sum(map(len, groups.values()))
        with counter("steering vector") as bar:
            for name, texts in groups.items():
                for at, text in enumerate(texts):
                    found[name] += await on_loop(self._portal, residuals.read(text, f"{name}[{at}]"))
                    bar.show(f"layer {layer}", sum(map(len, found.values())), total)
        made = mean_difference(residuals.layers[0], **found, normalize=normalize)
        source = {**made.source, "position": residuals.position}
        return replace(made, model=residuals.model, weights=weights, source=source)

    steering_vector, asteering_vector = both(_steering_vector)

    async def _probe(
        self: HasBackend,
        texts: Iterable[What],
        labels: Iterable[Any],
        *,
        layer: int | Sequence[int] | Literal["all"] = "all",
        position: Position = "last",
        folds: int = FOLDS,
    ) -> Probe:
        """Train a linear classifier on the activations of each layer, and return the accuracies.

        If ``probe`` is interrupted while it computes activations, it trains on the texts that are complete. If it is
        interrupted while it trains, it returns the layers that are complete. ``aprobe`` is cancelled instead.

        Args:
            texts: Texts, or a column of a data frame, each as ``what`` in ``trace``. Equal texts are in the same fold.
            labels: The class of each text.
            layer: Index or indices of the layers whose outputs are used; ``all`` uses all layers.
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
                f"there are {len(values)} texts and {len(classes)} labels; pass one label for each text", param="labels"
            )
        keys = [json.dumps(each.text, sort_keys=True, default=str) for each in values]
        run = ProbeRun(keys, classes, folds=folds)
        residuals = await on_loop(self._portal, Residuals.of(self._backend, layer, position))
        activations = LayerActivations(len(values), residuals.layers, residuals.width)
        began = time.monotonic()
        with counter("probe") as bar:
            try:
                for done, at in enumerate(run.order, 1):
                    activations.put(at, await on_loop(self._portal, residuals.read(values[at], f"texts[{at}]")))
                    bar.show(f"{done / (time.monotonic() - began):.1f} texts/s", done, len(values))
            except KeyboardInterrupt:
                if (part := run.of(activations.texts)) is None:
                    raise
                run = part
        accuracies: dict[int, list[float]] = {}
        with counter("probe") as bar:
            try:
                for trained in activations.layers:
                    accuracies[trained] = await in_thread(partial(run.accuracies, activations.of(trained)))
                    bar.show(f"layer {trained}", len(accuracies), len(activations.layers))
            except KeyboardInterrupt:
                if not accuracies:
                    raise
        return Probe(accuracies, run, activations)

    probe, aprobe = both(_probe)


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
            layers: One index, several indices, or ``all``.

        Raises:
            NotLoadedError: no chat model is loaded.
            InvalidRequestError: the position is invalid, or the model does not have a layer.
        """
        at = position if isinstance(position, str) and position in ("last", "mean") else integer(position)
        if at is None:
            raise InvalidRequestError(
                f"position is {position!r:.40}; pass 'last', 'mean', or the index of a token", param="position"
            )
        hooks = HookTable(await backend.trace(trace_body({"kind": "hooks"})))
        shapes = {int(match[1]): hooks[name] for name in hooks if (match := RESIDUAL.fullmatch(name))}
        indices = list(shapes)
        if not (isinstance(layers, str) and layers == "all"):
            is_list = integer(layers) is None and isinstance(layers, Iterable) and not isinstance(layers, str)
            found: set[int] = set()
            for item in layers if is_list else [layers]:  # type: ignore[attr-defined]
                if (layer := integer(item)) is None or not 0 <= layer < len(shapes):
                    raise InvalidRequestError(
                        f"layer is {item!r:.40}; pass an index from 0 to {len(shapes) - 1}, because {hooks.model} has "
                        f"{len(shapes)} layers",
                        param="layer",
                    )
                found.add(layer)
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
    """Return the items of a list, an array, or a column of a table.

    Raises:
        InvalidRequestError: the argument is none of these.
    """
    for method in ("to_pylist", "tolist", "to_list"):
        if callable(convert := getattr(given, method, None)):
            given = convert()
            break
    if isinstance(given, str | bytes | Mapping | Set) or hasattr(given, "columns") or not isinstance(given, Iterable):
        raise InvalidRequestError(
            f"{name} is a {type(given).__name__}; pass a list, or a column of a data frame", param=name
        )
    return list(given)


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
