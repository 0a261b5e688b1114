"""Test choices by log-likelihood with models, on MLX and on llama.cpp."""

import pandas as pd
import pytest

import lmx_lab
from lmx_lab.evals import Choice
from lmx_lab.settings import Settings

pytestmark = pytest.mark.slow
FRAME = pd.DataFrame({"text": ["The sea", "A stone"], "options": [["cold", "a warm place"], ["wet", "dry", "old"]]})


@pytest.fixture(params=["mlx", "gguf"])
def lab(request, tiny, tiny_gguf, tmp_path):
    paths = {"mlx": tiny.path, "gguf": tiny_gguf}
    with lmx_lab.Lab(Settings(home=tmp_path, port=0, slots=4, threads=1), loop="thread") as lab:
        lab.load(paths[request.param])
        yield lab


def test_the_log_probability_of_a_choice_is_that_of_its_tokens(lab):
    frame = FRAME.assign(right=0)
    result = lab.evaluate(frame, "{text} is ", answer="right", metric=Choice("options", chat_template=False))
    assert result.df["error"].isna().all(), result.df["error"].tolist()
    for label, row in result.df.iterrows():
        for choice, logprob in zip(row["choices"], row["logprobs"], strict=True):
            lens = result.lens(label, choice=choice)
            # The space at the end of the prompt belongs to the choice.
            assert "".join(lens.df["token"]) == f" {choice}"
            assert lens.logprob == pytest.approx(logprob, abs=1e-3)
    chat = lab.evaluate(frame, "{text}?", answer="right", metric=Choice(["a", "b", "c"]))
    assert chat.df["request_id"].notna().all()  # Choices of one token were scored by one request.
    for label, row in chat.df.iterrows():
        lens = [chat.lens(label, choice=choice).logprob for choice in "abc"]
        assert row["logprobs"] == pytest.approx(lens, abs=1e-3)
