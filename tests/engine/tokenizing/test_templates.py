"""Test the trial of chat templates with messages of several shapes before a load."""

import asyncio
import json
from functools import partial
from pathlib import Path

import pytest

from lmx_lab.engine.sandbox import SandboxPool, shared_pool
from lmx_lab.engine.tokenizing import template_worker
from lmx_lab.engine.tokenizing.templates import (
    SHAPES,
    TemplateBusyError,
    TemplateRefusalError,
    prepare_rendering,
    render,
    try_template,
    try_templates_of,
)
from lmx_lab.errors import UnusableModelError
from tests.support.waiting import auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PATH = Path("model")
TRIAL_S = 0.5


@pytest.mark.parametrize("number", range(len(SHAPES)))
async def test_a_template_that_never_ends_for_one_shape_is_refused(number):
    shape = SHAPES[number]
    tests = [
        f"messages | length == {len(shape['messages'])}",
        f"messages[-1].role == '{shape['messages'][-1]['role']}'",
        f"messages[0].role == '{shape['messages'][0]['role']}'",
        "tools" if "tools" in shape else "not tools",
    ]
    template = f"{{% if {' and '.join(tests)} %}}{ENDLESS}{{% endif %}}"
    with pytest.raises(
        UnusableModelError, match=r"model cannot be loaded: its chat template runs longer than the limit of 0\.5 s"
    ):
        await try_template(template, PATH, limit_s=TRIAL_S)


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 9 ** 11 }}"])
async def test_a_template_is_refused_by_its_time_or_memory(template):
    with pytest.raises(UnusableModelError, match="the limit of"):
        await try_template(template, PATH, limit_s=TRIAL_S)


async def test_a_template_that_refuses_messages_is_accepted():
    await try_template("{{ raise_exception('only users') }}{{ nothing.at.all }}", PATH)


async def test_a_template_that_was_accepted_is_not_tried_again():
    template = "{{ 'tried once' }}"
    await try_template(template, PATH)
    await try_template(template, PATH, limit_s=0.0)


async def test_a_process_that_was_started_in_advance_renders_the_first_template():
    shared_pool.cache_clear()
    prepare_rendering()
    await try_template("{{ 'started in advance' }}", PATH)
    assert shared_pool().starts == 1


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", ENDLESS),
        ("chat_template.json", json.dumps({"chat_template": ENDLESS})),
        ("tokenizer_config.json", json.dumps({"chat_template": ENDLESS})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "tool_use", "template": ENDLESS}]})),
    ],
)
async def test_templates_are_found_where_models_have_them(tmp_path, name, content):
    await try_templates_of(tmp_path)
    (tmp_path / name).write_text(content)
    with pytest.raises(UnusableModelError, match="runs longer"):
        await try_templates_of(tmp_path, limit_s=TRIAL_S)


async def test_a_template_that_waits_too_long_for_other_slow_ones_is_refused():
    pool = SandboxPool(share_s=60.0, wait_s=0.1)
    slow = asyncio.create_task(render(ENDLESS, {}, limit_s=60.0, pool=pool))
    await auntil(lambda: bool(pool.pids))
    with pytest.raises(TemplateBusyError, match=r"other slow templates were rendered for 0\.1 s"):
        await render("{{ 1 }}", {}, limit_s=0.1, pool=pool)
    # A template that was not tried is not accepted.
    with pytest.raises(UnusableModelError, match="model cannot be loaded now: other slow templates were rendered"):
        await try_template("{{ 'busy' }}", PATH, limit_s=0.1, pool=pool)
    slow.cancel()
    await asyncio.wait([slow])
    pool.close()
    with pytest.raises(TemplateRefusalError, match="no process could be started for it"):
        await render("{{ 1 }}", {}, pool=pool)


async def test_variables_that_cannot_be_written_are_refused():
    endless = []
    endless.append(endless)
    with pytest.raises(TemplateRefusalError, match="cannot be written as JSON"):
        await render("{{ a }}", {"a": endless})


# The worker renders templates as transformers does. It is called in this process.


def render_here(template, **variables):
    return json.loads(template_worker.handle(json.dumps({"template": template, "variables": variables}).encode()))


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{% for word in words %}\n  {% if word == 'b' %}{% break %}{% endif %}\n{{ word }}!{% endfor %}", "a!"),
        ("<{% generation %}{{ words[1] }}{% endgeneration %}>", "<b>"),
        ("{{ {'a': '<é'} | tojson }}", '{"a": "<é"}'),
        ("{% set ns = namespace(a=1) %}{% set ns.a = ns.a + 1 %}{{ ns.a }}", "2"),
        ("{{ dict(a=1).a }}{{ dict.fromkeys(words) | length }}", "12"),
        ("{{ strftime_now('%d.%m') | length }}", "5"),
    ],
)
def test_a_template_can_use_what_chat_templates_are_written_for(template, text):
    assert render_here(template, words=["a", "b"]) == {"text": text}


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only users') }}", "only users"),
        ("{{ raise_exception('x' * 5000) }}", "x" * template_worker.MAX_ERROR_CHARACTERS),
        ("{{ namespace(__class__=1) }}", "a namespace cannot have '__class__': names must not begin with _"),
        ("{% set ns = namespace() %}{% set ns._a = 1 %}", "a namespace cannot have '_a': names must not begin with _"),
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe."),
        ("{% for %}", "Expected an expression, got 'end of statement block'"),
    ],
)
def test_an_error_of_a_template_is_its_message(template, message):
    assert render_here(template) == {"error": message}


def test_a_template_that_exceeds_a_limit_is_reported():
    assert "memory" in render_here("{{ 'x' * size }}", size=10**18)["limit"]
    assert render_here("{% for n in range(99999) %}{{ 'x' * 999 }}{% endfor %}") == {
        "limit": "writes more than the limit of 16777216 characters"
    }
    of_ten = partial(template_worker.render, max_characters=10)
    assert of_ten("{% for n in range(5) %}{{ n }}{{ n }}{% endfor %}", {}) == "0011223344"
    with pytest.raises(template_worker.OutputTooLongError):
        of_ten("{% for n in range(6) %}{{ n }}{{ n }}{% endfor %}", {})
