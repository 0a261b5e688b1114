"""Tests of labs that were stopped, for each way to reach them."""

import asyncio
import threading

import pytest

from lmx_lab.errors import HostingError
from tests.support.asking import ENDLESS
from tests.support.labs import wait_until_idle

pytestmark = pytest.mark.anyio


def lab_threads():
    """Return the threads of labs, without the one that all labs and clients of this process share."""
    own = {thread for thread in threading.enumerate() if thread.name.startswith("lmx-lab-")}
    return {thread for thread in own if thread.name != "lmx-lab-background"}


async def test_a_stopped_lab_says_so_and_leaves_no_thread(reach, way, tmp_path):
    before = lab_threads()
    advice = "attach" if way == "attached" else "was stopped; launch"
    async with reach(tmp_path, "echo") as (lab, served):
        stream = await lab.astream("hi", **ENDLESS)
        backend, workbench = lab.workbench.backend, lab.workbench
        await lab.astart()
        await lab.astop()
        await lab.astop()
        assert (lab.running, served.running) == (False, way == "attached")
        for start in (lab.start, lab.__enter__):
            with pytest.raises(HostingError, match=r"was stopped; .* a new one"):
                await asyncio.to_thread(start)
        with pytest.raises(HostingError, match=r"was stopped; .* a new one"):
            await lab
        if way == "attached":
            await asyncio.to_thread(wait_until_idle, served)
            with pytest.raises(HostingError, match=advice):
                [piece async for piece in stream]
        for verb in (lab.achat("hi"), lab.aload("echo"), lab.aunload(), lab.amodels()):
            with pytest.raises(HostingError, match=advice):
                await verb
        for verb in (lab.chat, lab.load):
            with pytest.raises(HostingError, match=advice):
                await asyncio.to_thread(verb, "echo")
        assert (backend.state().state, backend.sample()) == ("stopped", None)
        assert advice.rsplit(maxsplit=1)[-1] in backend.state().note
        with pytest.raises(HostingError, match=advice.rsplit(maxsplit=1)[-1]):
            workbench.submit(backend.unload()).result(60)
        assert "stopped" in repr(lab)
        workbench.suspend()
    assert lab_threads() <= before
