"""The lab without a notebook: on the loop of a program, on a thread, in scripts; replies and progress."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from rich.console import Console

import lmx_lab
from lmx_lab.errors import (
    HostingError,
    InvalidRequestError,
    ModelNotFoundError,
    NotLoadedError,
    PortTakenError,
    UnusableModelError,
)
from lmx_lab.http.uvicorn_server import bind
from lmx_lab.notebook import launching
from lmx_lab.notebook.addresses import Addresses
from lmx_lab.notebook.arguments import chat_request
from lmx_lab.notebook.reply import safe_markdown
from lmx_lab.progress import bar, counter
from lmx_lab.settings import Settings
from lmx_lab.weights import Progress

pytestmark = pytest.mark.anyio


HELLO = "hi " * 4000
"""The engine repeats it, which takes some seconds."""


@pytest.fixture(scope="module", params=["kernel", "thread"])
async def lab(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[lmx_lab.Lab]:
    """A lab in a program with a loop of its own, which is what ``kernel`` means there."""
    settings = Settings(home=tmp_path_factory.mktemp("home"), port=0, echo_tokens_per_s=1000)
    async with lmx_lab.Lab(settings, loop=request.param) as lab:
        await lab.aload("echo")
        yield lab


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[lmx_lab.Lab]:
    with lmx_lab.launch(port=0, home=tmp_path, echo_tokens_per_s=1000) as lab:
        yield lab
    assert lmx_lab.current() is None


@pytest.fixture
def launched_with_models(tiny_home: Path) -> Iterator[lmx_lab.Lab]:
    with lmx_lab.launch(port=0, home=tiny_home) as lab:
        yield lab


async def until_idle(lab: lmx_lab.Lab) -> None:
    """The engine sees within a step that a reader has left."""
    while lab.engine.snapshot.active_requests + lab.engine.snapshot.queued_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def lab_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("lmx-lab-")}


# --- a program with a loop of its own


async def test_a_chat_gives_text_usage_and_timings(lab: lmx_lab.Lab) -> None:
    reply = await lab.achat(HELLO, max_tokens=4, temperature=0, system="Be brief.")
    assert (reply.model, reply.finish_reason, reply.usage.completion_tokens) == ("echo", "length", 4)
    assert reply.timings.predicted_n == 4
    assert str(reply) == reply.text


async def test_the_pieces_of_a_stream_are_its_reply(lab: lmx_lab.Lab) -> None:
    stream = await lab.astream([{"role": "user", "content": HELLO}], max_tokens=30)
    pieces = [piece async for piece in stream]
    assert stream.reply is not None
    assert ("".join(pieces), stream.reply.usage.completion_tokens) == (stream.reply.text, 30)
    assert [piece async for piece in stream] == []


async def test_leaving_a_stream_frees_its_slot(lab: lmx_lab.Lab) -> None:
    stream = await lab.astream(HELLO)
    async for _ in stream:
        break
    await until_idle(lab)
    assert stream.reply is None


async def test_closing_a_stream_frees_its_slot(lab: lmx_lab.Lab) -> None:
    stream = await lab.astream(HELLO)
    await stream.aclose()
    stream.close()
    await until_idle(lab)
    assert [piece async for piece in stream] == []


async def test_a_cancelled_chat_frees_its_slot(lab: lmx_lab.Lab) -> None:
    chat = asyncio.create_task(lab.achat(HELLO))
    while not lab.engine.snapshot.active_requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    chat.cancel()
    await asyncio.wait([chat])
    assert chat.cancelled()
    await until_idle(lab)


async def test_chats_at_once_share_the_engine(lab: lmx_lab.Lab) -> None:
    replies = await asyncio.gather(*(lab.achat(HELLO, max_tokens=20, temperature=0) for _ in range(6)))
    assert len({reply.text for reply in replies}) == 1


async def test_another_loop_may_ask_too(lab: lmx_lab.Lab) -> None:
    def ask() -> int:
        return asyncio.run(lab.achat(HELLO, max_tokens=2)).usage.completion_tokens

    assert await asyncio.to_thread(ask) == 2


async def test_a_failed_load_says_why_and_keeps_what_is_loaded(lab: lmx_lab.Lab) -> None:
    with pytest.raises(ModelNotFoundError):
        await lab.aload("no-such")
    with pytest.raises(UnusableModelError, match="runs on echo and not on mlx"):
        await lab.aload("echo", engine="mlx")
    assert (await lab.aload("echo", engine="auto")).model == "echo"
    assert [record.id for record in await lab.amodels() if record.loaded] == ["echo"]


async def test_without_a_model_a_chat_says_what_to_do(lab: lmx_lab.Lab) -> None:
    assert await lab.aunload() >= 0
    with pytest.raises(NotLoadedError, match=r"lab\.load"):
        await lab.achat(HELLO)
    assert (await lab.aload("echo")).model == "echo"


async def test_a_stopped_lab_cannot_be_used_or_started_again(tmp_path: Path) -> None:
    async with lmx_lab.Lab(Settings(home=tmp_path, port=0)) as lab:
        pass
    await lab.astop()
    for verb in (lab.achat(HELLO), lab.aload("echo"), lab.aunload(), lab.amodels()):
        with pytest.raises(HostingError, match="was stopped"):
            await verb
    assert repr(lab).startswith("LMX Lab: stopped")


async def test_a_failing_start_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = lab_threads()
    monkeypatch.setattr("lmx_lab.http.uvicorn_server.ANSWER_S", 0.05)
    with bind("127.0.0.1", 0, explicit=True) as other:
        taken = Settings(home=tmp_path, port=other.getsockname()[1])
        with pytest.raises(PortTakenError):
            await lmx_lab.Lab(taken, loop="thread").astart()
    monkeypatch.setattr("lmx_lab.engine.ModelManager.start", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread").astart()
    gc.collect()  # a socket that was left open would be a warning here, and warnings are errors
    assert lab_threads() <= before


async def test_what_could_never_match_is_refused_before_anything_starts() -> None:
    with pytest.raises(InvalidRequestError, match="cors_origins"):
        lmx_lab.Lab(Settings(cors_origins=("*",)))


# --- a script


def test_where_no_loop_runs_a_thread_serves(launched: lmx_lab.Lab) -> None:
    assert launched.mode == "thread"
    assert lmx_lab.launch(port=0, home=launched.settings.home, echo_tokens_per_s=1000) is launched is lmx_lab.current()


def test_a_stream_left_in_the_middle_frees_its_slot(launched: lmx_lab.Lab) -> None:
    launched.load("echo")
    for _ in launched.chat(HELLO, stream=True):
        break
    asyncio.run(until_idle(launched))


def test_threads_may_chat_at_once(launched: lmx_lab.Lab) -> None:
    launched.load("echo")
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(launched.chat(HELLO, max_tokens=9, temperature=0).text))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 4
    assert len(set(texts)) == 1


def test_threads_that_launch_at_once_get_one_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "PATIENCE_S", 120)
    labs: list[lmx_lab.Lab] = []
    threads = [threading.Thread(target=lambda: labs.append(lmx_lab.launch(port=0, home=tmp_path))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with labs[0]:
        assert labs.count(labs[0]) == 3


def test_a_restart_that_cannot_listen_leaves_what_runs(launched: lmx_lab.Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.http.uvicorn_server.ANSWER_S", 0.05)
    with bind("127.0.0.1", 0, explicit=True) as other, pytest.raises(PortTakenError):
        lmx_lab.launch(port=other.getsockname()[1], home=launched.settings.home, echo_tokens_per_s=1000)
    with pytest.raises(HostingError):
        lmx_lab.launch(port=0, host="192.0.2.77", home=launched.settings.home, echo_tokens_per_s=1000)
    with pytest.raises(InvalidRequestError):
        lmx_lab.launch(port=0, cors_origins=["*"], home=launched.settings.home, echo_tokens_per_s=1000)
    assert lmx_lab.current() is launched


def test_asking_for_the_port_that_it_has_changes_nothing(launched: lmx_lab.Lab) -> None:
    assert lmx_lab.launch(port=launched.port, home=launched.settings.home, echo_tokens_per_s=1000) is launched


def test_the_kernels_loop_needs_one() -> None:
    with pytest.raises(InvalidRequestError, match="running event loop"):
        lmx_lab.launch(loop="kernel")


SCRIPT = """
import lmx_lab
lab = lmx_lab.launch("tiny", port=0)
print(lab.chat("hi", max_tokens=3).usage.completion_tokens)
stream = iter(lab.chat("hi", stream=True))
next(stream)
{end}
"""
ASYNC_SCRIPT = """
import asyncio, lmx_lab
async def main():
    lab = await lmx_lab.launch("tiny", port=0)
    print((await lab.achat("hi", max_tokens=3)).usage.completion_tokens)
    {end}
asyncio.run(main())
"""


TWO_LAUNCHES = """
import asyncio, lmx_lab
from lmx_lab.errors import HostingError

async def launch():
    return lmx_lab.launch(port=0, loop="kernel")

async def main():
    results = await asyncio.gather(launch(), launch(), return_exceptions=True)
    labs = [result for result in results if isinstance(result, lmx_lab.Lab)]
    assert len(labs) == 1 or labs[0] is labs[1], results
    assert all(isinstance(result, lmx_lab.Lab | HostingError) for result in results), results
    await labs[0].astop()

asyncio.run(main())
"""
SCRIPTS = {
    "stopped": SCRIPT.format(end="lab.stop()").replace("tiny", "echo").replace("hi", "hi " * 9),
    "left": SCRIPT.format(end=""),
    "async, stopped": ASYNC_SCRIPT.format(end="await lab.astop()").replace("tiny", "echo").replace("hi", "hi " * 9),
    "async, left": ASYNC_SCRIPT.format(end=""),
    # A nested loop patches asyncio for the whole process.
    "two launches": TWO_LAUNCHES,
}


@pytest.fixture(scope="module")
def scripts(tiny_home: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """All at once: most of their time is the start of Python."""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-W", "default::ResourceWarning", "-c", source],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "LMX_LAB_HOME": str(tiny_home)},
        )
        for name, source in SCRIPTS.items()
    }
    yield running
    for process in running.values():
        with process:
            process.kill()


@pytest.mark.parametrize("name", ["stopped", "left", "async, stopped", "async, left"])
def test_a_script_ends_with_zero_and_says_nothing(scripts: dict[str, subprocess.Popen[str]], name: str) -> None:
    output, errors = scripts[name].communicate(timeout=180)
    assert (scripts[name].returncode, output, errors) == (0, "3\n", "")


def test_two_launches_at_once_on_one_loop_start_one_lab(scripts: dict[str, subprocess.Popen[str]]) -> None:
    _, errors = scripts["two launches"].communicate(timeout=180)
    assert scripts["two launches"].returncode == 0, errors


# --- looks


def test_the_html_of_a_lab_is_escaped(tmp_path: Path) -> None:
    lab = lmx_lab.Lab(Settings(home=tmp_path, host="<script>alert(1)</script>"), loop="thread")
    assert "<script" not in lab._repr_html_()
    assert "&lt;script&gt;" in lab._repr_html_()


def test_a_list_of_models_is_a_table(launched: lmx_lab.Lab) -> None:
    launched.load("echo")
    table = launched.models()._repr_html_()
    assert table.startswith("<table>")
    assert "<td>echo</td><td>yes</td>" in table


LIVE = [
    "<script>",
    "</script>",
    "<img src=x onerror=alert(1)>",
    "<a href='x'>",
    "![a](http://x/y)",
    "[a](javascript:x)",
]
LIVE += [
    "[a]: javascript:x",
    "[a][a]",
    "[a]",
    "<javascript:x>",
    "&lt;b&gt;",
    "&#60;i&#62;",
    "<!--",
    "-->",
    "<pre>",
    '"',
]
LAYOUT = [
    "```\n",
    "```html\n",
    "~~~\n",
    "`",
    "``",
    "\n",
    "\n\n",
    "    ",
    "- ",
    "> ",
    "1. ",
    "\\",
    "word",
    "* ",
    "|",
    "---",
]


class Elements(HTMLParser):
    """The elements and attributes of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: set[str] = set()
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.add(tag)
        self.found |= {name for name, _ in attributes}

    def handle_data(self, data: str) -> None:
        self.text += data


HARMLESS = {"p", "pre", "code", "ul", "ol", "li", "blockquote", "em", "strong", "hr", "br", "start"} | {
    *("h1", "h2", "h3", "table", "thead", "tbody", "tr", "th", "td", "s", "class")
}


def rendered(markdown: str) -> Elements:
    return Elements(MarkdownIt("gfm-like", {"linkify": False, "html": True}).render(markdown))


@given(st.lists(st.sampled_from(LIVE + LAYOUT) | st.text(max_size=5), max_size=12).map("".join))
def test_no_text_of_a_model_becomes_live_html_a_link_or_an_image(text: str) -> None:
    assert rendered(safe_markdown(text)).found <= HARMLESS


def test_html_of_a_model_is_shown_as_its_text() -> None:
    text = "Use <b>bold</b> & `a < b`:\n\n```html\n<script>x</script>\n\n  <i>\n```\nand **so** on"
    page = rendered(safe_markdown(text))
    lines = [line for line in page.text.splitlines() if line]
    assert lines == ["Use <b>bold</b> & a < b:", "<script>x</script>", "  <i>", "and so on"]
    assert {"strong", "pre", "code"} <= page.found


def test_a_block_that_was_cut_off_is_still_code() -> None:
    assert rendered(safe_markdown("```python\nif a < b:\n    x")).text == "if a < b:\n    x\n"


async def test_a_reply_shows_its_text_and_cost(lab: lmx_lab.Lab) -> None:
    reply = await lab.achat("hi", max_tokens=2, temperature=0)
    page = rendered(reply._repr_markdown_())
    assert "2 tokens" in page.text
    assert page.found <= {*HARMLESS, "small"}


# --- what is asked


@pytest.mark.parametrize(
    ("prompt", "parameters", "param"),
    [
        ("hi", {"temprature": 1}, "temprature"),
        ("hi", {"temperature": 3}, "temperature"),
        ("hi", {"max_tokens": 0}, "max_tokens"),
        ("hi", {"stream": True}, "stream"),
        ([], {}, "messages"),
        (["hi"], {}, "messages.0"),
        ([{"role": "poet", "content": "hi"}], {}, "messages.0.role"),
        (7, {}, "messages"),
        ("hello", {"n": 2}, "n"),
        ("hello", {"logprobs": True}, "logprobs"),
    ],
)
def test_a_wrong_parameter_is_named(prompt: object, parameters: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(prompt, parameters)  # type: ignore[arg-type]
    assert caught.value.param == param


def test_python_may_say_it_in_its_own_way() -> None:
    request = chat_request("hello", {"logit_bias": {5: 1, "7": 2.0}, "stop": ("a", "b")})
    assert request.logit_bias == {"5": 1, "7": 2.0}
    assert request.stop == ["a", "b"]


@pytest.mark.parametrize("bias", [{True: 1}, {5.0: 1}, {-1: 1}, [5]])
def test_a_bias_of_no_token_is_refused(bias: object) -> None:
    with pytest.raises(InvalidRequestError, match="logit_bias"):
        chat_request("hello", {"logit_bias": bias})


def test_a_system_prompt_comes_first() -> None:
    request = chat_request([{"role": "user", "content": "hi"}], {"system": "Be brief."})
    assert [message.role for message in request.messages] == ["system", "user"]


# --- addresses


def test_a_server_everywhere_answers_to_every_name_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmx_lab.notebook.addresses.lan_addresses", lambda: ["192.0.2.5", "172.17.0.1"])
    addresses = Addresses(settings=Settings(host="0.0.0.0"), port=8400)
    assert addresses.url == "http://127.0.0.1:8400"
    assert addresses.lan_urls == ["http://192.0.2.5:8400", "http://172.17.0.1:8400"]
    assert {"192.0.2.5:8400", "172.17.0.1:8400", "localhost:8400"} <= addresses.policy().hosts


def test_a_server_on_loopback_answers_to_loopback_only() -> None:
    addresses = Addresses(settings=Settings(host="[::1]"), port=8400)
    assert (addresses.url, addresses.lan_urls) == ("http://[::1]:8400", [])
    assert addresses.policy().hosts == {"127.0.0.1:8400", "localhost:8400", "[::1]:8400"}


# --- progress


def steps() -> Iterator[Progress]:
    for done in (0, 500_000, 1_000_000):
        yield Progress(stage="download", done_bytes=done, total_bytes=1_000_000)


def test_a_terminal_shows_a_bar_while_something_is_fetched() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, force_jupyter=False)
    with bar("org/[name]", console) as shown:
        for step in steps():
            shown.update(step)
    assert "org/[name]: download" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_narrow_terminal_shows_how_much_of_a_count_is_done() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=60, force_jupyter=False)
    with counter("bench", console) as shown:
        shown.show("[lab] " * 20, 3, 12)
    output = console.file.getvalue()  # type: ignore[attr-defined]
    assert " 3/12" in output
    assert "bench: [lab]" in output


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_is_drawn_into_a_file_or_before_the_first_step(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, force_jupyter=False)
    with bar("model", console) as shown:
        for step in [] if terminal else steps():
            shown.update(step)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]


# --- what is given wrongly


@pytest.mark.parametrize("model", [5, "", b"tiny", ["tiny"]])
def test_a_model_that_is_no_name_is_refused_before_anything_starts(model: object, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="model is"):
        lmx_lab.launch(model, port=0, home=tmp_path)  # type: ignore[arg-type]
    assert lmx_lab.current() is None


def test_the_loaded_model_may_be_named_by_its_path_too(launched_with_models: lmx_lab.Lab, tiny_home: Path) -> None:
    where = tiny_home / "models" / "tiny"
    launched_with_models.load("tiny")
    assert launched_with_models.chat("hello", model=str(where), max_tokens=1).model == "tiny"


def test_a_path_object_is_a_path(launched_with_models: lmx_lab.Lab, tiny_home: Path) -> None:
    assert launched_with_models.load(tiny_home / "models" / "tiny-two").model == "tiny-two"


@pytest.mark.parametrize("arguments", [{"lan": "no"}, {"lan": True, "host": "127.0.0.1"}, {"host": ""}])
def test_arguments_that_contradict_each_other_start_nothing(arguments: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError):
        lmx_lab.launch(port=0, home=tmp_path, **arguments)  # type: ignore[arg-type]
    assert lmx_lab.current() is None


def test_a_lone_surrogate_is_named(launched: lmx_lab.Lab) -> None:
    launched.load("echo")
    with pytest.raises(InvalidRequestError, match="surrogate"):
        launched.chat("half \ud800")


def test_a_stream_says_what_to_do_with_it_and_keeps_its_text(launched: lmx_lab.Lab) -> None:
    launched.load("echo")
    stream = launched.chat("hello", stream=True, max_tokens=20)
    assert "iterate" in repr(stream)
    first = next(iter(stream))
    assert stream.text.startswith(first)
