"""Grammars are compiled once; one that cannot be compiled is refused with the reason. Grammars that crash the compiler
or run forever do so in the sandbox and are refused.
"""

import asyncio
import contextlib
import re

import psutil
import pytest

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.compile import CACHE_SIZE, GrammarCompiler
from lmx_lab.engine.sandbox import SandboxPool, shared_pool
from lmx_lab.errors import InvalidRequestError, QueueFullError
from tests.engine.grammar.grammars import CALL, PERSON, TOOLS, Reading, grammar_for, schema
from tests.support.asking import invalid
from tests.support.engines import matchers_of
from tests.support.waiting import auntil

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (schema({"type": "foo"}), "unknown value foo"),
        (schema({"$ref": "https://example.com/schema.json"}), "is another document"),
        (schema({"$ref": "#/$defs/no"}), "has no part #/$defs/no; correct it"),
        (schema({"items": {"type": "string", "minLength": "2"}}), 'items: minLength has the invalid value "2"; corr'),
        (schema({"anyOf": [{"type": "null"}, {"properties": {"a": None}}]}), "anyOf.1.properties.a: a schema must be"),
        (schema({"patternProperties": {"^a": True, "a$": True}}), "several keys of patternProperties; change"),
        (schema({"patternProperties": {"(": True}}), "patternProperties: regular expression: unclosed group"),
        (
            schema({"type": "string", "pattern": "^a.*$", "minLength": 90}),
            'lower it; leave out minLength, or send "str',
        ),
        (schema({"enum": []}), "is empty; add a value"),
        (schema({"type": "number", "multipleOf": 0}), "multipleOf must be above 0"),
        (schema({"minimum": 3, "maximum": 1, "type": "integer"}), "greater than maximum"),
        (schema(False), "schema is false"),
        (AnswerFormat(kind="regex", text="(a"), "unclosed group"),
        (AnswerFormat(kind="regex", text="(?=a)b"), "look-ahead"),
        (AnswerFormat(kind="regex", text=r"a\bb"), "^ and $ are only supported at the ends"),
        (AnswerFormat(kind="gbnf", text='root ::= "a"{3,2}'), "enforced: range end must be >= start"),
        (AnswerFormat(kind="lark", text="start: foo"), 'line 1, character 8: unknown name: "foo"'),
        (AnswerFormat(kind="lark", text=""), "no start rule"),
    ],
)
def test_a_format_that_cannot_be_enforced_is_refused_with_the_reason(compiler, bad, reason):
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as refused:
        matchers_of(compiler, grammar_for(bad))
    assert reason in refused.value.message
    assert refused.value.param == "response_format"
    assert not re.search(r"<state>|\n|\(And|JSON schema:", refused.value.message)


def test_the_tool_with_invalid_parameters_is_named(compiler):
    tools = ToolUse(tools=(*TOOLS.tools, Tool(name="odd", parameters={"not": {}})), forced=True)
    with invalid("tools.2.function.parameters", r"the tool 'odd'.*not"):
        matchers_of(compiler, grammar_for(None, tools), tools)


def test_a_refusal_is_cached(table):
    pool = SandboxPool()
    compiler = GrammarCompiler(lambda: table, pool=pool)
    bad = grammar_for(AnswerFormat(kind="regex", text="(never"))
    messages = []
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            matchers_of(compiler, bad)
        messages.append((refused.value.message, refused.value.param))
        # The second refusal comes from the cache, without a process.
        for pid in pool.pids:
            psutil.Process(pid).kill()
    assert messages[0] == messages[1]
    assert pool.starts == 1
    pool.close()
    with pytest.raises(InvalidRequestError, match="unclosed group"):
        compiler.known_matchers(bad, 1)


def test_an_optional_tool_may_have_a_schema_that_cannot_be_enforced(compiler, tokenizer):
    odd = (Tool(name="odd", parameters={"not": {}}), Tool(name="far", parameters={"$ref": "https://example.com/x"}))
    tools = ToolUse(tools=(*TOOLS.tools, *odd))
    text = grammar_for(None, tools)
    (matcher,) = matchers_of(compiler, text, tools)
    for call in (CALL, CALL.replace("weather", "odd").replace("city", "x"), CALL.replace("weather", "far")):
        copy = matcher.deep_copy()
        assert copy.try_consume_tokens(tokens := tokenizer.encode(call, add_special_tokens=False)) == len(tokens)
    assert matcher.try_consume_tokens(tokenizer.encode(CALL.replace("city", "town"), add_special_tokens=False)) < 20


def test_compiled_grammars_are_cached_within_a_limit(compiler):
    texts = [grammar_for(AnswerFormat(kind="regex", text=f"x{number}")) for number in range(CACHE_SIZE + 3)]
    for text in texts:
        matchers_of(compiler, text)
        # The first grammar is used repeatedly, so it stays in the cache.
        matchers_of(compiler, texts[0])
    assert [text for text in texts if compiler.known_matchers(text, 1) is None] == texts[1:4]


def test_a_grammar_of_several_requests_is_checked_once(compiler):
    good, bad = grammar_for(schema({"const": "twice"})), grammar_for(AnswerFormat(kind="regex", text="(twice"))

    async def ask_twice(text):
        return await asyncio.gather(*(compiler.matchers(text, 2) for _ in range(2)), return_exceptions=True)

    portal = shared_pool().portal
    assert [len(matchers) for matchers in portal.run(ask_twice(good))] == [2, 2]
    refusals = portal.run(ask_twice(bad))
    assert [type(refusal) for refusal in refusals] == [InvalidRequestError] * 2
    assert refusals[0].message == refusals[1].message


def test_a_grammar_that_takes_too_much_time_to_compile_is_refused(table, pool):
    hurried = GrammarCompiler(lambda: table, compile_s=0.0, pool=pool)
    with pytest.raises(InvalidRequestError, match=r"it takes 0\.\d s to compile; the limit is 0 s: simplify it"):
        matchers_of(hurried, grammar_for(schema(PERSON)))


def test_known_grammars_do_not_wait_for_the_compiler(compiler):
    grammar = grammar_for(schema({"const": "known"}))
    assert compiler.known_matchers(grammar, 2) is None
    matchers_of(compiler, grammar)
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
        matchers_of(compiler, grammar_for(AnswerFormat(kind=kind, text=text)))
    assert matchers_of(compiler, grammar_for(schema(PERSON)))


@pytest.mark.parametrize("links", [2000, 7000])
def test_long_chains_of_references_do_not_crash(compiler, tokenizer, links):
    chain = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(links)}
    chained = grammar_for(schema({"$defs": {**chain, f"d{links}": {"const": "x"}}, "$ref": "#/$defs/d0"}))
    with contextlib.suppress(InvalidRequestError):
        assert Reading(compiler, tokenizer, '"x"', chained).constraint.complete
    assert matchers_of(compiler, grammar_for(schema(PERSON)))


def test_only_the_grammar_that_crashes_the_sandbox_is_refused(table):
    pool = SandboxPool()
    compiler = GrammarCompiler(lambda: table, pool=pool)
    assert matchers_of(compiler, grammar_for(schema({"const": "before"})))
    slow = grammar_for(AnswerFormat(kind="regex", text="a?" * 30_000))
    (first,) = map(psutil.Process, pool.pids)
    started = first.cpu_times().user

    # The stack is large enough for every known grammar within the limits of a request: the processes are killed here.
    async def kill_process(number):
        await auntil(lambda: pool.starts == number and bool(pool.pids))
        (process,) = map(psutil.Process, pool.pids)
        # A process that is killed before it is ready is a failed start.
        await auntil(lambda: process.cpu_times().user > started + 0.1)
        process.kill()

    async def check():
        checking = asyncio.create_task(compiler.matchers(slow, 1))
        await kill_process(1)
        await kill_process(2)
        await checking

    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        pool.portal.run(check())
    assert matchers_of(compiler, grammar_for(schema({"const": "now"})))
    # The slow grammar may not have been the cause of the failures, so it is checked again.
    with pytest.raises(InvalidRequestError, match="longer than 2 s"):
        matchers_of(compiler, slow)
    pool.close()


def test_a_grammar_that_waits_too_long_for_others_is_refused(table):
    pool = SandboxPool(share_s=60.0, wait_s=-1.9)
    compiler = GrammarCompiler(lambda: table, pool=pool)

    async def check():
        slow = asyncio.create_task(compiler.matchers(grammar_for(AnswerFormat(kind="regex", text="a?" * 30_000)), 1))
        await auntil(lambda: bool(pool.pids))
        with pytest.raises(QueueFullError, match="because other grammars and schemas were checked first") as busy:
            await compiler.matchers(grammar_for(schema({"const": 1})), 1)
        assert busy.value.retry_after_s == 1
        await asyncio.wait([slow])
        slow.exception()

    pool.portal.run(check())
    pool.close()


def test_grammars_are_compiled_without_a_check_if_no_process_can_be_started(table, caplog):
    pool = SandboxPool(start_s=0.0)
    assert matchers_of(GrammarCompiler(lambda: table, pool=pool), grammar_for(schema({"const": "x"})))
    assert "no process could be started: it was not ready within 0 s" in caplog.text
    pool.close()
