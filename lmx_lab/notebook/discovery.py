"""Announce a lab on the local network, and find the labs of others, with multicast DNS (DNS-SD, RFC 6763).

It needs zeroconf, which is optional (extra ``lan``) and imported on demand.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import re
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from lmx_lab.client import AsyncLabClient
from lmx_lab.errors import HostingError, InvalidRequestError, LabError, UnreachableError
from lmx_lab.extras import import_optional
from lmx_lab.notebook.addresses import lan_addresses
from lmx_lab.portal import LoopThread
from lmx_lab.results.frames import dtypes_of, make_table
from lmx_lab.urls import bracketed

if TYPE_CHECKING:
    import pandas as pd

P = ParamSpec("P")
T = TypeVar("T")
SERVICE = "_lmx-lab._tcp.local."
MAX_NAME_BYTES = 63
"""Maximum length of the name of a service in DNS-SD."""
FOUND_S = 3.0
"""Time that ``discover`` waits for announcements. A lab that has just answered a search may take a second to answer
again."""
ADDRESS_S = 1
"""Time that the address of an announced name may take. The addresses of all names are requested at the same time."""
MAX_NAMES = 100
"""Number of announced names whose addresses are requested. The same number is added for the name that is wanted."""
# An address, or a host with a port or a domain.
_ADDRESS = re.compile(r"[:/.]|^localhost$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class FoundLab:
    """A lab that is announced on the local network."""

    name: str
    address: str
    model: str | None
    """The loaded model; None if no model is ready, or if the lab does not answer."""
    key_needed: bool


def is_name(text: str) -> bool:
    """Whether a text can be the name of an announced lab and is not an address."""
    return bool(text.strip()) and not _ADDRESS.search(text.strip())


def discover(timeout_s: float = FOUND_S) -> pd.DataFrame:
    """Return the labs that are announced on the local network, with the columns of ``FoundLab``.

    ``lmx_lab.attach(name)`` attaches to one of them. A lab is announced only if it was started with ``--announce`` or
    ``launch(lan=True, announce=True)``.

    Args:
        timeout_s: Time to wait for announcements.

    Raises:
        MissingPackageError: pandas is not installed.
        HostingError: zeroconf is not installed, or the network does not allow multicast DNS.
    """
    return make_table(map(asdict, find_labs(timeout_s)), dtypes_of(FoundLab), needed_by="discover()")


def find_labs(timeout_s: float = FOUND_S, *, interfaces: Sequence[str] | None = None) -> list[FoundLab]:
    """Return the labs that are announced on the local network, sorted by their names.

    Args:
        interfaces: Addresses of this machine on which to search; by default those of the local network.

    Raises:
        HostingError: as ``discover``.
    """
    found = _in_thread(_browse, timeout_s, interfaces)
    if not found:
        return []
    # A separate loop, because the caller may be on a running one.
    thread = LoopThread("lmx-lab-discover")
    thread.start()
    try:
        return thread.run(_with_models(found))
    finally:
        thread.stop()


def find_address(name: str, *, interfaces: Sequence[str] | None = None) -> str:
    """Return the address of the announced lab with this name.

    Raises:
        HostingError: as ``discover``.
        UnreachableError: there is no such lab.
    """
    wanted = name.strip().casefold()
    labs = _in_thread(_browse, FOUND_S, interfaces, wanted)
    for lab in labs:
        if lab.name.casefold() == wanted:
            return lab.address
    names = ", ".join(repr(lab.name[:MAX_NAME_BYTES]) for lab in labs[:5]) or "none"
    raise UnreachableError(
        f"no lab is announced as {name!r:.80} on the local network (found: {names}); start it with --announce, or pass "
        "its address, such as http://192.168.1.20:8400"
    )


def _browse(timeout_s: float, interfaces: Sequence[str] | None, wanted: str = "") -> list[FoundLab]:
    """Return the announced labs, sorted by their names, without asking them for their models.

    Takes at most ``timeout_s`` and ``ADDRESS_S``, however many names other devices announce.

    Args:
        wanted: The search ends as soon as the address of this name is found.
    """
    zeroconf = import_optional("zeroconf", "finding labs")
    resolved: dict[str, FoundLab] = {}
    searches: dict[str, Future[None]] = {}
    is_found = threading.Event()

    async def resolve(service: str) -> None:
        info = zeroconf.ServiceInfo(SERVICE, service)
        if await info.async_request(network, ADDRESS_S * 1000) and info.port and (found := info.parsed_addresses()):
            resolved[service] = FoundLab(
                name=_name(service),
                address=f"http://{bracketed(found[0])}:{info.port}",
                model=None,
                key_needed=(info.properties or {}).get(b"key") == b"1",
            )
            if _name(service).casefold() == wanted:
                is_found.set()

    def changed(name: str, state_change: Any, **_: Any) -> None:
        if state_change is zeroconf.ServiceStateChange.Removed:
            resolved.pop(name, None)
            return
        # Any device can announce any number of labs, which must not keep the wanted one from being found.
        limit = 2 * MAX_NAMES if _name(name).casefold() == wanted else MAX_NAMES
        if name not in searches and len(searches) < limit:
            searches[name] = asyncio.run_coroutine_threadsafe(resolve(name), network.loop)

    with contextlib.closing(_open(zeroconf, interfaces)) as network:
        browser = zeroconf.ServiceBrowser(network, SERVICE, handlers=[changed])
        if not is_found.wait(timeout_s):
            wait(list(searches.values()), ADDRESS_S)
        browser.cancel()
        for search in searches.values():
            search.cancel()
    return sorted(resolved.values(), key=lambda lab: lab.name.casefold())


def _name(service: str) -> str:
    return service.removesuffix(f".{SERVICE}")


async def _with_models(labs: Sequence[FoundLab]) -> list[FoundLab]:
    async def with_model(lab: FoundLab) -> FoundLab:
        model = None
        with contextlib.suppress(LabError, TimeoutError):
            async with AsyncLabClient(lab.address) as client:
                model = (await asyncio.wait_for(client.ready(), 2.0)).model or None
        return replace(lab, model=model)

    return list(await asyncio.gather(*map(with_model, labs)))


class Announcement:
    """The announcement of a lab on the local network, from ``start`` to ``stop``. Both may block for a second.

    Args:
        name: The name that others see; by default that of this machine, without its domain. If another lab has it, a
            number is added.
        addresses: Addresses of this machine at which the lab can be reached. It is announced only on their networks.
        key_needed: Whether the lab needs a key.

    Raises:
        HostingError: zeroconf is not installed.
        InvalidRequestError: the name is too long or looks like an address, or the lab can be reached only from this
            machine.
    """

    def __init__(self, name: str | None, *, port: int, addresses: Sequence[str], key_needed: bool) -> None:
        self._zeroconf = import_optional("zeroconf", "announcing a lab")
        self.name = (name or socket.gethostname().partition(".")[0]).strip()
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES or not self.name.isprintable():
            raise InvalidRequestError(
                f"announce_name is {self.name!r:.80}; it must have 1 to {MAX_NAME_BYTES} bytes, without control "
                "characters",
                param="announce_name",
            )
        if not is_name(self.name):
            raise InvalidRequestError(
                f"announce_name is {self.name!r:.80}, which attach() would take for an address; choose another "
                "one without dots, colons and slashes",
                param="announce_name",
            )
        self._addresses = [address for address in addresses if _is_ipv4(address)]
        if not self._addresses:
            raise InvalidRequestError(
                "announce is set, but the server has no IPv4 address that other machines can reach; add lan=True or "
                "--host 0.0.0.0",
                param="announce",
            )
        self._port = port
        self._properties = {"path": "/", "key": "1" if key_needed else "0"}
        self._network: Any = None
        self._info: Any = None

    def check(self) -> None:
        """Check that the lab can be announced now.

        Raises:
            HostingError: the network does not allow multicast DNS.
        """
        _in_thread(lambda: _open(self._zeroconf, self._addresses).close())

    def start(self) -> str:
        """Announce the lab, and return the name under which it is announced.

        Raises:
            HostingError: the network does not allow multicast DNS.
        """
        return _in_thread(self._register)

    def _register(self) -> str:
        self._network = _open(self._zeroconf, self._addresses)
        self._info = self._zeroconf.ServiceInfo(
            SERVICE,
            f"{self.name}.{SERVICE}",
            port=self._port,
            parsed_addresses=self._addresses,
            properties=self._properties,
            server=f"lmx-lab-{secrets.token_hex(6)}.local.",
        )
        # zeroconf requests unicast answers by default, which reach only one program on this machine.
        browser = self._zeroconf.ServiceBrowser(
            self._network, SERVICE, handlers=[lambda **_: None], question_type=self._zeroconf.DNSQuestionType.QM
        )
        try:
            try:
                self._network.register_service(self._info, allow_name_change=True)
            finally:
                browser.cancel()
        except BaseException:
            self.stop()
            raise
        return _name(self._info.name)

    def stop(self) -> None:
        """Withdraw the announcement. Idempotent."""
        network, self._network = self._network, None
        if network is not None:
            # Also withdraws the service.
            _in_thread(network.close)


def _in_thread(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a function in another thread and wait for it. In this one, zeroconf would use its loop, which is blocked."""
    with ThreadPoolExecutor(1, thread_name_prefix="lmx-lab-mdns") as pool:
        return pool.submit(function, *args, **kwargs).result()


def _is_ipv4(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).version == 4
    except ValueError:
        return False


def _open(zeroconf: Any, interfaces: Sequence[str] | None) -> Any:
    chosen = list(interfaces if interfaces is not None else lan_addresses())
    try:
        return zeroconf.Zeroconf(interfaces=chosen or ["127.0.0.1"], ip_version=zeroconf.IPVersion.V4Only)
    except OSError as exc:
        if not chosen:
            raise HostingError(
                "this machine has no network connection, so it cannot find labs; connect it to a network and try again"
            ) from exc
        raise HostingError(f"multicast DNS cannot be used on {', '.join(chosen)}: {exc.strerror or exc}") from exc
