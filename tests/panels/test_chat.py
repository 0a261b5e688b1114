"""Test the chat panel without a browser: answers, their endings, the transcript."""

import json

import pytest

from lmx_lab.errors import ContextLengthError, InvalidRequestError, NotLoadedError
from lmx_lab.panels.chat import (
    MAX_CHARACTERS,
    MAX_MESSAGES,
    ChatPanel,
    TranscriptMessage,
    describe_ending,
    from_json,
    to_chat_messages,
    to_json,
    to_markdown,
    trim_transcript,
)
from lmx_lab.panels.workbench import Workbench
from tests.support.models import ENDLESS_CONTEXT
from tests.support.panels import Reader, Refused, ScriptedBackend, cost, delta

PANEL = ChatPanel

TRANSCRIPT = (
    TranscriptMessage(id=1, role="user", text="a\nb \u00fc"),
    TranscriptMessage(id=2, role="assistant", text="c", reasoning="d\ne", stats="3 tokens"),
    TranscriptMessage(id=3, role="user", text="f"),
    TranscriptMessage(id=4, role="assistant", text="", error="no model is loaded"),
)


@pytest.fixture
def answering(reader, backend):
    """A panel that has sent "Hi?", and whose answer begins with "Once"."""
    reader.ask("send", text="Hi?")
    reader.give(backend.steps, delta("Once"))
    reader.until(lambda panel: panel.live.get("text"))
    return reader


def transcript(panel):
    return [(message["role"], message["text"]) for message in panel.messages]


def answer(reader, backend, text, reply):
    reader.ask("send", text=text)
    reader.give(backend.steps, delta(reply, tokens=2), cost())
    reader.until(lambda panel: not panel.live and transcript(panel)[-1:] == [("assistant", reply)])


def test_an_answer_streams_and_ends_in_the_transcript_with_its_cost(reader, backend):
    reader.ask("send", text="Hi?")
    reader.until(lambda panel: transcript(panel) == [("user", "Hi?")] and panel.live["status"] == "sent")
    reader.give(backend.steps, "queued")
    reader.until(lambda panel: panel.live["status"] == "queued")
    reader.give(backend.steps, delta(reasoning="hm"), delta("Hel"))
    reader.until(lambda panel: (panel.live["reasoning"], panel.live["text"]) == ("hm", "Hel"))
    assert reader.panel.live["status"] == "2 tokens"
    reader.give(backend.steps, delta("lo"), cost(tokens=3))
    reader.until(lambda panel: not panel.live)
    turn = reader.panel.messages[-1]
    assert (turn["role"], turn["text"], turn["reasoning"]) == ("assistant", "Hello", "hm")
    assert turn["stats"] == "tiny · 3 tokens · 31.5 tok/s · first token in 0.12 s"


def test_pieces_are_coalesced_into_frames(backend):
    workbench = Workbench(backend)
    reader = Reader(ChatPanel(workbench))
    reader.ask("send", text="Hi?")
    reader.give(backend.steps, *(delta("x") for _ in range(300)), cost())
    reader.until(lambda panel: not panel.live and transcript(panel)[-1] == ("assistant", "x" * 300))
    assert len([name for name, _ in reader.frames if name == "live"]) < 30
    workbench.suspend()


def test_the_conversation_is_sent_with_the_next_question(reader, backend):
    answer(reader, backend, "One?", "1")
    reader.ask("send", text="Two?", system="Be short.", temperature=0, top_p=0.5, max_tokens=7.0, seed=3)
    reader.give(backend.steps, "queued")
    _, request = backend.requests[-1]
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "Be short."),
        ("user", "One?"),
        ("assistant", "1"),
        ("user", "Two?"),
    ]
    assert (request.temperature, request.top_p, request.max_tokens, request.seed) == (0, 0.5, 7, 3)
    reader.until(lambda panel: panel.sampling["system"] == "Be short." and panel.sampling["max_tokens"] == 7)


def test_an_edited_question_replaces_it_and_what_follows(reader, backend):
    answer(reader, backend, "One?", "1")
    answer(reader, backend, "Two?", "2")
    answer(reader, backend, "Three?", "3")
    second = reader.panel.messages[2]["id"]
    reader.ask("send", text="Two, in French?", replace=second)
    reader.give(backend.steps, delta("deux"), cost())
    reader.until(lambda panel: not panel.live and transcript(panel)[-1] == ("assistant", "deux"))
    assert transcript(reader.panel)[:3] == [("user", "One?"), ("assistant", "1"), ("user", "Two, in French?")]
    assert [message.content for message in backend.requests[-1][1].messages] == ["One?", "1", "Two, in French?"]
    for number in (second, reader.panel.messages[1]["id"], "x"):
        with pytest.raises(Refused, match="there is no question"):
            reader.ask("send", text="Two?", replace=number)
    assert len(reader.panel.messages) == 4


def test_a_saved_conversation_is_loaded_with_its_settings(reader, backend):
    with pytest.raises(Refused, match="no messages yet"):
        reader.ask("export", format="json")
    reader.ask("send", text="Hi?", system="Be short.", temperature=0.2)
    reader.give(backend.steps, delta(reasoning="hm"), delta("Yes"), cost())
    reader.until(lambda panel: len(panel.messages) == 2)
    before = reader.panel.messages
    saved = reader.ask("export", format="json")
    assert "Be short." in reader.ask("export", format="markdown")
    with pytest.raises(Refused, match="json or markdown"):
        reader.ask("export", format="pdf")
    reader.ask("clear")
    reader.until(lambda panel: not panel.messages)
    reader.ask("load", text=saved)
    reader.until(lambda panel: len(panel.messages) == 2)
    assert [{**message, "id": 0} for message in reader.panel.messages] == [{**each, "id": 0} for each in before]
    assert (reader.panel.sampling["system"], reader.panel.sampling["temperature"]) == ("Be short.", 0.2)
    with pytest.raises(Refused, match="temperature is 9"):
        reader.ask("load", text=saved.replace("0.2", "9"))
    reader.ask("send", text="And?")
    with pytest.raises(Refused, match="is generating an answer"):
        reader.ask("load", text=saved)


def test_a_second_question_is_refused_during_an_answer(reader, backend):
    reader.ask("send", text="One?")
    with pytest.raises(Refused, match="is generating an answer") as refusal:
        reader.ask("send", text="Two?")
    assert refusal.value.code == "queue-full"
    assert len(backend.requests) == 1


def test_stop_ends_the_generation_and_keeps_its_text(answering, backend):
    answering.ask("stop")
    answering.until(lambda panel: not panel.live)
    turn = answering.panel.messages[-1]
    assert (turn["text"], turn["stats"], backend.stopped) == ("Once", "stopped", 1)
    assert answering.panel.history[-1] == {"role": "assistant", "content": "Once"}
    answering.ask("stop")


def test_stop_right_after_send_ends_the_answer(reader, backend):
    reader.send("send", text="Hi?")
    reader.send("stop")
    reader.until(lambda panel: len(panel.messages) == 2 and not panel.live)
    assert reader.panel.messages[-1]["stats"] == "stopped"
    answer(reader, backend, "Again?", "Yes")


def test_a_prompt_that_is_too_long_is_reported_below_the_question(reader, backend):
    reader.ask("send", text="Long?")
    reader.give(backend.steps, ContextLengthError("the prompt has 900 tokens, the model takes 512; shorten it"))
    reader.until(lambda panel: not panel.live)
    assert transcript(reader.panel) == [("user", "Long?"), ("assistant", "")]
    assert "takes 512" in reader.panel.messages[-1]["error"]
    assert reader.panel.history == []
    answer(reader, backend, "Short?", "Yes")
    assert [message.content for message in backend.requests[-1][1].messages] == ["Short?"]


def test_an_unloaded_model_ends_the_answer_with_its_message(answering, backend):
    answering.give(backend.steps, NotLoadedError("tiny was unloaded"))
    answering.until(lambda panel: not panel.live)
    turn = answering.panel.messages[-1]
    assert (turn["text"], turn["error"]) == ("Once", "tiny was unloaded")


def test_showing_another_lab_stops_the_answer_and_keeps_the_transcript(answering, backend, workbench):
    following = ScriptedBackend()
    workbench.follow(following)
    answering.until(lambda panel: not panel.live)
    assert answering.panel.messages[-1]["stats"] == "ended: another lab is shown now"
    assert backend.stopped == 1
    answer(answering, following, "Still there?", "Yes")


def test_suspending_the_workbench_stops_the_answer(answering, backend, workbench):
    backend.set_state(state="stopped")
    workbench.suspend()
    assert answering.panel.server["state"] == "stopped"
    assert transcript(answering.panel) == [("user", "Hi?"), ("assistant", "Once")]
    assert not answering.panel.live
    following = ScriptedBackend()
    workbench.follow(following)
    answering.until(lambda panel: panel.server["state"] == "running")
    answer(answering, following, "Still there?", "Yes")


def test_a_closed_panel_ends_its_answer(answering, backend):
    answering.panel.close()
    answering.until(lambda panel: not panel.live)
    assert backend.stopped == 1


def test_clear_removes_everything_including_a_running_answer(reader, backend):
    answer(reader, backend, "One?", "1")
    reader.ask("send", text="Two?")
    reader.give(backend.steps, delta("2"))
    reader.until(lambda panel: panel.live.get("text"))
    reader.ask("clear")
    reader.until(lambda panel: not panel.messages and not panel.live)
    answer(reader, backend, "Three?", "3")
    assert [message.content for message in backend.requests[-1][1].messages] == ["Three?"]
    assert reader.panel.history == [{"role": "user", "content": "Three?"}, {"role": "assistant", "content": "3"}]


def test_a_stopped_server_refuses_with_the_next_step(reader, backend):
    backend.set_state(state="stopped")
    reader.until(lambda panel: panel.server["state"] == "stopped")
    with pytest.raises(Refused, match="run the launch cell again"):
        reader.ask("send", text="Hi?")
    assert not reader.panel.messages


INVALID = {
    **{"text": ["", 3, "x" * 100_001], "temperature": [2.5, "hot", float("nan")], "top_p": [-1]},
    **{"max_tokens": [0, 1.5], "seed": [-1, 2**60], "system": [5]},
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in INVALID.items() for value in values])
def test_invalid_fields_of_a_question_are_refused_by_name(reader, name, value):
    with pytest.raises(Refused, match=name) as refusal:
        reader.ask("send", **{"text": "Hi?", name: value})
    assert refusal.value.code == "invalid-request"
    assert not reader.panel.messages


def test_the_number_of_removed_messages_is_shown(reader, backend):
    for number in range(3):
        answer(reader, backend, "x" * 90_000, str(number))
    assert len(reader.panel.messages) == 4
    assert reader.panel.removed.startswith("older messages were removed, also from the prompt: 2; at most")


def test_an_answer_that_is_too_long_is_cut(reader, backend):
    reader.ask("send", text="Hi?")
    reader.give(backend.steps, delta("x" * (MAX_CHARACTERS + 1)))
    reader.until(lambda panel: not panel.live)
    assert reader.panel.messages[-1]["stats"].startswith("cut off after 200,000 characters")
    assert backend.stopped == 1


@pytest.mark.parametrize(
    ("reason", "tokens", "words"),
    [
        ("stop", 5, ""),
        ("length", 8, "cut at max_tokens"),
        ("length", 5, "cut: the model's context is full"),
        ("cancelled", 5, "stopped"),
        ("tool_calls", 5, "requests a tool"),
    ],
)
def test_the_ending_is_described(reason, tokens, words):
    assert describe_ending(cost(reason, tokens), max_tokens=8) == words


def test_the_snapshot_has_the_transcript_as_text(reader, backend):
    assert "chat without messages" in reader.panel.snapshot_html()
    answer(reader, backend, "<script>alert(1)</script>", "<b>&amp;</b>")
    html = reader.panel.snapshot_html()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "&lt;b&gt;&amp;amp;&lt;/b&gt;" in html
    assert "31.5 tok/s" in html
    assert "<script" not in html


def test_a_real_lab_answers_is_stopped_refuses_and_unloads(lab, real_workbench):
    lab.load("tiny")
    reader = Reader(ChatPanel(real_workbench))

    def answered(**fields):
        count = len(reader.panel.messages)
        reader.ask("send", **fields)
        reader.until(lambda panel: len(panel.messages) == count + 2)
        return reader.panel.messages[-1]

    turn = answered(text="Hello", max_tokens=5, temperature=0)
    assert turn["text"] == lab.chat("Hello", max_tokens=5, temperature=0).text
    assert turn["stats"].endswith("cut at max_tokens")
    assert lab.chat(reader.panel.history, max_tokens=2).text
    assert str(ENDLESS_CONTEXT) in answered(text="long " * 2 * ENDLESS_CONTEXT)["error"]
    for end in (lambda: reader.ask("stop"), lambda: lab.unload(wait=False)):
        reader.ask("send", text="Hello", max_tokens=7500)
        reader.until(lambda panel: panel.live.get("text"))
        end()
        reader.until(lambda panel: not panel.live)
        assert reader.panel.messages[-1]["text"]
    assert "load" in answered(text="And now?")["error"]


def test_the_transcript_is_bounded_and_begins_with_a_question():
    turns = tuple(TranscriptMessage(id=i, role=("user", "assistant")[i % 2], text="x") for i in range(MAX_MESSAGES + 3))
    kept = trim_transcript(turns)
    assert len(kept) == MAX_MESSAGES - 1
    assert kept[0].role == "user"
    assert kept[-1] is turns[-1]
    large = tuple(
        TranscriptMessage(id=i, role=("user", "assistant")[i % 2], text="x" * (MAX_CHARACTERS // 3)) for i in range(6)
    )
    assert trim_transcript(large) == large[4:]


def test_questions_without_an_answer_are_not_in_the_prompt():
    said = (("user", "a", ""), ("assistant", "", "no"), ("user", "b", ""), ("assistant", "c", ""), ("user", "d", ""))
    turns = tuple(TranscriptMessage(id=at, role=role, text=text, error=e) for at, (role, text, e) in enumerate(said))
    assert [it["content"] for it in to_chat_messages(turns, " ", unanswered=turns[-1])] == ["b", "c", "d"]


def test_a_file_has_the_messages_of_the_chat_format_and_all_that_is_shown():
    saved = to_json(TRANSCRIPT, {"temperature": 0.5, "system": "Be short."})
    messages = json.loads(saved)["messages"]
    assert messages[0] == {"role": "system", "content": "Be short."}
    assert messages[2] == {"role": "assistant", "content": "c", "reasoning_content": "d\ne", "stats": "3 tokens"}
    loaded, settings = from_json(saved)
    assert tuple(TranscriptMessage(id=at, **each) for at, each in enumerate(loaded, 1)) == TRANSCRIPT
    assert settings == {"temperature": 0.5, "system": "Be short."}


def test_a_list_of_messages_is_a_conversation_too():
    loaded, settings = from_json('[{"role": "user", "content": "a \\ud800"}]')
    assert (loaded[0]["role"], loaded[0]["text"], settings) == ("user", "a ?", {})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[" * 200_000, "not JSON"),
        ("3", "no list of messages"),
        ("[]", "no list of messages"),
        ('{"messages": {}}', "no list of messages"),
        ('{"messages": [{"role": "user", "content": "a"}], "sampling": 3}', "sampling is 3"),
        ("[3]", "message 0 .*it is 3"),
        ('[{"role": "user", "content": ["a"]}]', "content is .*must be a string"),
        ('[{"role": "tool", "content": "a"}]', "role is 'tool'"),
        ('[{"role": "user", "content": "a"}, {"role": "system", "content": "b"}]', "message 1 .*role is"),
    ],
)
def test_a_file_without_a_conversation_is_refused_with_the_next_step(text, words):
    with pytest.raises(InvalidRequestError, match=words) as refusal:
        from_json(text)
    assert "sampling" in words or "choose a file" in refusal.value.message


def test_a_conversation_as_markdown_has_a_heading_for_each_message():
    assert to_markdown(TRANSCRIPT, " ") == (
        "## You\n\na\nb \u00fc\n\n## Model\n\n> d\n> e\n\nc\n\n*3 tokens*\n\n"
        "## You\n\nf\n\n## Model\n\n**no model is loaded**\n"
    )
