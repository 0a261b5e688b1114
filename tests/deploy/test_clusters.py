"""Test Ray Serve, and the programs for Dask and Ray Data in the documentation, on clusters of this machine.

``make cluster`` has an environment with these packages.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time

import httpx2
import pytest

import lmx_lab
from lmx_lab.arguments import chat_request
from lmx_lab.client import LabClient
from lmx_lab.errors import AdminForbiddenError, LabError
from lmx_lab.notebook.lab import attach
from lmx_lab.settings import Settings
from tests.support.docs import DOCS, code_blocks
from tests.support.sockets import free_port

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]
ray = pytest.importorskip("ray", reason="Ray is not in this environment; make cluster has one with it")

from lmx_lab.deploy.ray_serve import application  # noqa: E402

WAIT_S = 240.0
# On a busy machine, the processes of Ray take longer to start than its defaults, and to answer.
TIMES = {
    "RAY_agent_register_timeout_ms": "240000",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "120",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
}
LONG = "word " * 400
SHORT = "one two three"
PROGRAMS = {
    lines[0].removeprefix("# "): block.text
    for block in code_blocks(DOCS / "cluster.md")
    if block.language == "python" and (lines := block.text.splitlines())[0].endswith("_example.py")
}


def wait_until(is_true):
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline
        threading.Event().wait(0.1)


@pytest.fixture(scope="module")
def serve():
    """Ray Serve on a free port; ``serve.url`` is its address."""
    # Ray and its processes read these variables when they are imported.
    with pytest.MonkeyPatch.context() as patched:
        for name, value in TIMES.items():
            patched.setenv(name, value)
        from ray import serve

        port = free_port()
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            _node_ip_address="127.0.0.1",
        )
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.url = f"http://127.0.0.1:{port}"
        yield serve
        serve.shutdown()
        ray.shutdown()


def echo(home, replicas):
    settings = Settings(home=home, echo_tokens_per_s=50, slots=4)
    return application("echo", settings=settings, num_replicas=replicas, ray_actor_options={"num_cpus": 0.5})


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def two_replicas(serve, home):
    serve.run(echo(home, 2), name="echo", route_prefix="/")
    return str(serve.url)


class Session:
    """A conversation, which is answered by one replica."""

    def __init__(self, url, name):
        self.client = httpx2.Client(base_url=url, headers={"x-session-id": name}, timeout=WAIT_S)
        self.text = ""
        self.error = None

    def chat(self, text):
        """Stream an answer; keeps its text and the error with which it ends."""
        self.text, self.error = "", None
        body = {"model": "default", "messages": [{"role": "user", "content": text}], "stream": True}
        try:
            with self.client.stream("POST", "/v1/chat/completions", json=body) as response:
                for line in response.iter_lines():
                    self.text += line
                    if "error" in line:
                        raise LabError(line)
        except (httpx2.HTTPError, LabError) as exc:
            self.error = exc

    def metric(self, name):
        """Return a metric of the replica, summed over its labels."""
        lines = self.client.get("/metrics").raise_for_status().text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


def two_sessions(url):
    """Return sessions that different replicas answer."""
    sessions = [Session(url, f"session {number}") for number in range(16)]
    first = sessions[0]
    first.chat(SHORT)
    count = first.metric("lmx_lab_requests_total")
    others = [each for each in sessions[1:] if each.metric("lmx_lab_requests_total") != count]
    assert others
    return [first, others[0]]


@contextlib.contextmanager
def long_answers(url):
    """Yield sessions of different replicas that answer during the block. It ends when their answers have ended."""
    sessions = two_sessions(url)
    threads = [threading.Thread(target=each.chat, args=(LONG,)) for each in sessions]
    for thread in threads:
        thread.start()
    for each in sessions:
        wait_until(lambda each=each: each.metric("lmx_lab_requests_active") == 1)
    yield sessions
    for thread in threads:
        thread.join(WAIT_S)


def test_a_conversation_stays_on_one_replica_and_a_disconnect_ends_its_answer(two_replicas):
    first, second = two_sessions(two_replicas)
    before = [each.metric("lmx_lab_requests_total") for each in (first, second)]
    for _ in range(4):
        first.chat(SHORT)
    assert [each.metric("lmx_lab_requests_total") for each in (first, second)] == [before[0] + 4, before[1]]
    assert first.text.count("data:") > 4
    body = {"model": "default", "messages": [{"role": "user", "content": LONG}], "stream": True}
    with second.client.stream("POST", "/v1/chat/completions", json=body) as response:
        # The response is closed when its iterator is deleted.
        lines = response.iter_lines()
        next(lines)
        wait_until(lambda: second.metric("lmx_lab_requests_active") == 1)
    wait_until(lambda: second.metric("lmx_lab_requests_active") == 0)
    assert second.metric("lmx_lab_output_tokens_total") < 200


def test_the_client_uses_replicas_like_one_server_but_cannot_change_them(two_replicas):
    with attach(two_replicas) as lab:
        rows = [f"row {number}" for number in range(30)]
        assert lab.map(rows, "{text}")["answer"].tolist() == rows
        assert "".join(lab.chat(SHORT, stream=True)) == SHORT
        with pytest.raises(AdminForbiddenError):
            lab.unload()
    with LabClient(two_replicas) as client:
        chunks = client.stream(chat_request(SHORT, {}), over="websocket")
        assert "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices) == SHORT


def replicas():
    from ray import serve
    from ray.serve.schema import ReplicaState

    states = serve.status().applications["echo"].deployments["lmx-lab"].replica_states
    return [state for state, count in states.items() for _ in range(count) if state == ReplicaState.RUNNING]


def test_the_answers_of_a_killed_replica_end_with_an_error_and_another_one_answers(two_replicas):
    from ray.serve._private.constants import SERVE_NAMESPACE

    with long_answers(two_replicas) as sessions:
        actors = [each["name"] for each in ray.util.list_named_actors(all_namespaces=True)]
        replica = next(name for name in actors if name.startswith("SERVE_REPLICA::echo#lmx-lab#"))
        ray.kill(ray.get_actor(replica, namespace=SERVE_NAMESPACE))
    assert sorted(each.error is None for each in sessions) == [False, True]
    assert sorted("[DONE]" in each.text for each in sessions) == [False, True]
    for each in sessions:
        each.chat(SHORT)
        assert each.error is None
    wait_until(lambda: len(replicas()) == 2)


def test_a_replica_that_is_removed_first_ends_its_answers(serve, two_replicas, home):
    with long_answers(two_replicas) as sessions:
        serve.run(echo(home, 1), name="echo", route_prefix="/")
    assert [each.error for each in sessions] == [None, None]
    assert all("[DONE]" in each.text for each in sessions)
    wait_until(lambda: len(replicas()) == 1)


def test_a_real_model_answers_below_a_path(serve, starter_home):
    settings = Settings(home=starter_home, memory_limit_bytes=2 * 10**9)
    real = application("smollm2-135m", settings=settings, load={"engine": "mlx"}, ray_actor_options={"num_cpus": 1})
    serve.run(real, name="real", route_prefix="/real")
    with attach(f"{serve.url}/real") as lab:
        assert "Paris" in lab.chat("Which city is the capital of France?", temperature=0, max_tokens=20).text
    serve.delete("real")


@pytest.mark.parametrize("name", ["dask_example.py", "ray_data_example.py"])
def test_the_programs_for_other_schedulers_answer_all_rows(name, tmp_path):
    with lmx_lab.Lab(Settings(home=tmp_path, port=0), loop="thread") as lab:
        lab.load("echo")
        (tmp_path / name).write_text(PROGRAMS[name].replace("http://127.0.0.1:8400", lab.url))
        command = [sys.executable, name]
        done = subprocess.run(
            command, cwd=tmp_path, env={**os.environ, **TIMES}, capture_output=True, text=True, check=False
        )
    assert done.returncode == 0, done.stderr
    assert "[100 rows x 3 columns]" in done.stdout
    assert "Row 99" in done.stdout
