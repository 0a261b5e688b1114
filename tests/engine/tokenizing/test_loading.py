"""A tokenizer that may take any time is loaded in a sandbox process first, or refused."""

import asyncio
import json
import uuid

import pytest

from lmx_lab.engine.mlx.load import load_chat
from lmx_lab.engine.sandbox import shared_pool
from lmx_lab.engine.tokenizing.loading import check_tokenizer_files
from lmx_lab.errors import InvalidRequestError, UnusableModelError
from lmx_lab.settings import Settings
from lmx_lab.weights.catalog import Catalog
from tests.support.engines import request
from tests.support.models import write_tiny_llama
from tests.support.waiting import auntil

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
SLOW = {"type": "Replace", "pattern": {"Regex": "(a|a|aa|b)*c"}, "content": ""}


@pytest.fixture
def load(tmp_path, smollm2):
    """Load a tiny model with changes in ``tokenizer.json``."""

    async def load_changed(changes, **limits):
        folder = tmp_path / uuid.uuid4().hex / "tiny"
        write_tiny_llama(folder, smollm2.path, seed=0)
        file = folder / "tokenizer.json"
        content = json.loads(file.read_text()) | changes
        file.unlink()
        file.write_text(json.dumps(content))
        await check_tokenizer_files(folder, **limits)
        return load_chat(Catalog(Settings()).resolve(str(folder)), limit_bytes=2**40)[1]

    return load_changed


@pytest.mark.long
async def test_a_tokenizer_with_an_unknown_pattern_is_used_in_its_process(load):
    slow, plain = await load({"normalizer": SLOW}), await load({})
    text, options, before = "Hello, world", {"special": True, "param": "prompt"}, shared_pool().pids
    expected = await plain.encode(request(), text, **options)
    assert shared_pool().pids == before
    assert await slow.encode(request(), text, **options) == expected
    with pytest.raises(InvalidRequestError, match="the tokenizer of"):
        await slow.encode(request(), "a" * 400 + "dc", **options)
    del slow
    await auntil(lambda: len(shared_pool().pids) < len(before))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": SLOW}, "the decoder may take any time"),
        ({"normalizer": {**SLOW, "pattern": {"Regex": "("}}}, "its tokenizer cannot be used"),
    ],
)
async def test_a_decoder_with_a_pattern_or_an_invalid_pattern_is_refused(load, changes, message):
    with pytest.raises(UnusableModelError, match=message):
        await load(changes)


async def test_a_tokenizer_that_takes_long_to_load_is_refused_and_its_process_ends(load):
    before = set(shared_pool().pids)
    reason = r"its tokenizer cannot be used: it takes .* s to load; the limit is 0"
    with pytest.raises(UnusableModelError, match=reason):
        await load({"normalizer": SLOW}, read_s=0.0)
    await auntil(lambda: set(shared_pool().pids) <= before)


async def test_the_check_of_a_tokenizer_can_be_cancelled(load):
    before, starts = set(shared_pool().pids), shared_pool().starts
    checking = asyncio.create_task(load({"normalizer": SLOW}))
    await auntil(lambda: shared_pool().starts > starts)
    checking.cancel()
    await asyncio.wait([checking])
    assert checking.cancelled()
    await auntil(lambda: set(shared_pool().pids) <= before)
