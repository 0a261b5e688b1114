"""Normalize server addresses, and put keys into headers."""

from __future__ import annotations

import ipaddress

import httpx2

from lmx_lab.errors import InvalidRequestError

MAX_SHOWN_CHARACTERS = 200
MAX_ADDRESS_CHARACTERS = 2000
PORTS = range(1, 65536)
EXAMPLE = "http://127.0.0.1:8400"


def normalize_address(text: str) -> str:
    """Return the address of a server: scheme, host, port and a proxy's prefix, without a trailing slash.

    ``http://`` may be missing. ``/v1`` at the end, as other chat clients expect it, is removed.

    Raises:
        InvalidRequestError: the text is not an address, or contains a password or a query. The message shows neither
            of these.
    """
    given = text.strip()
    if len(given) > MAX_ADDRESS_CHARACTERS:
        raise _invalid(f"the address has {len(given)} characters; the limit is {MAX_ADDRESS_CHARACTERS}")
    if "?" in given or "#" in given:
        raise _invalid(
            "the address has a part after '?' or '#'; remove that part, and give a key or Jupyter's token as api_key"
        )
    if "@" in given:
        raise _invalid("the address has a name or a password before '@'; remove it, and give the key as api_key")
    try:
        url = httpx2.URL(given if "://" in given else f"http://{given}")
    except httpx2.InvalidURL as exc:
        raise _invalid(
            f"{given[:MAX_SHOWN_CHARACTERS]!r} is not an address: {exc}; give one such as {EXAMPLE}"
        ) from None
    if url.scheme not in ("http", "https") or not url.host or not (url.port is None or url.port in PORTS):
        raise _invalid(f"{given[:MAX_SHOWN_CHARACTERS]!r} is not the address of a web server, such as {EXAMPLE}")
    return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1").rstrip("/") or "/")).rstrip("/")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {message}", param="url")


def is_loopback(address: str) -> bool:
    """Whether the address is on this machine's loopback interface."""
    host = httpx2.URL(address).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def authorization_header(key: str | None, *, name: str = "api_key") -> dict[str, str]:
    """Return the header that sends the key; no header without a key.

    Args:
        name: The argument with which the caller gave the key, for the error message.

    Raises:
        InvalidRequestError: the key cannot be sent in a header. The message does not show it.
    """
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise InvalidRequestError(
            f"{name} must consist of printable ASCII characters without spaces; omit it to send no key", param=name
        )
    return {"authorization": f"Bearer {key}"}
