"""Test ``lab.map`` over several labs: the distribution of rows, labs that fail and return, and refused labs."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import lmx_lab
from lmx_lab.backend import AnswerStream
from lmx_lab.batch import run
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, NotLoadedError, UnreachableError
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.notebook.remote import RemoteBackend
from lmx_lab.notebook.remote_server import attach
from lmx_lab.settings import Settings
from lmx_lab.wire.admin import ModelRecords
from lmx_lab.wire.chat import ChatRequest

ROWS = [f"row {number}" for number in range(24)]
GONE = "the server is gone"


def started(folder: Path, **settings: Any) -> lmx_lab.Lab:
    lab = lmx_lab.Lab(Settings(home=folder, port=0, slots=4, **settings), loop="thread")
    lab.start()
    lab.load("echo")
    return lab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lmx_lab.Lab]:
    with started(tmp_path_factory.mktemp("home")) as lab:
        yield lab


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[lmx_lab.Lab]:
    """A connection to another lab, which answers slowly."""
    with started(tmp_path_factory.mktemp("other"), echo_tokens_per_s=10) as served, attach(served.url) as other:
        yield other


def before_each(
    monkeypatch: pytest.MonkeyPatch, backend: type[LocalBackend | RemoteBackend], before: Callable[[], Any]
) -> None:
    """Await a function before each request to servers of this kind."""
    generate = backend.generate

    async def wrapped(self: Any, request: ChatRequest, *, batch: bool = False) -> AnswerStream:
        await before()
        return await generate(self, request, batch=batch)

    monkeypatch.setattr(backend, "generate", wrapped)


def test_the_faster_lab_answers_more_rows_and_the_cache_has_the_answers_of_both(
    lab: lmx_lab.Lab, other: lmx_lab.Lab, tmp_path: Path
) -> None:
    answers = lab.map(ROWS, "{text}", labs=[other, lab, other], cache=tmp_path / "a.db")
    assert answers["answer"].tolist() == ROWS
    fast, slow = answers.attrs["labs"]
    assert [fast["url"], slow["url"]] == [lab.url, other.url]
    assert fast["answers"] + slow["answers"] == len(ROWS)
    assert fast["answers"] > slow["answers"] > 0
    assert fast["output_tokens"] + slow["output_tokens"] == answers["output_tokens"].sum()
    assert fast["tokens_per_s"] > 0
    again = lab.map(ROWS, "{text}", labs=[other], cache=tmp_path / "a.db")
    assert again["answer"].tolist() == ROWS
    assert [each["answers"] for each in again.attrs["labs"]] == [0, 0]
    assert [each["answer"] for each in lab.map(iter(ROWS[:8]), "{text}", labs=[other])] == ROWS[:8]


def test_another_lab_answers_the_rows_of_one_that_fails_until_that_returns(
    lab: lmx_lab.Lab, other: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "MAX_PAUSE_S", 0.01)
    calls, returned, resumed = [0], [False], asyncio.Event()
    models = RemoteBackend.models

    async def fail() -> None:
        calls[0] += 1
        if returned[0]:
            resumed.set()
        elif calls[0] >= 5:
            raise UnreachableError(GONE)

    async def list_models(backend: RemoteBackend) -> ModelRecords:
        returned[0] = calls[0] >= 5
        return await models(backend)

    before_each(monkeypatch, RemoteBackend, fail)
    before_each(monkeypatch, LocalBackend, resumed.wait)
    monkeypatch.setattr(RemoteBackend, "models", list_models)
    with pytest.warns(RuntimeWarning, match=f"{other.url}.*{GONE}") as warned:
        answers = lab.map(ROWS, "{text}", labs=[other])
    assert len(warned) == 1
    assert answers["answer"].tolist() == ROWS
    own, failed = answers.attrs["labs"]
    assert (own["returned"], own["error"], failed["error"]) == (0, "", "")
    assert failed["returned"] > 0
    assert own["answers"] + failed["answers"] == len(ROWS)


@pytest.mark.filterwarnings("ignore:the other labs")
def test_if_all_labs_fail_one_error_names_the_reason_of_each(
    lab: lmx_lab.Lab, other: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, failed = {RemoteBackend: 0, LocalBackend: 0}, asyncio.Event()

    async def fail() -> None:
        calls[RemoteBackend] += 1
        if calls[RemoteBackend] > 4:
            failed.set()
            raise UnreachableError(GONE)

    async def fail_after_the_other() -> None:
        calls[LocalBackend] += 1
        if calls[LocalBackend] > 8:
            await failed.wait()
            raise NotLoadedError("the model is gone")

    before_each(monkeypatch, RemoteBackend, fail)
    before_each(monkeypatch, LocalBackend, fail_after_the_other)
    with pytest.raises(BatchStoppedError, match=rf"the model is gone; {other.url}: {GONE}") as stopped:
        lab.map(ROWS, "{text}", labs=[other])
    done = stopped.value.frame["answer"].dropna()
    assert 0 < len(done) <= 12
    assert done.tolist() == [ROWS[at] for at in done.index]


def test_labs_that_cannot_take_part_are_refused_before_the_first_row(
    lab: lmx_lab.Lab, other: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for labs in (other, [other.url], other.url):
        with pytest.raises(InvalidRequestError, match="list of labs"):
            lab.map(ROWS, "{text}", labs=labs)  # type: ignore[arg-type]

    async def share_with_a_kernel() -> None:
        async with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="kernel") as kernel:
            await lab.amap(ROWS, "{text}", labs=[kernel])

    with pytest.raises(InvalidRequestError, match="kernel's event loop"):
        asyncio.run(share_with_a_kernel())
    models = RemoteBackend.models

    async def changed(backend: RemoteBackend, **update: Any) -> ModelRecords:
        listed = await models(backend)
        return listed.model_copy(update={"models": [each.model_copy(update=update) for each in listed.models]})

    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, quantization="Q4_0"))
    with pytest.raises(InvalidRequestError, match=rf"echo .*{lab.url}, and echo \(Q4_0.*{other.url}"):
        lab.map(ROWS, "{text}", labs=[other])
    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, loaded=False))
    with pytest.raises(NotLoadedError, match=other.url):
        lab.map(ROWS, "{text}", labs=[other])


SERVED = """
import pathlib, sys, threading
import lmx_lab
from lmx_lab.settings import Settings

with lmx_lab.Lab(Settings(home=pathlib.Path(sys.argv[1]), port=0, slots=4, echo_tokens_per_s=50), loop="thread") as lab:
    lab.load("echo")
    print(lab.url, flush=True)
    threading.Event().wait()
"""


@pytest.mark.slow
def test_the_rows_of_a_killed_lab_are_answered_by_another(lab: lmx_lab.Lab, tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    rows = [f"row {number}" for number in range(400)]

    def prompt(row: Any) -> str:
        # Rows are read up to 256 ahead, so some are answered and others are being answered.
        if row["text"] == "row 300":
            child.kill()
        return str(row["text"])

    try:
        with attach(child.stdout.readline().strip()) as killed, pytest.warns(RuntimeWarning, match=killed.url):
            answers = lab.map(rows, prompt, labs=[killed])
    finally:
        child.kill()
        child.communicate()
    assert answers["answer"].tolist() == rows
    own, lost = answers.attrs["labs"]
    assert own["answers"] + lost["answers"] == len(rows)
    assert lost["returned"] > 0
    assert lost["error"]
