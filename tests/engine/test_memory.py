"""Memory and CPU limits are read from control groups of both versions, in files and in one real group; a budget keeps
models and caches within them, also while other programs need memory.
"""

import json
import mmap
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from lmx_lab.engine import memory
from lmx_lab.engine.memory import (
    CGROUPS,
    HEADROOM_BYTES,
    LEAST_BYTES,
    LEAST_WORK_BYTES,
    MEMBERSHIP,
    RESERVED_BYTES,
    Budget,
    container_free_bytes,
    cpu_limit,
    default_threads,
    footprint_bytes,
    memory_limit_bytes,
    pressure_reason,
)
from lmx_lab.engine.mlx import memory as mlx_memory
from lmx_lab.errors import OutOfMemoryError

MIB = 2**20
GIB = 2**30
V1_NONE = "9223372036854771712"
HUB = {"JUPYTERHUB_SERVICE_PREFIX": "/user/ada/"}
OWN_V2 = "0::/user.slice/notebook.service\n"
OWN_V1 = "5:cpu,cpuacct:/pods/mine\n4:memory:/pods/mine\n1:name=systemd:/pods/mine\n"


def tree(root, files, own):
    """Write the files of these groups; return the mount folder and the membership file."""
    root.mkdir(exist_ok=True)
    for name, text in files.items():
        (root / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "cgroup" / name).write_text(text)
    (root / "self").write_text(own)
    return root / "cgroup", root / "self"


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({}, "", None),
        ({}, OWN_V2, None),
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"memory.max": f"{2 * GIB}\n"}, "0::/\n", 2 * GIB),
        # The lowest limit of all enclosing groups counts.
        ({"user.slice/notebook.service/memory.max": f"{GIB}\n", "user.slice/memory.max": "max\n"}, OWN_V2, GIB),
        ({"user.slice/notebook.service/memory.max": "max\n", "user.slice/memory.max": f"{GIB}\n"}, OWN_V2, GIB),
        ({"user.slice/notebook.service/memory.max": f"{4 * GIB}\n", "user.slice/memory.max": f"{GIB}"}, OWN_V2, GIB),
        # Groups of other processes do not count.
        ({"user.slice/other.service/memory.max": f"{GIB}\n"}, OWN_V2, None),
        # A container that sees its own group as the root, but reads the path on the host.
        ({"memory.max": f"{GIB}\n"}, "0::/kubepods/burstable/pod1/abc\n", GIB),
        ({"memory.max": f"{GIB}\n"}, "0::/../../other\n", GIB),
        # Both versions together.
        ({"unified/user.slice/memory.max": f"{GIB}\n"}, OWN_V2, GIB),
        ({"memory/memory.limit_in_bytes": f"{V1_NONE}\n"}, OWN_V1, int(V1_NONE)),
        ({"memory/memory.limit_in_bytes": f"{2 * GIB}\n"}, OWN_V1, 2 * GIB),
        ({"memory/pods/mine/memory.limit_in_bytes": f"{GIB}", "memory/memory.limit_in_bytes": V1_NONE}, OWN_V1, GIB),
        ({"memory/pods/memory.limit_in_bytes": f"{GIB}"}, OWN_V1, GIB),
        ({"memory.max": "nonsense\n"}, "nonsense", None),
    ],
)
def test_the_lowest_memory_limit_of_all_enclosing_groups_counts(files, own, limit, tmp_path):
    assert memory_limit_bytes({}, *tree(tmp_path, files, own)) == limit


@pytest.mark.parametrize(
    ("environ", "limit"),
    [
        ({**HUB, "MEM_LIMIT": str(2 * GIB)}, 2 * GIB),
        ({**HUB, "MEM_LIMIT": f"{2.0 * GIB}"}, 2 * GIB),
        ({**HUB, "MEM_LIMIT": str(8 * GIB)}, 4 * GIB),
        # Without JupyterHub the name may have another meaning.
        ({"MEM_LIMIT": "512"}, 4 * GIB),
        *[({**HUB, "MEM_LIMIT": text}, 4 * GIB) for text in ("", "None", "2G", "0", "-1", "nan", "inf")],
    ],
)
def test_the_memory_limit_of_a_hub_counts_if_it_is_lower(environ, limit, tmp_path):
    assert memory_limit_bytes(environ, *tree(tmp_path, {"memory.max": str(4 * GIB)}, "0::/")) == limit


@pytest.mark.parametrize(
    ("files", "environ", "cpus"),
    [
        ({"user.slice/notebook.service/cpu.max": "max 100000\n", "user.slice/cpu.max": "150000 100000\n"}, {}, 2),
        ({"user.slice/notebook.service/cpu.max": "50000 100000\n", "user.slice/cpu.max": "200000 100000\n"}, {}, 1),
        ({"cpu.max": "400000 100000\n"}, {**HUB, "CPU_LIMIT": "1.5"}, 2),
        ({}, {**HUB, "CPU_LIMIT": "0.5"}, 1),
        ({"cpu.max": "100000 100000\n"}, {**HUB, "CPU_LIMIT": "4"}, 1),
        ({}, {"CPU_LIMIT": "1"}, None),
        ({}, HUB, None),
    ],
)
def test_the_lowest_cpu_limit_counts(files, environ, cpus, tmp_path):
    assert cpu_limit(environ, *tree(tmp_path, files, OWN_V2)) == cpus


def test_cpu_limits_of_version_1_are_read_in_the_groups_of_the_cpu_controller(tmp_path):
    group = "cpu/pods/mine"
    files = {f"{group}/cpu.cfs_quota_us": "250000\n", f"{group}/cpu.cfs_period_us": "100000\n"}
    assert cpu_limit({}, *tree(tmp_path, {**files, "cpu/cpu.cfs_quota_us": "-1\n"}, OWN_V1)) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="control groups are Linux's")
@pytest.mark.parametrize(
    ("files", "threads"),
    [
        ({}, 4),
        ({"cpu.max": "max 100000\n"}, 4),
        ({"cpu.max": "150000 100000\n"}, 2),
        ({"cpu.max": "10000 100000\n"}, 1),
        ({"cpu.max": "nonsense"}, 4),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
    ],
)
def test_there_is_a_thread_for_each_core_that_the_process_may_use(files, threads, tmp_path, monkeypatch):
    monkeypatch.setattr(memory.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert default_threads({}, tmp_path) == threads


def test_environment_variables_set_the_number_of_threads():
    assert default_threads({"OMP_NUM_THREADS": "3,2", "OPENBLAS_NUM_THREADS": "0"}) == 3
    assert default_threads({"OMP_NUM_THREADS": "3", "OPENBLAS_NUM_THREADS": "5"}) == 5


def test_inactive_file_pages_count_as_free(tmp_path):
    stat = f"anon {600 * MIB}\ninactive_file {300 * MIB}\nactive_file {100 * MIB}\n"
    files = {"memory.max": str(2 * GIB), "memory.current": str(GIB), "memory.stat": stat}
    assert container_free_bytes(*tree(tmp_path / "v2", files, "0::/")) == GIB + 300 * MIB
    stat = f"inactive_file 5\ntotal_inactive_file {300 * MIB}\n"
    files = {"memory.limit_in_bytes": str(2 * GIB), "memory.usage_in_bytes": str(GIB), "memory.stat": stat}
    v1 = {f"memory/pods/mine/{name}": text for name, text in files.items()}
    assert container_free_bytes(*tree(tmp_path / "v1", v1, OWN_V1)) == GIB + 300 * MIB


def test_free_memory_is_that_of_the_group_with_the_least(tmp_path):
    files = {
        "user.slice/memory.max": str(2 * GIB),
        "user.slice/memory.current": str(3 * GIB),
        "user.slice/notebook.service/memory.max": str(GIB),
        "user.slice/notebook.service/memory.current": str(MIB),
        "memory.max": str(GIB),
    }
    assert container_free_bytes(*tree(tmp_path, files, OWN_V2)) == 0
    assert container_free_bytes(*tree(tmp_path / "none", {}, OWN_V2)) is None


def test_models_get_80_percent_of_the_limit_of_a_hub(monkeypatch):
    for name, text in {**HUB, "MEM_LIMIT": str(GIB // 2)}.items():
        monkeypatch.setenv(name, text)
    assert mlx_memory.total_bytes() == GIB // 2
    assert mlx_memory.limit_bytes(None) == GIB // 2 * 8 // 10
    assert mlx_memory.limit_bytes(5) == 5


def stalls(percent):
    return f"some avg10={percent:.2f} avg60=0.00 avg300=0.00 total=1\nfull avg10=99.00 avg60=0.00 avg300=0.00 total=1\n"


def in_group(**files):
    return {f"user.slice/notebook.service/memory.{name}": f"{value}\n" for name, value in files.items()}


@pytest.mark.parametrize(
    ("files", "machine", "begins", "ends"),
    [
        pytest.param({}, "", None, None, id="no files"),
        pytest.param(in_group(pressure=stalls(0), max="max", current=GIB), stalls(1.9), None, None, id="no pressure"),
        pytest.param({}, stalls(10), "on this machine waited", "on this machine waited", id="machine"),
        pytest.param({}, stalls(5), None, "on this machine waited for memory during 5 %", id="machine, afterwards"),
        pytest.param(
            in_group(pressure=stalls(42)), stalls(0), "in this container", "in this container", id="container"
        ),
        pytest.param({"user.slice/memory.pressure": stalls(42)}, "", "in this container", "in this", id="outer group"),
        pytest.param(in_group(high=GIB, current=GIB * 97 // 100), "", "slowed down", "slowed down", id="high"),
        pytest.param(in_group(high=GIB, current=GIB * 94 // 100), "", None, "slowed down", id="high, afterwards"),
        pytest.param(in_group(max=GIB, current=GIB * 97 // 100), "", "0.03 GB of the", "are free", id="max"),
        pytest.param(in_group(max=GIB, current=GIB * 94 // 100), "", None, "are free", id="max, afterwards"),
        pytest.param(in_group(max=GIB, current=GIB // 2), "", None, None, id="half of max"),
        pytest.param({"memory.pressure": "nonsense avg10=x"}, "some avg10=", None, None, id="nonsense"),
    ],
)
def test_pressure_is_read_from_the_machine_and_all_enclosing_groups(files, machine, begins, ends, tmp_path):
    cgroups, membership = tree(tmp_path, files, OWN_V2)
    (tmp_path / "pressure").write_text(machine)
    for was, expected in ((False, begins), (True, ends)):
        reason = pressure_reason(was=was, cgroups=cgroups, membership=membership, machine=tmp_path / "pressure")
        assert (reason is None) is (expected is None)
        assert (expected or "") in (reason or "")


def test_pressure_is_read_from_groups_of_version_1(tmp_path):
    files = {"memory/memory.limit_in_bytes": str(GIB), "memory/memory.usage_in_bytes": str(GIB - MIB)}
    cgroups, membership = tree(tmp_path, files, OWN_V1)
    assert "0.00 GB of the container's 1.07 GB are free" in pressure_reason(
        was=False, cgroups=cgroups, membership=membership, machine=tmp_path / "missing"
    )


class Machine:
    """A machine in files, and what its programs use."""

    def __init__(self, folder):
        self.cgroups, self.membership = tree(folder, {}, OWN_V2)
        self.pressure_file = folder / "pressure"
        self.footprint, self.weights, self.inside, self.outside = 100 * MIB, 0, 0, 0
        self.released, self.evicted, self.events = [], [], []

    def budget(self, chosen):
        budget = Budget(
            chosen,
            weights=lambda: self.weights,
            evict=self.evicted.append,
            footprint=lambda: self.footprint,
            cgroups=self.cgroups,
            membership=self.membership,
            machine=self.pressure_file,
        )
        budget.add(lambda: self.inside, release=self.released.append)
        budget.add_process(lambda: self.outside)
        budget.add_observer(self.events.append)
        return budget

    def use(self, *, weights=0, requests=0, other=0, outside=0):
        """Use memory for models, their requests, anything else in this process, and another process."""
        self.weights, self.inside, self.outside = weights + outside, weights + requests, outside
        self.footprint = 100 * MIB + weights + requests + other


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_limit_is_shared_by_all_engines_and_everything_else_that_the_process_allocates(machine):
    budget = machine.budget(4 * GIB)
    # What the process used at its start does not count against a limit that was chosen.
    assert (budget.limit_bytes, budget.used_bytes, budget.free_bytes) == (4 * GIB, 0, 4 * GIB)
    assert (budget.footprint_bytes, budget.total_bytes) == (100 * MIB, 4 * GIB + 100 * MIB)
    machine.use(weights=GIB, requests=200 * MIB, other=300 * MIB, outside=GIB // 2)
    assert budget.limit_bytes == 4 * GIB - 300 * MIB
    assert budget.used_bytes == GIB + 200 * MIB + GIB // 2
    assert budget.footprint_bytes == 600 * MIB + GIB + GIB // 2
    assert budget.total_bytes == 4 * GIB + 100 * MIB
    machine.use()
    assert budget.free_bytes == 4 * GIB


def test_the_default_limit_counts_what_the_process_used_at_its_start(machine, monkeypatch):
    monkeypatch.setattr(memory, "total_bytes", lambda: 10 * GIB)
    budget = machine.budget(None)
    assert (budget.total_bytes, budget.limit_bytes) == (8 * GIB, 8 * GIB - 100 * MIB)


def test_models_that_are_in_memory_at_the_start_are_not_counted_twice(machine):
    machine.use(weights=GIB)
    budget = machine.budget(2 * GIB)
    assert (budget.used_bytes, budget.free_bytes, budget.footprint_bytes) == (GIB, GIB, GIB + 100 * MIB)


@pytest.mark.parametrize(("weights", "limit"), [(GIB, GIB + LEAST_BYTES), (2 * GIB - MIB, 2 * GIB), (3 * GIB, 2 * GIB)])
def test_other_data_of_the_process_leaves_loaded_models_a_part_of_the_limit(weights, limit, machine):
    budget = machine.budget(2 * GIB)
    machine.use(weights=weights, other=50 * GIB)
    assert budget.limit_bytes == limit


def test_the_process_of_an_unloaded_model_no_longer_counts(machine):
    budget = machine.budget(GIB)

    def used():
        return 5

    budget.add_process(used)
    assert budget.used_bytes == 5
    for _ in range(2):
        budget.remove_process(used)
        assert budget.used_bytes == 0


def test_pressure_lowers_the_limit_while_it_lasts(machine):
    budget = machine.budget(4 * GIB)
    machine.use(weights=GIB, requests=GIB)
    budget.update()
    assert (budget.pressure, machine.events) == (None, [])
    machine.pressure_file.write_text(stalls(20))
    budget.update()
    # Half of what requests and caches use stays allowed.
    assert budget.limit_bytes == GIB + GIB // 2
    assert machine.released == [GIB // 2]
    assert (machine.events[0].active, machine.events[0].limit_bytes) == (True, budget.total_bytes)
    assert str(machine.events[0]) == (
        "memory is short: programs on this machine waited for memory during 20 % of the last 10 s; "
        "2.25 GB are in use, and 1.72 GB are allowed now"
    )
    assert budget.freed_bytes == 0
    machine.use(weights=GIB, requests=GIB // 4)
    budget.update()
    assert budget.limit_bytes == GIB + GIB // 2
    assert budget.freed_bytes == GIB * 3 // 4
    machine.pressure_file.write_text(stalls(1))
    budget.update()
    assert (budget.limit_bytes, budget.freed_bytes) == (4 * GIB, 0)
    assert [(event.active, event.reason is None) for event in machine.events] == [(True, False), (False, True)]
    assert str(machine.events[1]).startswith("memory is no longer short; ")


@pytest.mark.parametrize(
    ("before", "during", "limit"),
    [
        pytest.param({"weights": GIB}, {"weights": GIB}, GIB + LEAST_WORK_BYTES, id="short texts are still computed"),
        pytest.param({"weights": GIB}, {"weights": 2 * GIB}, 2 * GIB, id="a model that was loaded meanwhile fits"),
        pytest.param({}, {"weights": 4 * GIB}, 3 * GIB, id="never more than without pressure"),
    ],
)
def test_pressure_never_takes_the_memory_of_weights(before, during, limit, machine):
    budget = machine.budget(3 * GIB)
    machine.use(**before)
    machine.pressure_file.write_text(stalls(20))
    budget.update()
    machine.use(**during)
    assert budget.limit_bytes == limit


def test_caches_are_dropped_before_idle_models_are_unloaded(machine):
    budget = machine.budget(2 * GIB)
    machine.use(weights=GIB, requests=GIB + 5)
    budget.update()
    assert (machine.released, machine.evicted) == ([5], [])
    for _ in range(2):
        budget.update()
    assert (machine.released, machine.evicted) == ([5], [5, 5])
    machine.use(weights=GIB)
    budget.update()
    machine.use(weights=GIB, requests=GIB + 7)
    budget.update()
    assert (machine.released, machine.evicted) == ([5, 7], [5, 5])


def test_a_load_is_refused_with_figures_if_other_programs_use_the_memory(machine):
    budget = machine.budget(4 * GIB)
    machine.cgroups, machine.membership = tree(
        machine.pressure_file.parent, in_group(max=2 * GIB, current=2 * GIB - 300 * MIB), OWN_V2
    )
    budget.require_free(300 * MIB - HEADROOM_BYTES, "tiny")
    with pytest.raises(
        OutOfMemoryError, match=r"tiny needs 0\.31 GB more, and of the 0\.31 GB that are free .* 0\.07 GB"
    ):
        budget.require_free(300 * MIB, "tiny")


@pytest.mark.skipif(sys.platform != "linux", reason="resource limits of memory are Linux's")
def test_the_limit_of_a_process_for_its_data_counts():
    program = f"""
import resource
from lmx_lab.engine.memory import Budget, free_bytes, total_bytes
resource.setrlimit(resource.RLIMIT_DATA, ({GIB}, {GIB}))
print(total_bytes(), Budget(None).total_bytes, free_bytes())
"""
    asked = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    total, allowed, free = map(int, asked.stdout.split())
    assert total == GIB - RESERVED_BYTES
    assert allowed == total * 8 // 10
    assert 0 < free < GIB


def test_the_footprint_grows_with_memory_that_is_used_and_not_with_mapped_files():
    before = footprint_bytes()
    data = os.urandom(64 * MIB)
    assert 60 * MIB < footprint_bytes() - before < 80 * MIB
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        del data
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            assert mapped.find(b"no such text" * 10) == -1
            assert footprint_bytes() - before < 30 * MIB


@pytest.mark.long
def test_a_process_in_a_real_group_reads_the_limit_of_the_group():
    paths = [line.split(":", 2) for line in MEMBERSHIP.read_text().splitlines()] if MEMBERSHIP.exists() else []
    own = next((path for _, controllers, path in paths if controllers == "memory"), None)
    if own is None:
        pytest.skip("this machine does not use control groups of version 1")
    try:
        group = Path(tempfile.mkdtemp(prefix="lmx-lab-", dir=CGROUPS / "memory" / own.lstrip("/")))
    except OSError as error:
        pytest.skip(f"no control group can be made: {error}")
    limit, join = 600 * MIB, f'echo $$ > {group}/cgroup.procs && exec "$@"'
    program = """
import json
from lmx_lab.engine import memory
from lmx_lab.engine.mlx import memory as mlx_memory
print(json.dumps([mlx_memory.total_bytes(), mlx_memory.limit_bytes(None), memory.free_bytes()]))
"""
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        asked = subprocess.run(
            ["sh", "-c", join, "sh", sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
    finally:
        group.rmdir()
    assert asked.returncode == 0, asked.stderr
    total, allowed, free = json.loads(asked.stdout)
    assert total == limit < psutil.virtual_memory().total
    assert allowed == limit * 8 // 10
    assert 0 < free < limit
