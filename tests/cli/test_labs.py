"""Tests of the commands for running labs: ``load``, ``unload``, ``keep``, ``status``, ``discover``, ``rm``."""

import asyncio
import json
import re
import secrets
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import pytest

from lmx_lab import attach
from lmx_lab.client import LabClient
from lmx_lab.client.labs import files_in_use
from lmx_lab.errors import InvalidRequestError, LabError, ModelBusyError
from lmx_lab.notebook import discovery
from tests.support.asking import ENDLESS, HELLO
from tests.support.commands import run_command, signal_at
from tests.support.labs import PACE, manager_of, serving
from tests.support.waiting import until

UNUSED_PORT = 9
"""The port of the discard service, which no program uses."""
LOOPBACK = ["127.0.0.1"]
NAME = "[bold]Anna's <lab>"


@pytest.fixture
def lab(tmp_path):
    with serving(tmp_path / "lab", "echo", echo_tokens_per_s=PACE, drain_s=600) as lab:
        yield lab


def run(lab, *arguments, **options):
    # The terminal shows progress.
    environ = {"LMX_LAB_PORT": str(lab.server.port), "TERM": "xterm"}
    return run_command(lab.settings.home, *arguments, environ=environ, **options)


def test_a_model_is_unloaded_and_loaded(lab):
    for command, status, shown in (
        ("unload", 0, r"unloaded, \d+ MB freed"),
        ("unload --now", 0, "no model was unloaded"),
        ("unload echo", 2, "echo is not loaded; no model is loaded"),
        ("load echo --engine mlx", 2, "invalid-request: "),
        ("load echo", 0, "echo loaded in .*"),
        ("keep echo --pin", 0, "echo stays in memory until it is unloaded by request"),
        ("unload echo", 2, "lmx-lab keep echo --no-pin"),
        ("keep echo --no-pin --ttl 600", 0, "echo is unloaded after 600 s without requests"),
        ("load echo --ttl never", 0, "echo loaded in .*"),
        ("keep echo --ttl soon", 2, 'ttl_s: must be a number of seconds, or "never"'),
    ):
        done = run(lab, *command.split())
        assert done.status == status, done.stderr
        assert re.fullmatch(f"{shown}\n", done.stdout) if status == 0 else shown in done.stderr


def test_a_loaded_model_is_not_deleted(tiny_home, tmp_path):
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "models" / "tiny")
    link = tmp_path / "models" / "link"
    link.symlink_to(tmp_path / "models" / "tiny")
    with serving(tmp_path, "tiny") as lab:
        done = run(lab, "rm", "tiny", "--yes")
        assert (done.status, done.stdout) == (1, "")
        remedy = f"lmx-lab unload tiny --url {lab.url}"
        assert done.stderr == f"model-busy: tiny is in use and was not deleted; unload it first: {remedy}\n"
        with pytest.raises(ModelBusyError, match=r"unload it first: lab\.unload\('tiny'\)"):
            lab.delete_model("tiny", yes=True)
        assert run(lab, "unload", "tinny").stderr.startswith(
            "invalid-request: tinny is not loaded; did you mean 'tiny'? tiny is loaded"
        )
        lab.load(str(link))
        assert run(lab, "rm", "tiny", "--yes").stderr.startswith("model-busy: tiny is in use and was not deleted; ")
        lab.unload()
        plan = lab.delete_model("tiny")
        assert f"{link} links to these files" in repr(plan)
        assert (
            repr(plan).splitlines()[-1].startswith("nothing was deleted; lab.delete_model('tiny', yes=True) deletes ")
        )
        assert (tmp_path / "models" / "tiny").exists()
        assert repr(lab.delete_model("tiny", yes=True)).startswith("deleted tiny: ")
        assert not (tmp_path / "models" / "tiny").exists()
        with attach(lab.url) as attached, pytest.raises(InvalidRequestError, match="run lmx-lab rm where its server"):
            attached.delete_model("tiny")


def test_a_model_that_another_lab_loads_is_not_deleted(lab, tiny_home):
    home = lab.settings.home
    shutil.copytree(tiny_home / "models" / "tiny", home / "models" / "tiny")
    refusal = f"tiny is in use and was not deleted; unload it first: lmx-lab unload tiny --url {lab.url}"
    with serving(home, None) as other, ThreadPoolExecutor(1) as pool:
        with closing(lab.chat("hello", stream=True, **ENDLESS)) as stream:
            next(iter(stream))
            load = pool.submit(lab.load, "tiny", wait=True)
            until(lambda: home / "models" / "tiny" in manager_of(lab).in_use)
            for _ in range(2):
                with pytest.raises(ModelBusyError, match=re.escape(refusal)):
                    other.delete_model("tiny", yes=True)
                # The lab is not at the configured port.
                done = run_command(home, "rm", "tiny", "--yes", environ={"LMX_LAB_PORT": str(UNUSED_PORT)})
                assert (done.status, done.stderr) == (1, f"model-busy: {refusal}\n")
                # The second time, the model is loaded.
                stream.close()
                load.result()
        lab.unload()
        assert other.delete_model("tiny", yes=True).deleted


def test_a_lab_that_does_not_list_its_models_is_named(tmp_path, tiny_home):
    shutil.copytree(tiny_home / "models" / "tiny", tmp_path / "models" / "tiny")
    with serving(tmp_path, None) as lab, serving(tmp_path, None, api_key="s3cret") as keyed:
        note = f"the lab at {keyed.url} does not list its models: "
        assert note in repr(lab.delete_model("tiny"))
        assert note in run(lab, "rm", "tiny", "--yes").stderr
        assert note in run(lab, "status").stderr


def test_a_lab_that_lists_its_models_without_their_files_is_named(lab, monkeypatch):
    assert asyncio.run(files_in_use(lab.settings)).unknown == ()
    monkeypatch.setattr("lmx_lab.server.admin.is_local", lambda scope: False)
    used = asyncio.run(files_in_use(lab.settings))
    assert used.unloads == {}
    assert used.unknown == (f"the lab at {lab.url} does not list the files that it uses",)


@pytest.mark.slow
def test_running_requests_are_listed_and_one_is_stopped(lab):
    none = run(lab, "ps")
    assert (none.status, none.stdout, "no request waits or runs" in none.stderr) == (0, "", True)
    with LabClient(lab.url) as client:
        stream = client.stream({"model": "echo", "messages": HELLO, **ENDLESS})
        next(stream)
        header, row = run(lab, "ps").stdout.splitlines()
        assert (header.split()[:2], row.split()[1]) == (["id", "client"], "127.0.0.1")
        (listed,) = json.loads(run(lab, "ps", "--json").stdout)["requests"]
        assert (listed["model"], listed["state"], row.split()[0]) == ("echo", "running", listed["id"])
        done = run(lab, "stop", listed["id"][:10])
        assert (done.status, done.stdout) == (0, f"stopped {listed['id']}\n"), done.stderr
        with pytest.raises(LabError, match="stopped"):
            list(stream)
    unknown = run(lab, "stop", "req_0")
    assert (unknown.status, unknown.stderr.startswith("not-found: ")) == (1, True), unknown.stderr


def test_the_status_lists_labs_and_their_models(lab, daemon):
    done = run(lab, "status")
    assert done.status == 0, done.stderr
    assert re.fullmatch(rf"lab at {lab.url}: echo on echo, \d+ MB\n", done.stdout)
    (listed,) = json.loads(run(lab, "status", "--json").stdout)["labs"]
    assert (listed["url"], [model["id"] for model in listed["models"]]) == (lab.url, ["echo"])
    none = run_command(daemon.settings.home, "status", environ={"LMX_LAB_PORT": str(UNUSED_PORT)})
    assert (none.status, none.stdout) == (1, f"daemon at {daemon.url}\n")
    assert none.stderr == "no lab is running; start one with lmx-lab serve --model smollm2-135m\n"


@pytest.mark.slow
def test_an_unload_says_what_it_waits_for_and_continues_after_ctrl_c(lab):
    interrupt = signal_at("echo: unloading, 1 answer left (", signal.SIGINT)

    def stop_answer(running):
        until(lambda: "no time limit" in str(manager_of(lab).snapshot.unloading))
        stream.close()

    with closing(lab.chat("hello", stream=True, **ENDLESS)) as stream:
        pieces = iter(stream)
        next(pieces)
        done = run(lab, "unload", meanwhile=interrupt, terminal=True)
        assert done.status == 130
        assert "the unload continues; lmx-lab unload --now stops" in done.stdout
        assert manager_of(lab).snapshot.unloading is not None
        # In a file, each change is a line.
        done = run(lab, "unload", "echo", "--wait", meanwhile=stop_answer)
        assert done.status == 0
        assert re.fullmatch(r"unloaded, \d+ MB freed\n", done.stdout)
        assert done.stderr == "echo: unloading, 1 answer left (no time limit)\n"


def test_without_a_lab_the_address_is_named(tmp_path):
    for command in (("unload",), ("load", "echo")):
        done = run_command(tmp_path, *command, environ={"LMX_LAB_PORT": str(UNUSED_PORT)})
        assert (done.status, f"127.0.0.1:{UNUSED_PORT}" in done.stderr) == (1, True)


@pytest.fixture
def own_service(monkeypatch):
    """Use loopback, and a type of service of this test alone, because other tests announce labs at the same time."""
    monkeypatch.setattr(discovery, "SERVICE", f"_lmx-{secrets.token_hex(4)}._tcp.local.")
    monkeypatch.setattr(discovery, "lan_addresses", lambda: LOOPBACK)


# Announcements take a second.
@pytest.mark.slow
@pytest.mark.usefixtures("own_service")
def test_the_labs_on_the_network_are_a_table(tmp_path):
    with ExitStack() as stack:
        lab = stack.enter_context(serving(tmp_path, "echo"))
        keyed = stack.enter_context(serving(tmp_path, None, api_key="s3cret"))
        for name, port, key_needed in ((NAME, lab.server.port, False), ("keyed", keyed.server.port, True)):
            announcement = discovery.Announcement(name, port=port, addresses=LOOPBACK, key_needed=key_needed)
            stack.callback(announcement.stop)
            announcement.start()
        lines = []
        # On a busy machine, an answer may come later.
        while len(lines) < 3:
            lines = run_command(tmp_path, "discover", "--seconds", "3").stdout.splitlines()
    assert lines[0].split() == ["name", "address", "model", "needs", "a", "key"]
    assert [line.split() for line in lines[1:]] == [
        [*NAME.split(), lab.url, "echo", "no"],
        ["keyed", keyed.url, "yes"],
    ]


@pytest.mark.usefixtures("own_service")
@pytest.mark.parametrize(
    ("addresses", "hint"), [(["192.0.2.5"], "serve --host 0.0.0.0 --announce"), ([], "no network connection")]
)
def test_without_labs_the_note_has_the_reason(tmp_path, monkeypatch, addresses, hint):
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: addresses)
    ended = run_command(tmp_path, "discover", "--seconds", "0.1")
    assert (ended.status, ended.stdout) == (0, "")
    assert ended.stderr.startswith("no lab is announced on the local network; ")
    assert hint in ended.stderr
