"""Sandboxes start on demand, and end at their limits or with their parent. Slow work does not delay other work."""

import asyncio
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from lmx_lab.engine import sandbox_worker
from lmx_lab.engine.grammar import compile
from lmx_lab.engine.sandbox import (
    SandboxBusyError,
    SandboxDiedError,
    SandboxPool,
    SandboxStartError,
    SandboxTimeoutError,
    Setup,
)
from lmx_lab.engine.tokenizing import encoder, templates
from tests.support.waiting import auntil

pytestmark = pytest.mark.anyio
WORKER = """
import os, sys, time
from pathlib import Path
MEMORY_BYTES, CPU_S = 2**30, 5
state = []

def handle(message):
    match message.partition(b" "):
        case b"wait", _, path:
            Path(path.decode() + ".begun").touch()
            while not Path(path.decode()).exists():
                time.sleep(0.01)
        case b"fill", _, size:
            len(bytearray(int(size)))
        case b"raise", _, _:
            raise ValueError
        case b"promise", _, size:
            os.write(int(sys.argv[2]), int(size).to_bytes(8, "big"))
            time.sleep(60)
        case b"environ", _, name:
            return os.environb.get(name, b"-")
        case b"set", _, word:
            state.append(word)
            return b""
        case b"refuse", _, word:
            return word
    return b"done " + message + b"".join(state)
"""


@pytest.fixture
def worker(tmp_path):
    path = tmp_path / "worker.py"
    path.write_text(WORKER)
    return path


@pytest.fixture
def make_pool():
    pools = []

    def make(**options):
        pools.append(SandboxPool(**options))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


@pytest.fixture
def pool(make_pool):
    return make_pool(share_s=0.05)


@pytest.fixture
def ask(pool, worker):
    return lambda message, **options: pool.run(worker, message, **({"limit_s": 60.0} | options))


async def test_messages_are_answered_by_one_process(pool, ask):
    assert [await ask(message) for message in (b"a", b"b", b"c" * 5_000_000)] == [
        b"done a",
        b"done b",
        b"done " + b"c" * 5_000_000,
    ]
    assert pool.starts == len(pool.pids) == 1


async def test_threads_and_other_loops_may_use_a_pool(pool, ask):
    assert pool.portal.run(ask(b"a")) == b"done a"
    assert await asyncio.to_thread(lambda: asyncio.run(ask(b"b"))) == b"done b"
    assert pool.starts == 1


async def test_the_process_has_a_clean_environment(ask, monkeypatch):
    monkeypatch.setenv("LMX_LAB_SOMETHING", "secret")
    assert await ask(b"environ LMX_LAB_SOMETHING") == b"-"
    assert await ask(b"environ PATH") == os.environb[b"PATH"]


async def test_work_beyond_its_time_limit_is_stopped(pool, ask, tmp_path):
    with pytest.raises(SandboxTimeoutError):
        await ask(f"wait {tmp_path / 'never'}".encode(), limit_s=0.2)
    assert await ask(b"again") == b"done again"
    assert pool.starts == 2


@pytest.mark.parametrize("message", [b"raise", b"fill 2000000000"])
async def test_work_that_crashes_its_process_fails(ask, message):
    with pytest.raises(SandboxDiedError):
        await ask(message)
    assert await ask(b"again") == b"done again"


async def test_a_process_that_announces_an_endless_reply_is_stopped(pool, ask):
    with pytest.raises(SandboxDiedError):
        await ask(b"promise 1099511627776")
    assert pool.pids == []


@pytest.mark.parametrize("ends_first", [True, False])
async def test_a_process_that_was_killed_between_messages_is_started_again(pool, ask, ends_first):
    await ask(b"a")
    (child,) = map(psutil.Process, pool.pids)
    child.kill()
    if ends_first:
        child.wait()
    assert await ask(b"b") == b"done b"


async def test_work_is_repeated_once_if_its_kept_process_is_killed(pool, ask, tmp_path):
    path, begun = tmp_path / "never", tmp_path / "never.begun"
    await ask(b"a")
    task = asyncio.create_task(ask(f"wait {path}".encode()))
    await auntil(begun.exists)
    begun.unlink()
    psutil.Process(*pool.pids).kill()
    await auntil(begun.exists)
    assert pool.starts == 2
    psutil.Process(*pool.pids).kill()
    with pytest.raises(SandboxDiedError):
        await task
    assert pool.starts == 2


async def test_closing_repeats_no_work(pool, ask, tmp_path):
    await ask(b"a")
    task = asyncio.create_task(ask(f"wait {tmp_path / 'never'}".encode()))
    await auntil((tmp_path / "never.begun").exists)
    pool.close()
    with pytest.raises(SandboxDiedError):
        await task
    assert pool.starts == 1


async def test_cancelled_work_is_stopped(pool, ask, tmp_path):
    path = tmp_path / "never"
    task = asyncio.create_task(ask(f"wait {path}".encode()))
    await auntil((tmp_path / "never.begun").exists)
    (child,) = map(psutil.Process, pool.pids)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    child.wait(30)
    assert await ask(b"again") == b"done again"


async def test_closing_ends_running_work_and_refuses_later_work(pool, ask, tmp_path):
    task = asyncio.create_task(ask(f"wait {tmp_path / 'never'}".encode()))
    await auntil((tmp_path / "never.begun").exists)
    (child,) = map(psutil.Process, pool.pids)
    pool.close()
    with pytest.raises(SandboxDiedError):
        await task
    child.wait(30)
    with pytest.raises(SandboxStartError, match="stopped"):
        await ask(b"b")
    pool.close()


async def test_a_worker_that_cannot_be_loaded_is_a_start_error(pool, tmp_path):
    (tmp_path / "wrong.py").write_text("import there_is_no_such_module")
    with pytest.raises(SandboxStartError, match="ended immediately"):
        await pool.run(tmp_path / "wrong.py", b"a", limit_s=5)


async def test_a_worker_that_is_not_ready_in_time_is_a_start_error(make_pool, tmp_path):
    (tmp_path / "slow.py").write_text("import time; time.sleep(60)")
    pool = make_pool(start_s=0.2)
    with pytest.raises(SandboxStartError, match=r"was not ready within 0\.2 s"):
        await pool.run(tmp_path / "slow.py", b"a", limit_s=5)
    assert pool.pids == []


async def test_a_system_that_starts_no_process_is_a_start_error(pool, ask, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/there/is/no/such/program")
    with pytest.raises(SandboxStartError, match="No such file"):
        await ask(b"a")
    assert pool.pids == []


# Setups


async def test_each_setup_has_processes_of_its_own_which_end_with_it(pool, ask):
    one, two = Setup(lambda: b"set 1"), Setup(lambda: b"set 2")
    assert [await ask(b"a ", setup=setup) for setup in (one, two, one)] == [b"done a 1", b"done a 2", b"done a 1"]
    assert len(pool.pids) == 2
    del one
    await auntil(lambda: len(pool.pids) == 1)
    assert await ask(b"b ", setup=two) == b"done b 2"


@pytest.mark.parametrize(("message", "error"), [(b"refuse me", "me"), (b"raise", "ended")])
async def test_a_setup_that_fails_is_an_error_of_the_work(pool, ask, message, error):
    with pytest.raises(SandboxDiedError, match=error):
        await ask(b"a", setup=Setup(lambda: message))
    assert pool.pids == []


@pytest.mark.long
async def test_a_setup_that_takes_too_long_is_an_error_of_the_work(make_pool, worker, tmp_path):
    pool = make_pool(start_s=3.0)
    with pytest.raises(SandboxDiedError, match="was not set up within 3 s"):
        await pool.run(worker, b"a", limit_s=60, setup=Setup(f"wait {tmp_path / 'never'}".encode))
    assert pool.pids == []


async def test_a_process_that_is_not_kept_ends_when_it_is_idle(make_pool, worker):
    pool, setup = make_pool(idle_s=0.05), Setup(keep=False)
    await pool.run(worker, b"a", limit_s=5)
    await pool.run(worker, b"a", limit_s=5, setup=setup)
    await auntil(lambda: len(pool.pids) == 1)
    assert await pool.run(worker, b"b", limit_s=5, setup=setup) == b"done b"
    assert pool.starts == 3


async def test_a_process_that_was_started_in_advance_is_used_or_ends(make_pool, worker):
    pool = make_pool()
    pool.start(worker)
    assert await pool.run(worker, b"a", limit_s=5) == b"done a"
    assert pool.starts == 1
    unused = make_pool(idle_s=0.05)
    unused.start(worker)
    await auntil(lambda: unused.starts == 1 and not unused.pids)


# Fairness


async def test_slow_work_keeps_its_process_and_other_work_uses_another(pool, ask, tmp_path):
    slow = asyncio.create_task(ask(f"wait {tmp_path / 'slow'}".encode()))
    await auntil((tmp_path / "slow.begun").exists)
    assert [await ask(message) for message in (b"a", b"b")] == [b"done a", b"done b"]
    assert not slow.done()
    assert pool.starts == 2
    (tmp_path / "slow").touch()
    assert (await slow).startswith(b"done wait")
    # One process is enough when no work is slow.
    await auntil(lambda: len(pool.pids) == 1)


async def test_a_second_slow_work_is_stopped_for_others_and_computed_after_the_first(pool, ask, tmp_path):
    first = asyncio.create_task(ask(f"wait {tmp_path / 'first'}".encode()))
    await auntil((tmp_path / "first.begun").exists)
    second = asyncio.create_task(ask(f"wait {tmp_path / 'second'}".encode()))
    await auntil((tmp_path / "second.begun").exists)
    assert await ask(b"a") == b"done a"
    assert not first.done()
    assert not second.done()
    (tmp_path / "second.begun").unlink()
    (tmp_path / "first").touch()
    await first
    await auntil((tmp_path / "second.begun").exists)
    (tmp_path / "second").touch()
    assert (await second).startswith(b"done wait")
    assert len(pool.pids) == 1


async def test_work_that_waits_too_long_is_refused(make_pool, worker, tmp_path):
    pool = make_pool(share_s=60.0, wait_s=0.1)
    running = asyncio.create_task(pool.run(worker, f"wait {tmp_path / 'end'}".encode(), limit_s=60))
    await auntil((tmp_path / "end.begun").exists)
    with pytest.raises(SandboxBusyError):
        await pool.run(worker, b"a", limit_s=0.1)
    (tmp_path / "end").touch()
    assert (await running).startswith(b"done wait")


# The parent


@pytest.mark.slow
def test_processes_end_with_their_parent(worker):
    program = f"""
    import asyncio
    from pathlib import Path
    from lmx_lab.engine.sandbox import SandboxPool

    pool, worker = SandboxPool(), Path({str(worker)!r})

    async def main():
        await pool.run(worker, b"a", limit_s=60)
        running = asyncio.create_task(pool.run(worker, b"wait {worker}.never", limit_s=60))
        while not Path({str(worker) + ".never.begun"!r}).exists():
            await asyncio.sleep(0.01)
        print(*pool.pids, flush=True)
        await running

    asyncio.run(main())
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], stdout=subprocess.PIPE, env=os.environ, text=True
    ) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait(timeout=30)


def test_processes_import_nothing_of_the_package():
    for path in (sandbox_worker.__file__, *(module.WORKER for module in (compile, encoder, templates))):
        assert not re.search(r"^\s*(from|import) lmx_lab", Path(path).read_text(), re.MULTILINE), path
