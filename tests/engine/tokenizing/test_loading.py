"""A tokenizer that may take any time is loaded in a sandbox process first, or refused."""

import json
import uuid

import pytest

from lmx_lab.engine.cancellation import Cancellation
from lmx_lab.engine.mlx.model import load_chat
from lmx_lab.engine.tokenizing import loading
from lmx_lab.engine.tokenizing.loading import check_tokenizer_files
from lmx_lab.errors import InvalidRequestError, NotLoadedError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights import Catalog
from tests.support.models import write_tiny_llama

pytestmark = pytest.mark.slow
SLOW = {"type": "Replace", "pattern": {"Regex": "(a|a|aa|b)*c"}, "content": ""}


@pytest.fixture
def load(tmp_path, smollm2):
    """Load a tiny model with changes in ``tokenizer.json``."""

    def load_changed(changes):
        folder = tmp_path / uuid.uuid4().hex / "tiny"
        write_tiny_llama(folder, smollm2.path, seed=0)
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text()) | changes
        file.unlink()
        file.write_text(json.dumps(content))
        check_tokenizer_files(folder, Cancellation())
        return load_chat(Catalog(Settings()).resolve(str(folder)), limit_bytes=2**40)

    return load_changed


@pytest.mark.long
def test_a_tokenizer_with_an_unknown_pattern_is_used_in_its_process(load):
    model, plain = load({"normalizer": SLOW}), load({})
    text, options = "Hello, world", {"special": True, "param": "prompt"}
    assert model.prompts.encode(text, **options) == plain.prompts.encode(text, **options)
    assert plain.prompts.is_quick(text)
    assert not model.prompts.is_quick(text)
    with pytest.raises(InvalidRequestError, match="the tokenizer of"):
        model.prompts.encode("a" * 400 + "dc", **options)


def test_a_decoder_with_a_pattern_is_refused(load):
    with pytest.raises(UnusableModelError, match="the decoder may take any time"):
        load({"decoder": SLOW})


def test_a_tokenizer_that_fails_to_load_names_the_reason(load):
    with pytest.raises(UnusableModelError, match="its tokenizer cannot be used"):
        load({"normalizer": {"type": "Replace", "pattern": {"Regex": "("}, "content": ""}})


def test_a_tokenizer_that_takes_long_to_load_is_refused_and_its_check_can_be_cancelled(load, tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "READ_S", 0.0)
    with pytest.raises(
        UnusableModelError, match=r"its tokenizer cannot be used: it takes .* s to load; the limit is 0"
    ):
        load({"normalizer": SLOW})
    (folder,) = (path / "tiny" for path in tmp_path.iterdir())
    cancellation = Cancellation()
    cancellation.cancel()
    with pytest.raises(NotLoadedError, match="cancelled"):
        check_tokenizer_files(folder, cancellation)
