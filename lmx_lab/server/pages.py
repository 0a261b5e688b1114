"""Pages for browsers: a chat, an overview of the server, and a description of its routes with a form to try them.

All links are relative, because behind JupyterHub or Binder the server has a path that only the browser knows. Nothing
is loaded from another host: the code of the pages is in ``built``. ``make panels`` writes it from the files in
``pages`` and of ``lmx_lab.panels``.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from lmx_lab.engine import ModelManager
from lmx_lab.engine.lookup import public_id
from lmx_lab.http.guard import CONTENT_POLICY, is_local
from lmx_lab.http.middleware import VERSION

BUILT, SOURCES = Path(__file__).parent / "built", Path(__file__).parent / "pages"
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>LMX Lab</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="favicon.ico">'
)
FRONT_POLICY = (
    f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'nonce-%(nonce)s'; {CONTENT_POLICY}; "
    "img-src 'self'"
)
# The pages with scripts contain them and their style sheets. The policy allows these by their hashes and not by a
# nonce, so that a page is the same for all clients and can be cached.
SCRIPT_POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; script-src '%(script)s'; style-src '%(style)s'; "
    f"connect-src 'self'; img-src 'self'; manifest-src 'self'; {CONTENT_POLICY}"
)
CHAT_HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>LMX Lab</title><meta name="viewport" '
    'content="width=device-width, initial-scale=1, viewport-fit=cover, interactive-widget=resizes-content">'
    '<meta name="color-scheme" content="light dark"><link rel="icon" href="favicon.ico">'
    '<link rel="apple-touch-icon" href="icon-192.png">'
    '<link rel="manifest" href="manifest.webmanifest" crossorigin="use-credentials">'
)


def page_routes(manager: ModelManager) -> APIRouter:
    """Return the router of the pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    front = (SOURCES / "about.html").read_text(encoding="utf-8")

    @router.api_route("/about", methods=["GET", "HEAD"])
    async def about(request: Request) -> Response:
        now, local = manager.snapshot, is_local(request.scope)
        others = [public_id(state.entry.id, local=local) for state in now.models if state is not now.main]
        also = f" Also loaded: {', '.join(others)}." if others else ""
        recorded = " The requests of all clients are recorded." if manager.settings.record == "all" else ""
        model = public_id(now.model, local=local) if now.model else "No chat model"
        state = f"{model} is {now.unloading or 'loaded'}.{also}{recorded}"
        # The address of this page, without the path of a proxy.
        url = f"{str(request.base_url).rstrip('/')}/v1/chat/completions"
        body = '{"model": "default", "messages": [{"role": "user", "content": "Say hello."}]}'
        curl = f"curl {url} -H 'content-type: application/json' -d '{body}'"
        nonce = secrets.token_urlsafe(16)
        page = front % {"nonce": nonce, "version": VERSION, "state": html.escape(state), "curl": html.escape(curl)}
        return HTMLResponse(page, headers={"content-security-policy": FRONT_POLICY % {"nonce": nonce}})

    if manager.settings.page:

        @router.get("/")
        async def chat(request: Request) -> Response:
            return _script_page(request, chat_page())

        manifest = _file("manifest.webmanifest", "application/manifest+json")
        router.add_api_route("/manifest.webmanifest", manifest)
        for name in ("icon-192.png", "icon-512.png"):
            router.add_api_route(f"/{name}", _file(name, "image/png", cached=True))
    else:
        router.add_api_route("/", about)

    @router.get("/docs")
    async def docs(request: Request) -> Response:
        return _script_page(request, routes_page())

    router.add_api_route("/favicon.ico", _file("favicon.svg", "image/svg+xml", cached=True))
    return router


@dataclass(frozen=True, kw_only=True)
class ScriptPage:
    """A document that contains its script and its style sheet."""

    compressed: bytes
    policy: str
    etag: str


@cache
def chat_page() -> ScriptPage:
    """Return the page for chats."""
    return _read_page("page", CHAT_HEAD, 'This page needs JavaScript. <a href="about">About this server</a>')


@cache
def routes_page() -> ScriptPage:
    """Return the page that describes the routes."""
    return _read_page("routes", HEAD, 'This page needs JavaScript. <a href="openapi.json">The routes as JSON</a>')


def _read_page(name: str, head: str, without_script: str) -> ScriptPage:
    """Read the script and the style sheet of a page, and combine them."""
    script, style = ((BUILT / f"{name}.{ending}").read_text(encoding="utf-8") for ending in ("js", "css"))
    text = (
        f"{head}<style>{style}</style><body><noscript>{without_script}</noscript>"
        f'<script type="module">{script}</script>'
    ).encode()
    return ScriptPage(
        compressed=gzip.compress(text, mtime=0),
        policy=SCRIPT_POLICY % {"script": _content_hash(script), "style": _content_hash(style)},
        etag=f'"{hashlib.sha256(text).hexdigest()[:32]}"',
    )


def _content_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _file(name: str, media_type: str, *, cached: bool = False) -> Callable[[], Awaitable[Response]]:
    content, headers = (SOURCES / name).read_bytes(), {"cache-control": "max-age=86400"} if cached else {}

    async def send() -> Response:
        return Response(content, media_type=media_type, headers=headers)

    return send


def _script_page(request: Request, page: ScriptPage) -> Response:
    """Respond with a page, or with status 304 if the client has it."""
    headers = {"etag": page.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
    if request.headers.get("if-none-match") == page.etag:
        return Response(status_code=304, headers=headers)
    headers["content-security-policy"] = page.policy
    if "gzip" in request.headers.get("accept-encoding", ""):
        return HTMLResponse(page.compressed, headers={**headers, "content-encoding": "gzip"})
    return HTMLResponse(gzip.decompress(page.compressed), headers=headers)
