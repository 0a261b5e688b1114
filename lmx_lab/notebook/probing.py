"""Define ``steering_vector`` and ``probe``, the methods of a lab that use the activations of many texts."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, Protocol

from lmx_lab.backend import Backend
from lmx_lab.errors import InvalidRequestError
from lmx_lab.instrument.probe import FOLDS, LayerActivations, Probe, ProbeRun
from lmx_lab.instrument.steering import Steer, mean_difference
from lmx_lab.instrument.traced_text import activation_fields, traced
from lmx_lab.notebook.verbs import LoopPortal, awaited, blocking, in_thread, on_loop
from lmx_lab.progress import counter
from lmx_lab.values.encoding import Vectors

Position = int | Literal["last", "mean"]
RESIDUAL = re.compile(r"blocks\.(\d+)\.hook_resid_post")


class ProbeOwner(Protocol):
    """An object with a backend and its loop."""

    @property
    def _portal(self) -> LoopPortal: ...
    @property
    def _backend(self) -> Backend: ...


class ProbeVerbs:
    """The methods of ``Lab`` that use the activations of many texts."""

    async def _steering_vector(
        self: ProbeOwner,
        positive: Iterable[str],
        negative: Iterable[str],
        layer: int,
        *,
        position: Position = "last",
        normalize: bool = True,
    ) -> Steer:
        """Return the difference between the mean activations of two groups of texts, for ``chat(..., steer=[...])``.

        Args:
            positive: Texts with a property.
            negative: Texts without the property.
            layer: Index of the layer whose output is used, starting at 0.
            position: The token whose activations are used: ``last``, an index, or ``mean`` for the mean of all tokens.
            normalize: Whether to scale the vector to length 1.

        Raises:
            NotLoadedError: no chat model is loaded.
            InvalidRequestError: an argument is invalid, the model does not have the layer, or both means are equal.
        """
        groups = [_texts(positive, "positive"), _texts(negative, "negative")]
        hooks = _hooks([layer])
        found: list[list[Vectors]] = [[], []]
        with counter("steering vector") as bar:
            for rows, texts in zip(found, groups, strict=True):
                for text in texts:
                    rows.append((await on_loop(_residuals(self._backend, text, hooks, position)))[layer])
                    bar.show(f"layer {layer}", sum(map(len, found)), sum(map(len, groups)))
        model = self._backend.state().model or ""
        weights = await on_loop(self._backend.weights_of(model))
        made = mean_difference(layer, *found, normalize=normalize)
        return replace(made, model=model, weights=weights, source={**made.source, "position": position})

    steering_vector = blocking(_steering_vector)
    asteering_vector = awaited(_steering_vector)

    async def _probe(
        self: ProbeOwner,
        texts: Iterable[str],
        labels: Iterable[Any],
        *,
        layer: int | Sequence[int] | Literal["all"] = "all",
        position: Position = "last",
        folds: int = FOLDS,
    ) -> Probe:
        """Train a linear classifier on the activations of each layer, and return the accuracy of each.

        Args:
            texts: Texts, or a column of a data frame.
            labels: The class of each text.
            layer: Index or indices of the layers whose outputs are used; ``all`` uses all layers.
            position: The token whose activations are used: ``last``, an index, or ``mean`` for the mean of all tokens.
            folds: Number of cross-validation folds.

        Raises:
            NotLoadedError: no chat model is loaded.
            InvalidRequestError: an argument is invalid, or a class has too few texts.
            ImportError: scikit-learn is not installed.
        """
        values, classes = _texts(texts, "texts"), list(labels)
        if len(values) != len(classes):
            raise InvalidRequestError(
                f"there are {len(values)} texts and {len(classes)} labels; pass one label for each text", param="labels"
            )
        run = ProbeRun(classes, folds=folds)
        hooks = _hooks(["*"] if layer == "all" else [layer] if isinstance(layer, int) else layer)
        began, activations = time.monotonic(), None
        with counter("probe") as bar:
            for at, text in enumerate(values):
                found = await on_loop(_residuals(self._backend, text, hooks, position))
                if activations is None:
                    activations = LayerActivations(len(values), list(found), len(next(iter(found.values()))))
                activations.put(at, list(found.values()))
                bar.show(f"{(at + 1) / (time.monotonic() - began):.1f} texts/s", at + 1, len(values))
        assert activations is not None
        accuracies = {}
        with counter("probe") as bar:
            for at, each in enumerate(activations.layers):
                accuracies[each] = await in_thread(partial(run.accuracies, activations.of(each)))
                bar.show(f"layer {each}", at + 1, len(activations.layers))
        return Probe(accuracies, run, activations)

    probe = blocking(_probe)
    aprobe = awaited(_probe)


def _texts(given: object, name: str) -> list[str]:
    """Return a group of texts as a list.

    Raises:
        InvalidRequestError: the argument is not a list of texts, or is empty.
    """
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise InvalidRequestError(f"{name} is {given!r:.80}; pass a list of texts", param=name)
    texts = list(given)
    for at, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise InvalidRequestError(f"{name}[{at}] is {text!r:.80}; pass only non-empty texts", param=name)
    if not texts:
        raise InvalidRequestError(f"{name} is empty; pass at least one text", param=name)
    return texts


def _hooks(layers: Iterable[object]) -> list[str]:
    """Return the names of the outputs of layers; ``*`` stands for all layers.

    Raises:
        InvalidRequestError: a layer is not an index, or the list is empty.
    """
    given = list(layers)
    for layer in given:
        if layer != "*" and (isinstance(layer, bool) or not isinstance(layer, int) or layer < 0):
            raise InvalidRequestError(f'layer contains {layer!r:.40}; pass indices, 0 or more, or "all"', param="layer")
    if not given:
        raise InvalidRequestError("layer is empty; pass at least one index", param="layer")
    return [f"blocks.{layer}.hook_resid_post" for layer in given]


async def _residuals(backend: Backend, text: str, hooks: list[str], position: object) -> dict[int, Vectors]:
    """Return the output of layers at one token of a text, or its mean over all tokens, by layer.

    Raises:
        InvalidRequestError: the position is invalid, or the model does not have a layer.
    """
    if position not in ("last", "mean") and (isinstance(position, bool) or not isinstance(position, int)):
        raise InvalidRequestError(
            f"position is {position!r:.40}; pass 'last', 'mean', or the index of a token", param="position"
        )
    at = -1 if position == "last" else position
    positions = at if isinstance(at, int) else None
    trace = await traced(text).run(backend, activation_fields(hooks, positions))
    found = {RESIDUAL.fullmatch(name): array for name, array in trace.arrays.items()}
    return {int(match[1]): array.mean(axis=0) for match, array in found.items() if match is not None}
