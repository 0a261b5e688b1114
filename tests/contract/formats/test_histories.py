"""Tests that a conversation remains usable in all formats, whatever its history contains, and that errors in it name
the place in the request.
"""

import httpx2
import pytest

from tests.support.formats import CLOCK, FORMATS, HELLO, Request, each_format
from tests.support.labs import manager_of, serving
from tests.support.waiting import until

BY_NAME = {form.name: form for form in FORMATS}
SHOWN = "[image, not shown to this model]"
USER = {"role": "user", "content": "hello"}
URL = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aaaa"}}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aaaa"}}
INPUT_IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,aaaa"}
TEXT = {"type": "text", "text": "See:"}
CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
CUT = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"a": 1'}}
NOTE = {"role": "developer", "content": "Now"}
BLOCK = {"type": "tool_use", "id": "c1", "name": "clock", "input": {}}
TOOL_USE = {"role": "assistant", "content": [BLOCK]}
ITEM = {"type": "function_call", "call_id": "c1", "name": "clock", "arguments": "{}"}
OLLAMA_CALL = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock", "arguments": {}}}]}
OLLAMA_RESULT = {"role": "tool", "content": "noon"}
FUNCTION = {"name": "clock", "arguments": "{}"}
CUSTOM = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "x"}}
CUSTOM_ITEM = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": None}
CUSTOM_OUTPUT = {"type": "custom_tool_call_output", "call_id": "c1", "output": "noon"}
OLD_CALL = {"role": "assistant", "content": None, "function_call": FUNCTION}
OLD_RESULT = {"role": "function", "name": "clock", "content": "noon"}
EMPTY_TEXT = {"type": "text", "text": None}


def calls(call=CALL):
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def ollama_calls(function):
    return calls({"function": function})


def chat_result(content="noon"):
    return {"role": "tool", "tool_call_id": "c1", "content": content}


def result(content="noon", id="c1"):
    return {"type": "tool_result", "tool_use_id": id, "content": content}


def results(*blocks):
    return {"role": "user", "content": list(blocks)}


def said(*blocks):
    return {"role": "assistant", "content": list(blocks)}


def output(content="noon", id="c1"):
    return {"type": "function_call_output", "call_id": id, "output": content}


def users(*contents):
    return [{"role": "user", "content": content} for content in contents]


def fields_of(form, messages):
    """Return the field of a format with a conversation."""
    return {"input" if form == "responses" else "messages": messages}


def prompt_of(lab, http):
    """Return the text of the last prompt."""
    return http.post("/detokenize", json={"tokens": lab.requests[-1].prompt}).json()["content"]


def case(form, messages, *texts, **fields):
    return pytest.param(BY_NAME[form], fields_of(form, messages) | fields, texts, id=f"{form}-{texts[0]:.40}")


ENTIRE = '{"name": "clock", "arguments": {}}\n</tool_call>'
CUT_OFF = '{"name": "clock", "arguments": {"a": 1\n</tool_call>'
EMPTY = "<tool_response>\n\n</tool_response>"
ANSWERED = "assistant\n<|end|>"
NOTED = "noon\n</tool_response>"
UNFILLED = ({"name": "clock"}, {"name": "clock", "arguments": None})


@pytest.mark.parametrize(
    ("form", "fields", "texts"),
    [
        case("chat", [USER, calls(CUT), chat_result(), USER], CUT_OFF),
        case("websocket", [USER, calls(CUT), chat_result(), USER], CUT_OFF),
        case("responses", [USER, {**ITEM, "arguments": '{"a": 1'}, output(), USER], CUT_OFF),
        case("ollama chat", [USER, ollama_calls(CUT["function"]), {**USER, "role": "tool"}], CUT_OFF),
        case("messages", [USER, said({**BLOCK, "input": '{"a": 1'}), results(result())], CUT_OFF),
        # Calls without arguments.
        *(case("chat", [USER, calls({**CALL, "function": each}), chat_result(), USER], ENTIRE) for each in UNFILLED),
        *(case("ollama chat", [USER, ollama_calls(each)], ENTIRE) for each in UNFILLED),
        *(case("responses", [USER, {**ITEM, "arguments": given}, output()], ENTIRE) for given in (None, {})),
        *(case("messages", [USER, said({**BLOCK, "input": given})], ENTIRE) for given in (None, "")),
        # Calls without ids, those of custom tools, and those that are older than tools.
        *(
            case("chat", [USER, calls({**CALL, "id": id_}), {**chat_result(), "tool_call_id": id_}], NOTED)
            for id_ in (None, "")
        ),
        case("websocket", [USER, calls({"function": FUNCTION}), {"role": "tool", "content": "noon"}], NOTED),
        case(
            "messages",
            [USER, said({**BLOCK, "id": None}), results({"type": "tool_result", "content": "noon"})],
            ENTIRE,
            NOTED,
        ),
        case("responses", [USER, {**ITEM, "call_id": None}, output(id=None)], ENTIRE, NOTED),
        case("chat", [USER, calls(CUSTOM), chat_result(), USER], '"arguments": {"input": "x"}', NOTED),
        *(case(form, [USER, OLD_CALL, OLD_RESULT], ENTIRE, NOTED) for form in ("chat", "websocket")),
        # Calls of a service's own tools.
        *(
            case(form, [USER, calls(hosted), chat_result(), USER], text, NOTED)
            for form in ("chat", "websocket", "ollama chat")
            for hosted, text in (
                ({"id": "c1", "type": "web_search", "web_search": {}}, '"name": "web_search"'),
                ({**CALL, "type": "builtin_function"}, ENTIRE),
            )
        ),
        # Texts that are null.
        case("chat", users([EMPTY_TEXT, TEXT]), "user\nSee:"),
        case("messages", users([EMPTY_TEXT, TEXT]), "user\nSee:", system=[EMPTY_TEXT]),
        case("messages", [USER, said({"type": "thinking", "thinking": None}), USER], ANSWERED),
        case("responses", users([EMPTY_TEXT, TEXT]), "user\nSee:"),
        case("responses", [USER, CUSTOM_ITEM, CUSTOM_OUTPUT], '"arguments": {"input": ""}', NOTED),
        # Answers and results without content.
        case("chat", [USER, {"role": "assistant"}, USER], ANSWERED),
        case("chat", [USER, calls(), {"role": "tool", "tool_call_id": "c1"}, USER], EMPTY),
        case("messages", [USER, {"role": "assistant", "content": None}, USER], ANSWERED),
        case("responses", [{"role": "assistant", "content": None}, USER], ANSWERED),
        case("responses", [USER, ITEM, output(None)], EMPTY),
        case("ollama chat", [USER, OLLAMA_CALL, {"role": "tool", "content": {"t": 5}}], '{"t":5}'),
        # Images in results of tools and in earlier messages.
        case("chat", [USER, calls(), chat_result([TEXT, URL]), USER], f"See:\n{SHOWN}"),
        case("chat", users([TEXT, URL], "hello"), f"See:\n{SHOWN}"),
        case("messages", [USER, TOOL_USE, results(result([TEXT, IMAGE]))], f"See:\n\n{SHOWN}"),
        case("messages", [USER, TOOL_USE, results(result(), IMAGE)], f"user\n{SHOWN}"),
        case("messages", users([TEXT, IMAGE], "hello"), f"See:\n\n{SHOWN}"),
        case("responses", [USER, ITEM, output([TEXT, INPUT_IMAGE])], SHOWN),
        case("responses", [*users([INPUT_IMAGE]), USER], SHOWN),
        # Images of a result in a message of the user after it, as the AI SDK and LiteLLM send them.
        *(
            case(form, [USER, calls(), chat_result(), *notes, *users([TEXT, URL])], SHOWN)
            for form in ("chat", "websocket")
            for notes in ([], [NOTE])
        ),
        case("messages", [USER, TOOL_USE, results(result()), *users([TEXT, IMAGE])], SHOWN),
        case("responses", [USER, ITEM, output(), *users([INPUT_IMAGE])], SHOWN),
        case("ollama chat", [USER, OLLAMA_CALL, OLLAMA_RESULT, {**USER, "images": ["aaaa"]}], SHOWN),
        case("ollama chat", [{**USER, "images": ["aaaa"]}, USER], f"hello\n{SHOWN}"),
        # Blocks and items of other types.
        *(
            case("messages", [USER, said({"type": kind, "id": "s1"}), USER], f"[{kind}, not shown to this model]")
            for kind in ("server_tool_use", "web_search_tool_result", "mcp_tool_use", "container_upload")
        ),
        case(
            "messages",
            [USER, TOOL_USE, results(result([{"type": "tool_reference"}]))],
            "[tool_reference, not shown to this model]",
        ),
        *(
            case("responses", [USER, {"type": kind, "id": "i1"}, USER], f"{before}\n[{kind}, not shown")
            for kind, before in (("local_shell_call", "assistant"), ("local_shell_call_output", "hello\n"))
        ),
        case(
            "responses",
            [USER, {"type": "compaction", "encrypted_content": "gAAAA"}, USER],
            "[summary of an earlier conversation, not readable on this server]",
        ),
        case("responses", [USER, ITEM, output({"t": 5}), USER], '{"t":5}'),
        case("messages", [USER, TOOL_USE, results(result({"t": 5}))], '{"t":5}'),
        case("responses", [said({"type": "refusal", "refusal": "I do not."}), USER], "I do not."),
        case("responses", [USER, {"type": "shell_call_output", "output": [{"stdout": "a"}]}], '[{"stdout":"a"}]'),
        # Texts of search results.
        *(
            case("messages", [USER, *given], "Found.")
            for found in [[{"type": "search_result", "title": "t", "content": [{"type": "text", "text": "Found."}]}]]
            for given in ([{"role": "user", "content": found}], [TOOL_USE, results(result(found))])
        ),
        # Blocks of the Messages format, which Cursor sends.
        *(
            case(form, [USER, TOOL_USE, results(result(content), *more)], ENTIRE, NOTED)
            for form in ("chat", "websocket")
            for content in ("noon", [{"type": "text", "text": "noon"}])
            for more in ((), (TEXT,))
        ),
        case("chat", [USER, TOOL_USE, results(result([IMAGE]))], SHOWN),
        # Calls that another server could not read, and arguments as PHP writes them.
        *(
            case("chat", [USER, calls({**CALL, "function": function}), chat_result(), USER], NOTED)
            for function in ({"name": "", "arguments": ""}, {"name": "clock", "arguments": []})
        ),
        case("ollama chat", [USER, {**calls(), "tool_calls": [{"function": {**FUNCTION, "arguments": []}}]}], ENTIRE),
        # Messages between a call and its result.
        case("chat", [USER, calls(), NOTE, chat_result(), USER], NOTED),
        case("messages", [USER, TOOL_USE, USER, results(result())], NOTED),
        case("responses", [USER, ITEM, NOTE, output(), USER], NOTED),
        case("ollama chat", [USER, OLLAMA_CALL, USER, OLLAMA_RESULT], NOTED),
    ],
)
def test_a_history_with_anything_is_answered(form, fields, texts, lab, http):
    form.streamed(http, Request(extra=fields))
    prompt = prompt_of(lab, http)
    assert [text for text in texts if text not in prompt] == [], prompt


@pytest.mark.parametrize(
    "history",
    [
        pytest.param([chat_result(), USER], id="first"),
        pytest.param([USER, chat_result()], id="last"),
        pytest.param([{"role": "system", "content": "Summary."}, chat_result(), USER], id="after a summary"),
        pytest.param([USER, calls(), chat_result("early"), {**USER, "role": "assistant"}, chat_result()], id="second"),
        pytest.param([USER, calls(), {**chat_result(), "tool_call_id": "zz"}, USER], id="another id"),
        pytest.param(
            [USER, {**calls(), "tool_calls": [CALL, CALL]}, chat_result(), chat_result("late")], id="equal ids"
        ),
    ],
)
@each_format("history")
def test_a_result_of_a_tool_without_its_call_is_read(form, history, lab, http):
    """Clients shorten long conversations, and then send results without their calls."""
    messages = [{**message, "content": message["content"] or ""} for message in history]
    form.streamed(http, Request(messages=messages))
    assert "<tool_response>\nnoon\n</tool_response>" in prompt_of(lab, http) or NOTED in prompt_of(lab, http)


def misplaced(form, place, *messages, **fields):
    return pytest.param(BY_NAME[form], fields_of(form, list(messages)) | fields, place, id=f"{form}-{place}")


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("chat", "messages.tool_call_id"),
        ("cohere", "messages.tool_call_id"),
        ("responses", "input.call_id"),
        ("messages", "messages.content.tool_use_id"),
    ],
)
def test_the_id_of_a_call_that_is_not_in_the_conversation_is_named(name, field, http):
    for history, is_named in (([USER, chat_result()], True), ([USER, calls(), chat_result()], False)):
        messages = [{**message, "content": message["content"] or ""} for message in history]
        response = BY_NAME[name].post(http, Request(messages=messages))
        assert response.status_code == 200, response.text
        assert (field in response.headers.get("x-lmx-ignored", "").split(", ")) is is_named


def test_a_response_may_be_continued_with_the_result_of_an_unknown_call(lab, http):
    form = BY_NAME["responses"]
    first = form.post(http, Request()).json()["id"]
    fields = {"previous_response_id": first, "input": [USER, output(id="zz")]}
    assert form.post(http, Request(extra=fields)).status_code == 200
    assert NOTED in prompt_of(lab, http)


@pytest.mark.parametrize(
    ("form", "fields", "place"),
    [
        misplaced("chat", "messages.1.content.1", *users("hello", [TEXT, URL])),
        misplaced("websocket", "messages.1.content.1", *users("hello", [TEXT, URL])),
        misplaced("messages", "messages.1.content.1", *users("hello", [TEXT, IMAGE])),
        misplaced("responses", "input.1.content.0", *users("hello", [INPUT_IMAGE])),
        misplaced("ollama chat", "messages.1.images", USER, {**USER, "images": ["aaaa"]}),
        # Not one of a result: the newest message of the user is the one before the call.
        misplaced("chat", "messages.0.content.0", *users([URL]), calls(), chat_result()),
        misplaced("messages", "messages.0.content.0", *users([IMAGE]), TOOL_USE, results(result())),
    ],
)
def test_an_image_in_the_newest_message_of_the_user_is_refused(form, fields, place, http):
    _, problem = form.refusal(http, Request(extra=fields))
    assert problem.message.startswith(f"{place}: images and other files cannot be read")


@pytest.mark.parametrize("name", ["mcp__server__" + "a" * 115, "files.read/all", "a:b"])
@each_format("forced")
def test_a_call_has_the_name_of_the_tool(form, name, http):
    request = Request(tools=[{**CLOCK, "name": name}], choice=name, max_tokens=300)
    assert [called for called, _ in form.answer(form.post(http, request).json()).calls] == [name]


def test_a_function_needs_no_type(lab, http):
    form = BY_NAME["chat"]
    form.streamed(http, Request(extra={"tools": [{"function": {"name": "clock"}}]}))
    assert '"clock"' in prompt_of(lab, http)


@each_format("tools")
def test_tools_may_have_the_same_name(form, lab, http):
    form.streamed(http, Request(tools=[CLOCK, {**CLOCK, "description": "Another clock."}]))
    prompt = prompt_of(lab, http)
    assert (prompt.count('"clock"'), "Another" in prompt) == (1, False)


MARKED = {**USER, "content": [{**TEXT, "cache_control": {}}], "timestamp": 5}


@pytest.mark.parametrize(
    ("form", "message", "names"),
    [
        ("chat", MARKED, "messages.timestamp, messages.content.cache_control"),
        ("messages", MARKED, "messages.timestamp, messages.content.cache_control"),
        ("responses", {**USER, "id": "m1", "status": "completed"}, "input.id, input.status"),
        ("ollama chat", {**USER, "timestamp": 5}, "messages.timestamp"),
    ],
)
def test_unknown_fields_inside_messages_are_ignored_and_named(form, message, names, http):
    response = BY_NAME[form].post(http, Request(extra=fields_of(form, [message] * 2)))
    assert (response.status_code, response.headers["x-lmx-ignored"]) == (200, names), response.text


BEGUN = (*HELLO, {"role": "assistant", "content": "hel"})


@each_format("history")
def test_an_answer_continues_the_last_message_of_the_assistant(form, lab, http):
    answers = [
        form.answer(form.assemble(form.frames(form.streamed(http, Request(messages=BEGUN))))),
        form.answer(form.post(http, Request(messages=BEGUN)).json()),
    ]
    assert [answer.text for answer in answers] == ["lo", "lo"]
    assert prompt_of(lab, http).endswith("assistant\nhel")


@each_format("history", "reasoning")
def test_an_answer_continues_reasoning_that_has_not_ended(form, http):
    thought = [{"role": "user", "content": "<think>hm</think>one"}, {"role": "assistant", "content": "<think>h"}]
    for begun, reasoning, text in ((thought, "m", "one"), ([thought[0], BEGUN[-1]], "", "<think>hm</think>one")):
        answer = form.answer(form.post(http, Request(messages=begun)).json())
        assert (answer.reasoning, answer.text) == (reasoning, text)


@pytest.mark.parametrize(
    ("fields", "last", "text"),
    [
        ({"continue_final_message": True, "add_generation_prompt": False}, {}, "lo"),
        ({}, {"prefix": True}, "lo"),
        ({}, {"prefix": False}, "hel"),
        ({"continue_final_message": False}, {}, "hel"),
        ({"add_generation_prompt": True}, {}, "hel"),
        ({"response_format": {"type": "regex", "regex": "hel|lo"}}, {}, "hel"),
    ],
)
def test_chat_requests_can_choose_a_continuation_or_a_new_answer(fields, last, text, http):
    request = Request(messages=[*HELLO, BEGUN[-1] | last], extra=fields)
    assert BY_NAME["chat"].answer(BY_NAME["chat"].post(http, request).json()).text == text


@pytest.mark.parametrize(
    ("form", "fields", "place"),
    [
        ("chat", {"continue_final_message": True, "messages": HELLO}, "continue_final_message: is true, but"),
        ("chat", {"continue_final_message": True, "add_generation_prompt": True}, "and so is add_generation_prompt"),
        ("chat", {"add_generation_prompt": False, "messages": HELLO}, "add_generation_prompt: is false"),
        (
            "chat",
            {"continue_final_message": True, "response_format": {"type": "json_object"}},
            "continue_final_message:",
        ),
        (
            "messages",
            {"tools": [{"name": "a", "input_schema": {}}], "tool_choice": {"type": "any"}},
            "messages: a format",
        ),
        ("ollama chat", {"format": "json"}, "messages: a format"),
    ],
)
def test_a_continuation_that_is_not_possible_is_refused(form, fields, place, http):
    _, problem = BY_NAME[form].refusal(http, Request(messages=BEGUN, extra=fields))
    assert place in problem.message


# The prefix cache


@pytest.fixture(scope="module", params=["mlx", "llama.cpp"])
def tiny_lab(request, tmp_path_factory, tiny, tiny_gguf):
    path = tiny.path if request.param == "mlx" else tiny_gguf
    with serving(tmp_path_factory.mktemp("prefixes"), path) as lab, httpx2.Client(base_url=lab.url, timeout=60) as http:
        yield lab, http


@each_format("history")
def test_the_turn_after_a_stopped_answer_finds_its_prefix(form, tiny_lab):
    lab, http = tiny_lab
    before = manager_of(lab).snapshot.totals
    first = {"role": "user", "content": f"{form.name}: " + " ".join(map(str, range(100)))}
    with form.stream(http, Request(messages=[first], max_tokens=200)):
        until(lambda: manager_of(lab).snapshot.totals.output_tokens > before.output_tokens)
    turn = Request(messages=[first, {"role": "assistant", "content": "so"}, USER], max_tokens=2)
    answer = form.answer(form.post(http, turn).json())
    cached_tokens = manager_of(lab).snapshot.totals.cached_tokens - before.cached_tokens
    assert cached_tokens > 0.9 * answer.prompt_tokens > 180
