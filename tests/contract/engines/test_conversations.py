"""Both engines write a conversation in a form that strict chat templates accept, and continue a message of the
assistant.
"""

import pytest

from lmx_lab.engine import ChatPrompt
from tests.contract.engines.entries import SETTINGS
from tests.support.asking import invalid
from tests.support.engines import entry_of, loaded, request, run
from tests.support.gguf import with_tokens
from tests.support.models import MARKERS, teach_thinking, write_tiny_llama

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
# Like those of Gemma and Mistral, but stricter: no system messages, and roles alternate from the first message on.
STRICT = """{% for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + ':' + message.content | trim + '<|im_end|>' }}
{%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"""
# System messages after the first message are dropped, calls need objects, and roles alternate except around calls.
CAREFUL = """{% set ns = namespace(turn=0) %}{% for message in messages %}
{%- if message.role == 'system' and loop.first %}[{{ message.content }}]
{%- elif message.role == 'tool' %}<{{ message.content }}>
{%- elif message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != (ns.turn % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- set ns.turn = ns.turn + 1 %}|{{ message.role }}:{{ message.content }}
{%- elif message.tool_calls %}{% for call in message.tool_calls %}
{%- for name, value in call.function.arguments.items() %}({{ call.function.name }} {{ name }}={{ value }}){% endfor %}
{%- endfor %}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson | length > 0 }}{% endif %}
{#- <tool_call> #}{% if add_generation_prompt %}|{% endif %}"""


def message(role, content, **fields):
    return {"role": role, "content": content, **fields}


def call(arguments, id="c1"):
    return {"type": "function", "id": id, "function": {"name": "look", "arguments": arguments}}


SYSTEM, ONE, TWO = message("system", "Be brief."), message("user", "one"), message("user", "two")
ANSWER = message("assistant", "yes")
CALLING = message("assistant", "", tool_calls=[call({"a": 1})])
RESULT = message("tool", "seen", tool_call_id="c1")


@pytest.fixture(scope="module", params=["mlx", "gguf"])
async def models(tmp_path_factory, smollm2, tiny_gguf, request):
    folder = tmp_path_factory.mktemp("strict")
    entries = {}
    for name, template in (("strict", STRICT), ("careful", CAREFUL)):
        path = folder / name
        if request.param == "mlx":
            write_tiny_llama(path, smollm2.path, seed=0)
            teach_thinking(path, template=template)
        else:
            path = with_tokens(tiny_gguf, MARKERS, folder / f"{name}.gguf", template)
        entries[name] = entry_of(path, name)
    async with (
        loaded(entries["strict"], SETTINGS) as strict,
        loaded(entries["careful"], SETTINGS) as careful,
    ):
        yield {"strict": strict, "careful": careful}


async def rendered(model, *messages, **fields):
    chat = request(prompt=ChatPrompt(messages=messages, **fields))
    return await model.model.render(chat)


def turns(*texts):
    roles = ["user", "assistant"] * len(texts)
    return "".join(f"<|im_start|>{role}:{text}<|im_end|>" for role, text in zip(roles, texts, strict=False))


@pytest.mark.parametrize(
    ("messages", "texts"),
    [
        ([ONE, ANSWER, TWO], ["one", "yes", "two"]),
        ([SYSTEM, ONE], ["Be brief.\n\none"]),
        ([SYSTEM], ["Be brief."]),
        ([SYSTEM, SYSTEM, ONE], ["Be brief.\n\nBe brief.\n\none"]),
        ([ONE, ANSWER, SYSTEM, TWO], ["one", "yes", "Be brief.\n\ntwo"]),
        ([ONE, TWO], ["one\n\ntwo"]),
        ([ONE, ANSWER, ANSWER, TWO], ["one", "yes\n\nyes", "two"]),
        ([ANSWER, ONE], ["", "yes", "one"]),
        ([SYSTEM, ANSWER, ONE], ["Be brief.", "yes", "one"]),
        (
            [ONE, CALLING, RESULT, TWO],
            [
                "one",
                '<tool_call>\n{"name": "look", "arguments": {"a": 1}}\n</tool_call>',
                "<tool_response>\nseen\n</tool_response>\n\ntwo",
            ],
        ),
    ],
)
async def test_a_template_of_alternating_roles_gets_any_conversation(models, messages, texts):
    assert await rendered(models["strict"], *messages) == f"{turns(*texts)}<|im_start|>assistant:"


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([SYSTEM, ONE], "[Be brief.]|user:one|"),
        ([ONE, ANSWER, SYSTEM, TWO], "|user:one|assistant:yes|user:Be brief.\n\ntwo|"),
        ([SYSTEM, ONE, TWO], "[Be brief.]|user:one\n\ntwo|"),
    ],
)
async def test_system_messages_that_a_template_would_drop_become_parts_of_the_next_message(models, messages, text):
    assert await rendered(models["careful"], *messages) == text


async def test_an_answer_continues_the_last_message(models):
    model = models["strict"]
    assert await rendered(model, ONE, message("assistant", "Well, "), continues=True) == (
        "<|im_start|>user:one<|im_end|><|im_start|>assistant:Well, "
    )
    prompt = ChatPrompt(messages=(ONE, message("assistant", "Well, ")), continues=True)
    _, report = await run(model, prompt=prompt, max_tokens=4, ignore_eos=True)
    assert (report.output_tokens, report.prompt_tokens) == (4, len(await model.model.encode(request(prompt=prompt))))


async def test_a_message_that_the_template_does_not_write_cannot_be_continued(models):
    with invalid("messages", "does not write the last message"):
        await rendered(models["careful"], ONE, message("other", "seen"), continues=True)
