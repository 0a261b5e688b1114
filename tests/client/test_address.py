"""Tests of addresses and keys."""

import pytest

from lmx_lab.client.address import authorization_header, is_loopback, normalize_address
from lmx_lab.errors import InvalidRequestError


@pytest.mark.parametrize(
    ("pasted", "normalized"),
    [
        ("http://127.0.0.1:8400", "http://127.0.0.1:8400"),
        ("http://127.0.0.1:8400/", "http://127.0.0.1:8400"),
        (" http://127.0.0.1:8400/v1/ \n", "http://127.0.0.1:8400"),
        ("localhost:8400", "http://localhost:8400"),
        ("studio.local:8400/v1", "http://studio.local:8400"),
        ("http://[::1]:8400/v1", "http://[::1]:8400"),
        ("http://hub/user/x/proxy/8400/", "http://hub/user/x/proxy/8400"),
        ("https://hub/user/x/proxy/8400/v1", "https://hub/user/x/proxy/8400"),
        ("https://hub/user/v1/proxy/8400", "https://hub/user/v1/proxy/8400"),
        ("HTTP://Hub:80/", "http://hub"),
    ],
)
def test_an_address_is_normalized(pasted, normalized):
    assert normalize_address(pasted) == normalized
    assert normalize_address(normalized) == normalized


@pytest.mark.parametrize(
    "pasted",
    [
        *("", "/", "//hub", "ftp://hub", "ws://hub", "http://", "http://a:b", "http://[::1", "http://h:0"),
        *("http://h:70000", "\ud800", "http://\x00", f"http://{'a' * 5000}"),
    ],
)
def test_an_invalid_address_is_refused(pasted):
    with pytest.raises(InvalidRequestError) as caught:
        normalize_address(pasted)
    assert caught.value.param == "url"
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "pasted", ["http://me:hidden@host", "http://host/?token=hidden", "host#hidden", "http://hidden@host:99999/"]
)
def test_a_secret_in_an_address_is_refused_without_showing_it(pasted):
    with pytest.raises(InvalidRequestError) as caught:
        normalize_address(pasted)
    assert "api_key" in str(caught.value)
    assert "hidden" not in f"{caught.value!r} {caught.value.__context__!r}"


@pytest.mark.parametrize("key", ["", " hidden", "hid den", "hidden\n", "hiddén"])
def test_a_key_that_is_not_valid_in_a_header_is_refused_without_showing_it(key):
    with pytest.raises(InvalidRequestError) as caught:
        authorization_header(key)
    assert caught.value.param == "api_key"
    assert "hid" not in str(caught.value)


def test_without_a_key_there_is_no_header():
    assert authorization_header(None) == {}


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("http://localhost:1", True),
        ("http://127.1.2.3", True),
        ("http://[::1]:1", True),
        ("http://10.0.0.1", False),
        ("http://studio.local", False),
    ],
)
def test_loopback_addresses_are_recognized(address, loopback):
    assert is_loopback(address) is loopback
