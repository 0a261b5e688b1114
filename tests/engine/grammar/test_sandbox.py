"""GrammarCompiler that crash the compiler or run forever do so in the sandbox and are refused."""

import contextlib

import pytest

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.grammar.compile import GrammarCompiler
from lmx_lab.engine.grammar.sandbox import GrammarSandbox
from lmx_lab.errors import InvalidRequestError, QueueFullError
from tests.engine.grammar.grammars import PERSON, Reading, grammar_for, schema

pytestmark = pytest.mark.slow
AMBIGUOUS = 'start: s\ns: s s | s s s | /[a-z]+/ | " "'


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (AnswerFormat(kind="lark", text=AMBIGUOUS), "Too many items|longer than 2 s|ms to check"),
        (AnswerFormat(kind="regex", text="a?" * 30_000), "longer than 2 s"),
    ],
    ids=["ambiguous", "optional"],
)
def test_a_grammar_that_takes_too_long_is_refused(compiler, bomb, reason):
    with pytest.raises(InvalidRequestError, match=reason):
        compiler.matchers(grammar_for(bomb), 1)
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
    assert process is not None
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
    assert process is not None
    assert process.poll() is None
    sandbox.close()
    assert process.poll() is not None
