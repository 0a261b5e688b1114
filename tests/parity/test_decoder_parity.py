"""Compare Qwen3 as embedder and as reranker with transformers on PyTorch, on small random models."""

import pytest

torch = pytest.importorskip("torch", reason="torch is not in this environment; make parity has one with it")

import transformers  # noqa: E402

from tests.parity.reference import SIZES, build, check, last, padded, save, texts  # noqa: E402
from tests.support.models import logit_score_files, pooling_files  # noqa: E402

LAST = pooling_files("lasttoken", normalize=False)
LENGTHS = (3, 17, 11, 1)


def config(kind="Qwen3", **changes):
    own = {"num_key_value_heads": 2, "head_dim": 8, "bos_token_id": None, "eos_token_id": None}
    return getattr(transformers, f"{kind}Config")(**SIZES | own | changes)


@pytest.mark.parametrize("kind", ["Qwen3Model", "Qwen3ForCausalLM", "LlamaModel"])
def test_the_vector_of_the_last_token_equals_that_of_transformers(tmp_path, kind):
    model = build(getattr(transformers, kind), config(kind.removesuffix("Model").removesuffix("ForCausalLM")))
    loaded, batch = save(tmp_path / "m", model, LAST), texts(*LENGTHS)
    inputs = padded(batch)
    inner = model.model if kind.endswith("ForCausalLM") else model
    with torch.no_grad():
        hidden = inner(**inputs).last_hidden_state
    check(loaded, batch, last(hidden, inputs["attention_mask"]))


def test_the_score_of_a_qwen3_classifier_equals_that_of_transformers(tmp_path):
    model = build(transformers.Qwen3ForSequenceClassification, config(num_labels=1))
    loaded, batch = save(tmp_path / "m", model, {}), texts(*LENGTHS)
    with torch.no_grad():
        expected = model(**padded(batch)).logits[:, 0].numpy()
    check(loaded, batch, expected)


@pytest.mark.parametrize("tied", [True, False])
def test_the_difference_of_two_logits_equals_that_of_transformers(tmp_path, tied):
    files = logit_score_files()
    model = build(transformers.Qwen3ForCausalLM, config(tie_word_embeddings=tied))
    loaded, batch = save(tmp_path / "m", model, files), texts(*LENGTHS)
    inputs, tokens = padded(batch), files["1_LogitScore/config.json"]
    with torch.no_grad():
        logits = torch.tensor(last(model(**inputs).logits, inputs["attention_mask"]))
    check(loaded, batch, (logits[:, tokens["true_token_id"]] - logits[:, tokens["false_token_id"]]).numpy())
