"""Rerankers score a query with documents: heads, prompts of decoders and activations."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from lmx_lab.errors import UnusableModelError
from tests.support.models import logit_score_files, modules, pairs_of, pooling_files, run, tiny_tokenizer

RAW = np.array([-3.0, 0.0, 200.0], np.float32)
SIGMOID = np.array([0.04742587, 0.5, 1.0], np.float32)


def shown(text):
    return tuple(tiny_tokenizer().encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize(
    ("settings", "config", "expected"),
    [
        ({}, {}, SIGMOID),
        ({"activation_fn": "torch.nn.modules.activation.Sigmoid"}, {}, SIGMOID),
        ({"activation_fn": "torch.nn.modules.linear.Identity"}, {}, RAW),
        ({}, {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, RAW),
        ({}, {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, RAW),
        (
            {"activation_fn": "torch.nn.modules.activation.Sigmoid"},
            {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            SIGMOID,
        ),
    ],
)
def test_the_activation_is_read_from_the_files(bert, settings, config, expected):
    model = bert({"config_sentence_transformers.json": settings}, labels=1, **config)
    np.testing.assert_allclose(model.activate(RAW), expected, atol=1e-6)


def test_vectors_have_no_activation(bert):
    assert bert().activate(RAW) is RAW


@pytest.mark.parametrize(
    ("settings", "labels", "message"),
    [
        ({"activation_fn": "my_code.Sigmoid"}, 1, r"my_code\.Sigmoid"),
        ({}, 2, "2 labels; a reranker has one"),
        ({}, 3, "3 labels; a reranker has one"),
    ],
)
def test_an_unsupported_activation_or_several_labels_are_refused(bert, settings, labels, message):
    with pytest.raises(UnusableModelError, match=message):
        bert({"config_sentence_transformers.json": settings}, labels=labels)


def test_a_cross_encoder_returns_one_score_per_document(bert):
    model = bert(labels=1)
    assert (model.method, model.dimensions) == ("cross-encoder", None)
    pairs = pairs_of(model, "where is paris", ["the capital of france", "a cat", ""], truncate=False)
    together = run(model.forward(pairs))
    assert together.shape == (3,)
    alone = np.concatenate([run(model.forward([pair])) for pair in pairs])
    np.testing.assert_allclose(together, alone, atol=1e-5)


def test_a_score_can_be_computed_by_pooling_and_modules(tmp_path, bert):
    random, folder = np.random.default_rng(1), tmp_path / "tiny-bert"
    dense = {"linear.weight": random.normal(0, 1, (1, 32)), "linear.bias": np.ones(1)}
    norm = {"norm.weight": random.normal(0, 1, 32), "norm.bias": np.ones(32)}
    for name, tensors in (("2_LayerNorm", norm), ("3_Dense", dense)):
        (folder / name).mkdir(parents=True)
        floats = {key: value.astype(np.float32) for key, value in tensors.items()}
        save_file(floats, folder / name / "model.safetensors")
    identity = "torch.nn.modules.linear.Identity"
    size = {"in_features": 32, "out_features": 1, "activation_function": identity, "module_output_name": "scores"}
    files = pooling_files("cls_token") | {
        "modules.json": modules("Pooling", "LayerNorm", "Dense"),
        "2_LayerNorm/config.json": {"dimension": 32},
        "3_Dense/config.json": size,
        "config_sentence_transformers.json": {"model_type": "CrossEncoder", "activation_fn": identity},
    }
    model = bert(files)
    [pair] = pairs_of(model, "cat", ["dog"], truncate=False)
    first = np.array(list(model.forward([pair]))[-1][0, 0])
    normed = (first - first.mean()) / np.sqrt(first.var() + 1e-5) * norm["norm.weight"] + 1
    np.testing.assert_allclose(run(model.forward([pair])), dense["linear.weight"] @ normed + 1, atol=1e-4)
    with pytest.raises(UnusableModelError, match="return 32 numbers; a reranker returns one"):
        bert(files | {"modules.json": modules("Pooling", "LayerNorm")})


def test_segments_change_the_score(bert):
    model = bert(labels=1)
    [pair] = pairs_of(model, "the cat", ["a dog"], truncate=False)
    without = type(pair)(pair.tokens)
    assert abs(run(model.forward([pair])) - run(model.forward([without])))[0] > 1e-3


DEFAULT_PROMPT = {"prompts": {"web": "a big red"}, "default_prompt_name": "web"}
TEMPLATE_OPTIONS = {"add_generation_prompt": True, "restore_suffix": True}
BERT_CONFIG = logit_score_files()["sentence_bert_config.json"]


@pytest.mark.parametrize(
    ("files", "prompt"),
    [
        pytest.param({}, "query: cat [SEP] document: dog [SEP]", id="the template of the model"),
        pytest.param(
            {"config_sentence_transformers.json": {"model_type": "CrossEncoder", **DEFAULT_PROMPT}},
            "system: a big red [SEP] query: cat [SEP] document: dog [SEP]",
            id="a default prompt is the system message",
        ),
        pytest.param(
            {"sentence_bert_config.json": {**BERT_CONFIG, "processing_kwargs": {"chat_template": TEMPLATE_OPTIONS}}},
            "query: cat [SEP] document: dog [SEP] answer:",
            id="template options",
        ),
        pytest.param(
            {"chat_template.jinja": "{% for m in messages %}{{ m['content'] | trim }} . {% endfor %}"},
            "cat . dog .",
            id="a template that strips documents",
        ),
    ],
)
def test_a_decoder_reads_pairs_through_its_chat_template(qwen3, files, prompt):
    model = qwen3(logit_score_files() | files)
    assert model.method == "decoder"
    [pair] = pairs_of(model, "cat", [" dog\n"], truncate=False)
    assert pair.tokens == shown(prompt)


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}{% endfor %}",
        "{{ messages[1]['content'] }}",
        "{{ raise_exception('only users') }}",
    ],
)
def test_a_template_that_does_not_show_query_and_document_is_refused(qwen3, template):
    with pytest.raises(UnusableModelError, match="chat template"):
        qwen3(logit_score_files() | {"chat_template.jinja": template})


def test_a_long_document_is_truncated_within_the_prompt(logit_reranker):
    before, after = shown("query: cat [SEP] document:"), shown("[SEP]")
    [pair, short] = pairs_of(logit_reranker, "cat", ["dog " * 500, "dog"], truncate=True)
    assert pair.tokens == (*before, *shown("dog") * (64 - len(before) - len(after)), *after)
    assert short.tokens == (*before, *shown("dog"), *after)


QWEN_CARD = "---\nbase_model: Qwen/Qwen3-Reranker-0.6B\npipeline_tag: text-ranking\n---\n# Model\n"


def qwen_prompt(query, document):
    return shown(
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        f"<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


def test_the_published_qwen3_reranker_uses_its_documented_prompt(qwen3):
    model = qwen3({"README.md": QWEN_CARD}, max_position_embeddings=1024, tokenizer={"model_max_length": 1024})
    assert (model.entry.kind, model.method) == ("rerank", "decoder")
    [pair] = pairs_of(model, "cat", ["dog"], truncate=False)
    assert pair.tokens == qwen_prompt("cat", "dog")


def test_a_qwen3_classifier_ranks_by_its_only_label(qwen3):
    weight = np.random.default_rng(3).normal(0, 1, (1, 32)).astype(np.float32)
    config = {"architectures": ["Qwen3ForSequenceClassification"], "max_position_embeddings": 1024}
    limits = {"model_max_length": 1024}
    model = qwen3({}, change={"score.weight": weight}, tokenizer=limits, **config)
    assert model.method == "decoder"
    pairs = pairs_of(model, "cat", ["dog", "a very big bird"], truncate=False)
    assert pairs[0].tokens == (2, 7, 3, 8, 3)
    assert run(model.forward(pairs)).shape == (2,)
    carded = qwen3({"README.md": QWEN_CARD}, change={"score.weight": weight}, tokenizer=limits, **config)
    assert pairs_of(carded, "cat", ["dog"], truncate=False)[0].tokens == qwen_prompt("cat", "dog")


def test_a_decoder_without_a_ranking_definition_is_refused(qwen3):
    with pytest.raises(UnusableModelError, match="score"):
        qwen3({}, architectures=["Qwen3ForSequenceClassification"])
    wrong = logit_score_files() | {"1_LogitScore/config.json": {"true_token_id": 99999, "false_token_id": None}}
    with pytest.raises(UnusableModelError, match="99999"):
        qwen3(wrong)
