"""Test the daemon in a kernel that is busy, interrupted and restarted, and functions of the notebook as its tools."""

import httpx2
import psutil
import pytest

from lmx_lab.daemon.home import DaemonHome, read_state

LAUNCH = "import lmx_lab, time; lab = lmx_lab.launch('tiny', port=0, daemon=True, daemon_port=0); print(lab.daemon.url)"
WAIT_S = 20


def health(url):
    return httpx2.get(f"{url}/v3/health", timeout=WAIT_S, trust_env=False).json()["status"]


def check_free(folder):
    """Check that the daemon has ended regularly; a killed one leaves its state file."""
    home = DaemonHome(folder)
    home.acquire(timeout_s=0)
    home.release()
    assert not (folder / "state.json").exists()


@pytest.mark.long
def test_busy_and_interrupted_cells_do_not_affect_the_daemon_and_the_kernels_end_stops_it(fresh_notebook):
    notebook, folder = fresh_notebook, fresh_notebook.home / "daemon"
    url = notebook.run(LAUNCH)
    notebook.start("print('started', flush=True); time.sleep(60)")
    notebook.read(until="started")
    assert health(url) == "ok"
    notebook.manager.interrupt_kernel()
    assert notebook.read().error == "KeyboardInterrupt"
    assert health(url) == "ok"
    check_turn(url, folder)
    shown = notebook.run("print(lab, lab._repr_html_(), lab.daemon, vars(lab))")
    state = read_state(folder)
    assert url in shown
    assert state.token not in shown
    notebook.manager.shutdown_kernel(now=False)
    check_free(folder)
    assert not [c for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port == state.port]


def check_turn(url, folder):
    """Run a turn, which needs the daemon's loop and the lab's loop in the kernel."""
    state = read_state(folder)
    headers = {"authorization": f"Bearer {state.token}"}
    with httpx2.Client(base_url=url, headers=headers, timeout=WAIT_S, trust_env=False) as http:
        http.post("/v3/sessions", json={"session_id": "kernel"})
        body = {"turn_id": "t", "content": "hi", "overrides": {"max_tokens": 3}}
        http.post("/v3/sessions/kernel/turns", json=body)
        turn = http.get("/v3/sessions/kernel/turns/t", params={"wait": WAIT_S}).json()
        assert turn["status"] == "done", turn


def test_the_output_of_a_tool_appears_below_the_cell_that_registered_it(fresh_notebook):
    fresh_notebook.run(
        """
        from lmx_lab.daemon.tools import PythonTools
        from lmx_lab.portal import LoopThread

        tools, loop = PythonTools(), LoopThread()
        loop.start()

        def talk(number: int) -> int:
            print("printed", number)
            return number

        tools.register(talk)
        """
    )
    registered = fresh_notebook.start("tools.register(talk)")
    fresh_notebook.read()
    called = fresh_notebook.run("print(loop.run(tools.call('talk', {'number': '3'})))")
    assert "ToolResult(status='ok', text='3')" in called
    fresh_notebook.until(lambda: "printed 3" in registered.text)
