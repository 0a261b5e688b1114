"""Test ``lab.bench`` on both loops, here and elsewhere."""

import pickle
import signal
import threading
from pathlib import Path

import pandas as pd
import pytest
from IPython.core.formatters import HTMLFormatter

import lmx_lab
from lmx_lab.bench import load, summary
from lmx_lab.bench.sample import COLUMNS
from lmx_lab.bench.targets import EngineTarget
from lmx_lab.errors import HostingError, InvalidRequestError, NotLoadedError
from lmx_lab.notebook.lab import attach
from lmx_lab.settings import Settings
from tests.support.kernels import Notebook
from tests.support.labs import manager_of, serving
from tests.support.model_server import STALL, WORDS, Scripted, after_calibration, token
from tests.support.models import write_tiny_llama
from tests.support.waiting import interrupt_when, until

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
KEY = "open-sesame-42"
SMALL = {"prompt_tokens": 48, "output_tokens": 8, "requests": 3}
BY_SERVER = ["queue_ms", "server_ttft_ms", "server_prefill_tok_s", "server_decode_tok_s", "peak_memory_gb"]


@pytest.fixture(scope="module")
def home(tmp_path_factory, smollm2):
    """A home for the runs of this module."""
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0)
    return home


@pytest.fixture(scope="module")
def lab(home):
    with serving(home, "tiny", api_key=KEY) as lab:
        yield lab


@pytest.fixture
def far(lab):
    with attach(lab.url, api_key=KEY) as far:
        yield far


def bench_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "lmx-lab-bench"]


def stored(home):
    return set((home / "bench").glob("*")) if (home / "bench").exists() else set()


def test_bench_measures_the_lab_and_stores_the_run_in_its_home(lab, home):
    rows = lab.bench(**SMALL, concurrency=(1, 2), repeats=2)
    assert tuple(rows.columns) == COLUMNS
    assert len(rows) == 2 * 2 * (1 + 3)
    assert rows["error"].isna().all()
    assert set(rows["target"]) == {"lab"}
    assert (rows["output_tokens"] == 8).all()
    assert summary(rows)["requests"].tolist() == [6, 6]
    assert rows.attrs["interrupted"] is False
    path = Path(rows.attrs["path"])
    assert path.parent == home / "bench"
    again = load(path)
    assert again["prompt_hash"].tolist() == rows["prompt_hash"].tolist()
    assert again.attrs["provenance"] == {path.stem: rows.attrs["provenance"]}
    assert rows.attrs["provenance"]["run"]
    assert bench_threads() == []


def test_the_table_has_the_servers_own_measurements(lab):
    rows = lab.bench(**SMALL, concurrency=1, record=False)
    # A notebook shows few columns of each case; the table itself, copies and selections are data frames.
    shown = HTMLFormatter()(rows)
    assert (shown.count("<tr"), "total_tok_s" in shown, "prompt_hash" in shown) == (2, True, False)
    assert "Summary of 4 requests, which .df lists" in shown
    for table in (rows.df, rows.copy(), rows[rows["error"].isna()], pickle.loads(pickle.dumps(rows))):
        assert "prompt_hash" in table.iloc[:, -3:]._repr_html_()
        pd.testing.assert_frame_equal(table, rows)
        assert table.attrs == rows.attrs
    assert rows[BY_SERVER].notna().all(axis=None)
    # The server measures from the arrival to its first token, the client from sending to receiving it.
    assert (rows["server_ttft_ms"] < rows["ttft_ms"]).all()
    assert (rows["queue_ms"] < rows["server_ttft_ms"]).all()
    assert rows["peak_memory_gb"].max() * 1e9 >= manager_of(lab).snapshot.model_memory_bytes


def test_a_run_that_is_not_recorded_stores_nothing(lab, home, tmp_path):
    before = stored(home)
    assert lab.bench(**SMALL, record=False).attrs["path"] is None
    assert stored(home) == before
    assert Path(lab.bench(**SMALL, record=tmp_path).attrs["path"]).parent == tmp_path
    assert stored(home) == before


def test_other_servers_and_the_engine_are_measured_with_the_lab(lab):
    with Scripted(WORDS) as other:
        rows = lab.bench(**SMALL, compare=[other.url, EngineTarget(manager_of(lab))], record=False)
        name = other.url.partition("://")[2]
        assert rows["target"].value_counts().to_dict() == {"lab": 4, name: 4, "engine": 4}
        assert lab.bench(**SMALL, compare=other.url, record=False)["target"].nunique() == 2
    assert rows["error"].isna().all()
    engine = rows[rows["target"] == "engine"]
    assert engine["engine"].unique().tolist() == ["lmx-lab, bare"]
    assert engine[BY_SERVER].notna().all(axis=None)
    assert (engine["queue_ms"] < engine["server_ttft_ms"]).all()
    assert (engine["server_ttft_ms"] < engine["ttft_ms"]).all()


def test_a_remote_lab_is_measured_by_the_same_verb(far, tmp_path, monkeypatch):
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    rows = far.bench(**SMALL)
    assert rows["error"].isna().all()
    assert rows[BY_SERVER].notna().all(axis=None)
    # The run is stored in this user's home, because the server's home may be on another machine.
    assert Path(rows.attrs["path"]).parent == tmp_path / "bench"


@pytest.mark.parametrize("loop", ["kernel", "thread"])
async def test_bench_can_be_awaited(home, loop):
    async with lmx_lab.Lab(Settings(home=home, port=0), loop=loop) as lab:
        await lab.aload("tiny")
        rows = await lab.abench(**SMALL, record=False)
    assert len(rows) == 4
    assert rows["error"].isna().all()


# --- interrupts


@pytest.mark.parametrize("where", ["lab", "far"])
def test_an_interrupt_stops_running_requests_and_keeps_the_rows(where, request, tmp_path):
    measured = request.getfixturevalue(where)
    before = signal.getsignal(signal.SIGINT)
    # Two requests calibrate, one warms up, one is answered; the answer of the next one does not end.
    with Scripted(after_calibration(WORDS, WORDS, [token("a"), STALL])) as other:
        waiting = interrupt_when(lambda: len(other.bodies) == 5)
        rows = measured.bench(**SMALL, compare=other.url, record=tmp_path)
        waiting.join()
        until(lambda: other.left == 1)
    assert rows.attrs["interrupted"] is True
    assert rows["error"].isna().all()
    assert rows[rows["target"] != "lab"]["warm_up"].tolist() == [True, False]
    assert load(rows.attrs["path"])["prompt_hash"].tolist() == rows["prompt_hash"].tolist()
    assert signal.getsignal(signal.SIGINT) == before
    assert bench_threads() == []


# --- with the kernel's loop


@pytest.fixture(scope="module")
def notebook(home):
    notebook = Notebook(home)
    notebook.run("import lmx_lab; lab = lmx_lab.launch('tiny', loop='kernel', port=0)")
    yield notebook
    stderr = notebook.stderr
    notebook.close()
    assert "Traceback" not in stderr, stderr
    assert "was destroyed" not in stderr, stderr


INTERRUPTED = """
{first_line}
import signal
from lmx_lab.bench import runner as measuring
text = measuring.progress_text
measuring.progress_text = lambda step: step.done == 3 and {after_three} or text(step)
rows = lab.bench(prompt_tokens=48, output_tokens={output_tokens}, requests=1000, record=False)
measuring.progress_text = text
print(3 <= len(rows) < 1000, rows.attrs["interrupted"], rows["error"].notna().sum())
"""
# In a cell with ``await``, the handler of ipykernel raises no exception.
in_both_kinds_of_cells = pytest.mark.parametrize("first_line", ["", "import asyncio; await asyncio.sleep(0)"])


@in_both_kinds_of_cells
def test_the_stop_button_keeps_the_rows(notebook, first_line):
    code = INTERRUPTED.format(first_line=first_line, after_three='print("started")', output_tokens=300)
    output = notebook.interrupt(code)
    assert output.error is None, output.message
    assert output.text.strip().splitlines()[-1] == "True True 0"
    # The lab still works.
    assert notebook.run("print(lab.chat('hi', max_tokens=2).usage.completion_tokens)") == "2"


@in_both_kinds_of_cells
def test_an_interrupt_between_two_requests_is_not_lost(notebook, first_line):
    raised = "signal.raise_signal(signal.SIGINT)"
    code = INTERRUPTED.format(first_line=first_line, after_three=raised, output_tokens=8)
    assert notebook.run(code) == "True True 0"


# --- what cannot be measured


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"prompt_tokens": "many"},
        {"compare": ["127.0.0.1:1", "127.0.0.1:1"]},
    ],
)
def test_an_invalid_argument_is_refused_and_stores_nothing(lab, home, wrong):
    before = stored(home)
    with pytest.raises(InvalidRequestError):
        lab.bench(**{**SMALL, **wrong})
    assert (stored(home), bench_threads()) == (before, [])


def test_bench_without_a_model_says_to_load_one(home):
    before = stored(home)
    with serving(home, None) as lab:
        with pytest.raises(NotLoadedError, match="load one first"):
            lab.bench(**SMALL)
        lab.stop()
        with pytest.raises(HostingError, match="was stopped"):
            lab.bench(**SMALL)
    assert (stored(home), bench_threads()) == (before, [])
