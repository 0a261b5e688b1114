"""Tests of the checks for Python and for the disk."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from lmx_lab.doctor.machine import check_disk, check_python
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_FAULT, finding_about, summary
from tests.support.commands import WAIT_S, environment

MOUNT = "mount -t tmpfs -o size=16m none {folder} && exec {python} -c '{script}'"
CHECK_DISK = """
import json
from dataclasses import asdict
from lmx_lab.doctor.machine import check_disk
from lmx_lab.settings import Settings
print(json.dumps([asdict(finding) for finding in check_disk(Settings.read())]))
"""


@pytest.mark.parametrize(
    ("version", "verdict"), [((3, 10, 14), "bad"), ((3, 11, 0), "fine"), ((3, 13, 9), "fine"), ((3, 15, 0), "note")]
)
def test_a_python_version_that_is_not_tested_is_reported(version, verdict):
    finding = check_python(version)
    assert summary(finding) == (verdict, verdict != "fine", verdict != "fine")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root can mount a small disk")
def test_a_disk_without_room_for_a_model_is_bad(tmp_path):
    command = MOUNT.format(folder=tmp_path, python=sys.executable, script=CHECK_DISK)
    tried = subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False)
    if tried.returncode != 0:
        pytest.skip("this container may not mount anything")
    done = subprocess.run(
        ["unshare", "--mount", "bash", "-c", command],
        capture_output=True, text=True, timeout=WAIT_S, env=environment(tmp_path), check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (disk,) = json.loads(done.stdout)
    assert disk["verdict"] == "bad"
    assert disk["found"] == f"0.0 GB free for {tmp_path}"
    assert "not even the smallest starter" in disk["means"]
    assert "LMX_LAB_HOME" in disk["remedy"]


def test_a_disk_reserve_that_leaves_no_room_for_a_model_is_bad(tmp_path):
    finding = finding_about("disk", check_disk(Settings(home=tmp_path, disk_reserve_bytes=2**50)))
    assert summary(finding) == EXPLAINED_FAULT
