"""Test the models panel without a browser: its list, loads, unloads, refused requests."""

import asyncio
import contextlib
import html
import threading
import time
from pathlib import Path
from typing import get_args

import pytest

import lmx_lab
from lmx_lab.engine.engines import engine_for
from lmx_lab.errors import InvalidRequestError, NotLoadedError, OutOfMemoryError, StorageFullError
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.panels.models import ENGINES, MAX_ROWS, ModelsPanel
from lmx_lab.panels.panel import BUG
from lmx_lab.settings import Settings
from lmx_lab.values.models import DiskUse, EngineChoice, ModelEvent, Stored, Unloading
from lmx_lab.wire.admin import Preference, RequestEvent
from tests.support.gguf import EXACT, LOSSY
from tests.support.labs import manager_of
from tests.support.panels import Reader, Refused, ScriptedBackend, panels_of, record, server_sample

PANEL = ModelsPanel


def cells(panel):
    return {row["id"]: (row["cells"][-1], row["action"]) for row in panel.rows}


def test_refresh_shows_the_list(reader, backend):
    backend.records = [
        record("tiny", loaded=True, vram_gb=0.01, quantization="4-bit"),
        record("mini", kind="embedding", loaded=True, pinned=True, vram_gb=1.5, context_length=None),
        record("other", loaded=True, loaded_context_length=5120, slots=8),
        *(record(str(fits), fits=fits) for fits in ("now", "after-unloading", "not-here")),
    ]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.rows) == 6)
    assert [row["cells"][6] for row in reader.panel.rows] == ["", "", "", "yes", "if others leave", "no"]
    assert [row["cells"][5] for row in reader.panel.rows[:3]] == ["512", "", "5,120 in 8 slots"]
    assert reader.panel.rows[0]["cells"] == ["chat", "mlx", "mlx", "250 MB", "4-bit", "512", "", "loaded, 10 MB"]
    assert cells(reader.panel) == {
        "tiny": ("loaded, 10 MB", ""),
        "mini": ("kept loaded, 1.50 GB", ""),
        "other": ("loaded", ""),
        **dict.fromkeys(("now", "after-unloading", "not-here"), ("on disk", "Load")),
    }


def test_the_panel_does_not_claim_that_there_are_no_models_before_it_has_listed_them(backend, workbench):
    may_answer, models = threading.Event(), backend.models

    async def slow():
        await asyncio.to_thread(may_answer.wait)
        return await models()

    backend.models = slow
    reader = Reader(ModelsPanel(workbench))
    reader.until(lambda panel: panel.choices)
    assert (reader.panel.rows, reader.panel.caption) == ([], "")
    may_answer.set()
    reader.ask("refresh")
    reader.until(lambda panel: panel.caption == "2 models on this disk")


def test_the_faster_engine_is_named_in_one_line(reader, backend):
    reader.ask("refresh")
    assert reader.panel.engines == ""
    detail = "for smollm2-135m: MLX 24 tok/s, llama.cpp 110 tok/s; prefer <GGUF> files"
    backend.preference = Preference(engine="llama.cpp", model="smollm2-135m", measured_at=1.0, detail=detail)
    reader.ask("refresh")
    reader.until(lambda panel: panel.engines == detail)
    assert "<div>for smollm2-135m: MLX 24 tok/s, llama.cpp 110 tok/s; prefer &lt;GGUF&gt; files</div>" in (
        reader.panel.snapshot_html()
    )


def test_quantized_copies_are_shown_with_their_loss(reader, backend):
    backend.records = [
        record("small", format="gguf", quantization="Q8_0", quantized_copy=EXACT, quantized_copies=[EXACT, LOSSY])
    ]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.rows) == 1)
    assert reader.panel.rows[0]["cells"][4] == "Q8_0 copy of Q4_1"
    assert "mean KL 0.005 per token, perplexity 17.8 instead of 17.7; loaded by default" in reader.panel.engines
    assert "mean KL 0.27 per token, perplexity 20.5 instead of 17.7; loaded only as small:Q4_0" in reader.panel.engines


def test_what_is_wrong_with_a_loaded_model_is_shown(reader, backend):
    backend.records = [record("tiny", loaded=True, vram_gb=0.1, warning="no merges"), record("small", warning="old")]
    reader.ask("refresh")
    reader.until(lambda panel: [(row["id"], row["warning"]) for row in panel.resident] == [("tiny", "no merges")])
    saved = reader.panel.snapshot_html()
    assert ("<div>tiny: no merges</div>" in saved, "old" in saved) == (True, False)


def test_a_model_without_its_engine_has_no_load_button_and_the_remedy_is_shown(reader, backend):
    remedy = "llama.cpp is not installed: pip install it"
    missing = {"format": "gguf", "engine": "llama.cpp", "problem": remedy}
    backend.records = [record("tiny"), record("a.gguf", **missing), record("b.gguf", **missing)]
    reader.ask("refresh")
    reader.until(lambda panel: panel.engines == remedy)
    assert cells(reader.panel) == {
        "tiny": ("on disk", "Load"),
        "a.gguf": ("needs llama.cpp", ""),
        "b.gguf": ("needs llama.cpp", ""),
    }
    assert [row["cells"][1:3] for row in reader.panel.rows] == [["mlx", "mlx"], *[["gguf", "llama.cpp"]] * 2]


def test_a_load_is_answered_at_once_and_its_end_is_shown_in_the_list(reader, backend):
    assert reader.ask("load", model=" tiny ") == {"model": "tiny"}
    reader.until(lambda panel: [job["id"] for job in panel.jobs] == ["tiny"])
    backend.records = [record("tiny", loaded=True, vram_gb=0.01)]
    reader.give(backend.loads, "done")
    reader.until(lambda panel: not panel.jobs and cells(panel) == {"tiny": ("loaded, 10 MB", "")})


@pytest.mark.parametrize(
    ("name", "event", "shown"),
    [
        (
            "org/big",
            ModelEvent(model="org/big", stage="download", done_bytes=500_000_000, total_bytes=2_000_000_000),
            {"text": "downloading", "detail": "500 MB of 2.00 GB", "fraction": 0.25},
        ),
        (
            "./folder",
            ModelEvent(model="/abs/folder", stage="load", total_bytes=1_000),
            {"text": "loading", "detail": "", "fraction": None},
        ),
    ],
    ids=["a download", "under another name"],
)
def test_a_load_shows_its_progress_as_one_job(reader, backend, name, event, shown):
    reader.ask("load", model=name)
    reader.give(backend.published, event)
    reader.until(lambda panel: panel.jobs == [{"id": name, **shown, "actions": ["Cancel"]}])


def in_memory(panel):
    return {row["id"]: row for row in panel.resident}


def test_each_model_in_memory_has_a_row(reader, backend):
    backend.set_state(model="tiny", others=("mini", "big"))
    backend.measured = server_sample(1.0, memory_total_gb=16.0)
    backend.records = [
        record("big", loaded=True, vram_gb=4.0, ttl_s=90.0, idle_since=time.time() - 200.0),
        record("mini", loaded=True, vram_gb=0.5, pinned=True, idle_since=time.time() - 7300.0),
        record("other"),
        record("tiny", loaded=True, vram_gb=0.01, main=True, ttl_s=3600.0, idle_since=time.time() - 10.0),
    ]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.resident) == 3 and panel.resident[0]["fraction"])
    choices = [["never", "never"], ["60", "1 min"], ["300", "5 min"], ["900", "15 min"], ["3600", "1 h"]]
    usual = {"main": False, "pinned": False, "leaving": False, "engine": "on mlx, context 512", "warning": ""}
    rows = [
        {"id": "tiny", "main": True, "memory": "10 MB of 16.00 GB", "fraction": 0.000625},
        {"id": "big", "memory": "4.00 GB of 16.00 GB", "fraction": 0.25},
        {"id": "mini", "pinned": True, "memory": "500 MB of 16.00 GB", "fraction": 0.03125},
    ]
    idle = [
        {"idle": "idle", "ttl": "3600", "ttls": choices},
        {"idle": "idle for 3 min", "ttl": "90", "ttls": [*choices[:2], ["90", "90 s"], *choices[2:]]},
        {"idle": "idle for 121 min", "ttl": "never", "ttls": choices},
    ]
    assert reader.panel.resident == [{**usual, **row, **times} for row, times in zip(rows, idle, strict=True)]
    backend.set_state(state="stopped")
    reader.until(lambda panel: panel.resident == [])


def test_a_row_says_whether_its_model_answers(reader, backend):
    backend.set_state(model="tiny")
    backend.records = [record("tiny", loaded=True, idle_since=time.time() - 200.0)]
    reader.ask("refresh")
    reader.until(lambda panel: panel.resident and panel.resident[0]["idle"] == "idle for 3 min")
    assert (reader.panel.resident[0]["memory"], reader.panel.resident[0]["fraction"]) == ("0 bytes", None)
    backend.measured = server_sample(1.0, active_requests=1)
    reader.until(lambda panel: panel.resident[0]["idle"] == "answering")
    event = RequestEvent(
        **{"request_id": "1", "model": "tiny", "finish_reason": "stop", "prompt_tokens": 1, "completion_tokens": 1},
        **{"tokens_per_second": 1.0, "ttft_ms": 1.0},
    )
    reader.give(backend.published, event)
    backend.measured = server_sample(2.0)
    reader.until(lambda panel: panel.resident[0]["idle"] == "idle")
    # An older server does not say how long a model has been idle.
    backend.records = [record("tiny", loaded=True)]
    reader.ask("refresh")
    reader.until(lambda panel: panel.resident[0]["idle"] == "")


def test_pins_and_times_to_live_are_changed(reader, backend):
    backend.records = [record("tiny", loaded=True)]
    reader.ask("refresh")
    for pin, ttl_s, shown in [
        (True, None, (True, "never")),
        (None, 300, (False, "300")),
        (False, "never", (False, "never")),
    ]:
        reader.ask("keep", model="tiny", pin=pin, ttl_s=ttl_s)
        assert backend.requests.pop() == ("keep", ("tiny", pin, ttl_s))
        reader.until(lambda panel, shown=shown: [(row["pinned"], row["ttl"]) for row in panel.resident] == [shown])
    with pytest.raises(Refused, match="ttl_s: ") as refusal:
        reader.ask("keep", model="tiny", ttl_s="soon")
    assert refusal.value.param == "ttl_s"


def test_a_model_next_to_the_main_one_is_unloaded_by_its_name_and_can_wait(reader, backend):
    backend.set_state(model="tiny", others=("big",))
    backend.records = [record("tiny", loaded=True), record("big", loaded=True)]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.resident) == 2)
    reader.ask("unload", model="big")
    reader.until(lambda panel: jobs(panel) == [("big", "unloading", [])])
    assert {name: row["leaving"] for name, row in in_memory(reader.panel).items()} == {"tiny": False, "big": True}
    waiting = Unloading(answers_left=1, seconds_left=28)
    backend.records[1] = record("big", loaded=True, unloading=waiting)
    reader.give(backend.published, ModelEvent(model="big", stage="unloading", unloading=waiting))
    reader.until(lambda panel: jobs(panel)[0][2] == ["Wait", "Stop now"])
    assert cells(reader.panel) == {"tiny": ("loaded", ""), "big": ("unloading", "")}
    reader.ask("unload", model="big", wait=True)
    reader.until(lambda panel: backend.requests == [("unload", "big"), ("unload", ("big", True))])
    backend.set_state(others=())
    backend.records = [record("tiny", loaded=True), record("big")]
    reader.give(backend.unloads, 0.1, 0.1)
    reader.give(backend.published, ModelEvent(model="big", stage="unloaded"))
    reader.until(lambda panel: not panel.jobs and list(in_memory(panel)) == ["tiny"])


def test_a_model_that_is_no_longer_next_to_the_main_one_is_detected(reader, backend):
    backend.set_state(model="tiny", others=("big",))
    backend.records = [record("tiny", loaded=True), record("big", loaded=True)]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.resident) == 2 and panel.server["others"] == ("big",))
    backend.records = [record("tiny", loaded=True), record("big")]
    backend.set_state(others=())
    reader.until(lambda panel: list(in_memory(panel)) == ["tiny"])


def test_a_load_has_the_options_of_the_form(reader, backend):
    options = {"engine": "llama.cpp", "context_length": 4096, "draft": "mini", "deterministic": True}
    reader.ask("load", model="tiny", options=options)
    reader.give(backend.loads, "done")
    reader.until(lambda panel: not panel.jobs)
    assert backend.requests == [("load", ("tiny", options))]


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"context_length": "many"}, "context_length"),
        ({"kv_cache_dtype": "q2"}, "kv_cache_dtype"),
        ({"contextlength": 1}, "contextlength"),
        ("engine", "options"),
    ],
)
def test_an_invalid_option_is_refused_with_its_name(reader, backend, options, field):
    with pytest.raises(Refused, match=field) as refusal:
        reader.ask("load", model="tiny", options=options)
    assert refusal.value.param == field
    assert backend.requests == []


def test_each_model_has_the_engines_that_can_run_it(reader, backend):
    backend.records = [
        record("both", format="gguf", engine="llama.cpp", formats=["gguf", "mlx"]),
        record("tiny"),
        record("echo", format="echo", engine="echo", formats=["echo"]),
    ]
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.rows) == 3)
    assert {row["id"]: row["engines"] for row in reader.panel.rows} == {
        "both": ["llama.cpp", "mlx"],
        "tiny": ["mlx"],
        "echo": [],
    }
    assert reader.panel.choices == {"engine": ["mlx", "llama.cpp"], "kv_cache_dtype": ["q8_0", "q4_0"]}
    # Without llama.cpp.
    backend.engines = backend.engines[:1]
    reader.ask("refresh")
    reader.until(lambda panel: panel.choices["engine"] == ["mlx"])
    assert [row["engines"] for row in reader.panel.rows] == [["mlx"], ["mlx"], []]


def test_the_engine_of_each_format_is_the_one_that_runs_it():
    assert {format_: engine_for(format_).name for format_ in ENGINES} == ENGINES
    assert sorted(ENGINES.values()) == sorted(name for name in get_args(EngineChoice) if name != "auto")


def jobs(panel):
    return [(job["id"], job["text"], job["actions"]) for job in panel.jobs]


def test_a_load_shows_that_it_waits_for_running_answers(reader, backend):
    state = Unloading(answers_left=2, seconds_left=28, replaced_by="tiny-two")
    backend.set_state(model="tiny", unloading=state)
    reader.ask("load", model="tiny-two")
    reader.give(backend.published, ModelEvent(model="tiny-two", stage="load"))
    reader.until(
        lambda panel: (
            jobs(panel)
            == [
                ("tiny-two", "waiting for running answers (2)", ["Cancel"]),
                ("tiny", "unloading, 2 answers left (28 s)", ["Wait", "Stop now"]),
            ]
        )
    )
    backend.set_state(model=None, unloading=None)
    reader.until(lambda panel: jobs(panel) == [("tiny-two", "loading", ["Cancel"])])


def test_an_unload_of_any_client_shows_its_state_and_can_wait_or_stop(reader, backend):
    backend.records = [record("tiny", loaded=True, vram_gb=0.01)]
    backend.set_state(model="tiny", unloading=Unloading(answers_left=1, seconds_left=28))
    reader.ask("refresh")
    row = ("tiny", "unloading, 1 answer left (28 s)", ["Wait", "Stop now"])
    reader.until(lambda panel: jobs(panel) == [row] and cells(panel) == {"tiny": ("unloading, 10 MB", "")})
    assert "model: tiny, unloading, 1 answer left (28 s)" in reader.panel.snapshot_html()
    event = ModelEvent(model="tiny", stage="unloading", unloading=Unloading(answers_left=1, seconds_left=28))
    reader.give(backend.published, event)
    reader.ask("unload", model="tiny", wait=True)
    backend.set_state(unloading=Unloading(answers_left=1, seconds_left=None))
    row = ("tiny", "unloading, 1 answer left (no time limit)", ["Stop now"])
    reader.until(lambda panel: jobs(panel) == [row])
    reader.ask("unload", model="tiny", wait=False)
    reader.until(lambda panel: backend.requests == [("unload", ("tiny", True)), ("unload", ("tiny", False))])
    backend.records = [record("tiny")]
    backend.set_state(model=None, unloading=None)
    reader.give(backend.unloads, 0.1, 0.1)
    reader.give(backend.published, ModelEvent(model="tiny", stage="unloaded"))
    reader.until(lambda panel: not panel.jobs and cells(panel) == {"tiny": ("on disk", "Load")})
    # A late click, after which another model may be loaded, changes nothing.
    reader.ask("unload", model="tiny", wait=False)
    assert len(backend.requests) == 2
    with pytest.raises(Refused, match="wait is 'yes'; it must be true or false"):
        reader.ask("unload", model="tiny", wait="yes")


def test_a_refused_wait_is_shown_unless_another_lab_is_shown(reader, backend, workbench):
    backend.set_state(model="tiny", unloading=Unloading(answers_left=1, seconds_left=28))
    reader.until(lambda panel: panel.jobs)
    reader.ask("unload", model="tiny", wait=True)
    reader.give(backend.unloads, NotLoadedError("tiny is gone"))
    reader.until(lambda panel: panel.error == "tiny was not unloaded: tiny is gone")
    reader.ask("dismiss")
    reader.ask("unload", model="tiny", wait=True)
    workbench.follow(ScriptedBackend())
    reader.until(lambda panel: not panel.jobs)
    reader.give(backend.unloads, NotLoadedError("tiny is gone"))
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.rows) == 2)
    assert not reader.panel.error


def test_an_unload_without_a_request_is_explained(reader, backend):
    event = ModelEvent(model="tiny", stage="unloaded", message="the memory is needed")
    reader.give(backend.published, event)
    reader.until(lambda panel: panel.error == "tiny was unloaded: the memory is needed")


def test_a_refused_cancel_keeps_the_failure_of_the_load(reader, backend):
    async def refuse(model, **_):
        raise NotLoadedError("it has just ended")

    backend.cancel_load = refuse
    reader.ask("load", model="org/big")
    with pytest.raises(Refused, match="it has just ended"):
        reader.ask("cancel", model="org/big")
    reader.give(backend.loads, OutOfMemoryError("too large"))
    reader.until(lambda panel: panel.error == "org/big was not loaded: too large")


def test_a_second_load_is_refused(reader, backend):
    reader.ask("load", model="tiny")
    with pytest.raises(Refused, match="tiny is being loaded") as refusal:
        reader.ask("load", model="tiny-two")
    assert refusal.value.code == "model-busy"
    assert backend.requests == [("load", "tiny")]
    assert not reader.panel.error


@pytest.mark.parametrize(
    ("error", "reason"), [(OutOfMemoryError("huge needs 80 GB"), "huge needs 80 GB"), (ValueError("x"), BUG)]
)
def test_a_failed_load_shows_the_reason_until_it_is_dismissed(reader, backend, error, reason):
    reader.ask("load", model="huge")
    reader.give(backend.loads, error)
    reader.until(lambda panel: panel.error == f"huge was not loaded: {reason}")
    reader.until(lambda panel: not panel.jobs)
    reader.ask("dismiss")
    reader.until(lambda panel: not panel.error)


def test_a_cancelled_load_is_not_shown_as_a_failure(reader, backend):
    reader.ask("load", model="org/big")
    reader.ask("cancel", model="org/big")
    assert backend.requests == [("load", "org/big"), ("cancel", "org/big")]
    reader.until(lambda panel: panel.jobs)
    reader.give(backend.loads, NotLoadedError("the load of org/big was cancelled"))
    reader.until(lambda panel: not panel.jobs)
    assert not reader.panel.error


def test_a_load_of_another_client_is_shown(reader, backend):
    event = ModelEvent(model="org/other", stage="download", done_bytes=1_000_000)
    reader.give(backend.published, event)
    reader.until(lambda panel: [(job["id"], job["detail"]) for job in panel.jobs] == [("org/other", "1 MB")])
    reader.give(backend.published, ModelEvent(model="org/other", stage="loaded"))
    reader.until(lambda panel: not panel.jobs)


def test_unload_unloads_the_model_that_was_shown_and_not_the_next_one(reader, backend):
    backend.set_state(model="tiny")
    reader.until(lambda panel: panel.server["model"] == "tiny")
    reader.ask("unload", model="tiny")
    reader.until(lambda panel: [job["text"] for job in panel.jobs] == ["unloading"])
    reader.ask("unload", model="tiny")
    reader.give(backend.unloads, 0.1)
    reader.until(lambda panel: not panel.jobs)
    backend.set_state(model="tiny-two")
    assert reader.ask("unload", model="tiny") == {"model": "tiny"}
    assert backend.requests == [("unload", "tiny")]


def test_an_unload_without_an_event_is_detected(reader, backend):
    backend.set_state(model="tiny")
    backend.records = [record("tiny", loaded=True, vram_gb=0.01)]
    reader.ask("refresh")
    reader.until(lambda panel: panel.server["model"] == "tiny")
    reader.until(lambda panel: cells(panel).get("tiny") == ("loaded, 10 MB", ""))
    backend.records = [record("tiny")]
    backend.set_state(model=None)
    reader.until(lambda panel: cells(panel).get("tiny") == ("on disk", "Load"))


def test_the_list_is_not_read_with_every_tick(reader, backend):
    reader.ask("refresh")
    for url in ("http://a", "http://b", "http://c"):
        backend.set_state(url=url)
        reader.until(lambda panel, url=url: panel.server["url"] == url)
    assert backend.scans == 1


def test_a_stopped_server_refuses_and_the_next_one_is_shown(reader, backend, workbench):
    backend.set_state(model="tiny")
    backend.records = [record("tiny", loaded=True, vram_gb=0.01, loaded_context_length=512, slots=8)]
    reader.ask("refresh")
    reader.until(lambda panel: cells(panel) == {"tiny": ("loaded, 10 MB", "")})
    # The load of another client.
    reader.give(backend.published, ModelEvent(model="org/other", stage="download", done_bytes=1_000_000))
    reader.until(lambda panel: panel.jobs)
    backend.set_state(state="stopped")
    reader.until(lambda panel: cells(panel) == {"tiny": ("on disk", "Load")} and not panel.jobs)
    assert reader.panel.rows[0]["cells"][5] == "512", "without slots"
    with pytest.raises(Refused, match="the server is stopped"):
        reader.ask("load", model="tiny")
    following = ScriptedBackend()
    following.records = [record("fresh")]
    workbench.follow(following)
    reader.until(lambda panel: panel.server["state"] == "running" and list(cells(panel)) == ["fresh"])
    reader.ask("load", model="fresh")
    reader.give(following.loads, "done")
    assert following.requests == [("load", "fresh")]


def test_a_load_of_the_previous_lab_is_removed(reader, backend, workbench):
    reader.ask("load", model="tiny")
    reader.until(lambda panel: panel.jobs)
    workbench.follow(ScriptedBackend())
    reader.until(lambda panel: not panel.jobs)
    reader.ask("load", model="tiny-two")


def test_a_view_that_missed_a_message_receives_all_state(reader, backend, monkeypatch):
    reader.ask("refresh")
    reader.until(lambda panel: len(panel.rows) == 2)
    sent = []
    monkeypatch.setattr(reader.panel, "send_state", lambda names: sent.append(set(names)))
    revision = reader.ask("compare", revision=-1)
    assert revision == reader.panel.revision > 0
    assert sent
    assert {"rows", "jobs", "server", "revision"} <= sent[0]
    assert not {"_esm", "_css"} & sent[0], "the code has not changed"
    sent.clear()
    assert reader.ask("compare", revision=revision) == revision
    assert sent == []


def test_a_thousand_models_are_a_bounded_list(reader, backend):
    backend.records = [record(f"model-{number}") for number in range(1000)]
    backend.set_state(disk="the disk of example.org:8400")
    reader.ask("refresh")
    reader.until(lambda panel: "1,000 models on the disk of example.org:8400" in panel.caption)
    assert len(reader.panel.rows) == MAX_ROWS


@pytest.mark.parametrize("name", [None, "", "  ", 7, "x" * 5000])
def test_an_invalid_model_name_is_refused(reader, name):
    with pytest.raises(Refused, match="model"):
        reader.ask("load", model=name)


@pytest.mark.parametrize("compact", [True, False])
def test_the_snapshot_has_the_list_without_a_view(workbench, backend, compact):
    backend.set_state(model="tiny", others=("mini",), lan_url="http://10.0.0.2:8400")
    backend.records = [record("<script>alert(1)</script>", loaded=True, vram_gb=0.01)]
    html = ModelsPanel(workbench, compact=compact).snapshot_html()
    assert "running in this kernel" in html
    assert ">&lt;script&gt;alert(1)&lt;/script&gt;</td>" in html
    assert "http://10.0.0.2:8400" in html
    assert "loaded, 10 MB" in html
    assert "<script" not in html
    assert ("<details>" in html) == compact


def test_requests_from_any_thread_are_answered(reader):
    thread = threading.Thread(target=lambda: reader.ask("refresh"))
    thread.start()
    thread.join()
    reader.until(lambda panel: len(panel.rows) == 2)


def stored(name, *sizes, what="model", remedy=""):
    files = tuple((f"part-{number}", size) for number, size in enumerate(sizes))
    return Stored(name=name, what=what, path=Path("/home", name), files=files, remedy=remedy)


def test_storage_shows_what_takes_space_and_what_a_deletion_would_delete(reader, backend):
    backend.records = [record("tiny", loaded=True)]
    reader.ask("refresh")
    assert reader.panel.storage == {}
    backend.use = DiskUse(
        items=(
            stored("llama.cpp", 3 * 10**9, what="models of llama.cpp", remedy="delete its files"),
            stored("big", *[10**8] * 10),
            stored("tiny", 10**6),
        ),
        free_bytes=2 * 10**9,
    )
    reader.ask("storage")
    reader.until(lambda panel: len(panel.storage.get("rows", ())) == 3)
    assert reader.panel.storage["note"] == "4.00 GB in all, 2.00 GB free: models of llama.cpp 3.00 GB, model 1.00 GB"
    names = ", ".join(f"part-{number} (100 MB)" for number in range(8))

    def row(name, what, size, *, remedy="", question=""):
        return {"id": name, "cells": [what, size, f"/home/{name}"], "remedy": remedy, "question": question}

    loaded = "It is in memory, and can be used until it is unloaded."
    assert reader.panel.storage["rows"] == [
        row("llama.cpp", "models of llama.cpp", "3.00 GB", remedy="delete its files"),
        row("big", "model", "1.00 GB", question=f"Delete big, 1.00 GB at /home/big? 10 files: {names} and 2 more."),
        row("tiny", "model", "1 MB", question=f"Delete tiny, 1 MB at /home/tiny? 1 file: part-0 (1 MB). {loaded}"),
    ]


def test_only_what_the_confirmed_question_names_is_deleted(reader, backend, workbench):
    tiny = stored("tiny", 10**6)
    backend.use = DiskUse(items=(tiny,), free_bytes=0)
    reader.ask("storage")
    reader.until(lambda panel: panel.storage.get("rows"))
    question = reader.panel.storage["rows"][0]["question"]
    with pytest.raises(Refused, match="has changed since it was listed"):
        reader.ask("remove", question=question.replace("1 MB", "2 MB"))
    reader.ask("remove", question=question)
    reader.until(lambda panel: panel.storage["note"] == "Deleting tiny …")
    assert [row["question"] for row in reader.panel.storage["rows"]] == [""]
    with pytest.raises(Refused, match="has changed since it was listed"):
        reader.ask("remove", question=question)
    reader.give(backend.removals, StorageFullError("/home/tiny cannot be deleted"))
    reader.until(lambda panel: panel.error == "tiny was not deleted: /home/tiny cannot be deleted")
    reader.until(lambda panel: panel.storage["rows"][0]["question"] == question)
    reader.ask("remove", question=question)
    backend.use = DiskUse(items=(), free_bytes=10**6)
    reader.give(backend.removals, None)
    reader.until(lambda panel: panel.storage == {"rows": [], "note": "0 bytes in all, 1 MB free"})
    assert backend.requests == [("remove", tiny)] * 2
    assert not reader.panel.error
    workbench.follow(ScriptedBackend())
    reader.until(lambda panel: panel.storage == {})


def test_a_real_lab_deletes_what_is_as_it_was_listed(lab, real_workbench):
    runs = lab.settings.home / "bench"
    runs.mkdir()
    (runs / "run.jsonl").write_bytes(b"0" * 2_000_000)
    reader = Reader(ModelsPanel(real_workbench))

    def question(panel):
        rows = panel.storage.get("rows", ())
        return next((row["question"] for row in rows if row["id"] == "bench"), None)

    reader.ask("storage")
    reader.until(question)
    tiny = next(row for row in reader.panel.storage["rows"] if row["id"] == "tiny")
    assert (tiny["cells"][0], tiny["cells"][2]) == ("model", str(lab.settings.home / "models" / "tiny"))
    assert question(reader.panel) == f"Delete bench, 2 MB at {runs}? 1 file: run.jsonl (2 MB)."
    (runs / "later.jsonl").write_bytes(b"0" * 1000)
    reader.ask("remove", question=question(reader.panel))
    changed = "bench was not deleted: bench has changed since it was listed; list it again"
    reader.until(lambda panel: panel.error == changed and question(panel))
    assert question(reader.panel).endswith("2 files: run.jsonl (2 MB), later.jsonl (1 kB).")
    reader.ask("remove", question=question(reader.panel))
    reader.until(lambda panel: panel.storage["rows"] and question(panel) is None)
    assert not reader.panel.error
    assert not runs.exists()
    assert (lab.settings.home / "models" / "tiny").exists()


def test_while_memory_is_short_a_line_has_the_reason_and_what_was_freed(reader, backend):
    reason = "0.01 GB of the container's 1.00 GB are free"
    backend.measured = server_sample(1.0, memory_pressure=reason, memory_freed_gb=0.25)
    line = f"Memory is short: {reason}. 250 MB of models and caches were freed, and further requests may have to wait."
    reader.until(lambda panel: panel.pressure == line)
    assert f"<div>{html.escape(line)}</div>" in reader.panel.snapshot_html()
    backend.measured = server_sample(2.0, memory_pressure=reason)
    reader.until(lambda panel: "are free. Nothing was freed, and" in panel.pressure)
    backend.measured = server_sample(3.0)
    reader.until(lambda panel: not panel.pressure)


def test_an_attached_lab_says_where_storage_is_listed(lab):
    with lmx_lab.attach(lab.url) as attached, panels_of(attached.backend) as workbench:
        reader = Reader(ModelsPanel(workbench))
        reader.ask("storage")
        reader.until(lambda panel: "run lmx-lab storage where the server runs" in panel.storage.get("note", ""))
        with pytest.raises(InvalidRequestError, match="where the server runs"):
            attached.backend.portal.run(attached.backend.remove_stored(stored("bench", 1)))


def test_a_real_lab_keeps_several_models(endless_home):
    settings = Settings(home=endless_home, port=0, resident=2)
    with lmx_lab.Lab(settings, loop="thread") as lab, panels_of(LocalBackend(lab.server)) as workbench:
        reader = Reader(ModelsPanel(workbench))
        for name in ("tiny", "tiny-two"):
            reader.ask("load", model=name)
            reader.until(lambda panel, name=name: in_memory(panel).get(name, {}).get("main") and not panel.jobs)
        reader.until(lambda panel: [row["fraction"] is not None for row in panel.resident] == [True, True])
        reader.ask("keep", model="tiny", pin=True)
        reader.until(lambda panel: in_memory(panel)["tiny"]["pinned"])
        reader.ask("unload", model="tiny")
        reader.until(lambda panel: panel.error.startswith("tiny was not unloaded: tiny is pinned"))
        reader.ask("keep", model="tiny", pin=False, ttl_s=900)
        reader.until(lambda panel: in_memory(panel)["tiny"]["ttl"] == "900")
        reader.ask("unload", model="tiny")
        reader.until(lambda panel: list(in_memory(panel)) == ["tiny-two"] and not panel.jobs and not panel.error)
        assert manager_of(lab).snapshot.model == "tiny-two"


def test_a_real_lab_loads_waits_and_unloads_and_its_errors_are_shown(lab, real_workbench, tmp_path):
    reader = Reader(ModelsPanel(real_workbench))
    reader.ask("refresh")
    reader.until(lambda panel: panel.rows)
    reader.ask("load", model="tiny")
    reader.until(lambda panel: panel.server["model"] == "tiny" and not panel.jobs)
    reader.until(lambda panel: list(in_memory(panel)) == ["tiny"])
    pieces = iter(lab.chat("Hello", stream=True, max_tokens=300, ignore_eos=True))
    next(pieces)
    reader.ask("load", model="tiny-two")
    assert len("".join(pieces)) > 100
    reader.until(lambda panel: panel.server["model"] == "tiny-two" and not panel.jobs)
    reader.until(lambda panel: list(in_memory(panel)) == ["tiny-two"])
    assert cells(reader.panel)["tiny"] == ("on disk", "Load")
    assert not reader.panel.error
    reader.ask("unload", model="tiny-two")
    reader.until(lambda panel: panel.server["model"] is None and not panel.jobs)
    reader.until(lambda panel: cells(panel)["tiny-two"] == ("on disk", "Load"))
    assert manager_of(lab).snapshot.model is None
    reader.ask("load", model=str(tmp_path))
    reader.until(lambda panel: panel.error.startswith(f"{tmp_path} was not loaded: "))
    assert not reader.panel.error_field


@pytest.mark.parametrize("is_attached", [False, True], ids=["local", "attached"])
def test_an_option_that_the_engine_refuses_is_named_until_the_next_load(lab, is_attached):
    with contextlib.ExitStack() as stack:
        backend = stack.enter_context(lmx_lab.attach(lab.url)).backend if is_attached else LocalBackend(lab.server)
        reader = Reader(ModelsPanel(stack.enter_context(panels_of(backend))))
        reader.ask("load", model="tiny", options={"kv_cache_dtype": "q8_0"})
        reader.until(lambda panel: panel.error.startswith("tiny was not loaded: tiny runs on MLX"))
        assert reader.panel.error_field == "kv_cache_dtype"
        reader.ask("load", model="tiny", options={"context_length": 100})
        reader.until(lambda panel: panel.server["model"] == "tiny" and not panel.jobs and not panel.error)
        assert not reader.panel.error_field
        assert manager_of(lab).snapshot.context_length == 100
        reader.ask("unload", model="tiny")
        reader.until(lambda panel: panel.server["model"] is None)
