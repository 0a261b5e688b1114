"""Server addresses and keys in their normal form."""

from __future__ import annotations

import ipaddress

import httpx2

from lmx_lab.errors import InvalidRequestError

SHOWN = 200
LONGEST = 2000
PORTS = range(1, 65536)


def server_address(text: str) -> str:
    """Normalize an address: scheme, host, port and a proxy's prefix, without a trailing slash.

    ``http://`` may be missing; ``/v1`` at the end, as chat clients write it, is removed.

    Raises:
        InvalidRequestError: it is not an address, or contains a password or a query, which the message does not show.
    """
    given = text.strip()
    if len(given) > LONGEST:
        raise _wrong(f"it has {len(given)} characters; at most {LONGEST} are taken")
    if "?" in given or "#" in given:
        raise _wrong("it has a part after '?' or '#'; remove it, and give a key, or Jupyter's token, as api_key")
    if "@" in given:
        raise _wrong("it has a name or a password before '@'; remove it, and give the key as api_key")
    try:
        url = httpx2.URL(given if "://" in given else f"http://{given}")
    except httpx2.InvalidURL as exc:
        raise _wrong(f"{given[:SHOWN]!r} is not an address: {exc}; it looks like http://127.0.0.1:8400") from exc
    if url.scheme not in ("http", "https") or not url.host or not (url.port is None or url.port in PORTS):
        raise _wrong(f"{given[:SHOWN]!r} is not the address of a web server; it looks like http://127.0.0.1:8400")
    return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1").rstrip("/") or "/")).rstrip("/")


def _wrong(said: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {said}", param="url")


def is_loopback(address: str) -> bool:
    """Whether the address is on this machine's loopback interface."""
    host = httpx2.URL(address).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(key: str | None, *, name: str = "api_key") -> dict[str, str]:
    """The headers with a key.

    Args:
        name: The argument that the key was given as.

    Raises:
        InvalidRequestError: the key cannot be sent in a header; the message does not show it.
    """
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise InvalidRequestError(f"{name} must be one word of ASCII characters, or left out", param=name)
    return {"authorization": f"Bearer {key}"}
