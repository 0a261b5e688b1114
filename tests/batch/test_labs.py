"""Test ``lab.map`` and ``lab.embed_frame`` over several labs: the distribution of rows, labs that fail and return, and
refused labs.
"""

import asyncio
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest

import lmx_lab
from lmx_lab.batch.search import PROBE, TEXTS_AT_ONCE
from lmx_lab.errors import BatchStoppedError, InvalidRequestError, NotLoadedError, UnreachableError
from lmx_lab.notebook.lab import attach
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


def before_each(monkeypatch, backend, before, method):
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


# --- the same for answers and vectors


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Inputs for which several labs compute answers or vectors."""

    inputs: list[str]
    verb: str
    arguments: tuple[str, ...] = ()
    column: str
    method: str
    """The method of a backend that computes the result of a request."""
    at_once: int
    """Number of inputs in a request."""
    running: int
    """Maximum number of requests that a lab computes at the same time."""
    probes: int
    """Number of requests before those for the inputs, which compare the vectors of the labs."""
    product: str

    def __str__(self):
        return self.product

    def run(self, lab, **options):
        return getattr(lab, self.verb)(self.inputs, *self.arguments, **options)

    def results(self, frame):
        """Return the results by their positions, without missing ones."""
        return {at: np.asarray(value).tolist() for at, value in frame[self.column].dropna().items()}


ANSWERS = Batch(
    inputs=ROWS,
    verb="map",
    arguments=("{text}",),
    column="answer",
    method="generate",
    at_once=1,
    running=6,
    probes=0,
    product="answers",
)
VECTORS = Batch(
    inputs=TEXTS,
    verb="embed_frame",
    column="embedding",
    method="embed",
    at_once=TEXTS_AT_ONCE,
    running=1,
    probes=1,
    product="vectors",
)


@pytest.fixture(params=[ANSWERS, VECTORS], ids=str)
def batch(request):
    return request.param


def test_another_lab_gets_the_inputs_of_one_that_fails_until_that_returns(batch, lab, second, monkeypatch):
    calls, resumed = Counter(), asyncio.Event()
    expected, models = batch.results(batch.run(lab)), RemoteBackend.models

    async def fail():
        calls["other"] += 1
        if calls["returns"]:
            calls["returned"] += 1
            if calls["returned"] > batch.probes:
                resumed.set()
        elif calls["other"] > 2:
            raise UnreachableError(GONE)

    async def wait():
        calls["own"] += 1
        if calls["own"] > batch.probes:
            await resumed.wait()

    async def list_models(backend):
        calls["returns"] = calls["other"] > 2
        return await models(backend)

    before_each(monkeypatch, RemoteBackend, fail, batch.method)
    before_each(monkeypatch, LocalBackend, wait, batch.method)
    monkeypatch.setattr(RemoteBackend, "models", list_models)
    with pytest.warns(RuntimeWarning, match=f"{second.url}.*{GONE}") as warned:
        found = batch.run(lab, labs=[second])
    assert len(warned) == 1
    assert batch.results(found) == expected
    own, failed = found.attrs["labs"]
    assert (own["returned"], own["error"], failed["error"]) == (0, "", "")
    assert batch.at_once <= failed["returned"] <= batch.running * batch.at_once
    assert own[batch.product] + failed[batch.product] == len(batch.inputs)


@pytest.mark.filterwarnings("ignore:the other labs")
def test_if_all_labs_fail_one_error_names_the_reasons_and_has_the_results_so_far(batch, lab, second, monkeypatch):
    calls, failed = Counter(), asyncio.Event()
    expected = batch.results(batch.run(lab))

    async def fail():
        calls["other"] += 1
        if calls["other"] > 2:
            failed.set()
            raise UnreachableError(GONE)

    async def fail_after_the_other():
        calls["own"] += 1
        # More than are computed at the same time, so that some results are complete.
        if calls["own"] > 8:
            await failed.wait()
            raise NotLoadedError("the model is gone")

    before_each(monkeypatch, RemoteBackend, fail, batch.method)
    before_each(monkeypatch, LocalBackend, fail_after_the_other, batch.method)
    with pytest.raises(BatchStoppedError, match=rf"the model is gone; {second.url}: {GONE}") as stopped:
        batch.run(lab, labs=[second])
    done = batch.results(stopped.value.frame)
    assert 0 < len(done) <= (8 + 2 - 2 * batch.probes) * batch.at_once
    assert f" {len(done)} {batch.product} of " in stopped.value.message
    assert done == {at: expected[at] for at in done}
    assert stopped.value.frame["error"].notna().sum() == len(batch.inputs) - len(done)


def test_labs_that_cannot_take_part_are_refused_before_the_first_request(batch, lab, other, monkeypatch):
    for labs in (other, [other.url], other.url):
        with pytest.raises(InvalidRequestError, match="list of labs"):
            batch.run(lab, labs=labs)

    models, requests = RemoteBackend.models, []

    async def changed(backend, **update):
        listed = await models(backend)
        return listed.model_copy(update={"models": [each.model_copy(update=update) for each in listed.models]})

    async def note():
        requests.append(batch.method)

    before_each(monkeypatch, LocalBackend, note, batch.method)
    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, quantization="Q4_0"))
    with pytest.raises(InvalidRequestError, match=rf"echo .*{lab.url}, and echo \(Q4_0.*{other.url}"):
        batch.run(lab, labs=[other])
    monkeypatch.setattr(RemoteBackend, "models", lambda backend: changed(backend, loaded=False))
    with pytest.raises(NotLoadedError, match=other.url):
        batch.run(lab, labs=[other])
    assert requests == []


def test_labs_that_compute_different_vectors_are_refused_before_the_first_text(lab, other, monkeypatch):
    embed, sent = RemoteBackend.embed, []

    async def other_vectors(backend, body):
        sent.append(body.input)
        return -(await embed(backend, body))

    monkeypatch.setattr(RemoteBackend, "embed", other_vectors)
    with pytest.raises(InvalidRequestError, match=rf"different vectors.*echo .*{lab.url}.*{other.url}"):
        lab.embed_frame(ROWS, labs=[other])
    assert sent == [[PROBE]]


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
def test_another_lab_gets_the_inputs_of_a_killed_one(batch, lab, monkeypatch, tmp_path):
    child = subprocess.Popen([sys.executable, "-c", SERVED, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    expected, calls = batch.results(batch.run(lab)), Counter()

    async def kill():
        calls["own"] += 1
        if calls["own"] == 5:
            child.kill()

    before_each(monkeypatch, LocalBackend, kill, batch.method)
    try:
        with attach(child.stdout.readline().strip()) as killed, pytest.warns(RuntimeWarning, match=killed.url):
            found = batch.run(lab, labs=[killed])
    finally:
        child.kill()
        child.communicate()
    assert batch.results(found) == expected
    own, lost = found.attrs["labs"]
    assert own[batch.product] + lost[batch.product] == len(batch.inputs)
    assert batch.at_once <= lost["returned"] <= batch.running * batch.at_once
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
