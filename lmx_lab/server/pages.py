"""Pages for browsers: a chat, an overview of the server, and Swagger UI, in which the routes can be tried.

All links are relative, because behind JupyterHub or Binder the server has a path that only the browser knows. Nothing
is loaded from another host: the compressed files of Swagger UI are in ``swagger_ui``, and the code of the chat page is
in ``chat_page``. ``make panels`` builds the latter from the files of ``lmx_lab.panels``.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import secrets
import struct
import zlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, Response

from lmx_lab.engine import ModelManager
from lmx_lab.engine.model_lookup import public_id
from lmx_lab.http.guard import CONTENT_POLICY, is_local
from lmx_lab.http.middleware import VERSION

CHAT_PAGE = Path(__file__).parent / "chat_page"
SWAGGER = Path(__file__).parent / "swagger_ui"
MEDIA_TYPES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
"""The files of Swagger UI 5.35.0, unchanged."""
CACHED = "max-age=86400"
HEAD = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><title>LMX Lab</title>'
    '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="favicon.ico">'
)
FRONT_STYLE = """
:root { color-scheme: light dark; background: Canvas; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46em; margin: 2em auto; padding: 0 1em; }
pre { padding: 0.8em; overflow-x: auto; border: 1px solid; border-radius: 4px; }
"""
FRONT = f"""{HEAD}
<style nonce="%(nonce)s">{FRONT_STYLE}</style>
<h1>LMX Lab {VERSION}</h1>
<p>%(state)s
<p>Programs use this server through the chat-completions format; their base URL is the address of this page followed by
<code>v1</code>. In a terminal:
<pre tabindex="0" role="group" aria-label="example request">%(curl)s</pre>
<ul>
<li><a href="docs">docs</a>: try all routes in the browser; <a href="openapi.json">openapi.json</a>: their description
for programs
<li><a href="readyz">readyz</a>: whether a model can answer requests
<li><a href="v1/models">v1/models</a>, <a href="admin/models">admin/models</a>: the models on disk, and which are loaded
<li><a href="metrics">metrics</a>: metrics for Prometheus
</ul>
"""
# Colours of Swagger UI that have too little contrast, and its blocks of code, which START makes scroll.
DOCS_STYLE = """
.swagger-ui .info .title small { background: #59606e; }
.swagger-ui .info .title small.version-stamp { background: #4d6b02; }
.swagger-ui .opblock.opblock-get .opblock-summary-method { background: #1663ab; }
.swagger-ui .opblock.opblock-post .opblock-summary-method { background: #1d7850; }
.swagger-ui .opblock.opblock-delete .opblock-summary-method { background: #b3261e; }
.swagger-ui .parameter__in, .swagger-ui .json-schema-2020-12-expand-deep-button { color: #555; }
.swagger-ui .parameter__name.required::after, .swagger-ui .parameter__name.required span { color: #b3261e; }
.swagger-ui .btn.cancel { color: #b3261e; border-color: #b3261e; }
.swagger-ui .btn.execute { background-color: #1663ab; border-color: #1663ab; }
.swagger-ui .download-contents { background: #59606e; }
.scrolling { max-height: 400px; overflow: auto; }
.scrolling pre.microlight { overflow: visible !important; min-width: fit-content; }
"""
# The document is passed as a value and not as a URL, so that requests go to the path of this page and not to the root
# of the Hub. The plugin is for users of keyboards and screen readers: no link inside of a button, no unnamed list of
# the only server, a name for the request body, and code that can be scrolled with the keyboard.
START = """
const accessible = ({ React: { createElement } }) => ({
  components: { DeepLink: ({ text }) => createElement("span", null, text), ServersContainer: () => null },
  wrapComponents: {
    TextArea: (Original) => (props) => createElement(Original, { "aria-label": "request body", ...props }),
    SyntaxHighlighter: (Original) => (props) => createElement(
      "div", { className: "scrolling", tabIndex: 0, role: "group", "aria-label": "code" },
      createElement(Original, props)),
  },
});
window.SwaggerUIBundle && fetch(document.getElementById("document").href).then((it) => it.json()).then((spec) => {
  spec.servers = [{ url: new URL(".", location).href }];
  SwaggerUIBundle({
    dom_id: "#routes", deepLinking: true, spec, plugins: [accessible], syntaxHighlight: { theme: "tomorrow-night" },
  });
});
"""
DOCS = f"""{HEAD}
<link rel="stylesheet" href="docs/swagger-ui.css" nonce="%(nonce)s">
<style nonce="%(nonce)s">{DOCS_STYLE}</style>
<div id="routes"><p>This page is rendered by Swagger UI in the browser. All routes are also described in
<a id="document" href="openapi.json">openapi.json</a>.</div>
<script src="docs/swagger-ui-bundle.js" nonce="%(nonce)s"></script>
<script nonce="%(nonce)s">{START}</script>
"""
ICON = b"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><rect width="16" height="16" rx="3" fill="#36c"/>
<path d="M5 3v10h7" fill="none" stroke="#fff" stroke-width="2"/></svg>"""
POLICY = f"default-src 'none'; base-uri 'none'; form-action 'none'; style-src 'nonce-%(nonce)s'; {CONTENT_POLICY}"
FRONT_POLICY = f"{POLICY}; img-src 'self'"
# The page contains its script and its style sheet. The policy allows them by their hashes and not by a nonce, so that
# the page is the same for all clients and can be cached.
CHAT_POLICY = (
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
ICON_SIZES = (192, 512)
MANIFEST = {
    "name": "LMX Lab",
    "short_name": "LMX Lab",
    "start_url": ".",
    "display": "standalone",
    "background_color": "#3366cc",
    "theme_color": "#3366cc",
    "icons": [
        {"src": f"icon-{size}.png", "sizes": f"{size}x{size}", "type": "image/png", "purpose": purpose}
        for size in ICON_SIZES
        for purpose in ("any", "maskable")
    ],
}
# Swagger UI's style sheet contains images as data URLs.
DOCS_POLICY = f"{POLICY}; img-src 'self' data:; script-src 'nonce-%(nonce)s'; connect-src 'self'"
"""The content security policy of the page, which allows its own scripts and style sheet, and requests to this server.
Behind a proxy the addresses of these files are not known, so a nonce identifies them."""


def page_routes(manager: ModelManager) -> APIRouter:
    """Return the router of the pages."""
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    # HEAD is for clients that only check whether the page exists. The HTTP server omits the body.
    if manager.settings.page:
        _add_chat_page(router)
    else:
        router.add_api_route("/", _about(manager), methods=["GET", "HEAD"])
    router.add_api_route("/about", _about(manager), methods=["GET", "HEAD"])

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> HTMLResponse:
        return _page(DOCS, DOCS_POLICY)

    @router.api_route("/docs/swagger-ui-bundle.js", methods=["GET", "HEAD"])
    async def script(request: Request) -> Response:
        return _swagger_file("swagger-ui-bundle.js", request)

    @router.api_route("/docs/swagger-ui.css", methods=["GET", "HEAD"])
    async def style(request: Request) -> Response:
        return _swagger_file("swagger-ui.css", request)

    @router.api_route("/favicon.ico", methods=["GET", "HEAD"])
    async def icon() -> Response:
        return Response(ICON, media_type="image/svg+xml", headers={"cache-control": CACHED})

    return router


def _about(manager: ModelManager) -> Callable[[Request], Awaitable[Response]]:
    async def about(request: Request) -> Response:
        state, curl = _describe(manager, local=is_local(request.scope)), _curl(request)
        return _page(FRONT, FRONT_POLICY, state=html.escape(state), curl=html.escape(curl))

    return about


def _add_chat_page(router: APIRouter) -> None:
    """Add the routes of the chat page, which are ``CHAT_PAGE_PATHS``."""

    @router.api_route("/", methods=["GET", "HEAD"])
    async def chat(request: Request) -> Response:
        page = chat_page()
        headers = {"etag": page.etag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == page.etag:
            return Response(status_code=304, headers=headers)
        return _compressed(request, page.compressed, "text/html", {**headers, "content-security-policy": page.policy})

    @router.api_route("/manifest.webmanifest", methods=["GET", "HEAD"])
    async def manifest() -> Response:
        return Response(json.dumps(MANIFEST), media_type="application/manifest+json")

    @router.api_route("/icon-192.png", methods=["GET", "HEAD"])
    async def small_icon() -> Response:
        return Response(icon_png(192), media_type="image/png", headers={"cache-control": CACHED})

    @router.api_route("/icon-512.png", methods=["GET", "HEAD"])
    async def large_icon() -> Response:
        return Response(icon_png(512), media_type="image/png", headers={"cache-control": CACHED})


@dataclass(frozen=True, kw_only=True)
class ChatPage:
    """The document of the chat page, which contains its script and its style sheet."""

    compressed: bytes
    policy: str
    etag: str


@cache
def chat_page() -> ChatPage:
    """Read the files of the chat page and combine them."""
    script, style = ((CHAT_PAGE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    text = (
        f'{CHAT_HEAD}<style>{style}</style><body><noscript>This page needs JavaScript. <a href="about">About this '
        f'server</a></noscript><script type="module">{script}</script>'
    ).encode()
    return ChatPage(
        compressed=gzip.compress(text, mtime=0),
        policy=CHAT_POLICY % {"script": _content_hash(script), "style": _content_hash(style)},
        etag=f'"{hashlib.sha256(text).hexdigest()[:32]}"',
    )


def _content_hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


@cache
def icon_png(size: int) -> bytes:
    """Return the icon as a PNG image: a white letter L on blue."""
    left, right, top, bottom, stroke = (size * part // 16 for part in (5, 11, 4, 12, 2))
    rows = bytearray()
    for y in range(size):
        row = ["0"] * size
        if top <= y < bottom:
            end = right if y >= bottom - stroke else left + stroke
            row[left:end] = "1" * (end - left)
        rows += b"\0" + int("".join(row), 2).to_bytes(size // 8, "big")
    chunks = {
        b"IHDR": struct.pack(">IIBBBBB", size, size, 1, 3, 0, 0, 0),
        b"PLTE": bytes.fromhex("3366ccffffff"),
        b"IDAT": zlib.compress(bytes(rows), 9),
        b"IEND": b"",
    }
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in chunks.items()
    )


def _page(text: str, policy: str, **values: str) -> HTMLResponse:
    values["nonce"] = secrets.token_urlsafe(16)
    return HTMLResponse(text % values, headers={"content-security-policy": policy % values})


def _swagger_file(name: str, request: Request) -> Response:
    content = (SWAGGER / f"{name}.gz").read_bytes()
    return _compressed(request, content, MEDIA_TYPES[name], {"cache-control": CACHED, "vary": "accept-encoding"})


def _compressed(request: Request, content: bytes, media_type: str, headers: Mapping[str, str]) -> Response:
    """Respond with gzip-compressed content, which is decompressed if the client does not accept gzip."""
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(content, media_type=media_type, headers={**headers, "content-encoding": "gzip"})
    return Response(gzip.decompress(content), media_type=media_type, headers=dict(headers))


def _describe(manager: ModelManager, *, local: bool) -> str:
    now = manager.snapshot
    pinned = [public_id(each.entry.id, local=local) for each in now.pinned]
    also = f" Also loaded: {', '.join(pinned)}." if pinned else ""
    state = now.unloading or "loaded"
    recorded = " The requests of all clients are recorded." if manager.settings.record == "all" else ""
    return f"{public_id(now.model, local=local) if now.model else 'No chat model'} is {state}.{also}{recorded}"


def _curl(request: Request) -> str:
    """Return an example request as a shell command, with the address of this page but without the path of a proxy."""
    url = f"{str(request.base_url).rstrip('/')}/v1/chat/completions"
    body = '{"model": "default", "messages": [{"role": "user", "content": "Say hello."}]}'
    return f"curl {url} -H 'content-type: application/json' -d '{body}'"
