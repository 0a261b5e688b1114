"""Where a server is and how one gets in: what people paste, in its one form."""

from __future__ import annotations

import ipaddress

import httpx2

from lmx_lab.errors import InvalidRequestError

SHOWN = 200
LONGEST = 2000
PORTS = range(1, 65536)


def server_address(text: str) -> str:
    """The address before which routes are put: scheme, host, port, a proxy's prefix, no slash at the end.

    ``http://`` may be missing; ``/v1`` at the end, which chat clients want, is left out.

    Raises:
        InvalidRequestError: it is none, or has a password or a query in it, which are not shown.
    """
    given = text.strip()
    if len(given) > LONGEST:
        raise _wrong(f"it has {len(given)} characters; at most {LONGEST} are taken")
    if "?" in given or "#" in given:
        raise _wrong("it goes on after '?' or '#'; leave that out, and give a key, or Jupyter's token, as api_key")
    if "@" in given:
        raise _wrong("there is a name or a password before '@'; leave it out, and give the key as api_key")
    try:
        url = httpx2.URL(given if "://" in given else f"http://{given}")
    except httpx2.InvalidURL as exc:
        raise _wrong(f"{given[:SHOWN]!r} is no address: {exc}; it looks like http://127.0.0.1:8400") from exc
    if url.scheme not in ("http", "https") or not url.host or not (url.port is None or url.port in PORTS):
        raise _wrong(f"{given[:SHOWN]!r} is no address of a web server; it looks like http://127.0.0.1:8400")
    return str(url.copy_with(path=url.path.rstrip("/").removesuffix("/v1").rstrip("/") or "/")).rstrip("/")


def _wrong(said: str) -> InvalidRequestError:
    return InvalidRequestError(f"url: {said}", param="url")


def is_loopback(address: str) -> bool:
    host = httpx2.URL(address).host
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bearer(key: str | None, *, name: str = "api_key") -> dict[str, str]:
    """The headers that carry a key.

    Args:
        name: Of the argument that it was given as.

    Raises:
        InvalidRequestError: no header can carry it; it is not shown.
    """
    if key is None:
        return {}
    if not (key.isascii() and key.isprintable() and key.split() == [key]):
        raise InvalidRequestError(f"{name} must be one word of ASCII characters, or left out", param=name)
    return {"authorization": f"Bearer {key}"}
