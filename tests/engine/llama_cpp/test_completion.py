"""Each request becomes a body for llama.cpp, and the events that it streams become the pieces of an answer."""

import asyncio
from dataclasses import replace

import pytest

from lmx_lab.engine import GenerationRequest, Sampling, TextPrompt
from lmx_lab.engine.answers import Generation
from lmx_lab.engine.llama_cpp.completion import (
    AnswerReader,
    Gap,
    TokenIndex,
    choose,
    completion_body,
    sampling,
    set_decoding_at,
)
from lmx_lab.engine.llama_cpp.tokenizer import join_texts
from lmx_lab.engine.scheduler import AdmissionControl, Permit
from lmx_lab.engine.stream import Mailbox
from lmx_lab.engine.text.channels import CONTENT, TOOL, ChannelFormat
from lmx_lab.engine.text.splitter import TextSplitter
from lmx_lab.engine.text.tool_calls import CallFormat
from lmx_lab.values.outputs import Delta, PromptProgress, merge_tool_calls
from lmx_lab.values.timeline import StepLog

REQUEST = GenerationRequest(prompt=TextPrompt(text="a"))


class Answer:
    """A generation, to which the events of its answer are added."""

    def __init__(self, request, channel_format):
        loop = asyncio.new_event_loop()
        loop.close()
        self.generation = Generation(
            request=request,
            model="m",
            prompt=list(range(10)),
            max_tokens=100,
            splitter=TextSplitter(join_texts, request.stop, channel_format),
            mailbox=Mailbox(loop, StepLog(100.0)),
            permit=Permit(AdmissionControl("m", limit=1)),
            arrived_at=100.0,
            timeout_s=60.0,
            row=AnswerReader(None),
            admitted_at=101.0,
            peak_memory_bytes=5,
        )

    def read(self, event, now):
        return self.generation.row.read(self.generation, event, now)

    def report(self, now):
        set_decoding_at(self.generation, now)
        return self.generation.report(now)

    def pause(self):
        self.generation.row.pause(self.generation)

    def __getattr__(self, name):
        return getattr(self.generation, name)


def reader(*, request=REQUEST, channel_format=None):
    return Answer(request, channel_format)


def probability(token, data, logprob=-1.0, top=()):
    others = [{"id": at, "token": "x", "bytes": [120], "logprob": -2.0 - at} for at in top]
    return {"id": token, "token": "?", "bytes": list(data), "logprob": logprob, "top_logprobs": others}


def piece(text, predicted, *entries):
    items = {"content": text, "tokens": [0], "stop": False, "tokens_predicted": predicted}
    return {**items, "completion_probabilities": list(entries)} if entries else items


def end(predicted, why="eos", text=""):
    return {"content": text, "tokens": [], "stop": True, "tokens_predicted": predicted, "stop_type": why}


def progress(processed, cache=0):
    state = {"total": 10, "cache": cache, "processed": processed, "time_ms": 1}
    # The other fields have no meaning here.
    return {"prompt_progress": state, "content": "", "tokens": [0], "stop": False, "tokens_predicted": 0}


def deltas(answer, *events, start=102.0):
    items = [item for at, event in enumerate(events) for item in answer.read(event, start + at)]
    return [item for item in items if isinstance(item, Delta)]


def summarize(items):
    return (
        "".join(item.text for item in items),
        "".join(item.reasoning for item in items),
        sum(item.tokens for item in items),
    )


# Sampling


def test_all_sampling_parameters_are_sent():
    body_ = sampling(REQUEST, [1, 2], choice=0, context_length=512)
    assert body_ == {
        "temperature": 0.7, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repeat_penalty": 1.0, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repeat_last_n": 512, "seed": -1, "logit_bias": [], "ignore_eos": False,
        "samplers": ["penalties", "dry", "top_p", "min_p", "top_k", "xtc", "temperature"],
        "dry_multiplier": 0.0, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 512,
        "xtc_probability": 0.0, "xtc_threshold": 0.1,
    }  # fmt: skip


def seed(value, choice=0):
    request_ = replace(REQUEST, sampling=Sampling(seed=value))
    return int(sampling(request_, [1, 2], choice=choice, context_length=512)["seed"])


@pytest.mark.parametrize("value", [0, 1, 2**32 - 2])
def test_a_valid_seed_is_sent_unchanged(value):
    assert seed(value) == value


# Bodies


def body(*, grammar=None, markers=(), **changes):
    request_ = replace(REQUEST, **changes)
    options = {"slot": 1, "choice": 0, "max_tokens": 9, "context_length": 512, "vocabulary_size": 1000, "may_end": True}
    return completion_body(request_, [1, 2], [], grammar=grammar, markers=markers, **options)


def test_a_completion_has_tokens_and_reports_progress():
    body_ = body(markers=["<think>"])
    assert (body_["prompt"], body_["n_predict"], body_["stream"], body_["return_progress"]) == ([1, 2], 9, True, True)
    assert body_["preserved_tokens"] == ["<think>"]
    assert {"n_probs", "grammar", "stop"} & set(body_) == set()


@pytest.mark.parametrize(("top", "sent"), [(0, 1), (1, 1), (20, 20)])
def test_at_least_one_alternative_is_requested_with_logprobs(top, sent):
    assert body(top_logprobs=top)["n_probs"] == sent
    # A named token may have any rank.
    assert body(top_logprobs=top, logprob_tokens=(7,))["n_probs"] == 1000


# Texts


@pytest.mark.parametrize(("why", "finish"), [("eos", "stop"), ("limit", "length"), ("word", "stop")])
def test_the_reason_of_the_end_is_read(why, finish):
    answer = reader()
    deltas(answer, piece("a", 1), end(1, why))
    assert answer.finish == finish


def test_events_after_the_end_are_ignored():
    answer = reader(request=replace(REQUEST, stop=("lo",)))
    items = deltas(answer, piece("Hel", 1), piece("lo", 2), piece(" there", 3), end(3, "limit"))
    assert summarize(items) == ("Hel", "", 2)
    assert (answer.finish, answer.output_tokens) == ("stop", 2)


@pytest.mark.parametrize(("last", "text", "finish"), [("D", "a ", "stop"), ("", "a EN", "length")])
def test_the_last_text_may_complete_a_stop_string(last, text, finish):
    answer = reader(request=replace(REQUEST, stop=("END",)))
    assert summarize(deltas(answer, piece("a E", 1), piece("N", 2), end(3, "limit", last)))[0] == text
    assert answer.finish == finish


# Log-probabilities


def logprobs(items):
    return [entry for item in items for entry in item.logprobs]


def test_a_part_of_a_character_is_shown_as_bytes():
    answer = reader(request=replace(REQUEST, top_logprobs=0))
    (items,) = logprobs(deltas(answer, piece("�", 1, probability(7, b"\xe2\x82")), end(1)))
    assert (items.text, items.bytes) == ("bytes:\\xe2\\x82", b"\xe2\x82")


def test_the_token_that_ends_the_text_is_marked():
    for why, ends in (("eos", True), ("limit", False)):
        answer = reader(request=replace(REQUEST, top_logprobs=0))
        events = [piece("a", 1, probability(7, b"a")), piece("", 2, probability(2, b"")), end(2, why)]
        assert [(item.token, item.ends) for item in logprobs(deltas(answer, *events))] == [(7, False), (2, ends)]


def test_a_token_without_text_in_the_middle_is_not_an_end():
    answer = reader(request=replace(REQUEST, top_logprobs=0))
    events = [piece("", 1, probability(1, b"")), piece("a", 2, probability(7, b"a")), piece("", 3, probability(2, b""))]
    items = logprobs(deltas(answer, *events, end(3)))
    assert [(item.token, item.ends) for item in items] == [(1, False), (7, False), (2, True)]


def test_all_tokens_of_a_piece_have_logprobs():
    answer = reader(request=replace(REQUEST, top_logprobs=0))
    event = piece("東", 2, probability(7, b"\xe6\x9d"), probability(8, b"\xb1"))
    assert [item.token for item in logprobs(deltas(answer, event, end(2)))] == [7, 8]


def test_drafts_before_a_pause_are_counted():
    answer = reader()
    for draft_n, accepted in ((3, 2), (6, 4)):
        deltas(answer, {**piece("a", 1), "timings": {"draft_n": draft_n, "draft_n_accepted": accepted}})
    answer.pause()
    # The first events of the next request have no drafts.
    deltas(answer, {**piece("b", 1), "timings": {}}, piece("c", 2))
    assert (answer.drafted_tokens, answer.accepted_tokens) == (6, 4)
    deltas(answer, {**end(2), "timings": {"draft_n": 5, "draft_n_accepted": 1}})
    assert (answer.drafted_tokens, answer.accepted_tokens) == (11, 5)


# Special tokens


@pytest.mark.parametrize(("last", "finish"), [("eos", "tool_calls"), ("limit", "length")])
def test_special_tokens_without_text_are_parts_of_markers(last, finish):
    calls = CallFormat(start="[CALL]", end="", parse=lambda text: {"name": text, "arguments": {}})
    transitions = {CONTENT: [("[CALL]", TOOL)]}
    answer = reader(
        channel_format=ChannelFormat(transitions=transitions, calls=calls, literals={7: "[CALL]", 8: "[OTHER]"})
    )
    specials = {token: {**piece("", 2), "tokens": [token]} for token in (7, 8)}
    items = deltas(
        answer, piece("I look.", 1), specials[8], specials[7] | {"tokens_predicted": 3}, piece("look", 4), end(5, last)
    )
    assert summarize(items) == ("I look.", "", 5)
    calls = merge_tool_calls(piece for item in items for piece in item.tool_calls)
    assert [(item.name, item.arguments) for item in calls] == [("look", "{}")]
    assert [item.ids for item in items[:4]] == [(0,), (8,), (7,), (0,)]
    assert answer.finish == finish


# Costs


def test_progress_includes_cached_tokens():
    answer = reader()
    items = [
        item
        for at, processed in enumerate((4, 7, 10))
        for item in answer.read(progress(processed, cache=4), 102.0 + at)
    ]
    assert items == [PromptProgress(done=done, total=10) for done in (4, 7, 10)]
    assert (answer.cached_tokens, answer.computed_tokens) == (4, 6)


def test_one_token_of_a_cached_prompt_is_computed():
    answer = reader()
    list(answer.read(progress(10, cache=10), 102.0))
    assert answer.cached_tokens == 9


def test_decode_time_includes_the_first_token():
    answer = reader()
    deltas(answer, progress(5), progress(10), piece("a", 1), piece("b", 2), piece("c", 3), end(3, "limit"))
    report = answer.report(105.0)
    assert (report.queue_s, report.prefill_s, report.decode_s) == (1.0, 2.5, 1.5)
    assert (report.ttft_s, report.total_s, report.tokens_per_second) == (4.0, 5.0, 2.0)
    assert (report.prompt_tokens, report.output_tokens, report.model, report.peak_memory_bytes) == (10, 3, "m", 5)


def test_the_decode_time_of_a_single_token_is_estimated_from_the_prompt():
    answer = reader()
    deltas(answer, progress(4), piece("a", 1), end(1))
    report = answer.report(103.0)
    assert (report.prefill_s, report.decode_s) == (pytest.approx(1.6), pytest.approx(0.4))


@pytest.mark.parametrize("events", [[], [piece("a", 1), end(1)], [progress(10, 10), piece("a", 1), end(1)]])
def test_times_add_up_whatever_was_streamed(events):
    answer = reader()
    deltas(answer, *events)
    answer.generation.finish = answer.finish or "length"
    report = answer.report(110.0)
    assert report.total_s == 10.0
    assert min(report.queue_s, report.prefill_s, report.decode_s) >= 0
    assert report.queue_s <= report.ttft_s <= report.total_s


TOKENS = [b"a", b"\xf0\x9f", b"\x98", b"\x80", b"\xf0", b"\x9f\x98", b"\x98\x80"]
FACE = "\N{GRINNING FACE}"


def gap(text, count, *last):
    return Gap(at=0, count=count, text=text, last=last)


def test_the_missing_tokens_are_those_with_the_bytes_of_the_text():
    index = TokenIndex(TOKENS)
    only = gap(f"a{FACE}", 2, 6)
    assert choose(index.candidates(only), only, []) == (0, 1)
    either = gap(FACE, 2, 3)
    assert index.candidates(either) == [(4, 5), (1, 2)]
    assert choose(index.candidates(either), either, [7, 1, 2, 3]) == (1, 2)
    # Neither is what the tokenizer would use.
    assert choose(index.candidates(either), either, [1, 6]) is None
    for none in (gap(FACE, 3, 3), gap("", 1, 3), gap("b", 1, 0)):
        assert choose(index.candidates(none), none, []) is None
