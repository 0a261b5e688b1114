"""Scripts contain answers in order; errors name the line and the problem."""

import json
import os
from pathlib import Path

import pytest

from lmx_lab.engine.echo.script import FAILURES, ScriptAnswer, read_script
from lmx_lab.errors import QueueFullError, UnusableModelError

FULL = {
    "text": "It is noon.",
    "reasoning": "Look.",
    "tool_calls": [{"name": "clock", "arguments": {"zone": "UTC"}}, {"name": "wait"}],
    "delay_s": 0.5,
    "tokens_per_s": 20,
}


def write_script(tmp_path, text):
    path = tmp_path / "answers.jsonl"
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("text", ['"one"\n\n{"text": "two"}\n', '\ufeff["one",\n {"text": "two"}]'])
def test_a_script_is_lines_or_an_array(tmp_path, text):
    script = read_script(write_script(tmp_path, text))
    first, second = script.take(), script.take()
    assert (first.text, second.text, script.take()) == ("one", "two", None)


def test_an_answer_that_is_put_back_is_the_next_one(tmp_path):
    script = read_script(write_script(tmp_path, '"one"\n"two"'))
    first = script.take()
    script.give_back(first)
    script.give_back(None)
    assert script.take() is first


def test_an_answer_is_converted_to_the_text_that_a_model_generates(tmp_path):
    answer = read_script(write_script(tmp_path, json.dumps(FULL))).take()
    assert (answer.delay_s, answer.tokens_per_s) == (0.5, 20)
    assert answer.as_model_text == (
        "<think>Look.</think>It is noon.\n"
        '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "wait", "arguments": {}}\n</tool_call>'
    )


def test_an_error_has_the_class_of_its_code():
    failure = ScriptAnswer(location="line 1", error="later", code="queue-full").failure()
    assert isinstance(failure, QueueFullError)
    assert (failure.message, failure.retry_after_s) == ("later", 1)
    assert all(failure.code == code for code, failure in FAILURES.items())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{nothing", r"line 2, column 2: this is not JSON: Expecting property name"),
        ('["one"', r"line 2, column 7: this is not JSON"),
        ("[" * 100_000, r"line 2: this is not JSON"),
        ("17", r"line 2: an answer must be a string or an object, not 17"),
        ('{"txt": "a"}', r'line 2: "txt" is not a key of an answer; the keys are text, reasoning, tool_calls'),
        ('{"delay_s": 1}', r"line 2: the answer is empty; give it a text, tool_calls or an error"),
        ('{"text": 5}', r"line 2: text is 5; it must be a string"),
        ('"\\ud800"', r"line 2: text has a lone surrogate"),
        ('{"text": "a", "delay_s": -1}', r"line 2: delay_s is -1; it must be 0 to 3600"),
        ('{"text": "a", "delay_s": true}', r"line 2: delay_s is true; it must be a number"),
        ('{"text": "a", "tokens_per_s": NaN}', r"line 2: this is not JSON: NaN is not a JSON number"),
        ('{"tool_calls": {"name": "x"}}', r'line 2: tool_calls is {"name": "x"}; it must be a list'),
        ('{"tool_calls": [{"name": "x"}, {"nam": "y"}]}', r'line 2: tool_calls\[1\] is {"nam": "y"}; it must be'),
        ('{"tool_calls": [{"name": "", "arguments": {}}]}', r"line 2: tool_calls\[0\] is"),
        ('{"error": "a", "code": "nope"}', r'line 2: code is "nope"; with an error it can be internal-error'),
        ('{"text": "a", "code": "queue-full"}', r'line 2: code is "queue-full"; with an error'),
    ],
)
def test_an_invalid_line_is_named_with_its_problem(tmp_path, line, problem):
    path = write_script(tmp_path, f'"fine"\n{line}\n')
    with pytest.raises(UnusableModelError, match=problem) as refused:
        read_script(path)
    assert f"the script {path} (echo_script)" in refused.value.message


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UnusableModelError, match=r"nowhere \(echo_script\): it cannot be read: No such file"):
        read_script(tmp_path / "nowhere")
    (tmp_path / "latin").write_bytes(b'"fine"\n"caf\xe9"\n')
    with pytest.raises(UnusableModelError, match=r"line 2 is not UTF-8"):
        read_script(tmp_path / "latin")


@pytest.mark.parametrize("make", [os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")])
def test_a_script_that_is_not_a_regular_file_is_refused_at_once(make, tmp_path):
    make(tmp_path / "script.json")
    with pytest.raises(UnusableModelError, match="not a regular file"):
        read_script(tmp_path / "script.json")
