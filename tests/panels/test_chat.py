"""The chat panel without a browser: answers, how they end, what is kept of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import lmx_lab
from lmx_lab.backend import ChatPiece, ChatStats
from lmx_lab.errors import ContextLengthError, NotLoadedError
from lmx_lab.panels.chat import MOST_CHARACTERS, MOST_TURNS, ChatPanel, Turn, end_in_words, messages, within_bounds
from lmx_lab.panels.workbench import Workbench
from tests.panels.conftest import CONTEXT
from tests.panels.scripted_backend import Reader, Refused, ScriptedSource


@pytest.fixture
def reader(quick: None, workbench: Workbench) -> Reader:
    return Reader(ChatPanel(workbench), workbench)


def stats(reason: str = "stop", tokens: int = 2) -> ChatStats:
    return ChatStats(
        model="tiny",
        finish_reason=reason,
        prompt_tokens=9,
        output_tokens=tokens,
        tokens_per_second=31.54,
        ttft_ms=120.0,
    )


def said(panel: Any) -> list[tuple[str, str]]:
    return [(turn["role"], turn["text"]) for turn in panel.turns]


def answer(reader: Reader, source: ScriptedSource, text: str, reply: str) -> None:
    reader.ask("send", text=text)
    reader.give(source.pieces, ChatPiece(text=reply, tokens=2), ChatPiece(stats=stats()), None)
    reader.until(lambda panel: not panel.live and said(panel)[-1:] == [("assistant", reply)])


def test_an_answer_streams_and_ends_in_the_transcript_with_its_cost(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Hi?")
    reader.until(lambda panel: said(panel) == [("user", "Hi?")] and panel.live["remark"] == "sent")
    reader.give(source.pieces, ChatPiece(remark="queued"))
    reader.until(lambda panel: panel.live["remark"] == "queued")
    reader.give(source.pieces, ChatPiece(reasoning="hm", tokens=1), ChatPiece(text="Hel", tokens=1))
    reader.until(lambda panel: (panel.live["reasoning"], panel.live["text"]) == ("hm", "Hel"))
    assert reader.panel.live["remark"] == "2 tokens"
    reader.give(source.pieces, ChatPiece(text="lo", tokens=1), ChatPiece(stats=stats(tokens=3)), None)
    reader.until(lambda panel: not panel.live)
    turn = reader.panel.turns[-1]
    assert (turn["role"], turn["text"], turn["reasoning"]) == ("assistant", "Hello", "hm")
    assert turn["stats"] == "tiny · 3 tokens · 31.5 tokens/s · first after 0.12 s"


def test_pieces_are_coalesced_into_frames(workbench: Workbench, source: ScriptedSource) -> None:
    reader = Reader(ChatPanel(workbench), workbench)
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, *(ChatPiece(text="x", tokens=1) for _ in range(300)), None)
    reader.until(lambda panel: not panel.live and said(panel)[-1] == ("assistant", "x" * 300))
    assert len([name for name, _ in reader.frames if name == "live"]) < 30


def test_what_was_said_goes_with_the_next_question(reader: Reader, source: ScriptedSource) -> None:
    answer(reader, source, "One?", "1")
    reader.ask("send", text="Two?", system="Be short.", temperature=0, top_p=0.5, max_tokens=7.0, seed=3)
    reader.give(source.pieces, ChatPiece(remark="queued"))
    _, request = source.asked[-1]
    assert request == {
        "messages": [
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": "One?"},
            {"role": "assistant", "content": "1"},
            {"role": "user", "content": "Two?"},
        ],
        "temperature": 0,
        "top_p": 0.5,
        "max_tokens": 7,
        "seed": 3,
    }
    reader.until(lambda panel: panel.sampling["system"] == "Be short." and panel.sampling["max_tokens"] == 7)


def test_one_answer_at_a_time(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="One?")
    with pytest.raises(Refused, match="an answer is being written") as refusal:
        reader.ask("send", text="Two?")
    assert refusal.value.code == "queue-full"
    assert len(source.asked) == 1


def test_stop_ends_the_generation_and_keeps_what_there_is(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="Once upon", tokens=2))
    reader.until(lambda panel: panel.live["text"])
    reader.ask("stop")
    reader.until(lambda panel: not panel.live)
    assert reader.panel.turns[-1]["text"] == "Once upon"
    assert reader.panel.turns[-1]["stats"] == "stopped"
    assert source.left == 1
    assert reader.panel.history[-1] == {"role": "assistant", "content": "Once upon"}
    reader.ask("stop")


def test_stop_right_after_send_ends_the_answer_too(reader: Reader, source: ScriptedSource) -> None:
    reader.tell("send", text="Hi?")
    reader.tell("stop")
    reader.until(lambda panel: len(panel.turns) == 2 and not panel.live)
    assert reader.panel.turns[-1]["stats"] == "stopped"
    answer(reader, source, "Again?", "Yes")


def test_a_prompt_that_is_too_long_leaves_the_question_and_says_so(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Long?")
    reader.give(source.pieces, ContextLengthError("the prompt has 900 tokens, the model takes 512; shorten it"))
    reader.until(lambda panel: not panel.live)
    assert said(reader.panel) == [("user", "Long?"), ("assistant", "")]
    assert "takes 512" in reader.panel.turns[-1]["error"]
    assert reader.panel.history == []
    answer(reader, source, "Short?", "Yes")
    assert [message["content"] for message in source.asked[-1][1]["messages"]] == ["Short?"]


def test_a_model_that_goes_away_ends_the_answer_with_its_message(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="Once", tokens=1), NotLoadedError("tiny was unloaded"))
    reader.until(lambda panel: not panel.live)
    turn = reader.panel.turns[-1]
    assert (turn["text"], turn["error"]) == ("Once", "tiny was unloaded")


def test_another_lab_ends_the_answer_and_the_transcript_stays(
    reader: Reader, source: ScriptedSource, workbench: Workbench
) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="Once", tokens=1))
    reader.until(lambda panel: panel.live.get("text"))
    following = ScriptedSource()
    workbench.follow(following)
    reader.until(lambda panel: not panel.live)
    assert reader.panel.turns[-1]["stats"] == "ended: another lab is shown now"
    assert source.left == 1
    answer(reader, following, "Still there?", "Yes")


def test_a_workbench_that_rests_ends_the_answer_and_shows_it(
    reader: Reader, source: ScriptedSource, workbench: Workbench
) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="Once", tokens=1))
    reader.until(lambda panel: panel.live.get("text"))
    source.is_now(state="stopped")
    workbench.rest()
    assert reader.panel.server["state"] == "stopped"
    assert said(reader.panel) == [("user", "Hi?"), ("assistant", "Once")]
    assert not reader.panel.live
    following = ScriptedSource()
    workbench.follow(following)
    reader.until(lambda panel: panel.server["state"] == "running")
    answer(reader, following, "Still there?", "Yes")


def test_a_closed_panel_ends_its_answer(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="Once", tokens=1))
    reader.until(lambda panel: panel.live.get("text"))
    reader.panel.close()
    reader.until(lambda panel: not panel.live)
    assert source.left == 1


def test_clear_forgets_everything_even_a_running_answer(reader: Reader, source: ScriptedSource) -> None:
    answer(reader, source, "One?", "1")
    reader.ask("send", text="Two?")
    reader.give(source.pieces, ChatPiece(text="2", tokens=1))
    reader.until(lambda panel: panel.live.get("text"))
    reader.ask("clear")
    reader.until(lambda panel: not panel.turns and not panel.live)
    answer(reader, source, "Three?", "3")
    assert [message["content"] for message in source.asked[-1][1]["messages"]] == ["Three?"]
    assert reader.panel.history == [{"role": "user", "content": "Three?"}, {"role": "assistant", "content": "3"}]


def test_a_stopped_server_refuses_and_says_what_helps(reader: Reader, source: ScriptedSource) -> None:
    source.is_now(state="stopped")
    reader.until(lambda panel: panel.server["state"] == "stopped")
    with pytest.raises(Refused, match="run the launch cell again"):
        reader.ask("send", text="Hi?")
    assert not reader.panel.turns


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("text", ""),
        ("text", 3),
        ("text", "x" * 100_001),
        ("temperature", 2.5),
        ("temperature", "hot"),
        ("top_p", -1),
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("seed", -1),
        ("seed", 2**60),
        ("system", 5),
        ("temperature", float("nan")),
    ],
)
def test_what_cannot_be_sent_is_refused_by_name(reader: Reader, name: str, value: object) -> None:
    with pytest.raises(Refused, match=name) as refusal:
        reader.ask("send", **{"text": "Hi?", name: value})
    assert refusal.value.code == "invalid-request"
    assert not reader.panel.turns


def test_the_transcript_is_bounded_and_begins_with_a_question() -> None:
    turns = tuple(Turn(id=i, role=("user", "assistant")[i % 2], text="x") for i in range(MOST_TURNS + 3))
    kept = within_bounds(turns)
    assert len(kept) == MOST_TURNS - 1
    assert kept[0].role == "user"
    assert kept[-1] is turns[-1]
    large = tuple(Turn(id=i, role=("user", "assistant")[i % 2], text="x" * (MOST_CHARACTERS // 3)) for i in range(6))
    assert within_bounds(large) == large[4:]


def test_what_is_no_longer_kept_is_said(reader: Reader, source: ScriptedSource) -> None:
    for number in range(3):
        answer(reader, source, "x" * 90_000, str(number))
    assert len(reader.panel.turns) == 4
    assert reader.panel.forgotten.startswith("2 older turns are no longer here")


def test_an_endless_answer_is_cut(reader: Reader, source: ScriptedSource) -> None:
    reader.ask("send", text="Hi?")
    reader.give(source.pieces, ChatPiece(text="x" * (MOST_CHARACTERS + 1), tokens=1))
    reader.until(lambda panel: not panel.live)
    assert reader.panel.turns[-1]["stats"].startswith("cut at 200,000 characters")
    assert source.left == 1


@pytest.mark.parametrize(
    ("reason", "tokens", "words"),
    [
        ("stop", 5, ""),
        ("length", 8, "cut at max_tokens"),
        ("length", 5, "cut: the model's context is full"),
        ("cancelled", 5, "stopped"),
        ("tool_calls", 5, "asks for a tool"),
    ],
)
def test_the_end_is_said_in_words(reason: str, tokens: int, words: str) -> None:
    assert end_in_words(stats(reason, tokens), max_tokens=8) == words


def test_questions_without_an_answer_are_not_in_the_prompt() -> None:
    turns = (
        Turn(id=1, role="user", text="a"),
        Turn(id=2, role="assistant", text="", error="no"),
        Turn(id=3, role="user", text="b"),
        Turn(id=4, role="assistant", text="c"),
        Turn(id=5, role="user", text="d"),
    )
    assert [it["content"] for it in messages(turns, " ", unanswered=turns[-1])] == ["b", "c", "d"]


def test_the_snapshot_has_the_transcript_as_text(reader: Reader, source: ScriptedSource) -> None:
    assert "nothing was said" in reader.panel.snapshot_html()
    answer(reader, source, "<script>alert(1)</script>", "<b>&amp;</b>")
    html = reader.panel.snapshot_html()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in html
    assert "31.5 tokens/s" in html
    assert "<script" not in html


# --- over a real lab


@pytest.fixture
def real_reader(lab: lmx_lab.Lab, quick: None, real_workbench: Workbench) -> Reader:
    lab.load("tiny")
    return Reader(ChatPanel(real_workbench), real_workbench)


def test_a_real_answer_and_its_history(lab: lmx_lab.Lab, real_reader: Reader) -> None:
    real_reader.ask("send", text="Hello", max_tokens=5, temperature=0)
    real_reader.until(lambda panel: len(panel.turns) == 2)
    reply = lab.chat([{"role": "user", "content": "Hello"}], max_tokens=5, temperature=0)
    assert real_reader.panel.turns[-1]["text"] == reply.text
    assert real_reader.panel.turns[-1]["stats"].endswith("cut at max_tokens")
    assert lab.chat(real_reader.panel.history, max_tokens=2).text


def test_a_real_answer_is_stopped(lab: lmx_lab.Lab, real_reader: Reader) -> None:
    real_reader.ask("send", text="Hello", max_tokens=7500)
    real_reader.until(lambda panel: panel.live.get("text"))
    real_reader.ask("stop")
    real_reader.until(lambda panel: not panel.live)
    text = real_reader.panel.turns[-1]["text"]
    assert text
    real_reader.ask("send", text="Hello", max_tokens=1)
    real_reader.until(lambda panel: len(panel.turns) == 4)


def test_a_real_prompt_that_is_too_long_is_refused_with_both_numbers(real_reader: Reader) -> None:
    real_reader.ask("send", text="long " * 2 * CONTEXT)
    real_reader.until(lambda panel: len(panel.turns) == 2)
    assert str(CONTEXT) in real_reader.panel.turns[-1]["error"]


def test_unloading_in_the_middle_of_a_real_answer_ends_it(
    lab: lmx_lab.Lab, real_reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lab.engine, "settings", replace(lab.engine.settings, drain_s=0.0))
    real_reader.ask("send", text="Hello", max_tokens=7500)
    real_reader.until(lambda panel: panel.live.get("text"))
    lab.unload()
    real_reader.until(lambda panel: not panel.live)
    assert real_reader.panel.turns[-1]["text"]
    real_reader.ask("send", text="And now?")
    real_reader.until(lambda panel: len(panel.turns) == 4)
    assert "load" in real_reader.panel.turns[-1]["error"]
