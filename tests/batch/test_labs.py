"""Test ``lab.map`` and ``lab.embed_frame`` over several labs: the distribution of rows, labs that fail and return, and
refused labs.
"""

import asyncio
import subprocess
import sys

import numpy as np
import pytest

import lmx_lab
from lmx_lab.batch.vectors import PROBE, TEXTS_AT_ONCE
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, NotLoadedError, UnreachableError
from lmx_lab.notebook import attach
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.notebook.remote import RemoteBackend
from lmx_lab.settings import Settings
from tests.support.labs import forbid_waits_on_loops, serving
from tests.support.models import write_tiny_bert

ROWS = [f"row {number}" for number in range(24)]
TEXTS = [f"text {number}" for number in range(24 * TEXTS_AT_ONCE)]
"""The texts of 24 requests for vectors."""
GONE = "the server is gone"


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo", slots=4) as lab:
        yield lab


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A connection to another lab, which answers slowly."""
    with (
        serving(tmp_path_factory.mktemp("other"), "echo", slots=4, echo_tokens_per_s=10) as served,
        attach(served.url) as other,
    ):
        yield other


@pytest.fixture(scope="module")
def second(tmp_path_factory):
    """A connection to another lab that is as fast as the first one."""
    with serving(tmp_path_factory.mktemp("second"), "echo", slots=4) as served, attach(served.url) as second:
        yield second


def before_each(monkeypatch, backend, before, method="generate"):
    """Await a function before each request to servers of this kind."""
    send = getattr(backend, method)

    async def wrapped(self, *args, **arguments):
        await before()
        return await send(self, *args, **arguments)

    monkeypatch.setattr(backend, method, wrapped)


def test_the_faster_lab_answers_more_rows_and_the_cache_has_the_answers_of_both(lab, other, tmp_path):
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


def test_another_lab_answers_the_rows_of_one_that_fails_until_that_returns(lab, other, monkeypatch):
    calls, returned, resumed = [0], [False], asyncio.Event()
    models = RemoteBackend.models

    async def fail():
        calls[0] += 1
        if returned[0]:
            resumed.set()
        elif calls[0] >= 5:
            raise UnreachableError(GONE)

    async def list_models(backend):
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
def test_if_all_labs_fail_one_error_names_the_reason_of_each(lab, other, monkeypatch):
    calls, failed = {RemoteBackend: 0, LocalBackend: 0}, asyncio.Event()

    async def fail():
        calls[RemoteBackend] += 1
        if calls[RemoteBackend] > 4:
            failed.set()
            raise UnreachableError(GONE)

    async def fail_after_the_other():
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


def test_several_labs_compute_vectors_and_the_cache_has_those_of_all(lab, second, monkeypatch, tmp_path):
    texts = [*TEXTS, "", TEXTS[0]]
    found = lab.embed_frame(texts, labs=[second, lab, second], cache=tmp_path / "v.db")
    assert found["error"].notna().tolist() == [text == "" for text in texts]
    assert np.array_equal(np.stack(found["embedding"].dropna()), lab.embed([*TEXTS, TEXTS[0]]))
    own, its = found.attrs["labs"]
    assert [own["url"], its["url"]] == [lab.url, second.url]
    assert own["vectors"] + its["vectors"] == len(TEXTS)
    assert min(own["vectors"], its["vectors"]) > 0
    assert max(own["vectors_per_s"], its["vectors_per_s"]) > 0
    forbid_waits_on_loops(monkeypatch)
    again = asyncio.run(lab.aembed_frame(texts, labs=[second], cache=tmp_path / "v.db"))
    awaited = asyncio.run(lab.amap(ROWS[:3], labs=[second], cache=tmp_path / "a.db", prompt="{text}"))
    assert awaited["answer"].tolist() == ROWS[:3]
    assert np.array_equal(np.stack(again["embedding"].dropna()), np.stack(found["embedding"].dropna()))
    assert [each["vectors"] for each in again.attrs["labs"]] == [0, 0]
    assert again.attrs["interrupted"] is False


def test_another_lab_computes_the_vectors_of_one_that_fails_until_that_returns(lab, second, monkeypatch):
    calls, returned, resumed = {"own": 0, "other": 0, "returned": 0}, [False], asyncio.Event()
    models = RemoteBackend.models

    async def fail():
        calls["other"] += 1
        if returned[0]:
            calls["returned"] += 1
            if calls["returned"] == 2:  # The first call compares the models.
                resumed.set()
        elif calls["other"] > 2:
            raise UnreachableError(GONE)

    async def wait():
        calls["own"] += 1
        if calls["own"] > 1:
            await resumed.wait()

    async def list_models(backend):
        returned[0] = calls["other"] > 2
        return await models(backend)

    expected = lab.embed(TEXTS)
    before_each(monkeypatch, RemoteBackend, fail, "embed")
    before_each(monkeypatch, LocalBackend, wait, "embed")
    monkeypatch.setattr(RemoteBackend, "models", list_models)
    with pytest.warns(RuntimeWarning, match=f"{second.url}.*{GONE}") as warned:
        found = lab.embed_frame(TEXTS, labs=[second])
    assert len(warned) == 1
    assert np.array_equal(np.stack(found["embedding"]), expected)
    own, failed = found.attrs["labs"]
    assert (own["returned"], own["error"], failed["returned"], failed["error"]) == (0, "", TEXTS_AT_ONCE, "")
    assert own["vectors"] + failed["vectors"] == len(TEXTS)


@pytest.mark.filterwarnings("ignore:the other labs")
def test_if_all_labs_fail_the_error_has_the_vectors_so_far(lab, second, monkeypatch):
    calls, failed = {"own": 0, "other": 0}, asyncio.Event()

    async def fail():
        calls["other"] += 1
        if calls["other"] > 2:
            failed.set()
            raise UnreachableError(GONE)

    async def fail_after_the_other():
        calls["own"] += 1
        if calls["own"] > 3:
            await failed.wait()
            raise NotLoadedError("the model is gone")

    before_each(monkeypatch, RemoteBackend, fail, "embed")
    before_each(monkeypatch, LocalBackend, fail_after_the_other, "embed")
    done = 3 * TEXTS_AT_ONCE
    with pytest.raises(BatchStoppedError, match=rf"{done} vectors.*the model is gone; {second.url}: {GONE}") as stopped:
        lab.embed_frame(TEXTS, labs=[second])
    assert stopped.value.frame["embedding"].notna().sum() == done
    assert stopped.value.frame["error"].notna().sum() == len(TEXTS) - done


def test_labs_that_cannot_take_part_are_refused_before_the_first_row(lab, other, monkeypatch, tmp_path):
    for labs in (other, [other.url], other.url):
        with pytest.raises(InvalidRequestError, match="list of labs"):
            lab.map(ROWS, "{text}", labs=labs)

    models = RemoteBackend.models

    async def changed(backend, **update):
        listed = await models(backend)
        return listed.model_copy(update={"models": [each.model_copy(update=update) for each in listed.models]})

    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, quantization="Q4_0"))
    with pytest.raises(InvalidRequestError, match=rf"echo .*{lab.url}, and echo \(Q4_0.*{other.url}"):
        lab.map(ROWS, "{text}", labs=[other])
    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, loaded=False))
    with pytest.raises(NotLoadedError, match=other.url):
        lab.map(ROWS, "{text}", labs=[other])


def test_labs_with_other_embedding_models_are_refused_before_the_first_text(lab, other, monkeypatch):
    with pytest.raises(InvalidRequestError, match="list of labs"):
        lab.embed_frame(ROWS, labs=other)
    models, embed, sent = RemoteBackend.models, RemoteBackend.embed, []

    async def other_vectors(backend, body):
        sent.append(body.input)
        return -(await embed(backend, body))

    monkeypatch.setattr(RemoteBackend, "embed", other_vectors)
    with pytest.raises(InvalidRequestError, match=rf"different vectors.*echo .*{lab.url}.*{other.url}"):
        lab.embed_frame(ROWS, labs=[other])
    assert sent == [[PROBE]]

    async def quantized(backend):
        listed = await models(backend)
        changed = [each.model_copy(update={"quantization": "Q4_0"}) for each in listed.models]
        return listed.model_copy(update={"models": changed})

    monkeypatch.setattr(RemoteBackend, "models", quantized)
    with pytest.raises(InvalidRequestError, match=rf"echo .*{lab.url}, and echo \(Q4_0.*{other.url}"):
        lab.embed_frame(ROWS, labs=[other])
    assert len(sent) == 1


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
def test_the_rows_of_a_killed_lab_are_answered_by_another(lab, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    rows = [f"row {number}" for number in range(400)]

    def prompt(row):
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


@pytest.mark.slow
def test_the_vectors_of_a_killed_lab_are_computed_by_another(lab, monkeypatch, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    calls = [0]

    async def kill():
        calls[0] += 1
        if calls[0] == 5:
            child.kill()

    before_each(monkeypatch, LocalBackend, kill, "embed")
    try:
        with attach(child.stdout.readline().strip()) as killed, pytest.warns(RuntimeWarning, match=killed.url):
            found = lab.embed_frame(TEXTS, labs=[killed])
    finally:
        child.kill()
        child.communicate()
    assert np.array_equal(np.stack(found["embedding"]), lab.embed(TEXTS))
    own, lost = found.attrs["labs"]
    assert own["vectors"] + lost["vectors"] == len(TEXTS)
    assert lost["returned"] == TEXTS_AT_ONCE
    assert lost["error"]


@pytest.mark.slow
def test_labs_whose_embedders_have_the_same_name_and_other_weights_are_refused(tmp_path):
    homes = [tmp_path / name for name in "ab"]
    for seed, home in enumerate(homes):
        write_tiny_bert(home / "models" / "embedder", seed=seed)
    first, second = (lmx_lab.Lab(Settings(home=home, port=0, embedder="embedder"), loop="thread") for home in homes)
    with first, second, attach(second.url) as attached:
        for other in (second, attached):
            with pytest.raises(InvalidRequestError, match=f"embedder .*{first.url}.*{second.url}"):
                first.embed_frame(["the cat"], labs=[other])


def test_a_lab_in_the_kernel_answers_rows_while_its_kernel_waits(lab, tmp_path):
    async def share_with_a_kernel():
        async with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="kernel") as kernel:
            await kernel.aload("echo")
            return lab.map(ROWS, "{text}", labs=[kernel])

    answers = asyncio.run(share_with_a_kernel())
    assert answers["answer"].tolist() == ROWS
    assert [each["answers"] > 0 for each in answers.attrs["labs"]] == [True, True]
