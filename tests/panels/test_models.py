"""Test the models panel without a browser: its list, loads, unloads, refused requests."""

import threading

import pytest

from lmx_lab.errors import NotLoadedError, OutOfMemoryError
from lmx_lab.panels.models import MAX_ROWS, ModelsPanel
from lmx_lab.panels.panel import BUG
from lmx_lab.values.models import ModelEvent, Unloading
from lmx_lab.wire.admin import Preference
from tests.support.gguf import EXACT, LOSSY
from tests.support.labs import manager_of
from tests.support.panels import Reader, Refused, ScriptedBackend, record

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
        "tiny": ("loaded, 10 MB", "Unload"),
        "mini": ("pinned, 1.50 GB", ""),
        "other": ("loaded", "Unload"),
        **dict.fromkeys(("now", "after-unloading", "not-here"), ("on disk", "Load")),
    }


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
    reader.until(lambda panel: not panel.jobs and cells(panel) == {"tiny": ("loaded, 10 MB", "Unload")})


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
    async def refuse(model):
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
    reader.until(lambda panel: cells(panel).get("tiny") == ("loaded, 10 MB", "Unload"))
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
    reader.until(lambda panel: cells(panel) == {"tiny": ("loaded, 10 MB", "Unload")})
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
    reader.until(lambda panel: "1000 models on the disk of example.org:8400" in panel.caption)
    assert len(reader.panel.rows) == MAX_ROWS


@pytest.mark.parametrize("name", [None, "", "  ", 7, "x" * 5000])
def test_an_invalid_model_name_is_refused(reader, name):
    with pytest.raises(Refused, match="model"):
        reader.ask("load", model=name)


@pytest.mark.parametrize("compact", [True, False])
def test_the_snapshot_has_the_list_without_a_view(workbench, backend, compact):
    backend.set_state(model="tiny", pinned=("mini",), lan_url="http://10.0.0.2:8400")
    backend.records = [record("<script>alert(1)</script>", loaded=True, vram_gb=0.01)]
    html = ModelsPanel(workbench, compact=compact).snapshot_html()
    assert "running, on the kernel&#x27;s loop" in html
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


def test_a_real_lab_loads_waits_and_unloads_and_its_errors_are_shown(lab, real_workbench, tmp_path):
    reader = Reader(ModelsPanel(real_workbench))
    reader.ask("refresh")
    reader.until(lambda panel: panel.rows)
    reader.ask("load", model="tiny")
    reader.until(lambda panel: panel.server["model"] == "tiny" and not panel.jobs)
    reader.until(lambda panel: cells(panel)["tiny"][1] == "Unload")
    pieces = iter(lab.chat("Hello", stream=True, max_tokens=300, ignore_eos=True))
    next(pieces)
    reader.ask("load", model="tiny-two")
    assert len("".join(pieces)) > 100
    reader.until(lambda panel: panel.server["model"] == "tiny-two" and not panel.jobs)
    reader.until(lambda panel: cells(panel)["tiny-two"][1] == "Unload")
    assert cells(reader.panel)["tiny"] == ("on disk", "Load")
    assert not reader.panel.error
    reader.ask("unload", model="tiny-two")
    reader.until(lambda panel: panel.server["model"] is None and not panel.jobs)
    reader.until(lambda panel: cells(panel)["tiny-two"] == ("on disk", "Load"))
    assert manager_of(lab).snapshot.model is None
    reader.ask("load", model=str(tmp_path))
    reader.until(lambda panel: panel.error.startswith(f"{tmp_path} was not loaded: "))
