"""Tests of ``--swap``: a request loads the model that it names if the model is on disk."""

import asyncio
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.support.asking import chat_body
from tests.support.engines import unload_when_idle_for
from tests.support.labs import manager_of, serving, wait_until_idle
from tests.support.waiting import until

PATH = "/v1/chat/completions"
TWO = ("tiny", "tiny-two")


@pytest.fixture
def swapping(tiny_home):
    with serving(tiny_home, "tiny", swap=True) as lab:
        yield lab


@pytest.fixture
def client(swapping):
    with httpx2.Client(base_url=swapping.url, timeout=60) as client:
        yield client


def ask(client, model, **changes):
    return client.post(PATH, json=chat_body(model=model, **changes))


def test_a_request_loads_its_model(swapping, client):
    assert ask(client, "tiny-two").json()["model"] == "tiny-two"
    assert manager_of(swapping).snapshot.model == "tiny-two"
    completed = client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert completed.json()["model"] == "tiny"


def test_default_means_the_loaded_model(client):
    assert ask(client, "default").json()["model"] == "tiny"


def test_default_loads_the_model_that_was_unloaded_because_it_was_idle(tiny_home):
    with (
        serving(tiny_home, "tiny", swap=True) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as client,
    ):
        ask(client, "tiny-two")
        asyncio.run(unload_when_idle_for(manager_of(lab), 0.001))
        until(lambda: manager_of(lab).snapshot.unload_cause == "idle")
        asyncio.run(unload_when_idle_for(manager_of(lab), None))
        assert ask(client, "default").json()["model"] == "tiny-two"


def test_default_does_not_load_a_model_that_an_administrator_unloaded(swapping, client):
    swapping.unload()
    refused = ask(client, "default")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no-model-loaded")
    assert ask(client, "tiny").status_code == 200


def test_simultaneous_requests_for_two_models_need_two_loads(tiny_home):
    with serving(tiny_home, "tiny", swap=True, slots=8) as lab:
        loads = []
        manager_of(lab).add_observer(
            lambda progress: loads.append(progress.model) if progress.stage == "load" else None
        )
        names = [TWO[at % 2] for at in range(12)]
        answers = at_once(lab, names, max_tokens=60)
    assert [answer.json().get("model") for answer in answers] == names
    # In the order of arrival eleven loads would be needed. The first one may start before all requests have arrived.
    assert len(loads) <= 3


def test_default_loads_nothing_if_no_model_was_loaded_before(echo_home):
    with serving(echo_home, None, swap=True) as lab, httpx2.Client(base_url=lab.url, timeout=60) as client:
        refused = ask(client, "default")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no-model-loaded")
        assert ask(client, "echo").status_code == 200


def test_only_ids_of_models_on_disk_are_loaded(swapping, client, tiny_home, tmp_path):
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "elsewhere")
    for name in (str(tmp_path / "elsewhere"), "unheard-of", "nobody/nothing", "qwen3-0.6b"):
        refused = ask(client, name)
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model-not-found")
    assert manager_of(swapping).snapshot.model == "tiny"


def test_running_and_queued_requests_are_answered_before_the_swap(tiny_home):
    with serving(tiny_home, "tiny", swap=True, slots=1) as lab:
        answers = at_once(lab, ["tiny", "tiny", "tiny", "tiny-two"], max_tokens=100)
    assert [answer.status_code for answer in answers] == [200] * 4
    assert {answer.json()["usage"]["completion_tokens"] for answer in answers} == {100}


def test_all_of_many_requests_for_two_models_are_answered(swapping):
    names = [TWO[at % 2] for at in range(6)]
    answers = at_once(swapping, names)
    assert [answer.json().get("model") for answer in answers] == names


def at_once(lab, names, **changes):
    with httpx2.Client(base_url=lab.url, timeout=120) as client, ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: ask(client, name, **changes), names))


def test_a_request_waits_for_the_load_of_an_administrator(swapping, client):
    with client.stream("POST", PATH, json=chat_body(stream=True, max_tokens=450)) as running:
        pieces = running.iter_text()
        next(pieces)
        load = threading.Thread(
            target=client.post, args=("/admin/models/load",), kwargs={"json": {"model": "tiny-two"}}
        )
        load.start()
        until(lambda: manager_of(swapping).snapshot.change is not None)
        answers = []
        request = threading.Thread(target=lambda: answers.append(ask(client, "tiny")))
        request.start()
        "".join(pieces)
    load.join()
    request.join()
    assert (answers[0].status_code, answers[0].json()["model"]) == (200, "tiny")


def test_a_client_that_disconnects_while_it_waits_for_a_model_does_not_delay_others(swapping, client):
    with client.stream("POST", PATH, json=chat_body(stream=True, max_tokens=450)) as running:
        pieces = running.iter_text()
        next(pieces)
        with pytest.raises(httpx2.ReadTimeout):
            client.post(PATH, json=chat_body(model="tiny-two"), timeout=httpx2.Timeout(60, read=0.05))
    wait_until_idle(swapping)
    assert ask(client, "tiny").json()["model"] == "tiny"


def test_after_a_failed_load_the_previous_model_answers(tiny_home, tmp_path):
    home = tmp_path / "home"
    shutil.copytree(tiny_home, home)
    (home / "models" / "tiny-two" / "config.json").write_text('{"model_type": "from_the_future"}')
    with serving(home, "tiny", swap=True) as lab, httpx2.Client(base_url=lab.url, timeout=60) as client:
        refused = ask(client, "tiny-two")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "invalid-request")
        assert ask(client, "tiny").status_code == 200


def test_the_number_of_requests_that_wait_for_models_is_limited(tiny_home):
    with (
        serving(tiny_home, "tiny", swap=True, slots=1, queue_limit=1) as lab,
        httpx2.Client(base_url=lab.url, timeout=60) as client,
    ):
        with client.stream("POST", PATH, json=chat_body(stream=True, max_tokens=450)) as running:
            pieces = running.iter_text()
            next(pieces)
            waiting = [threading.Thread(target=ask, args=(client, "tiny-two")) for _ in range(2)]
            for thread in waiting:
                thread.start()
            control = manager_of(lab)._control
            until(lambda: len(control.swaps) == 2)
            control.swaps.swap_s = 7.0
            refused = ask(client, "tiny")
        for thread in waiting:
            thread.join()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "queue-full")
    assert "slots 1 + queue_limit 1" in refused.json()["error"]["message"]
    assert "took 7.0 s" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "7"


def test_the_time_limit_includes_the_load(tiny_home):
    with serving(tiny_home, "tiny", swap=True, request_timeout_s=0.01) as lab:
        (late,) = at_once(lab, ["tiny-two"])
    assert (late.status_code, late.json()["error"]["code"]) == (504, "lmx-timeout")


def test_without_swap_another_model_is_refused(http):
    assert ask(http, "other").status_code == 503
