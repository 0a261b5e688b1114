"""Tests of model management, health and metrics: specification sections 2.7-2.9, 3, 4.2 and 4.3."""

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.support.asking import CHAT, ENDLESS, chat_body, echo_body, refused
from tests.support.labs import events_of, serving
from tests.support.models import write_tiny_llama


def load(http, model, **options):
    return http.post("/admin/models/load", json={"model": model, **options})


def test_readiness_follows_the_model(fresh_http):
    ready = fresh_http.get("/readyz")
    assert ready.status_code == 200
    assert (ready.json()["ready"], ready.json()["model"]) == (True, "echo")
    assert ready.json()["vram_gb"] > 0
    unloaded = fresh_http.post("/admin/models/unload")
    assert unloaded.json()["success"] is True
    assert unloaded.json()["freed_vram_gb"] == pytest.approx(ready.json()["vram_gb"], rel=0.1)
    not_ready = fresh_http.get("/readyz")
    assert not_ready.status_code == 503
    body = not_ready.json()
    assert (body["ready"], body["model"], body["vram_gb"]) == (False, "", 0.0)
    assert body["error"]["code"] == "no-model-loaded"
    error = refused(fresh_http.post(CHAT, json=echo_body()), 503, "no-model-loaded")
    assert "load" in error["message"]
    assert load(fresh_http, "echo").status_code == 200
    assert fresh_http.get("/readyz").status_code == 200


@pytest.mark.slow
def test_a_model_that_waits_for_answers_is_unloading_and_a_second_request_stops_them(fresh_lab, fresh_http):
    state = {"answers_left": 1, "seconds_left": 30, "replaced_by": None}
    with (
        events_of(fresh_lab, "models") as events,
        fresh_http.stream("POST", CHAT, json=echo_body(stream=True, **ENDLESS)) as answer,
    ):
        pieces = answer.iter_lines()
        next(pieces)
        unload = ThreadPoolExecutor(1).submit(fresh_http.post, "/admin/models/unload")
        event = next(event for event in events if event["type"] == "model")
        assert (event["model"], event["stage"], event["unloading"]) == ("echo", "unloading", state)
        records = {record["id"]: record for record in fresh_http.get("/admin/models").json()["models"]}
        assert (records["echo"]["loaded"], records["other"]["unloading"]) == (True, None)
        assert records["echo"]["unloading"]["answers_left"] == 1
        # The model is loaded until it is unloaded, but accepts nothing.
        ready = fresh_http.get("/readyz")
        assert (ready.status_code, ready.json()["unloading"]["answers_left"]) == (200, 1)
        assert "echo is unloading, 1 answer left (" in fresh_http.get("/about").text
        refused(fresh_http.post(CHAT, json=echo_body()), 503, "no-model-loaded")
        busy = refused(load(fresh_http, "other"), 409, "model-busy")
        assert "(echo: unloading, 1 answer left (" in busy["message"]
        wrong = fresh_http.post("/admin/models/unload", json={"wait": "no"})
        refused(wrong, 400, "invalid-request")
        freed = fresh_http.post("/admin/models/unload", json={"model": "echo", "wait": False}).json()
        assert freed == unload.result().json()
        assert freed["freed_vram_gb"] > 0
        assert any("requested to stop running requests immediately" in piece for piece in pieces)
    assert fresh_http.get("/readyz").status_code == 503


def test_the_list_has_all_models_on_disk_and_marks_the_loaded_one(http, echo_home):
    records = {record["id"]: record for record in http.get("/admin/models").json()["models"]}
    assert {"echo", "other"} <= set(records)
    loaded, other = records["echo"], records["other"]
    assert (loaded["loaded"], loaded["format"], loaded["kind"]) == (True, "echo", "chat")
    assert loaded["vram_gb"] > 0
    assert (loaded["context_length"], loaded["loaded_context_length"], loaded["slots"]) == (32_768, 32_768, 2)
    assert (other["loaded"], other["format"], other["vram_gb"]) == (False, "mlx", None)
    assert Path(other["path"]) == echo_home / "models" / "other"


def test_a_plan_has_the_memory_of_a_model_and_whether_it_fits(http):
    plan = http.get("/admin/models/plan", params={"model": "echo", "context_length": 1000}).json()
    assert (plan["model"], plan["engine"], plan["needed_bytes"], plan["fits"]) == ("echo", "echo", 0, "now")
    assert plan["limit_bytes"] > 10**8
    refused(http.get("/admin/models/plan", params={"model": "no-such"}), 404, "model-not-found")
    refused(http.get("/admin/models/plan"), 400, "invalid-request")
    for options in ({"context_length": 0}, {"engine": "zzz"}, {"kv_cache_dtype": "q3_0"}, {"deterministic": "maybe"}):
        refused(http.get("/admin/models/plan", params={"model": "echo", **options}), 400, "invalid-request")
    refused(http.get("/admin/models/plan", params={"model": "echo", "engine": "mlx"}), 400, "invalid-request")


def test_the_list_has_the_engines_and_the_engine_of_each_model(http):
    body = http.get("/admin/models").json()
    assert [(engine["name"], engine["tokens_per_second"]) for engine in body["engines"]] == [
        ("mlx", None),
        ("llama.cpp", None),
    ]
    assert all(engine["version"] for engine in body["engines"])
    assert body["preference"] is None
    assert {(record["engine"], record["problem"]) for record in body["models"]} == {("echo", None), ("mlx", None)}


def test_v1_models_lists_the_models_in_the_chat_format(http):
    body = http.get("/v1/models").json()
    assert body["object"] == "list"
    assert {"echo", "other"} <= {card["id"] for card in body["data"]}
    loaded, other = (http.get(f"/v1/models/{name}").json() for name in ("echo", "other"))
    assert (loaded["object"], loaded["context_length"], loaded["slots"]) == ("model", 32_768, 2)
    assert other["slots"] is None


def test_default_is_the_loaded_model(fresh_http):
    echo = fresh_http.get("/v1/models/echo").json()
    assert fresh_http.get("/v1/models/default").json() == {**echo, "id": "default", "root": "echo"}
    fresh_http.post("/admin/models/unload")
    for answer in (fresh_http.get("/v1/models/default"), fresh_http.post(CHAT, json=echo_body(model="default"))):
        refused(answer, 503, "no-model-loaded")


def test_a_load_replaces_the_loaded_model(fresh_tiny_http):
    body = load(fresh_tiny_http, "tiny-two", draft="tiny").json()
    assert set(body) == {
        *("success", "model", "load_time_ms", "vram_gb", "engine", "engine_reason", "slots", "context_length"),
        *("kv_cache_dtype", "draft", "warning"),
    }
    assert (body["kv_cache_dtype"], body["draft"]) == (None, "tiny")
    assert "the draft model tiny is not smaller than tiny-two" in body["warning"]
    assert (body["success"], body["model"]) == (True, "tiny-two")
    assert body["load_time_ms"] > 0
    loaded = [record["id"] for record in fresh_tiny_http.get("/admin/models").json()["models"] if record["loaded"]]
    assert loaded == ["tiny-two"]
    assert fresh_tiny_http.post(CHAT, json=chat_body(model="tiny-two")).status_code == 200
    assert fresh_tiny_http.post(CHAT, json=chat_body(model="tiny")).status_code == 503


def test_a_load_may_choose_the_engine_which_must_run_the_models_format(http, echo_home):
    assert load(http, "echo", engine="auto").status_code == 200
    for model, engine in (("echo", "mlx"), ("other", "llama.cpp")):
        assert refused(load(http, model, engine=engine), 400, "invalid-request")["param"] == "engine"
    assert http.get("/readyz").json()["model"] == "echo"


def test_after_the_error_of_a_load_the_loaded_model_still_answers(fresh_tiny_http, tiny_home, tmp_path):
    folder = shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "new")
    config = json.loads((folder / "config.json").read_text())
    new = {**config, "model_type": "from_the_future", "architectures": ["FutureForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(new))
    for model, status, code, part in (
        ("unheard-of", 404, "model-not-found", "unheard-of"),
        # MLX does not support the architecture.
        (str(folder), 400, "invalid-request", "from_the_future"),
    ):
        assert part in refused(load(fresh_tiny_http, model), status, code)["message"]
        assert fresh_tiny_http.get("/readyz").json()["model"] == "tiny"
        assert fresh_tiny_http.post(CHAT, json=chat_body()).status_code == 200


def test_a_path_and_an_id_can_be_different_models_of_one_name(fresh_tiny_http, tiny_home, tmp_path):
    path = tmp_path / "tiny"
    write_tiny_llama(path, tiny_home / "models" / "tiny", seed=7)
    before = fresh_tiny_http.post(CHAT, json=chat_body(model="default")).json()["choices"][0]["message"]
    answer = load(fresh_tiny_http, str(path)).json()
    assert answer["model"] == str(path)
    assert answer["load_time_ms"] > 0
    records = [record for record in fresh_tiny_http.get("/admin/models").json()["models"] if record["loaded"]]
    assert [record["path"] for record in records] == [str(path)]
    assert str(path) in [card["id"] for card in fresh_tiny_http.get("/v1/models").json()["data"]]
    after = fresh_tiny_http.post(CHAT, json=chat_body(model=str(path))).json()["choices"][0]["message"]
    assert before != after


def test_unusual_folders_do_not_hide_other_models(fresh_http, echo_home):
    odd = echo_home / "models" / os.fsdecode(b"caf\xe9")
    odd.mkdir()
    (odd / "config.json").write_text("{}")
    locked = echo_home / "models" / "locked"
    locked.mkdir(mode=0)
    try:
        assert "other" in [record["id"] for record in fresh_http.get("/admin/models").json()["models"]]
    finally:
        shutil.rmtree(odd)
        locked.rmdir()


def test_an_allowed_page_can_read_the_headers_of_the_server(echo_home):
    page = "http://localhost:3000"
    with serving(echo_home, "echo", cors_origins=(page,), record="all") as lab, httpx2.Client(base_url=lab.url) as http:
        answer = http.post(CHAT, json=echo_body(user="ada"), headers={"origin": page})
    exposed = set(answer.headers["access-control-expose-headers"].lower().split(", "))
    own = {name for name in answer.headers if name.startswith("x-")} - {"x-content-type-options"}
    assert {"x-request-id", "x-lmx-lab", "x-lmx-ignored", "x-lmx-recorded"} <= own <= exposed
