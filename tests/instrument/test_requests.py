"""Test which requests are recorded, what a record contains, and its repetition and deletion, on the echo engine."""

import asyncio
import contextlib
import json
import pickle
import sqlite3
from dataclasses import replace
from functools import partial

import httpx2
import pandas as pd
import pytest
from websockets.sync.client import connect

import lmx_lab
from lmx_lab.engine import Caller, GenerationRequest, TextPrompt
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, NotLoadedError
from lmx_lab.instrument import load_requests
from lmx_lab.instrument import store as store_module
from lmx_lab.instrument.requests import Replay
from lmx_lab.instrument.store import RecordStore, encode_provenance, encode_record
from lmx_lab.server.recording import request_from_json, request_to_json
from lmx_lab.settings import Settings
from lmx_lab.values.recording import Provenance, Record
from lmx_lab.values.steering import SteeringVector
from tests.support.labs import forbid_waits_on_loops, serving

SEA = [{"role": "user", "content": "the sea is wide"}]
BODY = {"model": "default", "messages": SEA, "max_tokens": 8}
RECORD = Record(
    at=1.0,
    request_id="",
    own=True,
    request={"sampling": {"seed": 2**70}},
    prompt=(1, 2),
    answer=(3, 4),
    text="hello",
    outcome="stop",
    provenance=Provenance(model="m", format="echo", quantization=None, dtype="auto", engine="e", machine="x"),
)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    with serving(tmp_path_factory.mktemp("home"), "echo", api_key="s3cret-key") as lab:
        yield lab


def post(lab, path="/v1/chat/completions", *, own=False, **fields):
    """Send a request like a client from ``lab.openai``, or like one that only knows the key.

    Args:
        fields: Changes of the body; a field with the value None is left out.
    """
    headers = {"authorization": f"Bearer {lab.settings.api_key}", **(lab.openai["default_headers"] if own else {})}
    body = {name: value for name, value in (BODY | fields).items() if value is not None}
    return httpx2.post(f"{lab.url}{path}", json=body, headers=headers).raise_for_status()


# --- what is recorded


def test_requests_of_the_notebook_are_recorded_and_those_of_other_clients_are_not(lab):
    before = len(lab.requests)
    lab.chat("hello", system="Be brief.")
    assert "x-lmx-recorded" not in post(lab, own=True).headers
    post(lab, own=True, stream=True)
    post(lab, "/v1/completions", own=True, messages=None, prompt=["one", "two"], n=2)
    assert len(lab.requests) - before == 1 + 1 + 1 + 4
    assert post(lab).status_code == 200
    assert len(lab.requests) - before == 7
    assert lab.requests.df["own"].all()
    assert httpx2.get(f"{lab.url}/readyz").json().get("recorded") is None


@pytest.mark.slow
def test_requests_of_the_lab_s_daemon_are_own(tmp_path):
    with serving(tmp_path, "echo", daemon_port=0) as lab:
        lab.start_daemon().session().run("hello")
        assert [request.record.own for request in lab.requests] == [True]


@pytest.mark.slow
def test_with_all_the_requests_of_other_clients_are_recorded_and_their_answers_have_a_header(tmp_path):
    with serving(tmp_path, "echo", record="all") as lab:
        assert httpx2.post(f"{lab.url}/v1/chat/completions", json=BODY).headers["x-lmx-recorded"] == "1"
        with httpx2.stream("POST", f"{lab.url}/v1/chat/completions", json=BODY | {"stream": True}) as stream:
            assert stream.headers["x-lmx-recorded"] == "1"
            stream.read()
        with connect(f"{lab.url.replace('http', 'ws')}/v1/chat/stream") as socket:
            assert socket.response.headers["x-lmx-recorded"] == "1"
            socket.send(json.dumps(BODY))
            while "done" not in json.loads(socket.recv()):
                pass
        message = {"model": "default", "max_tokens": 8, "messages": SEA}
        for streamed in (False, True):
            for path, body in (("messages", message), ("responses", {"input": "hello"})):
                answer = httpx2.post(f"{lab.url}/v1/{path}", json=body | {"stream": streamed})
                assert answer.headers["x-lmx-recorded"] == "1"
        assert [request.record.own for request in lab.requests] == [False] * 7
        assert all(request.record.request_id for request in lab.requests)
        assert httpx2.get(f"{lab.url}/readyz").json()["recorded"] is True
        assert "The requests of all clients are recorded." in httpx2.get(f"{lab.url}/about").text


def test_nothing_is_recorded_with_off(tmp_path):
    with serving(tmp_path, "echo", record="off", record_to=tmp_path / "requests.db") as lab:
        lab.chat("hello")
        assert len(lab.requests) == 0
    assert not (tmp_path / "requests.db").exists()


def test_a_record_has_the_tokens_the_settings_the_drawn_seed_and_the_provenance(lab):
    reply = lab.chat("hello wide sea", temperature=0.5, top_p=0.9, stop=["zzz"], max_tokens=20, logprobs=2)
    record = lab.requests[-1].record
    assert (record.prompt, record.answer) == (reply.prompt_ids, reply.ids)
    assert len(reply.ids) == reply.usage.completion_tokens
    assert record.text == reply.text
    assert [token.logprob for token in record.logprobs] == [token.logprob for token in reply.logprobs or ()]
    sampling = record.request["sampling"]
    assert (sampling["temperature"], sampling["top_p"], record.request["stop"]) == (0.5, 0.9, ["zzz"])
    assert isinstance(sampling["seed"], int)
    assert record.timings["output_tokens"] == len(reply.ids)
    assert record.provenance.model == "echo"
    assert record.provenance.engine.startswith("echo-")
    lab.chat("hello", temperature=0)
    assert lab.requests[-1].record.request["sampling"]["seed"] is None


def test_a_record_does_not_describe_its_caller_and_cannot_choose_one():
    request = GenerationRequest(
        prompt=TextPrompt(text="a"), caller=Caller(local=True, client="192.0.2.1", request_id="req_1", batch=True)
    )
    stored = json.loads(json.dumps(request_to_json(request)))
    assert "caller" not in stored
    assert "192.0.2.1" not in json.dumps(stored)
    changed = stored | {"caller": {"local": True}, "client": "192.0.2.1", "request_id": "req_1"}
    assert request_from_json(changed, model="m") == replace(request, model="m", caller=Caller())


def test_the_vectors_of_an_older_record_are_read():
    # Without a hash, older versions have stored an empty text.
    steer = {"layer": 1, "vector": "AACAPw==", "scale": 2.0, "weights": ""}
    stored = request_to_json(GenerationRequest(prompt=TextPrompt(text="a"))) | {"steer": [steer]}
    assert request_from_json(stored, model="m").steer == (SteeringVector(**steer),)


def test_an_answer_that_was_stopped_is_recorded_with_what_was_delivered(tmp_path):
    with serving(tmp_path, "echo", echo_tokens_per_s=500) as lab:
        stream = lab.chat("hello", stream=True, max_tokens=5000, ignore_eos=True)
        next(iter(stream))
        stream.close()
        lab.chat("hi")
        first = lab.requests[0].record
    assert first.outcome == "cancelled"
    assert first.answer
    assert not first.timings


def test_the_data_frame_has_exact_seeds_although_greedy_requests_have_none(tmp_path):
    with serving(tmp_path, "echo") as lab:
        empty = lab.requests.df
        lab.chat("one", temperature=0)
        lab.chat("two", temperature=1, seed=2**60 + 1)
        frame = lab.requests.df
        assert list(frame["seed"]) == [pd.NA, 2**60 + 1]
        assert frame.dtypes.to_dict() == empty.dtypes.to_dict()
        assert {str(frame[name].dtype) for name in ("seed", "output_tokens")} == {"Int64"}
        assert (str(frame["own"].dtype), str(frame["at"].dtype)) == ("bool", "datetime64[us, UTC]")
        assert frame["at"].map(pd.Timestamp.timestamp).tolist() == pytest.approx(
            [each.record.at for each in lab.requests]
        )
        lab.chat("three", temperature=1, seed=2**70)
        assert list(lab.requests.df["seed"]) == [pd.NA, 2**60 + 1, 2**70]


def test_a_request_that_ended_early_has_no_numbers_in_the_data_frame(tmp_path):
    records = RecordStore(tmp_path / "requests.db")
    for changes in ({}, {"answer": None, "outcome": "cancelled"}):
        records.add(partial(replace, RECORD, **changes), key="")
    records.close()
    frame = load_requests(tmp_path / "requests.db").df
    assert frame["output_tokens"].tolist() == [2, pd.NA]
    assert str(frame["output_tokens"].dtype) == "Int64"
    assert frame["ttft_s"].isna().all()
    assert str(frame["ttft_s"].dtype) == "float64"


# --- replay


def test_a_request_is_replayed_with_its_seed(lab):
    lab.chat("hello", temperature=2, max_tokens=30, ignore_eos=True)
    count = len(lab.requests)
    replay = lab.requests[-1].replay()
    assert replay.same
    assert replay.first_difference is None
    assert replay.changed == {}
    assert (replay.unit, len(replay.df)) == ("token", 30)
    assert "the same" in repr(replay)
    assert len(lab.requests) == count


@pytest.mark.slow
def test_the_second_choice_of_a_completion_is_replayed_with_its_own_seed(lab):
    fields = {"messages": None, "prompt": "one", "n": 2, "max_tokens": 20, "temperature": 2, "ignore_eos": True}
    post(lab, "/v1/completions", own=True, **fields)
    first, second = sorted(lab.requests[-2:], key=lambda each: each.record.choice)
    assert first.answer != second.answer
    assert second.replay().same


@pytest.mark.slow
def test_requests_with_tools_and_formats_are_replayed(lab):
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    lab.chat("hello", tools=[tool], tool_choice="required")
    assert lab.requests[-1].record.tool_calls[0]["name"] == "look"
    assert lab.requests[-1].replay().same
    lab.chat("hello", response_format={"type": "json_object"}, logit_bias={"300": 2.5})
    assert lab.requests[-1].replay().same


def test_a_difference_is_reported_with_its_position_and_its_cause():
    changed = replace(RECORD.provenance, engine="e2", weights="b")
    replay = Replay(recorded=RECORD, replayed=replace(RECORD, answer=(3, 5, 6), prompt=(1,), provenance=changed))
    assert (replay.same, replay.first_difference) == (False, 1)
    # The hash of the recorded weights is not known, so it is not compared.
    assert replay.changed == {"engine": ("e", "e2"), "prompt": ((1, 2), (1,))}
    assert list(replay.df["same"]) == [True, False, False]
    nothing = replace(RECORD, answer=())
    assert list(replay.df["recorded"]) == [3, 4, pd.NA]
    assert replay.df.dtypes.to_dict() == Replay(recorded=nothing, replayed=nothing).df.dtypes.to_dict()
    longer = Replay(recorded=RECORD, replayed=replace(RECORD, answer=None, text="hello!"))
    assert (longer.unit, longer.first_difference) == ("character", 5)


def test_a_replay_needs_the_recorded_model(lab):
    lab.chat("hello")
    request = lab.requests[-1]
    request.record = replace(request.record, provenance=replace(request.record.provenance, model="gone"))
    with pytest.raises((NotLoadedError, LabError), match="gone"):
        request.replay()


# --- the sequence


def test_the_requests_are_a_sequence(lab):
    lab.requests.clear()
    for text in ("one", "two", "three"):
        lab.chat(text)
    requests = lab.requests
    assert [request.text for request in requests] == ["one", "two", "three"]
    assert (requests[0].text, requests[-1].text, requests[1].text) == ("one", "three", "two")
    assert [request.text for request in requests[1:]] == ["two", "three"]
    with pytest.raises(TypeError, match="integer"):
        lab.requests[1.5]
    with pytest.raises(KeyError, match="no request '1'"):
        lab.requests["1"]
    with pytest.raises(IndexError, match="3 are recorded"):
        requests[3]
    assert list(requests.df["text"]) == ["one", "two", "three"]
    assert "'three'" in repr(requests)
    assert "'three'" in repr(requests[-1])
    assert "<td" in requests._repr_html_()
    requests[1].delete()
    assert [request.text for request in requests] == ["one", "three"]


def test_an_attached_lab_has_no_requests(lab):
    with lmx_lab.attach(lab.url, api_key="s3cret-key") as far:
        reply = far.chat("hello")
        with pytest.raises(AttributeError, match="runs in another process"):
            _ = far.requests
        assert reply.ids == ()
        with pytest.raises(InvalidRequestError, match="logprobs"):
            reply.lens()


# --- files


def test_a_file_is_read_without_a_server_and_has_no_keys_or_addresses(tmp_path):
    path = tmp_path / "requests.db"
    with serving(tmp_path, "echo", record="all", record_to=path, api_key="s3cret-key") as lab:
        lab.chat("the first")
        post(lab, user="user-name", metadata={"who": "user-name"})
        own = lab.openai["default_headers"]["x-lmx-own"]
        len(lab.requests)
        assert {file.stat().st_mode & 0o777 for file in tmp_path.glob("requests.db*")} == {0o600}
    data = path.read_bytes()
    assert b"the first" in data
    for secret in (b"s3cret", b"127.0.0.1", own.encode(), b"user-name"):
        assert secret not in data
    loaded = load_requests(path)
    assert [request.text for request in loaded] == ["the first", "the sea is wide"]
    with pytest.raises(InvalidRequestError, match=r"lab\.requests\.load"):
        loaded[0].replay()
    with pytest.raises(InvalidRequestError, match="opened read-only"):
        loaded.clear()
    with serving(tmp_path, "echo", record_to=path) as lab:
        assert lab.requests.load(path)[0].replay().same
        lab.chat("another run")
        assert len(lab.requests) == 3
        # A stopped lab writes no records, and raises an error.
        requests = lab.requests
    with pytest.raises(LabError, match="was closed"):
        len(requests)
    with pytest.raises(HostingError):
        load_requests(path, lab.backend)[0].replay()


def test_deleted_records_are_overwritten_in_the_file(tmp_path):
    path = tmp_path / "requests.db"
    with serving(tmp_path, "echo", record_to=path) as lab:
        lab.chat("this is a private matter")
        lab.chat("the other")
        lab.requests[0].delete()
        assert [request.text for request in lab.requests] == ["the other"]
        assert b"private" not in b"".join(file.read_bytes() for file in tmp_path.glob("requests.db*"))


def test_files_that_are_not_recordings_are_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("not a database" * 100)
    with pytest.raises(InvalidRequestError, match="another path"):
        lmx_lab.Lab(Settings(home=tmp_path, port=0, record_to=tmp_path / "notes.txt"))
    with pytest.raises(InvalidRequestError, match="another path"):
        load_requests(tmp_path / "missing.db")
    assert not (tmp_path / "missing.db").exists()


# --- limits and faults


def test_the_oldest_records_are_deleted_above_the_limits():
    store = RecordStore(max_records=3)
    for at in range(5):
        store.add(partial(replace, RECORD, text=f"{at}"), "key")
    assert [record.text for record in store] == ["2", "3", "4"]
    assert store.rows()[0][-2:] == (str(2**70), "2")
    store.close()
    # Records of batches replace only each other.
    store = RecordStore(max_records=4, max_batch_records=2)
    for text in ("chat", "row 1", "row 2", "row 3", "row 4", "other chat"):
        store.add(partial(replace, RECORD, text=text, batch=text.startswith("row")), "key")
    assert [record.text for record in store] == ["chat", "row 3", "row 4", "other chat"]
    # Deleted records no longer count.
    store.delete()
    for text in ("row 5", "row 6", "chat"):
        store.add(partial(replace, RECORD, text=text, batch=text.startswith("row")), "key")
    assert [record.text for record in store] == ["row 5", "row 6", "chat"]
    store.close()
    store = RecordStore(max_bytes=3000)
    for _ in range(8):
        store.add(partial(replace, RECORD, text="x" * 1000), "key")
    assert len(store) == 2
    store.close()


@pytest.mark.slow
def test_many_records_are_read_in_pages(tmp_path, monkeypatch):
    path = tmp_path / "requests.db"
    RecordStore(path).close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        provenance = encode_provenance(RECORD.provenance)
        connection.execute("INSERT INTO provenance (id, key, data) VALUES (1, 'key', ?)", (provenance,))
        row = (1.0, 1, "", "m", "stop", 2, "hello", 9, 1, encode_record(RECORD))
        sql = "INSERT INTO records (at, own, request_id, model, outcome, prompt_tokens, text, size, provenance, data)"
        connection.executemany(f"{sql} VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", (row for _ in range(100_000)))
        connection.commit()
    requests = load_requests(path)
    decoded = []
    decode = store_module.decode_record

    def count(*arguments, **named):
        decoded.append(named["id_"])
        return decode(*arguments, **named)

    monkeypatch.setattr(store_module, "decode_record", count)
    assert len(requests) == 100_000
    assert requests[-1].id == 100_000
    assert "recorded: 100,000 requests; the newest 10 are shown" in repr(requests)
    assert len(decoded) == 1
    first = next(iter(requests))
    assert (first.id, len(decoded)) == (1, 1 + store_module.PAGE)
    assert len(requests.df) == 100_000


@pytest.mark.slow
def test_a_full_disk_loses_records_but_no_request(tmp_path, caplog):
    with serving(tmp_path, "echo", record_to=tmp_path / "requests.db") as lab:
        lab.chat("one")
        store = lab.server.records
        pages = store._call(lambda: store._connection.execute("PRAGMA page_count").fetchone()[0])
        store._call(lambda: store._connection.execute(f"PRAGMA max_page_count = {pages + 1}").fetchone())
        long = "wide" * 3000
        assert [lab.chat(long).text for _ in range(3)] == [long] * 3
        assert [request.text for request in lab.requests] == ["one"]
        store._call(lambda: store._connection.execute("PRAGMA max_page_count = 100000").fetchone())
        lab.chat("two")
        assert [request.text for request in lab.requests] == ["one", "two"]
    assert sum("could not be recorded" in line for line in caplog.messages) == 1
    assert [request.text for request in load_requests(tmp_path / "requests.db")] == ["one", "two"]


# --- probabilities


def test_the_lens_shows_recorded_log_probabilities_or_scores_the_tokens(lab):
    reply = lab.chat("hello <b>sea</b>\n", logprobs=3, temperature=0)
    lens = reply.lens()
    assert (lens.source, len(lens)) == ("answer", len(reply.logprobs or ()))
    frame = lab.requests[-1].lens().df
    assert list(frame["logprob"]) == [token.logprob for token in reply.logprobs or ()]
    assert list(frame["rank"]) == [1] * len(frame)
    assert len(frame["alternatives"][0]) == 3
    page = lens._repr_html_()
    assert "<b>" not in page
    assert "&lt;" in page
    assert "⏎" in page
    scored = lab.chat("hello sea", temperature=0)
    lens = scored.lens(color="rank")
    assert lens.source == "scoring"
    assert [token.token for token in lens] == list(scored.ids)
    assert lens.logprob == pytest.approx(lab.requests[-1].lens().logprob)
    with pytest.raises(InvalidRequestError, match="probability, entropy, rank"):
        scored.lens(color="red")
    with pytest.raises(InvalidRequestError, match="no lab"):
        pickle.loads(pickle.dumps(scored)).lens()


@pytest.mark.slow
def test_named_tokens_reach_replies_clients_records_and_frames(lab):
    named = [" sea", 300]
    reply = lab.chat("hello", logprob_tokens=named)
    tokens = reply.logprobs[0].named
    assert (tokens[0].text, tokens[1].token) == (" sea", 300)
    assert list(lab.requests[-1].lens().df["logprob_tokens"][0]) == [token.text for token in tokens]
    answer = post(lab, logprobs=True, logprob_tokens=named).json()["choices"][0]["logprobs"]["content"][0]
    assert [each["token"] for each in answer["logprob_tokens"]] == [token.text for token in tokens]
    with lmx_lab.attach(lab.url, api_key="s3cret-key") as far:
        there = far.chat("hello", logprob_tokens=named).logprobs
        assert [each.logprob for each in there[0].named] == pytest.approx([each.logprob for each in tokens])
    fields = {"messages": None, "prompt": "hello", "max_tokens": 2, "echo": True, "logprobs": 0}
    choice = post(lab, "/v1/completions", **fields, logprob_tokens=named).json()["choices"][0]
    found = choice["logprobs"]["logprob_tokens"]
    assert [len(each) for each in found] == [0] * (len(found) - 2) + [2, 2]
    assert "logprob_tokens" not in post(lab, "/v1/completions", **fields).json()["choices"][0]["logprobs"]
    with pytest.raises(InvalidRequestError, match="which is 2 tokens of echo"):
        lab.chat("hello", logprob_tokens=[" seaside"[:6]])
    with pytest.raises(httpx2.HTTPStatusError) as refused:
        post(lab, "/v1/completions", **{**fields, "logprobs": None}, logprob_tokens=named)
    assert "requires logprobs" in refused.value.response.text


@pytest.mark.anyio
async def test_awaited_methods_do_not_make_the_callers_loop_wait_for_the_disk(lab, monkeypatch):
    await lab.achat("the sea", max_tokens=3)
    request = await asyncio.to_thread(lambda: lab.requests[-1])
    forbid_waits_on_loops(monkeypatch)
    assert (await request.areplay()).same
    lens = await request.alens()
    assert tuple(token.token for token in lens) == request.answer
    branch = await request.abranch(1, lens[0].token, name="other")
    assert branch.tree()["other"] is branch
