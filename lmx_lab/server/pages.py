"""Serve two pages for browsers: an overview, and the routes to try.

All their links are relative: behind a Hub or Binder the server has a path that only the browser knows.
"""

from __future__ import annotations

import base64
import hashlib

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

from lmx_lab.http.guard import CONTENT_POLICY
from lmx_lab.http.middleware import VERSION

SWAGGER = "https://cdn.jsdelivr.net/npm/swagger-ui-dist@5.35.0/swagger-ui"
"""Scripts and styles (1.9 MB) that the browser loads from another server. They run with the rights of this server's
pages, so their hashes are fixed here."""
STYLE_HASH = "WlYgdmXYOOBWL5apwjDEZwN+U3HmXSSu5R6V5aGxEcf7z+KuRNwBhoxKVN1i3D5I"
SCRIPT_HASH = "gjRm0bEPMeTmMh5jT2cHccIwCUZSTd8YC+j0d0sXw0MdGEfScduGpSyF3ZSSLkX9"
HEAD = '<!doctype html><html lang="en"><meta charset="utf-8"><title>LMX Lab</title>'
FRONT = f"""{HEAD}
<h1>LMX Lab {VERSION}</h1>
<p>A local language model, served. Programs speak the chat-completions format with it; their base URL is the address of
this page with <code>v1</code> at its end.
<ul>
<li><a href="docs">docs</a>: all routes, to try here; <a href="openapi.json">openapi.json</a>: the same for programs
<li><a href="readyz">readyz</a>: whether a model answers
<li><a href="v1/models">v1/models</a>, <a href="admin/models">admin/models</a>: what is on disk, and what is loaded
<li><a href="metrics">metrics</a>: figures for Prometheus
</ul>
"""
# The description is passed as a value and not as a URL: so requests go to the path of this page, not to the Hub's root.
START = """
window.SwaggerUIBundle && fetch(document.getElementById("document").href).then((it) => it.json()).then((spec) => {
  spec.servers = [{ url: new URL(".", location).href }];
  SwaggerUIBundle({ dom_id: "#routes", deepLinking: true, spec });
});
"""
DOCS = f"""{HEAD}
<link rel="stylesheet" href="{SWAGGER}.css" integrity="sha384-{STYLE_HASH}" crossorigin="anonymous">
<div id="routes"><p>This page is made by Swagger UI, which the browser takes from the internet. All that it would show
is in <a id="document" href="openapi.json">openapi.json</a>.</div>
<script src="{SWAGGER}-bundle.js" integrity="sha384-{SCRIPT_HASH}" crossorigin="anonymous"></script>
<script>{START}</script>
"""
FRONT_POLICY = f"default-src 'none'; base-uri 'none'; form-action 'none'; {CONTENT_POLICY}"
START_HASH = base64.b64encode(hashlib.sha256(START.encode()).digest()).decode()
# The images are in Swagger UI's style sheet.
DOCS_POLICY = (
    f"{FRONT_POLICY}; script-src {SWAGGER}-bundle.js 'sha256-{START_HASH}'; style-src {SWAGGER}.css; "
    "img-src data:; connect-src 'self'"
)
"""What the page may run and access: its two scripts, its style sheet and this server."""


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)

    # HEAD is for clients that only check whether the page exists. The HTTP server omits the body.
    @router.api_route("/", methods=["GET", "HEAD"])
    async def front() -> HTMLResponse:
        return _page(FRONT, FRONT_POLICY)

    @router.api_route("/docs", methods=["GET", "HEAD"])
    async def docs() -> HTMLResponse:
        return _page(DOCS, DOCS_POLICY)

    return router


def _page(text: str, policy: str) -> HTMLResponse:
    return HTMLResponse(text, headers={"content-security-policy": policy})
