"""Add the vectors of steered requests to layer outputs, in the rows of these requests. Runs on the engine thread.

Layers are hooked only while a pass with a steered row is built. A layer adds one array, in which the rows of other
requests are zero, so their values are bitwise identical to those without steering.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

import mlx.core as mx
import numpy as np
from mlx_lm.generate import BatchGenerator, GenerationBatch, PromptProcessingBatch
from numpy.typing import NDArray

from lmx_lab.engine.mlx.capture.install import HookFunction, HookPoint, install
from lmx_lab.engine.mlx.capture.points import RESID_POST, HookPoints
from lmx_lab.engine.mlx.weights import ChatWeights
from lmx_lab.engine.validation import check_steering
from lmx_lab.errors import InvalidRequestError
from lmx_lab.values.steering import SteeringVector, read_components

UNSTEERED: AbstractContextManager[None] = nullcontext()
MAX_LENGTH = 1e18
"""Maximum length of the sum of the vectors for a layer. The norms of a model compute its square in float32."""


@dataclass(frozen=True, eq=False)
class RequestSteering:
    """The vectors of one request."""

    vectors: Mapping[int, NDArray[np.float32]]
    """Sum of the request's vectors for each layer, each vector multiplied by its scale."""
    key: str
    """Equal for requests with the same vectors, whose key-value caches are interchangeable."""

    @classmethod
    def of(cls, steer: Sequence[SteeringVector], points: HookPoints) -> RequestSteering | None:
        """Return the sums of a request's vectors; None if all sums are zero.

        Raises:
            InvalidRequestError: a vector does not fit the model, or a sum is too long.
        """
        layers = len(points.parts.blocks)
        (width,) = points.sizes[point_name(layers - 1)]
        check_steering(steer, points.model, layers=layers, width=width)
        sums: dict[int, NDArray[np.float64]] = {}
        for each in steer:
            scaled = each.scale * read_components(each.vector, each.scale).astype(np.float64)
            sums[each.layer] = sums[each.layer] + scaled if each.layer in sums else scaled
        for layer, total in sums.items():
            if (length := float(np.linalg.norm(total))) > MAX_LENGTH:
                raise InvalidRequestError(
                    f"the vectors for layer {layer} have a sum of length {length:g}, and the limit is {MAX_LENGTH:g}; "
                    "use smaller scales",
                    param="steer",
                )
        vectors = {layer: total.astype(np.float32) for layer, total in sums.items() if total.any()}
        if not vectors:
            return None
        digest = hashlib.sha256()
        for layer in sorted(vectors):
            digest.update(layer.to_bytes(4, "little") + vectors[layer].tobytes())
        return cls(vectors, digest.hexdigest())

    def check(self, logprobs: mx.array | Sequence[float | None]) -> None:
        """Check log-probabilities that were computed with the vectors.

        Raises:
            InvalidRequestError: they contain NaN, because values in the model exceed the range of their type.
        """
        values = logprobs if isinstance(logprobs, mx.array) else mx.array([each or 0.0 for each in logprobs])
        if mx.isnan(values).any().item():
            lengths = ", ".join(
                f"{np.linalg.norm(vector.astype(np.float64)):.3g} at layer {layer}"
                for layer, vector in sorted(self.vectors.items())
            )
            raise InvalidRequestError(
                f"the vectors of steer are too long (length {lengths}): the model computes values that are not finite; "
                "use a smaller scale",
                param="steer",
            )


class BatchSteering:
    """The steered requests of a batch, and the hooks of their layers."""

    def __init__(self, model: ChatWeights) -> None:
        self._model = model
        self._requests: dict[int, RequestSteering] = {}
        """The steered requests by uid."""
        self._hooks: dict[tuple[int, ...], Mapping[HookPoint, HookFunction]] = {}
        """The hooks of the last few batches, by the uids of their rows."""

    def use_in(self, generator: BatchGenerator, *, answers: SteerableAnswers | None) -> None:
        """Replace the batches of a generator by batches with steerable rows.

        Args:
            answers: The batch of answers; None creates one.
        """
        model = self._model.model
        prompts = SteerablePrompts.empty(model, generator.sampler, prefill_step_size=generator.prefill_step_size)
        answers = SteerableAnswers.empty(model, generator.sampler) if answers is None else answers
        prompts.steering = answers.steering = self
        generator._prompt_batch, generator._generation_batch = prompts, answers

    def add(self, uid: int, steering: RequestSteering | None) -> None:
        """Steer a request in all later passes. Does nothing if ``steering`` is None."""
        if steering is not None:
            self._requests[uid] = steering

    def remove(self, uid: int | None) -> None:
        """Remove a request."""
        if uid is not None and self._requests.pop(uid, None) is not None:
            self._hooks.clear()

    def rows(self, uids: Sequence[int]) -> AbstractContextManager[None]:
        """Hook the layers while the ``with`` block runs, for passes whose rows are these requests."""
        if not self._requests or self._requests.keys().isdisjoint(uids):
            return UNSTEERED
        key = tuple(uids)
        if key not in self._hooks:
            # The arrays of a few batches of answers and prompts are kept.
            if len(self._hooks) == 4:
                self._hooks.clear()
            self._hooks[key] = self._functions([self._requests.get(uid) for uid in uids])
        return install(self._hooks[key])

    def alone(self, steering: RequestSteering | None) -> AbstractContextManager[None]:
        """Hook the layers while the ``with`` block runs, for passes with a single row."""
        return UNSTEERED if steering is None else install(self._functions([steering]))

    def _functions(self, rows: Sequence[RequestSteering | None]) -> Mapping[HookPoint, HookFunction]:
        """Return the function of each steered layer."""
        functions: dict[HookPoint, HookFunction] = {}
        for layer in sorted({layer for row in rows if row is not None for layer in row.vectors}):
            vectors = [None if row is None else row.vectors.get(layer) for row in rows]
            added = np.zeros((len(rows), 1, max(len(each) for each in vectors if each is not None)), dtype=np.float32)
            for at, vector in enumerate(vectors):
                if vector is not None:
                    added[at, 0] = vector
            point = self._model.hook_points.point(point_name(layer))
            functions[point] = partial(_add, mx.array(added))
        return functions


def _add(added: mx.array, residual: mx.array) -> mx.array:
    return residual + added.astype(residual.dtype)


def point_name(layer: int) -> str:
    """Return the name of the hook point at which a vector is added."""
    return f"blocks.{layer}.{RESID_POST}"


class SteerablePrompts(PromptProcessingBatch):
    """mlx-lm's batch of prompts, with steered rows."""

    steering: BatchSteering

    def _copy(self) -> SteerablePrompts:
        copied: SteerablePrompts = super()._copy()  # type: ignore[no-untyped-call]
        copied.steering = self.steering
        return copied

    def prompt(self, tokens: list[list[int]]) -> None:
        with self.steering.rows(self.uids):
            super().prompt(tokens)

    def generate(self, tokens: list[list[int]]) -> GenerationBatch:
        with self.steering.rows(self.uids):
            return cast("GenerationBatch", super().generate(tokens))


class SteerableAnswers(GenerationBatch):
    """mlx-lm's batch of answers, with steered rows."""

    steering: BatchSteering

    def next(self) -> list[GenerationBatch.Response]:
        with self.steering.rows(self.uids):
            return self._advance()

    def _advance(self) -> list[GenerationBatch.Response]:
        """Compute the next token of each row. Called while the layers are hooked."""
        return super().next()
