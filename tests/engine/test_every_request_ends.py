"""For any sequence of actions, every accepted request ends exactly once, and the engine continues."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmx_lab.engine import Sampling
from lmx_lab.errors import LabError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import fail_next_step, finish, load_entry, manager_with, numbers, request, run, until_idle

pytestmark = pytest.mark.long

ACTIONS = st.sampled_from(["submit", "submit", "submit", "many", "score", "step", "cancel", "drop", "fail", "load"])


async def perform_actions(manager, models, actions, random):
    """Perform the actions on the engine; return the streams that were not cancelled or dropped."""
    streams = []
    for at, action in enumerate(actions):
        submitted = replace(
            request(prompt=numbers(random.choice([3, 40, 400]), start=random.choice([100, 9000]))),
            max_tokens=random.choice([1, 5, 200]),
            sampling=Sampling(temperature=random.choice([0, 1]), seed=random.choice([None, at])),
            score_prompt=action == "score",
        )
        try:
            if action in ("submit", "score"):
                streams.append(await manager.submit(submitted))
            elif action == "many":
                streams += await manager.generate(submitted, choices=3)
            elif action == "load":
                await load_entry(manager, random.choice(models), finish_queued=random.choice([True, False]))
        except LabError:
            continue
        if action == "step":
            await asyncio.sleep(random.choice([0, 0.005, 0.02]))
        elif action == "fail":
            await fail_next_step(manager, ValueError("injected"))
        elif action in ("cancel", "drop") and streams:
            abandoned = streams.pop(random.randrange(len(streams)))
            if action == "cancel":
                await abandoned.aclose()
            del abandoned
    return streams


@settings(deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(actions=st.lists(ACTIONS, max_size=20), random=st.randoms(use_true_random=False))
def test_every_request_ends_exactly_once(tiny, tiny_home, ends, actions, random):
    async def scenario():
        ends.clear()
        models = [tiny, Catalog(Settings(home=tiny_home)).resolve("tiny-two")]
        async with manager_with(tiny, Settings(slots=2, queue_limit=3, drain_s=0.2)) as manager:
            streams = await perform_actions(manager, models, actions, random)
            for stream in streams:
                try:
                    await finish(stream)
                except LabError:
                    assert stream.report is None
                assert ends[id(stream.steps)] == 1
            await until_idle(manager)
            try:
                await run(manager)
            except LabError:
                # A failure that was injected last affects this request.
                await run(manager)

    asyncio.run(scenario())
