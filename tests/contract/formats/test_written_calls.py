"""Tests that a history in any format contains the calls as the model wrote them."""

import json

import pytest

from tests.support.engines import llama_model
from tests.support.families import CODER
from tests.support.formats import CLOCK, HELLO, Request, each_format
from tests.support.gguf import with_tokens
from tests.support.labs import manager_of, serving
from tests.support.models import MARKERS

pytestmark = pytest.mark.slow
WRITTEN = {f"call_{zone}": f"what the model wrote for {zone}" for zone in ("UTC", "CET")}


@pytest.fixture(scope="module")
def lab(tmp_path_factory, tiny_gguf):
    home = tmp_path_factory.mktemp("written-home")
    model = with_tokens(tiny_gguf, MARKERS, home / "coder.gguf", CODER)
    with serving(home, model, record="all") as lab:
        for id_, text in WRITTEN.items():
            call = (id_, CLOCK["name"], json.dumps({"zone": id_[-3:]}))
            llama_model(manager_of(lab)).tokenizer.chat_format.written.add("", "", [call], text, 0)
        yield lab


def turn(id_):
    function = {"name": CLOCK["name"], "arguments": json.dumps({"zone": id_[-3:]})}
    call = {"id": id_, "type": "function", "function": function}
    answer = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    return answer, {"role": "tool", "tool_call_id": id_, "content": "noon"}


@pytest.mark.parametrize("stream", [False, True])
@each_format("history")
def test_a_history_contains_the_calls_as_the_model_wrote_them(lab, http, form, stream):
    messages = [*HELLO, *(message for id_ in WRITTEN for message in turn(id_))]
    asked = Request(messages=messages, tools=[CLOCK], max_tokens=1)
    if stream or "http" not in form.can:
        form.streamed(http, asked)
    else:
        assert form.post(http, asked).status_code == 200
    prompt = http.post("/detokenize", json={"tokens": lab.requests[-1].prompt}).json()["content"]
    assert [text for text in WRITTEN.values() if text in prompt] == list(WRITTEN.values())
