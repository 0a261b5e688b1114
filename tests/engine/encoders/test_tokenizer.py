"""Texts and pairs become token ids: prompts, limits and errors."""

import time

import pytest

from lmx_lab.errors import ContextLengthError, InvalidRequestError
from tests.support.asking import invalid
from tests.support.models import embed, pairs_of, pooling_files, texts_of, tiny_tokenizer

PROMPTS = {"prompts": {"query": "query: ", "passage": "passage: "}}


def tokens(model, *inputs, **options):
    options = {"input_type": None, "truncate": False} | options
    return [text.tokens for text in texts_of(model, inputs, **options)]


def words(count):
    return " ".join(["cat"] * count)


def test_texts_get_special_tokens_and_token_ids_are_used_unchanged(bert):
    model = bert()
    assert tokens(model, "", "cat", (7, 8), (5,)) == [(2, 3), (2, 7, 3), (7, 8), (5,)]
    assert embed(model, "", "東京 🦊 naïve", "\x00\t\n").shape == (3, 32)


@pytest.mark.parametrize(
    ("settings", "input_type", "front"),
    [
        (PROMPTS, "query", "query: "),
        (PROMPTS, "document", "passage: "),
        (PROMPTS, None, ""),
        (PROMPTS | {"default_prompt_name": "passage"}, None, "passage: "),
        ({"prompts": {"other": "a "}, "default_prompt_name": "other"}, "query", "a "),
        ({}, "query", ""),
    ],
)
def test_prompts_of_the_model_are_put_before_texts(bert, settings, input_type, front):
    plain = bert()
    model = bert(pooling_files("mean_tokens") | {"config_sentence_transformers.json": settings})
    assert tokens(model, "cat", input_type=input_type) == tokens(plain, f"{front}cat")


def test_texts_are_lower_cased_if_the_files_require_it(bert):
    model = bert(pooling_files("mean_tokens") | {"sentence_bert_config.json": {"do_lower_case": True}})
    assert tokens(model, "CAT") == tokens(model, "cat")


def test_a_text_over_the_limit_is_refused_with_its_index_its_length_and_the_limit(bert):
    model = bert(pooling_files("mean_tokens") | {"sentence_bert_config.json": {"max_seq_length": 10}})
    assert model.context_length == 10
    assert len(tokens(model, words(8))[0]) == 10
    with pytest.raises(ContextLengthError) as caught:
        tokens(model, "cat", words(9))
    assert caught.value.message == (
        "input.1 is too long: 11 tokens > 10 maximum. This model's maximum context length is 10 tokens (tiny-bert); "
        "shorten it or send truncate: true"
    )
    assert caught.value.param == "input.1"
    with pytest.raises(ContextLengthError, match=r"^documents\.513 is too long: 11 tokens"):
        tokens(model, "cat", words(9), param="documents", first=512)
    with pytest.raises(ContextLengthError, match=r"^query is too long: 11 tokens"):
        tokens(model, words(9), param="query", first=None)


def test_truncation_keeps_the_last_special_token(bert):
    model = bert()
    assert tokens(model, words(100), "cat", tuple([7] * 100), truncate=True) == [
        (2, *[7] * 62, 3),
        (2, 7, 3),
        tuple([7] * 64),
    ]
    # Truncation is off again for the next text.
    with pytest.raises(ContextLengthError):
        tokens(model, words(100))


@pytest.mark.slow
def test_a_text_of_a_megabyte_is_refused_without_tokenizing_all_of_it(bert):
    model, text = bert(), words(250_000)

    def beginning():
        assert len(tokens(model, text, truncate=True)[0]) == 64
        with pytest.raises(ContextLengthError, match="more than"):
            tokens(model, text)

    def seconds(work):
        started = time.perf_counter()
        work()
        return time.perf_counter() - started

    assert min(seconds(beginning) for _ in range(3)) < seconds(lambda: model.texts._encoder._backend.encode(text)) / 4


@pytest.mark.parametrize("truncate", [True, False])
def test_a_text_of_few_tokens_is_used_whole_unless_it_has_far_too_many_characters(bert, truncate):
    model, spaces = bert(), " " * 6401
    assert tokens(model, spaces[1:], spaces[4:] + "cat", truncate=truncate) == [(2, 3), (2, 7, 3)]
    with pytest.raises(ContextLengthError, match="6401 characters > 6400 maximum"):
        tokens(model, spaces, truncate=truncate)
    with pytest.raises(ContextLengthError, match="documents is too long"):
        pairs_of(model, "cat", [spaces], truncate=truncate)
    with pytest.raises(ContextLengthError, match="query is too long"):
        pairs_of(model, spaces, ["cat"], truncate=truncate)


def test_a_text_without_tokens_is_refused(qwen3):
    model = qwen3(tokenizer={"tokenizer": tiny_tokenizer(frame=False)})
    with pytest.raises(InvalidRequestError, match=r"input\.0 is empty"):
        tokens(model, "")


def test_pairs_have_two_segments(bert):
    model = bert(labels=1)
    [pair] = pairs_of(model, "the cat", ["a dog"], truncate=False)
    assert pair.tokens == (2, 5, 7, 3, 6, 8, 3)
    assert pair.second_start == 4


def test_the_default_prompt_is_put_before_the_query_of_a_pair(bert):
    settings = PROMPTS | {"default_prompt_name": "query"}
    model = bert({"config_sentence_transformers.json": settings}, labels=1)
    [pair] = pairs_of(model, "cat", ["dog"], truncate=False)
    assert pair.tokens == (2, *tokens(model, "query: cat", input_type="document")[0][-3:-1], 3, 8, 3)


def test_only_the_document_of_a_pair_is_truncated(bert):
    model = bert(labels=1)
    query = tuple(tokens(model, "where is paris")[0][1:-1])
    [pair, short] = pairs_of(model, "where is paris", [words(500), "cat"], truncate=True)
    assert pair.tokens == (2, *query, 3, *[7] * (64 - len(query) - 3), 3)
    assert short.tokens == (2, *query, 3, 7, 3)
    with pytest.raises(ContextLengthError, match=r"documents\.1 is too long: 106 tokens > 64 maximum"):
        pairs_of(model, "where is paris", ["cat", words(100)], truncate=False)


@pytest.mark.parametrize("length", [62, 200_000])
def test_a_query_that_leaves_no_room_for_documents_is_refused(bert, logit_reranker, length):
    for model in (bert(labels=1), logit_reranker):
        with invalid("query", r"^query is too long", ContextLengthError):
            pairs_of(model, words(length), ["cat"], truncate=True)


def test_lone_surrogates_in_pairs_are_refused(bert):
    model = bert(labels=1)
    with pytest.raises(InvalidRequestError, match=r"^query has the lone"):
        pairs_of(model, "\ud800", ["cat"], truncate=False)
    with pytest.raises(InvalidRequestError, match=r"^documents\.1 has the lone"):
        pairs_of(model, "cat", ["cat", "\udc00"], truncate=False)
