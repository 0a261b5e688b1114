"""Test the trial of chat templates with messages of several shapes before a load."""

import json
import threading
from pathlib import Path

import pytest

from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.tokenizing import templates
from lmx_lab.engine.tokenizing.templates import (
    SHAPES,
    TemplateLimitError,
    TemplateRefusalError,
    TemplateSandbox,
    prepared_trial,
    try_template,
    try_templates_of,
)
from lmx_lab.errors import NotLoadedError, UnusableModelError

pytestmark = pytest.mark.slow
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
PATH = Path("model")


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch):
    monkeypatch.setattr(templates, "TRIAL_S", 0.5)


@pytest.mark.parametrize("number", range(len(SHAPES)))
def test_a_template_that_never_ends_for_one_shape_is_refused(number):
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
        try_template(template, PATH, Cancellation())


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{{ 'x' * 9 ** 11 }}"])
def test_a_template_is_refused_by_its_time_or_memory(template):
    with pytest.raises(UnusableModelError, match="the limit of"):
        try_template(template, PATH, Cancellation())


def test_a_template_that_refuses_messages_is_accepted():
    try_template("{{ raise_exception('only users') }}{{ nothing.at.all }}", PATH, Cancellation())


def test_a_process_that_was_started_in_advance_is_used_once_and_ended():
    with prepared_trial():
        (sandbox,) = templates._prepared
        try_template("{{ 'started in advance' }}", PATH, Cancellation())
        assert (templates._prepared, sandbox._usual.process.starts) == ([], 1)
    with prepared_trial():
        (sandbox,) = templates._prepared
    with pytest.raises(TemplateLimitError, match="ended the process"):
        sandbox.render("{{ 1 }}", {})


def test_a_trial_can_be_cancelled(monkeypatch):
    monkeypatch.setattr(templates, "TRIAL_S", 60.0)
    cancellation = Cancellation()
    threading.Timer(0.3, cancellation.cancel).start()
    with pytest.raises(NotLoadedError, match="cancelled"):
        try_template(ENDLESS, PATH, cancellation)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("chat_template.jinja", ENDLESS),
        ("chat_template.json", json.dumps({"chat_template": ENDLESS})),
        ("tokenizer_config.json", json.dumps({"chat_template": ENDLESS})),
        ("tokenizer_config.json", json.dumps({"chat_template": [{"name": "tool_use", "template": ENDLESS}]})),
    ],
)
def test_templates_are_found_where_models_have_them(tmp_path, name, content):
    try_templates_of(tmp_path, Cancellation())
    (tmp_path / name).write_text(content)
    with pytest.raises(UnusableModelError, match="runs longer"):
        try_templates_of(tmp_path, Cancellation())


def test_a_slow_template_does_not_delay_others():
    sandbox, ended = TemplateSandbox(20.0), threading.Event()

    def render_slow():
        with pytest.raises((TemplateLimitError, TemplateRefusalError)):
            sandbox.render(ENDLESS, {})
        ended.set()

    slow = threading.Thread(target=render_slow)
    slow.start()
    try:
        assert [sandbox.render("{{ a }}", {"a": number}) for number in range(5)] == list("01234")
        assert not ended.is_set()
    finally:
        sandbox._slow.process.stop()
        slow.join()
        sandbox.stop()
