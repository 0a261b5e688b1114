"""A program that uses a lab. Type checkers find an error in each line that ends with ``wrong``, and in no other."""

from collections.abc import Iterator
from typing import assert_type

import lmx_lab
from lmx_lab import Reply
from lmx_lab.evals.evaluation import Evaluation
from lmx_lab.instrument.traces import ActivationCache
from lmx_lab.notebook.reply import ReplyStream
from lmx_lab.notebook.results import ModelList
from lmx_lab.values.models import LoadReport
from lmx_lab.values.plan import LoadPlan


def blocking() -> Iterator[str]:
    with lmx_lab.attach("http://127.0.0.1:8400") as lab:
        assert_type(lab.load("tiny", engine="mlx"), LoadReport)
        assert_type(lab.models(), ModelList)
        assert_type(lab.plan("tiny", context_length=8192), LoadPlan)
        assert_type(lab.trace("text", "blocks.*.hook_resid_post", positions=-1), ActivationCache)
        assert_type(lab.evaluate(["a"], "{text}", answer="text"), Evaluation)
        assert_type(lab.chat("hi"), Reply)
        stream = lab.chat("hi", stream=True)
        assert_type(stream, ReplyStream)
        yield from stream
        lab.load("tiny", engin="mlx")  # wrong
        lab.trace("text")  # wrong
        lab.map(["a"], "{text}", labs=["http://127.0.0.1:8400"])  # wrong


async def awaited() -> None:
    lab = lmx_lab.attach("http://127.0.0.1:8400")
    assert_type(await lab.aload("tiny", wait=True), LoadReport)
    assert_type(await lab.achat("hi"), Reply)
    assert_type((await lab.achat("hi")).usage.completion_tokens, int)
    async for piece in await lab.astream("hi"):
        assert_type(piece, str)
    async for piece in lab.astream("hi"):
        assert_type(piece, str)
    assert_type(await lab.acomplete("hi", max_tokens=4), Reply)
    assert_type(lab.tokenize("hi"), list[int])
    await lab.aunload(model="tiny", now=True)  # wrong
