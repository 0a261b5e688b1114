"""A form that llama.cpp has no time to try is taken on trust, and tried again by the next who asks for it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from lmx_lab.engine import AnswerFormat
from lmx_lab.engine.grammar.build import build_grammar
from lmx_lab.engine.grammar.sandbox import GrammarSandbox
from lmx_lab.engine.llama_cpp import grammar as forms_module
from lmx_lab.engine.llama_cpp.connection import LlamaConnection
from lmx_lab.engine.llama_cpp.grammar import Forms
from lmx_lab.engine.llama_cpp.words import read_token_table
from lmx_lab.errors import InvalidRequestError, QueueFullError
from lmx_lab.weights.gguf.header import read_header

pytestmark = pytest.mark.anyio


class Server(LlamaConnection):
    """Answers a trial as told: with the token that is forbidden, with another, or not at all."""

    def __init__(self) -> None:
        self.enforces: bool | None = True
        self.asked: list[Any] = []

    async def ask(self, path: str, question: Any) -> Any:
        self.asked.append(question)
        if self.enforces is None:
            await asyncio.Event().wait()
        ((forbidden, _),) = question["logit_bias"]
        return {"tokens": [forbidden + 1 if self.enforces else forbidden]}


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
async def forms(tiny_gguf: Path, server: Server) -> AsyncIterator[Forms]:
    trials = GrammarSandbox()
    with ThreadPoolExecutor(1) as compiling:
        yield Forms(read_token_table(read_header(tiny_gguf, arrays=True)), trials, compiling, server)
    trials.close()


def of(kind: Any, text: str) -> str:
    made = build_grammar(AnswerFormat(kind=kind, text=text), None, None, markers={})
    assert made is not None
    return made


async def test_what_was_tried_is_not_tried_again(forms: Forms, server: Server) -> None:
    digits = of("regex", "[0-9]+")
    assert await forms.enforced(digits, None) == await forms.enforced(digits, None)
    (question,) = server.asked
    assert question["n_predict"] == 1
    assert "/[0-9]+/" in question["grammar"]


async def test_what_is_ignored_there_is_refused_each_time(forms: Forms, server: Server) -> None:
    server.enforces = False
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"cannot be enforced by llama\.cpp") as refused:
            await forms.enforced(of("json_schema", json.dumps({"type": "integer"})), None)
        assert refused.value.param == "response_format"
    assert len(server.asked) == 4


async def test_what_could_not_be_tried_is_not_trusted(
    forms: Forms, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms_module, "TRIAL_S", 0.01)
    server.enforces = None
    digits = of("regex", "[0-9]+")
    with pytest.raises(QueueFullError, match="try again in 5 s"):
        await forms.enforced(digits, None)
    server.enforces = False
    with pytest.raises(InvalidRequestError):
        await forms.enforced(digits, None)
