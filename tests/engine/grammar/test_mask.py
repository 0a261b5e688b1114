"""Grammars, masks and budgets over a real vocabulary, without a model."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import tokenizer_utils

from lmx_lab.engine import AnswerFormat, Tool, ToolUse
from lmx_lab.engine.grammar.build import Thoughts, grammar
from lmx_lab.engine.grammar.compile import KEPT, Grammars, words_of
from lmx_lab.engine.grammar.mask import Constraint
from lmx_lab.engine.grammar.sandbox import compiled, tokenizer_of
from lmx_lab.engine.grammar.trials import Trials
from lmx_lab.engine.mlx.sampling import ConstrainedSampler
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.values.models import ModelEntry

WIDTH = 49152
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = ToolUse(tools=(Tool(name="weather", parameters=CITY), Tool(name="time-of", parameters={"type": "object"})))
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHTS = Thoughts(start=("<think>",), end=("</think>",), open=False)
OPEN = Thoughts(start=("<think>",), end=("</think>",), open=True)


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelEntry) -> Any:
    return tokenizer_utils.load(smollm2.path)


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    trials = Trials()
    yield trials
    trials.end()


@pytest.fixture(scope="module")
def grammars(tokenizer: Any, trials: Trials) -> Grammars:
    return Grammars(words_of(tokenizer, width=WIDTH, markers=set()), trials)


def schema(value: Any) -> AnswerFormat:
    return AnswerFormat(kind="json_schema", text=json.dumps(value))


def made(answer_format: AnswerFormat | None, tools: ToolUse | None = None, thoughts: Thoughts | None = None) -> str:
    text = grammar(answer_format, tools, thoughts, markers={})
    assert text is not None
    return text


class Reading:
    """A text fed to a grammar token by token, as far as its masks allow."""

    def __init__(self, grammars: Grammars, tokenizer: Any, text: str, grammar: str) -> None:
        (matcher,) = grammars.matchers(grammar, 1)
        self.constraint = Constraint(matcher, None)
        self.read = ""
        tokens = tokenizer.encode(text, add_special_tokens=False)
        for at, token in enumerate(tokens):
            mask = self.constraint.mask(WIDTH)
            if mask is None or not mask[token]:
                break
            self.constraint.advance(token)
            self.read = tokenizer.decode(tokens[: at + 1])
        mask = self.constraint.mask(WIDTH)
        self.may_end = self.constraint.complete or (mask is not None and bool(mask[2]))
        self.allowed = 0 if mask is None else int(mask.sum())


@pytest.mark.parametrize(
    "text",
    ['{"name": "Bob", "age": 4}', '{"name":"Bob","age":4}', '{\n  "name": "B\\"ob",\n  "age": 4\n}'],
)
def test_json_is_read_however_it_is_spaced(grammars: Grammars, tokenizer: Any, text: str) -> None:
    reading = Reading(grammars, tokenizer, text, made(schema(PERSON)))
    assert (reading.read, reading.constraint.complete) == (text, True)


@pytest.mark.parametrize(
    ("text", "read"),
    [
        ('{"name": 4', '{"name":'),
        ('{"age"', '{"'),
        ("Sure: {", ""),
        ('{"name": "Bob", "age": 4, "x": 1}', '{"name": "Bob", "age": 4'),
    ],
)
def test_what_is_not_in_the_schema_cannot_be_said(grammars: Grammars, tokenizer: Any, text: str, read: str) -> None:
    assert Reading(grammars, tokenizer, text, made(schema(PERSON))).read.rstrip() == read


@pytest.mark.parametrize("text", ["{" + " " * 100, "{" + "\n" * 10, '{"name": "Bob",' + "\n \n \n \n", " " * 30 + "{"])
def test_white_space_is_not_endless(grammars: Grammars, tokenizer: Any, text: str) -> None:
    assert len(Reading(grammars, tokenizer, text, made(schema(PERSON))).read) < len(text)


def test_a_schema_cannot_bring_its_own_rule_about_white_space(grammars: Grammars, tokenizer: Any) -> None:
    loose = {**PERSON, "x-guidance": {"whitespace_flexible": True, "whitespace_pattern": r"\s+"}}
    assert Reading(grammars, tokenizer, "{" + "\n" * 40, made(schema(loose))).read == "{"


@pytest.mark.parametrize(
    ("pattern", "text"),
    [(r"[a-z]+/\d{2}", "abc/12"), (r"a\/b[/]c", "a/b/c"), ("one\ntwo", "one\ntwo"), (r"\\/", "\\/"), ("é+", "éé")],
)
def test_a_regex_may_have_slashes_and_lines(grammars: Grammars, tokenizer: Any, pattern: str, text: str) -> None:
    reading = Reading(grammars, tokenizer, text, made(AnswerFormat(kind="regex", text=pattern)))
    assert (reading.read, reading.may_end) == (text, True)


def test_a_lark_grammar_is_followed(grammars: Grammars, tokenizer: Any) -> None:
    lark = AnswerFormat(kind="lark", text='start: "yes" | NO\nNO: /no+/')
    assert Reading(grammars, tokenizer, "nooo", made(lark)).may_end
    assert Reading(grammars, tokenizer, "maybe", made(lark)).read == ""


@pytest.mark.parametrize("thoughts", [THOUGHTS, OPEN])
@pytest.mark.parametrize("answer", ['{"name": "Bob", "age": 4}', CALL])
def test_thoughts_come_before_the_form(grammars: Grammars, tokenizer: Any, thoughts: Thoughts, answer: str) -> None:
    thought = ("" if thoughts.open else "<think>") + 'Is it {"x"} or <tool_call>?\n</think>\n\n'
    text = made(schema(PERSON), TOOLS, thoughts)
    reading = Reading(grammars, tokenizer, thought + answer, text)
    assert (reading.read, reading.may_end) == (thought + answer, True)
    assert Reading(grammars, tokenizer, thought + "so", text).read == thought
    assert not Reading(grammars, tokenizer, thought, text).may_end
    # Thoughts may be left out, unless the prompt has begun them.
    assert Reading(grammars, tokenizer, answer, text).may_end is not thoughts.open


def test_a_possible_call_is_enforced_once_it_has_begun(grammars: Grammars, tokenizer: Any) -> None:
    text = made(None, TOOLS)
    for free in ("Hello <tool_", f"See: {CALL}", f"{CALL}\n{CALL} and so on"):
        reading = Reading(grammars, tokenizer, free, text)
        assert (reading.read, reading.may_end) == (free, True)
    for broken in ("<tool_call>nonsense", CALL.replace("weather", "whether"), CALL.replace("Paris", 'x": 3')):
        assert Reading(grammars, tokenizer, broken, text).read != broken


def test_one_call_is_the_last_word_where_calls_are_not_parallel(grammars: Grammars, tokenizer: Any) -> None:
    single = ToolUse(tools=TOOLS.tools, parallel=False)
    assert Reading(grammars, tokenizer, f"See: {CALL} more", made(None, single)).read == f"See: {CALL}"
    assert Reading(
        grammars, tokenizer, CALL, made(None, ToolUse(tools=TOOLS.tools, parallel=False, forced=True))
    ).may_end


def test_forced_calls_are_calls_and_not_endless(grammars: Grammars, tokenizer: Any) -> None:
    forced = made(None, ToolUse(tools=TOOLS.tools, forced=True))
    assert Reading(grammars, tokenizer, "Hello", forced).read == ""
    assert Reading(grammars, tokenizer, f"{CALL}\n{CALL}", forced).may_end
    many = "\n".join([CALL] * 20)
    assert Reading(grammars, tokenizer, many, forced).read == "\n".join([CALL] * 16)


def test_a_named_tool_is_called_once(grammars: Grammars, tokenizer: Any) -> None:
    named = made(None, ToolUse(tools=TOOLS.tools, forced=True, only="time-of"))
    other = CALL.replace("weather", "time-of")
    assert Reading(grammars, tokenizer, CALL, named).read != CALL
    reading = Reading(grammars, tokenizer, f"{other}\n{other}", named)
    assert (reading.read, reading.constraint.complete) == (other, True)


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
def test_what_cannot_be_enforced_is_refused_with_the_reason(grammars: Grammars, bad: AnswerFormat, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be enforced") as refused:
        grammars.matchers(made(bad), 1)
    assert reason in refused.value.message
    assert refused.value.param == "response_format"
    assert "<state>" not in refused.value.message


def test_the_tool_whose_parameters_are_wrong_is_named(grammars: Grammars) -> None:
    tools = ToolUse(tools=(*TOOLS.tools, Tool(name="odd", parameters={"not": {}})), forced=True)
    with pytest.raises(InvalidRequestError, match=r"the tool 'odd'.*not") as refused:
        grammars.matchers(made(None, tools), 1, tools)
    assert refused.value.param == "tools.2.function.parameters"


AMBIGUOUS = 'start: s\ns: s s | s s s | /[a-z]+/ | " "'


def test_a_grammar_that_grows_too_complex_on_the_way_says_so(tokenizer: Any) -> None:
    words = words_of(tokenizer, width=WIDTH, markers=set())
    matcher = compiled(tokenizer_of(words), made(AnswerFormat(kind="lark", text=AMBIGUOUS)))
    constraint = Constraint(matcher, None)
    drawn = np.random.default_rng(0)
    for _ in range(300):
        mask = constraint.mask(WIDTH)
        if mask is None:
            break
        constraint.advance(int(drawn.choice(np.flatnonzero(mask))))
    assert isinstance(constraint.failure, InvalidRequestError)
    assert "<state>" not in constraint.failure.message
    assert constraint.mask(WIDTH) is None


@pytest.mark.parametrize(
    ("bomb", "reason"),
    [
        (AnswerFormat(kind="lark", text=AMBIGUOUS), "Too many items"),
        (AnswerFormat(kind="regex", text="a?" * 30_000), "longer than 5 s"),
    ],
    ids=["ambiguous", "optional"],
)
def test_what_would_hold_up_others_is_refused_in_time(grammars: Grammars, bomb: AnswerFormat, reason: str) -> None:
    with pytest.raises(InvalidRequestError, match=reason):
        grammars.matchers(made(bomb), 1)
    assert grammars.matchers(made(schema(PERSON)), 1)


@pytest.mark.parametrize("links", [2000, 7000])
def test_long_chains_of_references_crash_nothing(grammars: Grammars, tokenizer: Any, links: int) -> None:
    chain: dict[str, Any] = {f"d{n}": {"$ref": f"#/$defs/d{n + 1}"} for n in range(links)}
    chained = made(schema({"$defs": {**chain, f"d{links}": {"const": "x"}}, "$ref": "#/$defs/d0"}))
    with contextlib.suppress(InvalidRequestError):
        assert Reading(grammars, tokenizer, '"x"', chained).constraint.complete
    assert grammars.matchers(made(schema(PERSON)), 1)


def test_what_crashes_the_trial_is_refused_and_nothing_else(grammars: Grammars, trials: Trials) -> None:
    assert grammars.matchers(made(schema({"const": "before"})), 1)
    assert trials._process is not None
    # With the stack that it has, no grammar within the limits of a request is known to do it.
    trials._process.kill()
    with pytest.raises(InvalidRequestError, match="nested too deeply"):
        grammars.matchers(made(schema({"const": "now"})), 1)
    assert grammars.matchers(made(schema({"const": "now"})), 1)


def test_a_refusal_is_remembered(grammars: Grammars, trials: Trials) -> None:
    bad = made(AnswerFormat(kind="regex", text="(never"))
    said = []
    for _ in range(2):
        with pytest.raises(InvalidRequestError) as refused:
            grammars.matchers(bad, 1)
        said.append((refused.value.message, refused.value.param))
        # The second time nobody is asked, and no process started.
        trials._stop()
    assert said[0] == said[1]
    assert trials._process is None


def test_what_takes_long_gives_way_to_those_that_wait(grammars: Grammars) -> None:
    hurried = Trials(waiting=lambda: True)
    with pytest.raises(QueueFullError, match="others wait") as busy:
        Grammars(grammars._words, hurried).matchers(made(AnswerFormat(kind="regex", text="a?" * 30_000)), 1)
    assert busy.value.retry_after_s == 1
    hurried.end()


def test_a_tool_that_need_not_be_called_may_have_any_schema(grammars: Grammars, tokenizer: Any) -> None:
    odd = (Tool(name="odd", parameters={"not": {}}), Tool(name="far", parameters={"$ref": "https://example.com/x"}))
    tools = ToolUse(tools=(*TOOLS.tools, *odd))
    text = made(None, tools)
    (matcher,) = grammars.matchers(text, 1, tools)
    for call in (CALL, CALL.replace("weather", "odd").replace("city", "x"), CALL.replace("weather", "far")):
        copy = matcher.deep_copy()
        assert copy.try_consume_tokens(tokens := tokenizer.encode(call, add_special_tokens=False)) == len(tokens)
    assert matcher.try_consume_tokens(tokenizer.encode(CALL.replace("city", "town"), add_special_tokens=False)) < 20


def test_the_trial_ends_with_its_owner(grammars: Grammars) -> None:
    owner = Trials()
    Grammars(grammars._words, owner).matchers(made(schema({"const": "x"})), 1)
    process = owner._process
    assert process is not None
    assert process.poll() is None
    owner.end()
    assert process.poll() is not None


@pytest.mark.parametrize("text", ["x <|im_end|> y", "<|endoftext|>", "a" * 3000])
def test_a_constant_may_be_long_or_spell_a_special_token(grammars: Grammars, text: str) -> None:
    (matcher,) = grammars.matchers(made(schema({"const": text})), 1)
    constraint, said = Constraint(matcher, None), b""
    while not constraint.complete and constraint.failure is None:
        mask = constraint.mask(WIDTH)
        assert mask is not None
        token = int(np.flatnonzero(mask)[-1])
        said += grammars._words.tokens[token]
        constraint.advance(token)
    assert json.loads(said) == text


def test_leaving_the_grammar_is_noticed(grammars: Grammars, tokenizer: Any) -> None:
    (matcher,) = grammars.matchers(made(schema(PERSON)), 1)
    constraint = Constraint(matcher, None)
    constraint.advance(tokenizer.encode("no")[0])
    assert isinstance(constraint.failure, InvalidRequestError)
    assert constraint.mask(WIDTH) is None


def test_answers_of_one_request_do_not_share_their_place(grammars: Grammars, tokenizer: Any) -> None:
    first, second = (Constraint(matcher, None) for matcher in grammars.matchers(made(schema(PERSON)), 2))
    first.advance(tokenizer.encode("{")[0])
    before, after = second.mask(WIDTH), first.mask(WIDTH)
    assert before is not None
    assert after is not None
    assert (before != after).any()


def test_grammars_are_compiled_once_and_kept_within_a_bound(grammars: Grammars) -> None:
    text = made(schema(PERSON))
    grammars.matchers(text, 1)
    kept = grammars._compiled[text]
    grammars.matchers(text, 1)
    assert grammars._compiled[text] is kept
    for number in range(KEPT + 3):
        grammars.matchers(made(AnswerFormat(kind="regex", text=f"x{number}")), 1)
    assert len(grammars._compiled) == KEPT


def test_ids_without_a_token_are_never_allowed(tokenizer: Any, trials: Trials) -> None:
    wide = Grammars(words_of(tokenizer, width=WIDTH + 100, markers=set()), trials)
    (matcher,) = wide.matchers(made(AnswerFormat(kind="regex", text="(?s:.*)")), 1)
    mask = Constraint(matcher, None).mask(WIDTH + 100)
    assert mask is not None
    assert mask[:WIDTH].sum() > WIDTH // 2
    assert not mask[WIDTH:].any()
    # Special tokens are no text; the one that ends the answer may come.
    assert not mask[3]
    assert mask[2]


@pytest.mark.parametrize("normalize", [False, True])
def test_the_sampler_draws_the_likeliest_that_is_allowed(grammars: Grammars, tokenizer: Any, normalize: bool) -> None:
    (matcher,) = grammars.matchers(made(AnswerFormat(kind="regex", text="(yes|no)")), 1)
    logits = mx.random.normal((1, WIDTH), key=mx.random.key(3))
    seen: list[mx.array] = []

    def likeliest(logprobs: mx.array) -> mx.array:
        seen.append(logprobs)
        return mx.argmax(logprobs, axis=-1)

    sampler = ConstrainedSampler(Constraint(matcher, None), likeliest, normalize=normalize)
    text = ""
    while text not in ("yes", "no"):
        token = int(sampler(logits).item())
        text += tokenizer.decode([token])
        assert "yes".startswith(text) or "no".startswith(text)
    total = float(mx.exp(seen[0]).sum())
    assert (abs(total - 1) < 1e-3) is normalize
