"""Test in a kernel that errors of the package are displayed in short form, and other errors as usual."""

import pytest

from lmx_lab.client import LabClient
from tests.support.kernels import Notebook
from tests.support.waiting import until

SETUP = """
import asyncio, sys, lmx_lab
from lmx_lab.client import LabClient
from lmx_lab.wire.chat import ChatRequest
lab = lmx_lab.launch('echo', port=0, echo_tokens_per_s=200)
client = LabClient('http://127.0.0.1:9')

def ask(text, **parameters):
    return lab.chat(text, **parameters)

async def ask_twice():
    async with asyncio.TaskGroup() as group:
        for _ in range(2):
            group.create_task(lab.achat("hi", top_p=2))

# As if they were not installed.
sys.modules |= {"pandas": None, "zeroconf": None}
"""
HANDLER = """
from lmx_lab.notebook import short_errors
shell = get_ipython()
shell.set_custom_exc((KeyError,), lambda *args, **kwargs: print("KeyError handled"))
short_errors.install(shell)
"""
CALLS = {
    "lab.chat('hi', temperatur=1)": "did you mean 'temperature'?",
    "lab.chat('hi', top_p=2)": "top_p",
    "ask('hi', top_p=2)": "top_p",
    "await lab.achat('hi', top_p=2)": "top_p",
    "await lab.achat('hi', stream=True)": "to await a stream, call astream(...)",
    "lab.chat('hi', schema={})": "did you mean 'response_format'?",
    "lab.load('echo', engin='mlx')": "did you mean 'engine'?",
    "client.load('echo', engin='mlx')": "did you mean 'engine'?",
    "lab.load('no-such-model')": "no-such-model",
    "lab.embed()": "embed() missing 1 required positional argument: 'texts'",
    "lab.embed('hi', dimension=3)": "did you mean 'dimensions'?",
    "lmx_lab.launch(modle='echo')": "did you mean 'model'?",
    "lmx_lab.attach('http://127.0.0.1:9')": "http://127.0.0.1:9",
    "ChatRequest(model='echo', mesages=[])": "messages",
    "await ask_twice()": "(2 times)",
    "lab.requests.df": "df needs pandas, which is not installed: pip install 'lmx-lab[lab]'",
    "lmx_lab.discover()": "finding labs needs zeroconf, which is not installed: pip install 'lmx-lab[lan]'",
}


@pytest.fixture(scope="module")
def notebook(tiny_home):
    notebook = Notebook(tiny_home)
    notebook.run(SETUP)
    yield notebook
    notebook.close()


def show(output):
    return "\n".join(output.traceback)


@pytest.mark.parametrize("call", CALLS)
def test_an_error_is_the_callers_line_and_a_message(notebook, call):
    output = notebook.fail(call)
    assert len(output.traceback) <= 8, show(output)
    assert f", line 1:  {call}" in show(output)
    assert CALLS[call] in output.traceback[-1]


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("lab.chat('hello ' * 200, max_tokens=5000)", "KeyboardInterrupt"),
        ("for piece in lab.chat('hello ' * 200, stream=True, max_tokens=5000): pass", "KeyboardInterrupt"),
        ("lab.chat('hello ' * 200, stream=True, max_tokens=5000)", "KeyboardInterrupt"),
        ("await lab.achat('hello ' * 200, max_tokens=5000)", "CancelledError"),
    ],
)
def test_an_interrupt_is_the_line_that_it_ended(notebook, call, name):
    url = notebook.run("print(lab.url)")
    notebook.start(call)
    with LabClient(url) as client:
        until(lambda: any(request.completion_tokens for request in client.clients()))
    notebook.manager.interrupt_kernel()
    first, second = notebook.read().traceback
    assert first.startswith(f"{name}: Cell In[")
    assert first.endswith(f"], line 1:  {call}")
    assert second == "%tb shows the traceback"


def test_an_interrupt_in_a_compiled_module_that_the_package_calls_is_the_line_that_it_ended(notebook):
    # Sending a display to the front end is such code of zmq.
    notebook.run(
        "compiled = compile('def publish(*_, **__): raise KeyboardInterrupt', 'zmq/backend/cython/_zmq.py', 'exec')\n"
        "names = {}\nexec(compiled, names)\npublisher = get_ipython().display_pub\n"
        "usual, publisher.publish = publisher.publish, names['publish']"
    )
    try:
        output = notebook.fail("lab.chat('hello', stream=True)")
    finally:
        notebook.run("publisher.publish = usual")
    assert output.traceback[0].endswith("], line 1:  lab.chat('hello', stream=True)"), show(output)
    assert len(output.traceback) == 2


def test_an_interrupt_in_a_function_of_the_caller_is_shown_as_usual(notebook):
    code = "def stopped(row):\n    raise KeyboardInterrupt\nlist(lab.map(iter([{'a': 1}]), stopped))"
    output = notebook.fail(code)
    assert output.error == "KeyboardInterrupt"
    assert "Traceback (most recent call last)" in show(output)
    assert "----> 2     raise KeyboardInterrupt" in show(output)


def test_the_line_of_a_function_that_the_cell_calls_is_shown_too(notebook):
    assert "line 8, in ask:  return lab.chat(text, **parameters)" in show(notebook.fail("ask('hi', top_p=2)"))


def test_the_whole_traceback_can_be_shown(notebook):
    short = notebook.fail("lab.chat('hi', top_p=2)")
    last = notebook.fail("%tb")
    assert (last.error, "arguments.py" in show(last)) == (short.error, True)
    notebook.run("lmx_lab.full_tracebacks()")
    try:
        full = notebook.fail("lab.chat('hi', top_p=2)")
    finally:
        notebook.run("lmx_lab.full_tracebacks(False)")
    assert (full.error, full.message) == (short.error, short.message)
    assert "arguments.py" in show(full)
    assert len(full.traceback) > 8


def test_other_errors_and_earlier_handlers_are_kept(notebook):
    assert "Traceback (most recent call last)" in show(notebook.fail("int('x')"))
    mixed = "raise ExceptionGroup('mixed', [lmx_lab.LabError('a'), KeyError('b')])"
    notebook.start(mixed)
    assert "KeyError: 'b'" in notebook.read().stderr
    notebook.run(HANDLER)
    notebook.start("{}[1]")
    assert notebook.read().text == "KeyError handled\n"
    assert len(notebook.fail("lab.chat('hi', top_p=2)").traceback) <= 8
