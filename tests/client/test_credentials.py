"""Tests of reading the daemon's state file."""

import os
import traceback

import pytest

from lmx_lab.client.credentials import Credentials, DaemonEndpoint
from lmx_lab.errors import InvalidRequestError, UnreachableError
from tests.support.daemons import TOKEN, write_state


def test_the_state_file_of_a_home_is_read(tmp_path, monkeypatch):
    write_state(tmp_path)
    credentials = Credentials.from_home(tmp_path)
    assert credentials.endpoint == DaemonEndpoint(url="http://127.0.0.1:4321", token=TOKEN, daemon_id="dmn_1")
    assert TOKEN not in f"{credentials!r} {credentials} {credentials.endpoint!r} {credentials.endpoint}"
    monkeypatch.setenv("LMX_LAB_HOME", str(tmp_path))
    assert Credentials.from_home().endpoint == credentials.endpoint


def test_without_a_daemon_the_message_says_how_to_start_one(tmp_path):
    with pytest.raises(UnreachableError, match=r"no daemon of this user.*lmx-lab daemon.*LMX_LAB_HOME") as caught:
        Credentials.from_home(tmp_path)
    assert str(tmp_path / "daemon" / "state.json") in str(caught.value)


def test_a_file_that_others_may_read_is_not_trusted(tmp_path):
    write_state(tmp_path).chmod(0o644)
    with pytest.raises(UnreachableError, match=r"other users have access .*644"):
        Credentials.from_home(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_path_that_is_not_a_regular_file_is_not_trusted(tmp_path, kind):
    path = write_state(tmp_path)
    path.rename(tmp_path / "elsewhere")
    match kind:
        case "link":
            path.symlink_to(tmp_path / "elsewhere")
        case "pipe":
            os.mkfifo(path, 0o600)
        case "folder":
            path.mkdir(0o700)
    with pytest.raises(UnreachableError, match="cannot be trusted"):
        Credentials.from_home(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", f'{{"token": "{TOKEN}"', f'{{"token": "{TOKEN}", "port": "{TOKEN}"}}', "\x00" * 100_000),
        *({"token": f"{TOKEN} two"}, {"host": ""}, {"port": 99_999}),
    ],
)
def test_an_invalid_state_is_refused_without_showing_it(tmp_path, content):
    path = write_state(tmp_path, **(content if isinstance(content, dict) else {}))
    if isinstance(content, str):
        path.write_text(content)
    with pytest.raises(UnreachableError, match="not a valid state file") as caught:
        Credentials.from_home(tmp_path)
    frames = caught.value.__traceback__.tb_next  # the variables of the test may contain the token
    shown = traceback.TracebackException(type(caught.value), caught.value, frames, capture_locals=True)
    assert TOKEN not in "".join(shown.format())


# --- reading again


def test_a_restarted_daemon_is_found(tmp_path):
    path = write_state(tmp_path)
    credentials = Credentials.from_home(tmp_path)
    assert not credentials.refresh()
    path.unlink()
    assert not credentials.refresh()
    write_state(tmp_path, port=4322, token="other", daemon_id="dmn_2")
    assert credentials.refresh()
    assert credentials.endpoint == DaemonEndpoint(url="http://127.0.0.1:4322", token="other", daemon_id="dmn_2")
    assert not credentials.refresh()


def test_a_file_that_is_not_trusted_changes_nothing(tmp_path):
    write_state(tmp_path)
    credentials = Credentials.from_home(tmp_path)
    write_state(tmp_path, port=4322).chmod(0o640)
    assert not credentials.refresh()
    assert credentials.url == "http://127.0.0.1:4321"


# --- given by the caller


@pytest.mark.parametrize("end", ["", "/", "/v3", "/v3/"])
def test_the_end_of_an_address_does_not_matter(end):
    credentials = Credentials(f"http://h:1/proxy{end}", TOKEN)
    assert (credentials.url, credentials.endpoint.daemon_id) == ("http://h:1/proxy", None)
    assert not credentials.refresh()


@pytest.mark.parametrize(("url", "token", "param"), [("http://h", "two words", "token"), ("ftp://h", None, "url")])
def test_an_invalid_address_or_token_is_refused_without_showing_it(url, token, param):
    with pytest.raises(InvalidRequestError) as caught:
        Credentials(url, token)
    assert caught.value.param == param
    assert "two words" not in str(caught.value)
