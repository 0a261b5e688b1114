"""Memory and CPU limits are read from control groups of both versions, in files and in one real group."""

import json
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
    MEMBERSHIP,
    container_free_bytes,
    cpu_limit,
    default_threads,
    memory_limit_bytes,
)
from lmx_lab.engine.mlx import memory as mlx_memory

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
