"""Turns from submission to end, on a real store and with a scripted upstream."""

import asyncio

import pytest

from lmx_lab import errors
from lmx_lab.daemon.tools import ToolResult
from lmx_lab.wire.mcp import ToolRecord
from lmx_lab.wire.sessions import CancelTurns, SessionMessage, SubmitTurn, TurnOverrides
from tests.support.daemons import ASKS, FREE, ScriptedToolbox, check_log, daemon
from tests.support.labs import serving
from tests.support.model_server import (
    DROP,
    STALL,
    Gate,
    Refusal,
    calls,
    chunk,
    ending,
    event,
    refuses,
    says,
    thought,
    token,
)
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio


# --- answers


async def test_a_turn_is_answered_and_its_session_is_idle_afterwards(here, upstream):
    session = await here.session(says("Hel", "lo", thinks=["Hm"]), system_prompt="Be brief.")
    record = await here.run(session, "hi")
    assert (record.status, record.stop_reason, record.text, record.error) == ("done", "end", "Hello", None)
    assert (record.stats.tokens, record.stats.prompt_tokens, record.stats.steps) == (3, 5, 1)
    assert record.stats.ttft_ms is not None
    assert await here.kinds(session) == ["turn.queued", "turn.started", "message.done", "turn.done"]
    shown = await here.snapshot(session)
    assert (shown.status, shown.active_turn_id, shown.partial_text) == ("idle", None, "")
    assert [(message.role, message.content) for message in shown.messages] == [("user", "hi"), ("assistant", "Hello")]
    assert shown.messages[1].reasoning_content == "Hm"
    assert upstream.bodies[0]["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
    ]
    assert here.turns.counts() == (0, 0)


async def test_the_next_turn_sends_the_history_without_thoughts(here, upstream):
    session = await here.session(says("one", thinks=["Hm"]), says("two"))
    await here.run(session, "1")
    await here.run(session, "2")
    assert upstream.bodies[1]["messages"] == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": "2"},
    ]


async def test_overrides_apply_to_one_turn_and_extra_fields_are_sent_unchanged(here, upstream):
    session = await here.session(says("a"), model="m")
    overrides = TurnOverrides(
        model="n", temperature=0, max_tokens=7, extra={"min_p": 0.1, "messages": [], "stream": False}
    )
    await here.run(session, overrides=overrides)
    await here.run(session)
    first, second = upstream.bodies
    assert {name: first[name] for name in ("model", "temperature", "max_tokens", "min_p", "stream")} == {
        **{"model": "n", "temperature": 0, "max_tokens": 7, "min_p": 0.1, "stream": True}
    }
    assert len(first["messages"]) == 1
    assert (second["model"], "temperature" in second, "min_p" in second) == ("m", False, False)


@pytest.mark.parametrize(
    ("script", "reason", "text"),
    [
        (says("Hel", finish="length"), "length", "Hel"),
        (says(), "end", ""),
        (says(finish="content_filter"), "end", ""),
        ([token(""), b"data: [DONE]\n\n"], "end", ""),
    ],
)
async def test_the_stop_reason_is_that_of_the_answer_and_an_empty_one_is_no_message(here, script, reason, text):
    session, turn = await here.begin(script)
    record = await here.ended(session, turn)
    assert (record.status, record.stop_reason, record.text) == ("done", reason, text)
    roles = [message.role for message in (await here.snapshot(session)).messages]
    assert roles == (["user", "assistant"] if text else ["user"])


async def test_tokens_within_one_batch_are_one_event(here):
    gate = Gate()
    session, turn = await here.begin([token("a") + token("b"), gate, token("c"), *ending()])
    await gate.reached()
    await here.seen("turn.token")
    gate.open()
    await here.ended(session, turn)
    texts = [item["data"]["text"] for item in await here.seen("turn.token", 2)]
    assert "".join(texts) == "abc"
    assert texts[-1] == "c"


async def test_the_state_of_the_model_request_is_reported_as_progress(here):
    gate = Gate()
    session, turn = await here.begin([b": prompt 1/2 tokens\n\n", gate, *says("a")])
    await here.seen("turn.progress", 2)
    gate.open()
    await here.ended(session, turn)
    notes = [item["data"] for item in await here.events(session) if item["event"] == "turn.progress"]
    assert notes == [{"step": 1, "note": ""}, {"step": 1, "note": "prompt 1/2 tokens"}]


async def test_the_state_of_the_model_server_is_reported_only_when_it_changes(here, upstream):
    session = await here.session(says("a"))
    for _ in range(3):
        await here.run(session)
    (status,) = [item for item in await here.events() if item["event"] == "model.status"]
    assert status["data"] == {"url": upstream.url, "reachable": True, "model": "scripted", "error": None}
    assert (status["session_id"], status["turn_id"]) == (None, None)


async def test_the_length_of_a_message_is_limited(here, upstream):
    record = await here.answer([token("a" * 600_000), token("b" * 600_000), STALL])
    assert (record.stop_reason, record.text) == ("length", "a" * 600_000 + "b" * 400_000)
    await upstream.until(lambda: upstream.left == 1)


# --- failures


@pytest.mark.parametrize(
    ("script", "code", "text"),
    [
        (refuses(503, "no-model-loaded"), "no-model-loaded", ""),
        (refuses(400, "context_length_exceeded"), "context_length_exceeded", ""),
        (refuses(429, "queue-full"), "queue-full", ""),
        (Refusal(502, b"<html>", "text/html"), "upstream-unreachable", ""),
        ([token("Hel"), token("lo"), DROP], "connection-lost", "Hello"),
        ([token("Hel"), event({"error": {"code": "oom-unloaded", "message": "m"}})], "oom-unloaded", "Hel"),
        ([thought("Hm"), DROP], "connection-lost", ""),
    ],
)
async def test_an_error_of_the_model_ends_the_turn_with_its_code_and_the_partial_text(here, script, code, text):
    record = await here.answer(script)
    assert (record.status, record.stop_reason, record.text) == ("error", None, text)
    assert record.error.code == code
    (failed,) = await here.seen("turn.error")
    assert (failed["data"]["error"]["code"], failed["data"]["text"]) == (code, text)


async def test_an_unreachable_model_server_is_an_error_and_an_event(tmp_path):
    async with daemon(tmp_path, "http://127.0.0.1:9") as here:
        record = await here.answer()
        assert (record.error.code, record.error.retryable) == ("upstream-unreachable", True)
        (status,) = await here.seen("model.status")
        assert (status["data"]["reachable"], status["data"]["model"]) == (False, None)
        check_log(await here.events())


async def test_after_an_error_the_history_has_the_question_and_the_partial_answer(here, upstream):
    session = await here.session([token("Hel"), DROP], refuses(503, "no-model-loaded"), says("ok"))
    for content in ("1", "2", "3"):
        await here.run(session, content)
    assert upstream.bodies[2]["messages"] == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "Hel"},
        {"role": "user", "content": "2\n\n3"},
    ]


@pytest.mark.slow
async def test_a_turn_ends_at_its_time_limit(tmp_path, upstream):
    async with daemon(tmp_path, upstream, turn_timeout_s=3.0) as here:
        record = await here.answer([token("Hel"), STALL])
        assert (record.error.code, record.text) == ("turn-timeout", "Hel")
        await upstream.until(lambda: upstream.left == 1)
        check_log(await here.events())


async def test_a_turn_can_override_its_time_limit(here):
    record = await here.answer([STALL], overrides=TurnOverrides(timeout_s=0.05))
    assert record.error.code == "turn-timeout"


# --- tools


async def test_a_tool_runs_after_it_is_in_the_log_and_its_result_is_sent_to_the_model(here, upstream):
    session = await here.session(calls((FREE, {"a": 1}), text=["Let me see."]), says("3"))
    logged = []

    async def work(name, arguments, note):
        logged.extend(await here.kinds(session))
        note("half way")
        return "three"

    here.toolbox.work = work
    record = await here.run(session)
    assert (record.text, here.toolbox.called) == ("3", [(FREE, {"a": 1})])
    assert logged[-1] == "tool.start"
    assert await here.kinds(session, record.turn_id) == [
        *("turn.queued", "turn.started", "message.done", "tool.start", "tool.output", "tool.end"),
        *("message.done", "turn.done"),
    ]
    (end,) = await here.seen("tool.end")
    assert (end["data"]["status"], end["data"]["text"], end["data"]["truncated"]) == ("ok", "three", False)
    assert upstream.bodies[0]["tools"][0]["function"]["name"] == FREE
    call = {"id": "call_0", "type": "function", "function": {"name": FREE, "arguments": '{"a": 1}'}}
    assert upstream.bodies[1]["messages"][1:] == [
        {"role": "assistant", "content": "Let me see.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "content": "three"},
    ]
    assert (record.stats.steps, record.stats.tool_calls, record.stats.prompt_tokens) == (2, 1, 10)


async def test_the_reasoning_before_a_call_is_sent_until_the_end_of_the_turn(here, upstream):
    session = await here.session([thought("Hm"), *calls((FREE, {}))], says("3"), says("4"))
    await here.run(session, "count")
    await here.run(session, "again")
    sent = [[message.get("reasoning_content") for message in body["messages"]] for body in upstream.bodies]
    assert sent == [[None], [None, "Hm", None], [None] * 5]


async def test_results_are_sent_in_the_order_of_the_calls(here, upstream):
    second = asyncio.Event()

    async def work(name, arguments, note):
        if arguments["n"] == 1:
            await second.wait()
        second.set()
        return f"result {arguments['n']}"

    here.toolbox.work = work
    await here.answer(calls((FREE, {"n": 1}), (FREE, {"n": 2})), says("ok"))
    told = [(message["tool_call_id"], message["content"]) for message in upstream.bodies[1]["messages"][2:]]
    assert told == [("call_0", "result 1"), ("call_1", "result 2")]


async def test_a_turn_runs_a_limited_number_of_tools_at_once(tmp_path, upstream):
    toolbox = ScriptedToolbox()

    async def work(name, arguments, note):
        await asyncio.sleep(0)
        return "done"

    toolbox.work = work
    async with daemon(tmp_path, upstream, toolbox, parallel_tools=2) as here:
        await here.answer(calls(*[(FREE, {"n": n}) for n in range(6)]), says("ok"))
        assert (len(toolbox.called), toolbox.most_running) == (6, 2)
        check_log(await here.events())


async def test_ids_of_calls_are_unique_in_a_session(here):
    twice = calls((FREE, {}), (FREE, {}), ids=["same", "same"])
    bare = [chunk({"tool_calls": [{"function": {"name": FREE, "arguments": "{}"}}] * 2}), *ending("tool_calls")]
    session = await here.session(twice, bare, says("ok"), calls((FREE, {}), ids=["same"]), says("ok"))
    await here.run(session)
    await here.run(session)
    ids = [item["data"]["call_id"] for item in await here.seen("tool.end", 5)]
    assert len(set(ids)) == 5
    assert "same" in ids


@pytest.mark.parametrize(
    ("name", "arguments"), [("nope", "{}"), (FREE, "{"), (FREE, "[]"), ("", "{}"), ("x" * 999, "")]
)
async def test_an_invalid_call_is_reported_to_the_model_which_continues(here, upstream, name, arguments):
    record = await here.answer(calls((name, arguments)), says("sorry"))
    assert (record.text, here.toolbox.called) == ("sorry", [])
    (end,) = await here.seen("tool.end")
    assert end["data"]["status"] == "error"
    assert upstream.bodies[1]["messages"][-1]["content"] == end["data"]["text"]
    sent = upstream.bodies[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    assert sent in ("{}", arguments)


async def test_a_turn_ends_after_too_many_unknown_tools(here, upstream):
    record = await here.answer(calls(("nope", {})))
    assert (record.error.code, len(upstream.bodies)) == ("turn-failed", 4)


async def test_the_number_of_steps_is_limited(here, upstream):
    record = await here.answer(calls((FREE, {}), text=["Again."]), overrides=TurnOverrides(max_steps=3))
    assert (record.stop_reason, record.text, len(upstream.bodies)) == ("max_steps", "Again.", 3)
    assert len(here.toolbox.called) == 3


async def test_long_results_are_cut_off_at_a_character_with_a_note(tmp_path, upstream):
    toolbox = ScriptedToolbox()
    toolbox.work = lambda name, arguments, note: "é" * 100
    async with daemon(tmp_path, upstream, toolbox, tool_result_bytes=11) as here:
        await here.answer(calls((FREE, {})), says("ok"))
        (end,) = await here.seen("tool.end")
    assert end["data"]["truncated"] is True
    assert end["data"]["text"].startswith("ééééé\n[cut off after 11 of 200 bytes")
    assert upstream.bodies[1]["messages"][-1]["content"] == end["data"]["text"]


async def test_lone_surrogates_of_a_tool_are_replaced(here):
    def work(name, arguments, note):
        note("\ud83d")
        return "a\ud83d"

    here.toolbox.work = work
    session, turn = await here.begin(calls((FREE, '{"x": "\\ud83d"}')), says("ok"))
    assert (await here.ended(session, turn)).text == "ok"
    (end,) = await here.seen("tool.end")
    assert end["data"]["text"] == "a?"
    await here.snapshot(session)


def failing(*_):
    return 1 / 0


@pytest.mark.parametrize(
    ("work", "status", "text"),
    [
        (failing, "error", "ZeroDivisionError"),
        (lambda *_: ToolResult(status="error", text="hm"), "error", "hm"),
        (lambda *_: ToolResult(status="timeout", text="hm"), "timeout", "hm"),
    ],
)
async def test_the_status_of_a_tool_is_that_of_its_result_or_of_its_exception(here, work, status, text):
    here.toolbox.work = work
    assert (await here.answer(calls((FREE, {})), says("ok"))).text == "ok"
    (end,) = await here.seen("tool.end")
    assert (end["data"]["status"], text in end["data"]["text"]) == (status, True)


@pytest.mark.parametrize(
    ("session_tools", "turn_tools", "names"),
    [
        (None, None, [FREE, ASKS, "time__now"]),
        ([], None, []),
        ([FREE], None, [FREE]),
        (["time__*"], None, ["time__now"]),
        ([FREE], ["time__*", ASKS], [ASKS, "time__now"]),
        (None, [], []),
    ],
)
async def test_a_turn_has_the_tools_of_its_session_or_its_overrides(here, upstream, session_tools, turn_tools, names):
    time = {"description": "", "parameters": {"type": "object"}, "read_only": False, "permission": "ask"}
    here.toolbox.listed.append(ToolRecord(name="time__now", **time))
    session = await here.session(says("ok"), tools=session_tools)
    await here.run(session, overrides=None if turn_tools is None else TurnOverrides(tools=turn_tools))
    assert [tool["function"]["name"] for tool in upstream.bodies[0].get("tools", [])] == names


async def test_a_tool_outside_of_the_selection_cannot_be_called(here, upstream):
    upstream.then(calls((FREE, {})), says("ok"))
    await here.run(await here.session(tools=[ASKS]))
    assert here.toolbox.called == []


async def test_a_tool_choice_applies_to_the_first_step(here, upstream):
    session = await here.session(calls((FREE, {})), says("ok"))
    await here.run(session, overrides=TurnOverrides(tool_choice="required"))
    await here.run(session, overrides=TurnOverrides(tool_choice=FREE))
    chosen = [body.get("tool_choice") for body in upstream.bodies]
    assert chosen == ["required", None, {"type": "function", "function": {"name": FREE}}]


async def test_a_tool_choice_that_is_not_available_is_an_error(here):
    session = await here.session(says("ok"), tools=[])
    for choice in ("required", FREE):
        record = await here.run(session, overrides=TurnOverrides(tool_choice=choice))
        assert (record.error.code, record.error.param) == ("invalid-request", "overrides.tool_choice")
    assert (await here.run(session, overrides=TurnOverrides(tool_choice="none"))).text == "ok"


@pytest.mark.parametrize("given", [None, []], ids=["other tools", "no tools"])
async def test_the_error_of_a_tool_choice_explains_the_absence(here, upstream, given):
    here.toolbox.absences["lost__echo"] = "the MCP server 'lost' has failed"
    record = await here.run(await here.session(tools=given), overrides=TurnOverrides(tool_choice="lost__echo"))
    assert "'lost__echo', but the MCP server 'lost' has failed; th" in record.error.message
    assert upstream.bodies == []


# --- submitting


async def test_a_repeated_submit_runs_the_turn_once(here, upstream):
    session = await here.session(says("ok"))
    body = SubmitTurn(turn_id="mine", content="hi")
    first, new = await here.turns.submit(session, body)
    assert (new, first.status) == (True, "queued")
    await here.ended(session, "mine")
    again, new = await here.turns.submit(session, body)
    assert (new, again.turn_id, again.status, again.cursor <= first.cursor) == (False, "mine", "done", True)
    after = [item["event"] for item in await here.events(session) if item["seq"] > again.cursor]
    assert after[0] == "turn.queued"
    with pytest.raises(errors.IdempotencyConflictError):
        await here.turns.submit(session, SubmitTurn(turn_id="mine", content="ho"))
    assert len(upstream.bodies) == 1
    other = await here.session()
    assert (await here.turns.submit(other, body))[1] is True
    await here.ended(other, "mine")


async def test_the_turns_of_a_session_run_one_at_a_time_in_order(here):
    gate = Gate()
    session = await here.session([gate, *says("1")], says("2"), says("3"), says("4"))
    turns = [await here.submit(session, str(n)) for n in (1, 2, 3)]
    statuses = [(await here.turns.read(session, turn)).status for turn in turns]
    assert statuses == ["running", "queued", "queued"], "with a free slot, a turn has started when it is accepted"
    with pytest.raises(errors.TurnInProgressError, match=turns[0]):
        await here.submit(session, when_busy="reject")
    await gate.reached()
    assert here.turns.counts() == (1, 2)
    assert (await here.snapshot(session)).queued_turn_ids == turns[1:]
    gate.open()
    records = [await here.ended(session, turn) for turn in turns]
    assert [record.text for record in records] == ["1", "2", "3"]
    assert (await here.run(session, when_busy="reject")).text == "4"
    ahead = [item["data"]["ahead"] for item in await here.seen("turn.queued", 4)]
    assert ahead == [0, 1, 2, 0]


async def test_an_interrupting_turn_cancels_the_active_one_and_runs_next(here):
    session = await here.session([token("Hel"), STALL], says("urgent"), says("later"))
    first, second = await here.submit(session), await here.submit(session)
    await here.seen("turn.token")
    third = await here.submit(session, when_busy="interrupt")
    records = [await here.ended(session, turn) for turn in (first, third, second)]
    assert [(record.stop_reason, record.text) for record in records] == [
        ("cancelled", "Hel"),
        ("end", "urgent"),
        ("end", "later"),
    ]


async def test_full_queues_refuse_with_a_time_to_retry(tmp_path, upstream):
    upstream.then([STALL])
    async with daemon(tmp_path, upstream, queued_turns_per_session=2, queued_turns=3) as here:
        session, other = await here.session(), await here.session()
        running = await here.submit(session)
        await here.seen("turn.started")
        for _ in range(2):
            await here.submit(session)
        with pytest.raises(errors.QueueFullError, match="this session") as caught:
            await here.submit(session)
        assert caught.value.retry_after_s
        await here.submit(other)
        await here.seen("turn.started", 2)
        await here.submit(other)
        with pytest.raises(errors.QueueFullError, match="3 turns are queued"):
            await here.submit(other)
        assert here.turns.counts() == (2, 3)
        await here.turns.cancel(session, CancelTurns(queued=True))
        assert here.turns.counts()[1] == 1
        await here.ended(session, running)


async def test_unknown_sessions_and_turns_are_errors(here):
    with pytest.raises(errors.SessionNotFoundError):
        await here.submit("nope")
    with pytest.raises(errors.SessionNotFoundError):
        await here.turns.read("nope", "nope")
    with pytest.raises(errors.SessionNotFoundError):
        await here.turns.cancel("nope", CancelTurns())
    session = await here.session()
    with pytest.raises(errors.TurnNotFoundError):
        await here.turns.read(session, "nope", wait_s=5)
    with pytest.raises(errors.TurnNotFoundError):
        await here.turns.cancel(session, CancelTurns(turn_id="nope"))
    assert here.turns.is_idle


async def test_sessions_share_the_slots_fairly(tmp_path, upstream):
    gate = Gate()
    upstream.then([gate, *says("a")], says("a"))
    async with daemon(tmp_path, upstream, running_turns=1) as here:
        busy, other = await here.session(), await here.session()
        turns = [(busy, await here.submit(busy)) for _ in range(3)]
        await gate.reached()
        turns.append((other, await here.submit(other)))
        gate.open()
        for session, turn in turns:
            await here.ended(session, turn)
        started = [item["session_id"] for item in await here.seen("turn.started", 4)]
        assert started.index(other) == 1


async def test_reading_waits_for_the_end_up_to_the_requested_time(here):
    gate = Gate()
    session, turn = await here.begin([gate, *says("a")])
    assert (await here.turns.read(session, turn, wait_s=0.01)).ended_at is None
    waiting = [asyncio.create_task(here.ended(session, turn)) for _ in range(3)]
    assert (await here.turns.read(session, turn, wait_s=0.01)).status == "running"
    gate.open()
    assert {record.text for record in await asyncio.gather(*waiting)} == {"a"}
    await auntil(lambda: here.turns.is_idle)


async def test_the_history_that_a_session_was_created_with_is_sent(here, upstream):
    upstream.then(says("ok"))
    lost = {"call_id": "a", "name": FREE, "arguments": "broken"}
    told = [
        SessionMessage(role="user", content="1"),
        SessionMessage.model_validate({"role": "assistant", "tool_calls": [lost]}),
        SessionMessage(role="assistant", content=""),
        SessionMessage(role="assistant", content="2"),
    ]
    await here.run(await here.session(messages=tuple(told)), "3")
    call = {"id": "a", "type": "function", "function": {"name": FREE, "arguments": "{}"}}
    assert upstream.bodies[0]["messages"] == [
        {"role": "user", "content": "1"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "there is no result"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "3"},
    ]


# --- a real server


@pytest.fixture(scope="module")
def lab(tiny_home):
    with serving(tiny_home, "tiny") as lab:
        yield lab


async def test_a_labs_server_runs_turns_with_tools(tmp_path, lab):
    async with daemon(tmp_path, lab.url) as here:
        session = await here.session()
        overrides = TurnOverrides(tool_choice=FREE, temperature=0, max_tokens=60)
        record = await here.run(session, overrides=overrides)
        assert (record.status, record.stop_reason) == ("done", "length")
        assert here.toolbox.called == [(FREE, {})]
        assert record.stats.steps == 2
        assert 60 < record.stats.completion_tokens <= 120
        again = await here.run(session, overrides=TurnOverrides(max_tokens=8, temperature=0))
        assert again.stats.completion_tokens == 8
        (status,) = await here.seen("model.status")
        assert status["data"]["model"] == "tiny"
        unknown = await here.run(session, overrides=TurnOverrides(model="nope"))
        assert unknown.error.code == "model-not-found"
        check_log(await here.events())
