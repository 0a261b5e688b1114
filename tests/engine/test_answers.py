"""A generation ends exactly once, whatever its engine does."""

import asyncio

import pytest

from lmx_lab.engine import Caller, GenerationRequest, TokenPrompt
from lmx_lab.engine.answers import Answers, Generation
from lmx_lab.engine.scheduler import AdmissionControl, Turns
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.errors import EngineError, GenerationTimeoutError, NotLoadedError
from lmx_lab.values.outputs import GenerationReport
from lmx_lab.values.timeline import StepLog

pytestmark = pytest.mark.anyio
PROMPT = [1, 2, 3]


class Computed:
    """Generations whose tokens the test adds."""

    def __init__(self, slots=1):
        self.removed, self.fails = [], False
        self.admission = AdmissionControl("m", limit=10)
        turns = Turns(wait_s=0.0, turn_s=0.0)
        self.answers = Answers(self, slots=slots, turns=turns)

    def submit(self, *, client=None, timeout_s=60.0, now=100.0):
        request = GenerationRequest(prompt=TokenPrompt(tokens=tuple(PROMPT)), caller=Caller(client=client))
        generation = Generation(
            request=request,
            model="m",
            prompt=PROMPT,
            max_tokens=5,
            splitter=TextSplitter("".join, ()),
            mailbox=Mailbox(asyncio.get_running_loop(), StepLog(now)),
            permit=self.admission.admit(1)[0],
            arrived_at=now,
            timeout_s=timeout_s,
            row=None,
        )
        self.answers.add([generation])
        return generation

    async def end_of(self, generation):
        self.answers.deliver()
        await asyncio.sleep(0)
        return generation.mailbox.end

    judge = None

    def begin(self, generation):
        generation.computed_tokens = len(PROMPT)
        self.answers.scheduler.prefilled(generation)

    def can_pause(self, generation):
        return True

    def pause(self, generation): ...

    def resume(self, generation):
        self.answers.scheduler.prefilled(generation)

    def remove(self, generation):
        self.removed.append(generation)
        if self.fails:
            raise MemoryError("injected")

    def remaining_s(self, generation):
        return 0.0


async def test_only_the_first_end_counts():
    computed = Computed()
    generation = computed.submit()
    computed.answers.update(101.0)
    generation.add("a", 102.0)
    generation.complete("length")
    computed.answers.end(generation, generation.report(103.0))
    computed.answers.end(generation, EngineError("late"))
    computed.answers.cancel(generation)
    report = await computed.end_of(generation)
    assert isinstance(report, GenerationReport)
    assert (report.finish_reason, report.output_tokens, report.queue_s) == ("length", 1, 1.0)
    assert (computed.removed, computed.admission.active) == ([generation], 0)
    assert (computed.answers.totals.prompt_tokens, computed.answers.totals.output_tokens) == (3, 1)


async def test_a_generation_ends_even_if_its_engine_fails_to_remove_it():
    computed = Computed()
    computed.fails = True
    generation = computed.submit()
    computed.answers.update(101.0)
    error = NotLoadedError("unloaded")
    with pytest.raises(MemoryError):
        computed.answers.end(generation, error)
    assert await computed.end_of(generation) is error
    others = [computed.submit() for _ in range(2)]
    with pytest.raises(MemoryError):
        computed.answers.end_all(error)
    assert [await computed.end_of(other) for other in others] == [error, error]
    assert computed.admission.active == 0


async def test_the_tokens_of_a_paused_generation_are_still_counted():
    computed = Computed(slots=2)
    long = [computed.submit(client="a", timeout_s=1e12) for _ in range(2)]
    computed.answers.update(101.0)
    for generation in long:
        generation.add("a", 102.0)
    computed.submit(client="b", timeout_s=1e12)
    computed.answers.update(1e9)
    assert len(computed.answers.scheduler.queued) == 1
    counted = computed.answers.totals
    assert (counted.prompt_tokens, counted.output_tokens) == (9, 2)


async def test_running_and_queued_generations_end_at_their_deadlines():
    computed = Computed()
    running, queued = computed.submit(timeout_s=10.0), computed.submit(timeout_s=20.0)
    computed.answers.update(110.0)
    assert running in computed.answers.scheduler
    computed.answers.update(110.5)
    assert isinstance(await computed.end_of(running), GenerationTimeoutError)
    later = computed.submit(timeout_s=30.0)
    assert computed.answers.next_at(110.5) == 120.0
    computed.answers.update(120.5)
    assert isinstance(await computed.end_of(queued), GenerationTimeoutError)
    assert later in computed.answers.scheduler


async def test_a_complete_answer_does_not_expire():
    computed = Computed()
    complete, late = computed.submit(), computed.submit()
    computed.answers.update(101.0)
    complete.add("a", 102.0)
    complete.complete("stop")
    computed.answers.update(200.0)
    assert isinstance(await computed.end_of(late), GenerationTimeoutError)
    assert complete in computed.answers.scheduler
    assert computed.answers.next_at(200.0) is None


async def test_generations_for_a_closed_loop_are_cancelled():
    computed = Computed()
    generation = computed.submit()
    computed.answers.update(101.0)
    loop = generation.mailbox.loop = asyncio.new_event_loop()
    loop.close()
    computed.answers.post(generation, generation.add("a", 102.0))
    computed.answers.deliver()
    assert (computed.removed, generation.mailbox.end) == ([generation], None)
