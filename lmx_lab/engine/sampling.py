"""Samplers, one object per distinct parameter set, for the engine thread only."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable

import mlx.core as mx
from mlx_lm.sample_utils import make_sampler

from lmx_lab.engine.requests import Sampling

Sampler = Callable[[mx.array], mx.array]
KEPT_SAMPLERS = 256


class Samplers:
    """Interned: ``BatchGenerator`` samples all rows in one call only when they share the sampler object."""

    def __init__(self) -> None:
        # MLX's random state is per thread and starts equal in every new one.
        mx.random.seed(int.from_bytes(os.urandom(8), "little"))
        self._made: OrderedDict[Sampling, Sampler] = OrderedDict()

    def get(self, sampling: Sampling) -> Sampler:
        sampler = self._made.pop(sampling, None) or make_sampler(temp=sampling.temperature, top_p=sampling.top_p)
        self._made[sampling] = sampler
        if len(self._made) > KEPT_SAMPLERS:
            self._made.popitem(last=False)
        return sampler
