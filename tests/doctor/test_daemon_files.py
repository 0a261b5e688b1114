"""Tests of the check for the daemon's folder."""

import pytest

from lmx_lab.doctor.daemon_files import check_daemon_files
from lmx_lab.settings import Settings
from tests.doctor.findings import EXPLAINED_FAULT, finding_about, summary
from tests.support.daemons import serving


@pytest.fixture
def daemon(tmp_path):
    with serving(tmp_path) as daemon:
        yield daemon


def test_a_token_that_other_users_can_read_is_bad(daemon):
    assert [finding.verdict for finding in check_daemon_files(daemon.settings)] == ["fine"]
    state = daemon.folder / "state.json"
    state.chmod(0o644)
    daemon.folder.chmod(0o755)
    folder, file = check_daemon_files(daemon.settings)
    assert {summary(folder), summary(file)} == {EXPLAINED_FAULT}
    assert (folder.remedy, file.remedy.partition(",")[0]) == (f"chmod 700 {daemon.folder}", f"chmod 600 {state}")
    assert daemon.token not in file.text


def test_an_invalid_state_file_is_bad(tmp_path):
    folder = tmp_path / "daemon"
    folder.mkdir(mode=0o700)
    assert finding_about("daemon", check_daemon_files(Settings(home=tmp_path))).found == "no daemon is running"
    (folder / "state.json").touch(mode=0o600)
    finding = finding_about("daemon", check_daemon_files(Settings(home=tmp_path)))
    assert summary(finding) == EXPLAINED_FAULT
    assert finding.remedy == f"rm {folder / 'state.json'}"
