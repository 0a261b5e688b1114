"""The worker of the template sandbox renders chat templates as transformers does. It is called in this process."""

import json
from functools import partial

import pytest

from lmx_lab.engine.tokenizing import template_worker


def render(template, **variables):
    answer = json.loads(template_worker.handle(json.dumps({"template": template, "variables": variables}).encode()))
    return answer


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
    assert render(template, words=["a", "b"]) == {"text": text}


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
    assert render(template) == {"error": message}


def test_a_template_that_exceeds_a_limit_is_reported():
    assert "memory" in render("{{ 'x' * size }}", size=10**18)["limit"]
    assert render("{% for n in range(99999) %}{{ 'x' * 999 }}{% endfor %}") == {
        "limit": "writes more than the limit of 16777216 characters"
    }
    of_ten = partial(template_worker.render, max_characters=10)
    assert of_ten("{% for n in range(5) %}{{ n }}{{ n }}{% endfor %}", {}) == "0011223344"
    with pytest.raises(template_worker.OutputTooLongError):
        of_ten("{% for n in range(6) %}{{ n }}{{ n }}{% endfor %}", {})
