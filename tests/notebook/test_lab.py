"""Test labs in this process: failing starts, paths as models, and their display."""

import gc
import html
import inspect
import json
import pathlib
import re
import socket
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pandas as pd
import psutil
import pytest

import lmx_lab
from lmx_lab.errors import ArgumentError, HostingError, InvalidRequestError, PortTakenError
from lmx_lab.instrument.requests import RecordedRequest
from lmx_lab.notebook.addresses import Addresses, NotebookServer
from lmx_lab.notebook.lab import NAMES
from lmx_lab.notebook.local import LocalBackend
from lmx_lab.notebook.reply import Reply
from lmx_lab.settings import Settings
from lmx_lab.urls import qr_data_uri
from lmx_lab.values.models import LoadOptions, LoadSpec
from tests.support.docs import ROOT
from tests.support.programs import run_script

pytestmark = pytest.mark.anyio


async def test_a_failing_start_releases_everything(tmp_path, monkeypatch):
    before = set(threading.enumerate())
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        taken = Settings(home=tmp_path, port=other.getsockname()[1])
        with pytest.raises(PortTakenError):
            await lmx_lab.Lab(taken, loop="thread").astart()
    monkeypatch.setattr("lmx_lab.engine.ModelManager.start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread").astart()
    gc.collect()  # A socket that is still open causes a warning here, and warnings are errors.
    assert not {thread for thread in set(threading.enumerate()) - before if thread.name.startswith("lmx-lab-")}


def test_the_loaded_model_may_be_named_by_its_path_too(tiny_home):
    with lmx_lab.launch("tiny", port=0, home=tiny_home) as lab:
        assert lab.chat("hello", model=str(tiny_home / "models" / "tiny"), max_tokens=1).model == "tiny"


def test_a_stream_describes_itself_and_a_list_of_models_is_a_table(launched):
    launched.load("echo")
    stream = launched.chat("hello", stream=True, max_tokens=20)
    assert "iterate" in repr(stream)
    first = next(iter(stream))
    assert stream.text.startswith(first)
    table = launched.models()._repr_html_()
    assert table.startswith("<table>")
    assert re.search("<td[^>]*>echo</td><td[^>]*>yes</td>", table)


def test_the_html_of_a_lab_is_escaped_and_has_the_qr_code_of_its_chat_page(tmp_path, monkeypatch):
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5"])
    code = html.escape(qr_data_uri("http://192.0.2.5:8400"))
    hostile = "<script>alert(1)</script>"
    for settings, count in (({}, 1), ({"page": False}, 0), ({"host": "127.0.0.1"}, 0), ({"host": hostile}, 0)):
        shown = lmx_lab.Lab(Settings(home=tmp_path, **{"host": "0.0.0.0", **settings}), loop="thread")._repr_html_()
        assert shown.count(f"src='{code}'") == count
        assert "<script" not in shown
        assert ("&lt;script&gt;" in shown) == (settings.get("host") == hostile)


def test_long_calls_are_jobs_of_the_lab(launched, monkeypatch):
    jobs = []
    monkeypatch.setattr(
        LocalBackend, "job", property(lambda self: "", lambda self, job: jobs.append(job)), raising=False
    )
    launched.load("echo")
    launched.map(["a", "b"], "{text}")
    launched.compare(["a"], [{"temperature": 0}])
    launched.bench(prompt_tokens=8, output_tokens=4, requests=1, record=False)
    begins = [job.partition(", ")[0] for job in jobs]
    assert list(dict.fromkeys(begins)) == ["Map", "", "Compare", "Measuring"]
    assert jobs[-1] == ""


def test_every_method_of_a_stopped_lab_says_that_it_is_stopped(launched):
    attached = lmx_lab.attach(launched.url)
    attached.stop()
    launched.stop()
    rows = pd.DataFrame({"text": ["a"], "label": ["b"]})
    arguments = {
        "load": ("echo",),
        "unload": (),
        "models": (),
        "chat": ("hello",),
        "embed": ("hello",),
        "rerank": ("hello", ["a"]),
        "map": (["a"], "{text}"),
        "embed_frame": (rows, "text"),
        "search": (rows.assign(vector=[[1.0]]), "a", "text"),
        "evaluate": (rows, "{text}"),
        "compare": (["a"], [{}]),
        "bench": (),
        "explore": ("hello",),
        "timeline": (),
        "hooks": (),
        "trace": ("hello", "blocks.*.hook_resid_post"),
        "logit_lens": ("hello",),
        "attention": ("hello", 0),
        "direct_logit_attribution": ("hello", "a"),
        "patch": ("hello", "hi"),
        "steering_vector": (["a"], ["b"], 0),
    }
    keywords = {"evaluate": {"answer": "label"}, "patch": {"answer": "a", "other": "b"}, "bench": {"record": False}}
    for lab, message in ((launched, "this lab was stopped"), (attached, "this connection was stopped")):
        for name, given in arguments.items():
            with pytest.raises(HostingError, match=message):
                getattr(lab, name)(*given, **keywords.get(name, {}))


@pytest.mark.parametrize(
    ("call", "param"),
    [
        (lambda lab, one: lab.chat("hello", max_tokens=one), "max_tokens"),
        (lambda lab, one: lab.chat("hello").branch(one, "x"), "at"),
        (lambda lab, one: lab.map(["a"], "{text}", n=one), "n"),
        (lambda lab, one: lab.map(["a"], "{text}", seed=one), "seed"),
        (lambda lab, one: lab.explore("hello", width=one), "width"),
        (lambda lab, one: lab.explore("hello", depth=one), "depth"),
        (lambda lab, one: lab.embed("hello", dimensions=one), "dimensions"),
        (lambda lab, one: lab.rerank("hello", ["a"], top_n=one), "top_n"),
        (lambda lab, one: lab.search(["a"], "hello", top_n=one), "top_n"),
        (lambda lab, one: lab.compare(["a"], [{"max_tokens": one}]), "max_tokens"),
        (lambda lab, one: lab.evaluate([{"text": "a", "label": "b"}], "{text}", answer="label", n=one), "n"),
        (lambda lab, one: lab.bench(prompt_tokens=4, output_tokens=2, requests=one, record=False), "requests"),
        (lambda lab, one: lab.timeline(one), "last_s"),
    ],
)
def test_numbers_of_numpy_are_arguments_and_booleans_are_not(launched, call, param):
    launched.load("echo")
    call(launched, np.int64(1))
    for value in (True, np.True_):
        with pytest.raises(InvalidRequestError) as refused:
            call(launched, value)
        assert refused.value.param == param


# --- both forms of its methods


AWAITED = sorted(name for name in dir(lmx_lab.Lab) if f"a{name}" in dir(lmx_lab.Lab))
"""Methods with a form for ``await``."""


def test_the_signature_of_load_names_each_option_with_its_default():
    _, model, *options = inspect.signature(lmx_lab.Lab.load).parameters.values()
    assert model.name == "model"
    assert {it.name: it.default for it in options} == {
        name: getattr(LoadSpec, name) for name in LoadOptions.__annotations__
    }
    assert "context_length: 'int | None' = None" in str(inspect.signature(lmx_lab.Lab.aload))


def test_the_defaults_of_all_methods_are_readable():
    for name in dir(lmx_lab.Lab):
        if callable(method := getattr(lmx_lab.Lab, name)) and not name.startswith("_"):
            shown = str(inspect.signature(method))
            assert "Ellipsis" not in shown, name
            assert " object at " not in shown, name


def test_completion_offers_what_a_lab_is_for(launched):
    names = {name for group in NAMES.values() for name in group}
    assert len(names) == 46
    assert {name for name in dir(launched) if name not in names} == {
        "astream",
        *(f"a{name}" for name in names if hasattr(launched, f"a{name}")),
    }
    everything = [name for group in NAMES.values() for name in group]
    documented = re.findall(r"``(\w+)``", inspect.getdoc(lmx_lab.Lab).partition("\n\n``launch()``")[0])
    assert documented == everything
    assert "``await lab.aload(...)`` does the same." in lmx_lab.Lab.load.__doc__


@pytest.mark.long
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_type_checkers_know_the_types_of_the_methods(checker, tmp_path):
    program = pathlib.Path(__file__).parent / "typed" / "program.py"
    # With its cache mypy takes two seconds, without it half a minute.
    cache = ROOT / ".cache" / "mypy-users"
    options = ["--config-file=", "--strict", "--follow-imports=silent", "--cache-dir", str(cache), str(program)]
    if checker == "basedpyright":
        settings = {"typeCheckingMode": "strict", "include": [str(program)], "extraPaths": [str(ROOT)]}
        (tmp_path / "settings.json").write_text(json.dumps(settings))
        options = ["--project", str(tmp_path / "settings.json"), "--pythonpath", sys.executable]
    command = [sys.executable, "-m", checker, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    found = {int(line) for line in re.findall(r"program\.py:(\d+)(?::\d+ -)?:? error", done.stdout)}
    lines = program.read_text().splitlines()
    assert found == {at for at, line in enumerate(lines, 1) if line.endswith("# wrong")}, done.stdout + done.stderr


# The awaited form of ``chat(stream=True)`` is ``astream``, and ``close`` is another name of ``stop``.
@pytest.mark.parametrize("name", [name for name in AWAITED if name not in ("chat", "close")])
def test_each_method_of_a_lab_has_two_documented_forms_with_the_same_parameters(name):
    plain, awaitable = forms = [getattr(lmx_lab.Lab, each) for each in (name, f"a{name}")]
    assert inspect.signature(awaitable) == inspect.signature(plain)
    assert inspect.iscoroutinefunction(awaitable)
    for form, method in zip((name, f"a{name}"), forms, strict=True):
        assert (method.__qualname__, method.__module__) == (f"Lab.{form}", "lmx_lab.notebook.lab")
        assert next(iter(inspect.signature(method).parameters)) == "self"
        assert method.__doc__


METHODS = [lmx_lab.Lab.timeline, lmx_lab.Lab.compare, *(getattr(Reply, name) for name in ("branch", "lens", "trace"))]


@pytest.mark.parametrize("method", [*METHODS, RecordedRequest.replay], ids=lambda method: method.__qualname__)
def test_an_argument_that_a_method_of_a_lab_or_a_result_does_not_have_is_named(method):
    with pytest.raises(ArgumentError, match=rf"^{method.__name__}\(\) has no argument 'nothing'"):
        method(SimpleNamespace(backend=None), nothing=1)


@pytest.mark.slow
def test_an_attached_lab_imports_neither_the_engine_nor_the_server(tmp_path):
    with lmx_lab.launch("echo", port=0, home=tmp_path) as lab:
        code = f"""
import sys, lmx_lab
with lmx_lab.attach({lab.url!r}) as lab:
    assert lab.chat("hello", max_tokens=2).usage.completion_tokens == 2
    lab.models(), lab.snapshot(), repr(lab), lab._repr_html_()
print(*sys.modules)
"""
        modules = run_script(code).split()
    unneeded = ("lmx_lab.engine.", "lmx_lab.server.", "mlx.", "mlx_lm.", "xllamacpp.")
    assert [name for name in modules if f"{name}.".startswith(unneeded)] == []


# --- addresses


def test_a_server_on_all_interfaces_accepts_every_name_of_this_machine(monkeypatch):
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5", "172.17.0.1"])
    addresses = Addresses(settings=Settings(host="0.0.0.0"), port=8400)
    assert addresses.url == "http://127.0.0.1:8400"
    assert addresses.lan_urls == ["http://192.0.2.5:8400", "http://172.17.0.1:8400"]
    assert {"192.0.2.5:8400", "172.17.0.1:8400", "localhost:8400"} <= addresses.policy().hosts


def test_a_server_on_loopback_accepts_only_loopback_names():
    addresses = Addresses(settings=Settings(host="[::1]"), port=8400)
    assert (addresses.url, addresses.lan_urls) == ("http://[::1]:8400", [])
    assert addresses.policy().hosts == {"127.0.0.1:8400", "localhost:8400", "[::1]:8400"}


def test_a_connection_is_recognized_by_both_of_its_ends():
    server = NotebookServer(process=psutil.Process(), url="http://localhost:8888/")
    with socket.create_server(("127.0.0.1", 0)) as lab, socket.create_server(("127.0.0.1", 0)) as other:
        here, elsewhere = lab.getsockname(), other.getsockname()
        with socket.create_connection(here) as connection:
            peer = connection.getsockname()
            assert server.owns(peer, here)
            # Another process may use the same port for a connection to another address.
            assert not server.owns(peer, elsewhere)
            assert not server.owns((peer[0], peer[1] ^ 1), here)
