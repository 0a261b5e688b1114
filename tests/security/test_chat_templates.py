"""Tests that malicious chat templates are limited and do not affect other requests."""

import json
import threading
from functools import partial

import httpx2
import psutil
import pytest
from jinja2 import TemplateError
from mlx_lm import tokenizer_utils

from lmx_lab.engine.llama_cpp import engine as engine_module
from lmx_lab.engine.llama_cpp.process import SCRIPT
from lmx_lab.engine.mlx import memory
from lmx_lab.engine.sandbox import SandboxPool, shared_pool
from lmx_lab.engine.tokenizing.templates import TemplateLimitError, TemplateRefusalError, render, render_chat
from lmx_lab.errors import OutOfMemoryError, UnusableModelError
from tests.support.families import FAMILIES
from tests.support.gguf import with_template
from tests.support.labs import manager_of, serving
from tests.support.models import THINKER_TEMPLATE, teach_thinking, write_tiny_llama

pytestmark = pytest.mark.slow
LIMIT_S = 0.5
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
# Without limits, each would block or exhaust the machine: by time, by memory, or within a single operation.
MALICIOUS = {
    "a loop": ENDLESS,
    "a recursion of macros": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "a long multiplication": "{{ (7 ** 999999999) % 7 }}",
    "a long text": "{{ 'x' * 99999999999 }}",
    "a long list": "{{ ([1] * 99999999999) | length }}",
    "a doubling": "{% set ns = namespace(s='x') %}{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "a wide field": "{{ '%99999999999d' % 1 }}",
    "a wide format": "{{ '{:>99999999999}'.format(1) }}",
    "a wide filter": "{{ 'x' | center(99999999999) }}",
    "a wide method": "{{ 'x'.ljust(99999999999) }}",
    "a deep indent": "{{ [1] | tojson(indent=9999999999) }}",
    "a large batch": "{{ [1] | batch(9999999999, 0) | list | length }}",
    "a fine rounding": "{{ 1.5 | round(999999999, 'ceil') }}",
    "a long output": "{% for a in range(99999) %}{{ 'x' * 999 }}{% endfor %}",
    "a long message": "{{ raise_exception('x' * 99999999) }}",
}
# Operations that Jinja's sandbox or ours forbids.
FORBIDDEN = {
    "Python's inside": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "the globals of a function": "{{ raise_exception.__globals__ }}",
    "the inside by a filter": "{{ '' | attr('__class__') }}",
    "the inside by a format": "{{ '{0.__class__}'.format('') }}",
    "a namespace's inside": "{{ namespace(__class__=1) }}",
    "the machine's files": "{% include '/etc/passwd' %}",
    "another's list": "{{ messages.append(1) }}",
}


@pytest.fixture(scope="module")
def rendered():
    """Render a template with a short time limit."""
    pool = SandboxPool()
    yield lambda template, variables: pool.portal.run(render(template, variables, limit_s=LIMIT_S, pool=pool))
    pool.close()


@pytest.mark.parametrize("what", MALICIOUS)
def test_a_malicious_template_is_stopped_at_a_limit_and_the_next_one_is_rendered(rendered, what):
    before = psutil.Process().memory_info().rss
    with pytest.raises((TemplateLimitError, TemplateRefusalError)) as caught:
        rendered(MALICIOUS[what], {})
    assert len(str(caught.value)) <= 1100
    assert psutil.Process().memory_info().rss - before < 2**29
    assert rendered("{{ word }}", {"word": "hello"}) == "hello"


@pytest.mark.parametrize("what", FORBIDDEN)
def test_forbidden_operations_are_rejected(rendered, what):
    try:
        shown = rendered(FORBIDDEN[what], {"messages": []})
    except TemplateRefusalError:
        return
    assert shown in ("", "None")


# Comparison with transformers

CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "<where> & ü"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "d", "parameters": CITY}}
CALL = {"id": "abcdefgh1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich 🏔"}}}
CONVERSATION = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "Hi\n"},
    {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [CALL]},
    {"role": "tool", "content": "{}", "tool_call_id": "abcdefgh1", "name": None},
    {"role": "user", "content": "  ü \u2028 {{ 7 }} "},
]
FEATURES = """\
{{- bos_token }}
{%- set ns = namespace(n=0, last=none) -%}
{% for message in messages %}
    {% if message.role == 'tool' %}{% continue %}{% endif %}
    {% set ns.n = ns.n + 1 %}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
    {{- message | tojson(indent=2) }} {{ message.thinking | default('-') }} {{ message.name is defined }}
    {% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ ns.n }} {{ dict(a=1) | tojson }} {{ dict.fromkeys(['a'], 1) }} {{ strftime_now('%Y')[:2] }} {{ tools | tojson }}
{%- if documents is not none %}documents{% endif %} {{ enable_thinking }} {{ messages[::-1][0].content | upper }}
{{- (tools[0].function.parameters | tojson(ensure_ascii=true)) if tools else '' }}
{%- for key, value in messages[0].items() | sort %} {{ key }}={{ value }}{% endfor %}
{%- if add_generation_prompt %}>{% endif %}"""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, smollm2):
    folder = tmp_path_factory.mktemp("m") / "m"
    write_tiny_llama(folder, smollm2.path, seed=0)
    teach_thinking(folder)
    return tokenizer_utils.load(folder)


TEMPLATES = {"all": FEATURES, "thinker": THINKER_TEMPLATE, **{name: each.template for name, each in FAMILIES.items()}}


@pytest.mark.parametrize("turns", [2, 5])
@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_are_rendered_as_by_transformers(tokenizer, name, turns):
    tokenizer.chat_template = TEMPLATES[name]
    options = {"tools": [WEATHER] if turns > 2 else None, "add_generation_prompt": True, "own": "x"}
    shown = [
        outcome(partial(tokenizer.apply_chat_template, CONVERSATION[:turns], tokenize=False, **options)),
        outcome(lambda: shared_pool().portal.run(render_chat(tokenizer, CONVERSATION[:turns], **options))),
    ]
    assert shown[0] == shown[1]


def outcome(render):
    """Return the text, or the error message of the template."""
    try:
        return str(render())
    except (TemplateRefusalError, TemplateError) as exc:
        return f"refused: {exc}"


# A server with a malicious template

TRIGGER = "please loop"
LOOP = f"{{% if '{TRIGGER}' in m.content %}}{ENDLESS}{{% endif %}}"
SOMETIMES = f"{{% for m in messages %}}{LOOP}{{{{ m.content }}}}{{% endfor %}}"


@pytest.fixture(scope="module")
def malicious_home(tmp_path_factory, smollm2):
    """Write models: the template of ``always`` never ends, the one of ``sometimes`` only for some requests."""
    home = tmp_path_factory.mktemp("hostile-home")
    for name, template in (("always", ENDLESS), ("sometimes", SOMETIMES)):
        write_tiny_llama(home / "models" / name, smollm2.path, seed=0)
        config = home / "models" / name / "tokenizer_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return home


@pytest.fixture(scope="module")
def malicious_lab(malicious_home):
    with serving(malicious_home, "sometimes", slots=4) as lab:
        yield lab


@pytest.mark.long
def test_a_template_that_never_ends_is_rejected_when_the_model_is_loaded(malicious_lab):
    with pytest.raises(UnusableModelError, match=r"its chat template runs longer than the limit of 2 s"):
        malicious_lab.load("always")
    assert manager_of(malicious_lab).snapshot.model == "sometimes"


def test_other_requests_are_answered_while_a_template_loops(malicious_lab):
    with httpx2.Client(base_url=malicious_lab.url, timeout=60) as http:
        ended = []

        def loop():
            body = {"model": "sometimes", "messages": [{"role": "user", "content": TRIGGER}], "max_tokens": 1}
            answer = httpx2.post(f"{malicious_lab.url}/v1/chat/completions", json=body, timeout=60)
            ended.append((answer.status_code, answer.json()))

        asking = threading.Thread(target=loop)
        asking.start()
        answered = 0
        while asking.is_alive():
            assert http.get("/healthz").status_code == 200
            plain = http.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "model": "sometimes"})
            assert plain.status_code == 200
            answered += not ended
        asking.join()
        (status, body), error = ended[0], ended[0][1]["error"]
        assert (status, error["code"], error["param"]) == (400, "invalid-request", "messages")
        assert "sometimes" in body["error"]["message"]
        assert "the limit of 5 s" in body["error"]["message"]
        assert answered >= 3
        chat = {"model": "sometimes", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
        assert http.post("/v1/chat/completions", json=chat).status_code == 200


# Templates of GGUF files


@pytest.fixture(scope="module")
def gguf_lab(tmp_path_factory, tiny_gguf):
    with serving(tmp_path_factory.mktemp("home"), None) as lab:
        yield lab, with_template(tiny_gguf, SOMETIMES, tmp_path_factory.mktemp("gguf"))


def test_a_gguf_template_that_never_ends_is_rejected_before_the_load(gguf_lab, tiny_gguf, tmp_path):
    for template, words in ((ENDLESS, "runs longer than"), (MALICIOUS["a long text"], "MB of memory")):
        with pytest.raises(UnusableModelError, match=f"its chat template .*{words}"):
            gguf_lab[0].load(str(with_template(tiny_gguf, template, tmp_path)))


def test_a_gguf_template_that_never_ends_when_its_format_is_detected_is_rejected(gguf_lab, tiny_gguf, tmp_path):
    template = f"{{% if messages[0].content == 'probe' %}}{ENDLESS}{{% endif %}}{{{{ messages[0].content }}}}"
    with pytest.raises(UnusableModelError, match="its chat template runs longer than the limit of 5 s"):
        gguf_lab[0].load(str(with_template(tiny_gguf, template, tmp_path)))
    assert llama_processes() == []


def test_a_llama_cpp_process_that_uses_too_much_memory_during_a_load_is_stopped(gguf_lab, tiny_gguf, monkeypatch):
    limit = memory.limit_bytes(None)
    monkeypatch.setattr(engine_module, "EXTRA_BYTES", 2**20 - limit - limit // 10)
    with pytest.raises(OutOfMemoryError, match=r"used more than .* GB of memory"):
        gguf_lab[0].load(str(tiny_gguf))


def chat(text):
    return {"model": "default", "messages": [{"role": "user", "content": text}], "max_tokens": 1}


def llama_processes():
    return [it for it in psutil.Process().children() if it.cmdline()[2:3] == [str(SCRIPT)]]


def test_a_request_whose_gguf_template_loops_is_refused(gguf_lab, caplog):
    lab, path = gguf_lab
    lab.load(str(path))
    before = llama_processes()
    with httpx2.Client(base_url=lab.url, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json=chat(TRIGGER), headers={"x-request-id": "the-cause"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "runs longer than the limit of 5 s" in answer.text
        assert http.post("/v1/chat/completions", json=chat("hello")).status_code == 200
    assert llama_processes() == before
    assert answer.headers["x-request-id"] in caplog.text


def test_llama_cpp_does_not_render_the_template_of_a_file(gguf_lab, tiny_gguf, tmp_path):
    lab, _ = gguf_lab
    # The sandbox refuses the underscore, but llama.cpp does not, and would render the rest while it loads.
    lab.load(str(with_template(tiny_gguf, f"{{% set ns = namespace(_a=1) %}}{ENDLESS}", tmp_path)))
    with httpx2.Client(base_url=lab.url, timeout=60) as http:
        answer = http.post("/v1/chat/completions", json=chat("hello"))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
        assert "names must not begin with _" in answer.text
        prompt = {"model": "default", "prompt": "hello", "max_tokens": 1}
        assert http.post("/v1/completions", json=prompt).status_code == 200
