"""Compare encoders, and Qwen3 as embedder and reranker, with transformers on PyTorch, on small random models."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not in this environment; make parity has one with it")

import transformers  # noqa: E402

from lmx_lab.engine.texts import TextTokens  # noqa: E402
from tests.parity.reference import SIZES, build, check, last, mean, padded, save, texts  # noqa: E402
from tests.support.models import logit_score_files, pooling_files, run  # noqa: E402

MEAN, LAST = (pooling_files(pooling, normalize=False) for pooling in ("mean_tokens", "lasttoken"))
FAMILIES = {
    "bert": (transformers.BertConfig, transformers.BertModel, transformers.BertForSequenceClassification),
    "roberta": (transformers.RobertaConfig, transformers.RobertaModel, transformers.RobertaForSequenceClassification),
    "xlm-roberta": (
        transformers.XLMRobertaConfig,
        transformers.XLMRobertaModel,
        transformers.XLMRobertaForSequenceClassification,
    ),
    "camembert": (
        transformers.CamembertConfig,
        transformers.CamembertModel,
        transformers.CamembertForSequenceClassification,
    ),
}
BATCHES = {"alone": (7,), "equal": (9, 9), "padded": (3, 17, 11, 1), "long": (600, 130)}


def config(family, **changes):
    own = {"pad_token_id": 1} if family != "bert" else {}
    return FAMILIES[family][0](**SIZES | own | changes)


def modern(**changes):
    tokens = dict.fromkeys(("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 1)
    return transformers.ModernBertConfig(**SIZES | tokens | {"local_attention": 8} | changes)


def check_states(folder, model, batch, pool=mean):
    """Assert that the vectors of a batch are the pooled hidden states of transformers."""
    inputs = padded(batch, pad=model.config.pad_token_id)
    with torch.no_grad():
        # A model with a head returns no hidden states.
        hidden = getattr(model, "model", model)(**inputs).last_hidden_state
    loaded = save(folder, model, MEAN if pool is mean else LAST)
    check(loaded, batch, pool(hidden, inputs["attention_mask"]))


def check_logits(folder, model, batch):
    with torch.no_grad():
        expected = model(**padded(batch, pad=model.config.pad_token_id)).logits[:, 0].numpy()
    check(save(folder, model, {}), batch, expected)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_equal_those_of_transformers(tmp_path, family, lengths):
    check_states(tmp_path / "m", build(FAMILIES[family][1], config(family)), texts(*lengths))


@pytest.mark.parametrize("act", ["gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu"])
def test_activations_and_sizes_of_the_configuration_are_used(tmp_path, act):
    model = build(transformers.BertModel, config("bert", hidden_act=act, layer_norm_eps=1e-3, type_vocab_size=1))
    check_states(tmp_path / "m", model, texts(12, 5))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_logit_of_a_classifier_equals_that_of_transformers(tmp_path, family):
    check_logits(tmp_path / "m", build(FAMILIES[family][2], config(family, num_labels=1)), texts(20, 9, 33))


def test_the_segments_of_a_pair_are_used(tmp_path):
    model = build(transformers.BertForSequenceClassification, config("bert", num_labels=1))
    loaded = save(tmp_path / "m", model, {})
    batch = [TextTokens(text.tokens, second_start=4) for text in texts(11, 6)]
    inputs = padded(batch)
    with torch.no_grad():
        kinds = (torch.arange(11) >= 4).int()[None] * inputs["attention_mask"]
        expected = model(**inputs, token_type_ids=kinds).logits[:, 0].numpy()
    check(loaded, batch, expected)


def test_a_roberta_text_may_contain_the_padding_token(tmp_path):
    model = build(transformers.RobertaModel, config("roberta"))
    loaded = save(tmp_path / "m", model, MEAN)
    batch = [TextTokens((5, 6, 1, 7, 1, 8)), TextTokens((1, 9))]
    ids = torch.tensor([[5, 6, 1, 7, 1, 8], [1, 9, 1, 1, 1, 1]])
    mask = torch.tensor([[1] * 6, [1, 1, 0, 0, 0, 0]])
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    check(loaded, batch, mean(hidden, mask))


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "mlp_bias": True, "norm_bias": True},
        {"hidden_activation": "silu", "local_attention": 64},
        {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ],
    ids=["plain", "biases", "silu", "types"],
)
def test_hidden_states_of_modernbert_equal_those_of_transformers(tmp_path, changes, lengths):
    check_states(tmp_path / "m", build(transformers.ModernBertModel, modern(**changes)), texts(*lengths))


@pytest.mark.parametrize("pooling", ["cls", "mean"])
@pytest.mark.parametrize("changes", [{}, {"classifier_bias": True, "classifier_activation": "relu"}], ids=["", "bias"])
def test_the_logit_of_a_modernbert_classifier_equals_that_of_transformers(tmp_path, pooling, changes):
    settings = modern(num_labels=1, classifier_pooling=pooling, **changes)
    model = build(transformers.ModernBertForSequenceClassification, settings)
    check_logits(tmp_path / "m", model, texts(40, 9, 33))


def test_the_window_of_modernbert_changes_the_result(tmp_path):
    batch = texts(100)
    narrow, wide = (
        run(
            save(tmp_path / str(size), build(transformers.ModernBertModel, modern(local_attention=size)), MEAN).forward(
                batch
            )
        )
        for size in (8, 64)
    )
    assert np.abs(narrow - wide).max() > 1e-2


# --- decoders as embedders and rerankers

LENGTHS = BATCHES["padded"]


def qwen3(kind="Qwen3", **changes):
    own = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None}
    return getattr(transformers, f"{kind}Config")(**SIZES | own | changes)


@pytest.mark.parametrize("kind", ["Qwen3Model", "Qwen3ForCausalLM", "LlamaModel"])
def test_the_vector_of_the_last_token_equals_that_of_transformers(tmp_path, kind):
    model = build(getattr(transformers, kind), qwen3(kind.removesuffix("Model").removesuffix("ForCausalLM")))
    check_states(tmp_path / "m", model, texts(*LENGTHS), last)


def test_the_score_of_a_qwen3_classifier_equals_that_of_transformers(tmp_path):
    model = build(transformers.Qwen3ForSequenceClassification, qwen3(num_labels=1))
    check_logits(tmp_path / "m", model, texts(*LENGTHS))


@pytest.mark.parametrize("tied", [True, False])
def test_the_difference_of_two_logits_equals_that_of_transformers(tmp_path, tied):
    files = logit_score_files()
    model = build(transformers.Qwen3ForCausalLM, qwen3(tie_word_embeddings=tied))
    loaded, batch = save(tmp_path / "m", model, files), texts(*LENGTHS)
    inputs, tokens = padded(batch), files["1_LogitScore/config.json"]
    with torch.no_grad():
        logits = torch.tensor(last(model(**inputs).logits, inputs["attention_mask"]))
    check(loaded, batch, (logits[:, tokens["true_token_id"]] - logits[:, tokens["false_token_id"]]).numpy())
