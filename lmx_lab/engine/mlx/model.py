"""Hold the weights of a chat model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from lmx_lab.engine.mlx.capture.points import HookPoints, find_parts, find_points
from lmx_lab.engine.mlx.kv_cache import Traits
from lmx_lab.engine.text.vocabulary import Vocabulary
from lmx_lab.values.models import ModelEntry


@dataclass(frozen=True, kw_only=True, eq=False)
class ChatWeights:
    """A chat model in memory. Used on the engine thread only."""

    entry: ModelEntry
    model: Any
    traits: Traits
    """Those of the model, with the sizes of both models if there is a draft model."""
    draft: tuple[Any, int] | None
    """The draft model, and the number of tokens that both models know; None if there is none."""
    vocabulary: Vocabulary
    ends: frozenset[int]
    """The tokens that end any answer."""

    @cached_property
    def hook_points(self) -> HookPoints:
        """The places in the model at which values can be read and replaced. The first use computes a few tokens.

        Raises:
            InvalidRequestError: the values of its blocks have no names.
        """
        return find_points(find_parts(self.model, self.entry.id), self.entry.id)

    def arithmetic(self) -> list[str]:
        """Return the properties, in addition to the model's files, that the values in KV caches depend on."""
        parameters: Any = tree_flatten(self.model.parameters())
        weights = sorted(f"{name} {value.dtype} {value.shape}" for name, value in parameters)
        versions = [f"{package} {version(package)}" for package in ("lmx-lab", "mlx", "mlx-lm")]
        return [*versions, str(mx.default_device()), *weights]
