"""Whatever is done in whatever order, every accepted request ends exactly once, and the engine goes on."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmx_lab.engine import ModelManager, Sampling, TokenStream
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.values.models import ModelEntry
from lmx_lab.weights import Catalog
from tests.engine.conftest import finish, numbers, poison, request, run, until_idle

pytestmark = pytest.mark.long

ACTS = st.sampled_from(["submit", "submit", "submit", "many", "score", "step", "cancel", "drop", "fail", "load"])


async def live(manager: ModelManager, models: list[ModelEntry], acts: list[str], random: object) -> list[TokenStream]:
    """Do all this to the engine; returns the streams that were not left."""
    streams: list[TokenStream] = []
    for at, act in enumerate(acts):
        wanted = replace(
            request(prompt=numbers(random.choice([3, 40, 400]), start=random.choice([100, 9000]))),
            max_tokens=random.choice([1, 5, 200]),
            sampling=Sampling(temperature=random.choice([0, 1]), seed=random.choice([None, at])),
            score_prompt=act == "score",
        )
        try:
            if act in ("submit", "score"):
                streams.append(await manager.submit(wanted))
            elif act == "many":
                streams += await manager.submit_all(wanted, choices=3)
            elif act == "load":
                await manager.load_entry(random.choice(models), finish_queued=random.choice([True, False]))
        except LabError:
            continue
        if act == "step":
            await asyncio.sleep(random.choice([0, 0.005, 0.02]))
        elif act == "fail":
            await poison(manager, ValueError("injected"))
        elif act in ("cancel", "drop") and streams:
            left = streams.pop(random.randrange(len(streams)))
            if act == "cancel":
                await left.aclose()
            del left
    return streams


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(acts=st.lists(ACTS, max_size=20), random=st.randoms(use_true_random=False))
def test_every_request_ends_exactly_once(
    tiny: ModelEntry, tiny_home: object, ends: Counter[int], acts: list[str], random: object
) -> None:
    async def story() -> None:
        ends.clear()
        models = [tiny, Catalog(Settings(home=tiny_home)).resolve("tiny-two")]
        async with ModelManager(Settings(slots=2, queue_limit=3, drain_s=0.2)) as manager:
            await manager.load_entry(tiny)
            streams = await live(manager, models, acts, random)
            for stream in streams:
                try:
                    await finish(stream)
                except LabError:
                    assert stream.report is None
                assert ends[id(stream._mailbox)] == 1
            await until_idle(manager)
            try:
                await run(manager)
            except LabError:
                # A failure that was injected last had nobody to meet.
                await run(manager)

    asyncio.run(story())
