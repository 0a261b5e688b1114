"""Test attached labs in the cells of a kernel."""

import pytest

from tests.support.kernels import Notebook
from tests.support.labs import serving
from tests.support.models import write_tiny_llama
from tests.support.waiting import until


@pytest.fixture(scope="module")
def lab(tmp_path_factory, smollm2):
    home = tmp_path_factory.mktemp("home")
    write_tiny_llama(home / "models" / "tiny", smollm2.path, seed=0, context=8192)
    with serving(home, "tiny") as lab:
        yield lab


@pytest.fixture(scope="module")
def notebook(lab, tiny_home):
    notebook = Notebook(tiny_home)
    notebook.run(f"import asyncio, lmx_lab; far = lmx_lab.attach({lab.url!r})")
    yield notebook
    stderr = notebook.stderr
    notebook.close()
    assert "Traceback" not in stderr
    assert "never" not in stderr


@pytest.mark.long
def test_blocking_and_awaited_verbs_and_streams_work_in_cells(lab, notebook):
    text = lab.chat("hi", max_tokens=5, temperature=0).text
    parameters = "'hi', max_tokens=5, temperature=0"
    assert notebook.run(f"print(repr(far.chat({parameters}).text))") == repr(text)
    assert notebook.run(f"print(repr((await far.achat({parameters})).text))") == repr(text)
    assert notebook.run(f"print(repr(''.join(far.chat({parameters}, stream=True))))") == repr(text)
    assert notebook.run("print(asyncio.get_running_loop().is_running(), far.models()[0].loaded)") == "True True"


def test_the_stop_button_ends_the_generation_on_the_server(lab, notebook):
    output = notebook.interrupt("""
        for piece in far.chat("hi", stream=True, max_tokens=7500, ignore_eos=True):
            print("started", end="")
        """)
    assert output.error == "KeyboardInterrupt"
    until(lambda: lab.engine.snapshot.active_requests == 0)
    assert lab.engine.snapshot.output_tokens < 7500
    assert notebook.run("print(far.chat('hi', max_tokens=2).usage.completion_tokens)") == "2"


def test_a_cell_can_attach_to_the_lab_of_its_own_kernel(notebook):
    notebook.run("own = lmx_lab.launch(loop='kernel', port=0); near = lmx_lab.attach(own.url)")
    assert notebook.run("print(near.models() == own.models() == await near.amodels())") == "True"
    notebook.run("near.stop()")
    assert notebook.run("own.stop(); print(len(far.models()))") == "1"
