"""Grammars are compiled once; one that cannot be compiled is refused with the reason. Grammars that crash the compiler
or run forever do so in the sandbox and are refused.
"""

import contextlib

import pytest

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.compile import CACHE_SIZE, GrammarCompiler, GrammarSandbox
from lmx_lab.errors import InvalidRequestError, QueueFullError
from tests.engine.grammar.grammars import CALL, PERSON, TOOLS, Reading, grammar_for, schema

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (schema({"type": "foo"}), "Invalid type: foo"),
        (schema({"$ref": "https://example.com/schema.json"}), "does not fetch"),
        (schema({"$ref": "#/$defs/no"}), "does not exist"),
        (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
        (schema({"minimum": 3, "maximum": 1, "type": "integer"}), "greater than maximum"),
        (schema(False), "schema is false"),
        (AnswerFormat(kind="regex", text="(a"), "unclosed group"),
        (AnswerFormat(kind="regex", text="(?=a)b"), "look-ahead"),
        (AnswerFormat(kind="lark", text="start: foo"), 'unknown name: "foo"'),
        (AnswerFormat(kind="lark", text=""), "no start rule"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_with_the_reason(compiler, bad, reason):
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as refused:
        compiler.matchers(grammar_for(bad), 1)
    assert reason in refused.value.message
    assert refused.value.param == "response_format"
    assert "<state>" not in refused.value.message


def test_the_tool_with_invalid_parameters_is_named(compiler):
    tools = ToolUse(tools=(*TOOLS.tools, Tool(name="odd", parameters={"not": {}})), forced=True)
    with pytest.raises(InvalidRequestError, match=r"the tool 'odd'.*not") as refused:
        compiler.matchers(grammar_for(None, tools), 1, tools)
    assert refused.value.param == "tools.2.function.parameters"


def test_a_refusal_is_cached(compiler, sandbox):
    bad = grammar_for(AnswerFormat(kind="regex", text="(never"))
    messages = []
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            compiler.matchers(bad, 1)
        messages.append((refused.value.message, refused.value.param))
        # The second time, no process is started.
        sandbox._process.stop()
    assert messages[0] == messages[1]
    assert not sandbox._process.is_running


def test_an_optional_tool_may_have_a_schema_that_cannot_be_enforced(compiler, tokenizer):
    odd = (Tool(name="odd", parameters={"not": {}}), Tool(name="far", parameters={"$ref": "https://example.com/x"}))
    tools = ToolUse(tools=(*TOOLS.tools, *odd))
    text = grammar_for(None, tools)
    (matcher,) = compiler.matchers(text, 1, tools)
    for call in (CALL, CALL.replace("weather", "odd").replace("city", "x"), CALL.replace("weather", "far")):
        copy = matcher.deep_copy()
        assert copy.try_consume_tokens(tokens := tokenizer.encode(call, add_special_tokens=False)) == len(tokens)
    assert matcher.try_consume_tokens(tokenizer.encode(CALL.replace("city", "town"), add_special_tokens=False)) < 20


def test_compiled_grammars_are_cached_within_a_limit(compiler):
    text = grammar_for(schema(PERSON))
    compiler.matchers(text, 1)
    kept = compiler._compiled[text]
    compiler.matchers(text, 1)
    assert compiler._compiled[text] is kept
    for number in range(CACHE_SIZE + 3):
        compiler.matchers(grammar_for(AnswerFormat(kind="regex", text=f"x{number}")), 1)
    assert len(compiler._compiled) == CACHE_SIZE


def test_known_grammars_do_not_wait_for_the_compiler(compiler):
    grammar = grammar_for(schema({"const": "known"}))
    assert compiler.known_matchers(grammar, 2) is None
    compiler.matchers(grammar, 1)
    assert len(compiler.known_matchers(grammar, 2) or ()) == 2


# The sandbox


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("lark", 'start: s\ns: s s | s s s | /[a-z]+/ | " "', "Too many items|longer than 2 s|ms to check"),
        ("regex", "a?" * 30_000, "longer than 2 s"),
    ],
    ids=["ambiguous", "optional"],
)
def test_a_grammar_that_takes_too_long_is_refused(compiler, kind, text, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.matchers(grammar_for(AnswerFormat(kind=kind, text=text)), 1)
    assert compiler.matchers(grammar_for(schema(PERSON)), 1)


@pytest.mark.parametrize("links", [2000, 7000])
def test_long_chains_of_references_do_not_crash(compiler, tokenizer, links):
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(links)}
    chained = grammar_for(schema({"$defs": {**chain, f"d{links}": {"const": "x"}}, "$ref": "#/$defs/d0"}))
    with contextlib.suppress(InvalidRequestError):
        assert Reading(compiler, tokenizer, '"x"', chained).constraint.complete
    assert compiler.matchers(grammar_for(schema(PERSON)), 1)


def test_only_the_grammar_that_crashes_the_sandbox_is_refused(compiler, sandbox):
    assert compiler.matchers(grammar_for(schema({"const": "before"})), 1)
    # The stack is large enough for every known grammar within the limits of a request, so the process is killed here.
    process = sandbox._process._process
    process.kill()
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        compiler.matchers(grammar_for(schema({"const": "now"})), 1)
    assert compiler.matchers(grammar_for(schema({"const": "now"})), 1)


def test_a_slow_grammar_is_refused_while_others_wait(compiler):
    hurried = GrammarSandbox(has_waiting=lambda: True)
    with pytest.raises(QueueFullError, match="other requests wait") as busy:
        GrammarCompiler(compiler._table, hurried).matchers(
            grammar_for(AnswerFormat(kind="regex", text="a?" * 30_000)), 1
        )
    assert busy.value.retry_after_s == 1
    hurried.close()


def test_closing_the_sandbox_ends_its_process(compiler):
    sandbox = GrammarSandbox()
    GrammarCompiler(compiler._table, sandbox).matchers(grammar_for(schema({"const": "x"})), 1)
    process = sandbox._process._process
    assert process.poll() is None
    sandbox.close()
    assert process.poll() is not None
