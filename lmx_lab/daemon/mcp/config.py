"""Configurations of MCP servers: checked, changed, shown without their secrets."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.process import found_program
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import REDACTED, ChangeMcpServer, McpServerConfig

KEPT_RUNNING = frozenset({"name", "permission"})
"""Changing other fields starts the server anew."""
ENTRIES = 256
"""Of env, and of headers."""
VALUE_CHARACTERS = 32_768
_VARIABLE = re.compile(r"[^=\0]{1,256}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")


def check(config: McpServerConfig) -> None:
    """Refuse what can never start. A program that is not there may come, so that is for the start to tell. Blocking.

    Raises:
        InvalidRequestError: names the field.
    """
    if config.transport == "http":
        _check_url(config.url or "")
        _check_entries("headers", config.headers, _HEADER)
        return
    for field, text in (("command", config.command or ""), *(("args", arg) for arg in config.args)):
        if "\0" in text:
            raise InvalidRequestError(f"{field} has a null character; leave it out", param=field)
    if config.cwd is not None:
        _check_folder(config.cwd)
    _check_entries("env", config.env, _VARIABLE)
    try:
        found_program(config)
    except McpFailure as failure:
        if failure.kind == "invalid":
            raise InvalidRequestError(failure.message, param="command") from failure


def shown(values: dict[str, str]) -> dict[str, str]:
    return dict.fromkeys(values, REDACTED)


def kept(config: McpServerConfig, before: McpServerConfig | None) -> McpServerConfig:
    """The configuration with its redacted values as they were before.

    Raises:
        InvalidRequestError: there is no value to keep.
    """
    old_env, old_headers = (before.env, before.headers) if before is not None else ({}, {})
    changes = {"env": _restored("env", config.env, old_env)}
    changes["headers"] = _restored("headers", config.headers, old_headers)
    return config.model_copy(update=changes)


def changed(config: McpServerConfig, change: ChangeMcpServer) -> McpServerConfig:
    """
    Raises:
        InvalidRequestError: the result is no configuration, or there is no value to keep.
    """
    given = {name: getattr(change, name) for name in change.model_fields_set}
    # Null leaves a field as it is, but for the one that may be null.
    given = {name: value for name, value in given.items() if value is not None or name == "cwd"}
    try:
        new = McpServerConfig.model_validate({**config.model_dump(), **given})
    except ValidationError as exc:
        raise InvalidRequestError(_in_words(exc)) from None
    return kept(new, config)


def _in_words(exc: ValidationError) -> str:
    # Without the input, which has the secrets.
    error = exc.errors(include_input=False, include_url=False)[0]
    where = ".".join(map(str, error["loc"]))
    text = error["msg"].removeprefix("Value error, ")
    return f"{where}: {text}" if where else text


def _restored(field: str, values: dict[str, str], before: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if value == REDACTED and name not in before:
            raise InvalidRequestError(
                f"{field} has {REDACTED!r} for {name!r:.80}, which keeps a value, and there is none; send the value",
                param=field,
            )
    return {name: before[name] if value == REDACTED else value for name, value in values.items()}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise InvalidRequestError(f"url is no address: {exc}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(map(_blank, url)):
        raise InvalidRequestError(
            f"url has to begin with http:// or https:// and name a host; it is {url!r:.200}", param="url"
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError(
            "url has a user name or password in it, which would be shown; send an Authorization header in headers",
            param="url",
        )


def _blank(character: str) -> bool:
    return character.isspace() or ord(character) < 32


def _check_folder(cwd: str) -> None:
    try:
        is_folder = Path(cwd).is_dir()
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise InvalidRequestError(
            f"cwd is {cwd!r:.200}, and there is no such folder; make it or correct cwd", param="cwd"
        )


def _check_entries(field: str, values: dict[str, str], names: re.Pattern[str]) -> None:
    if len(values) > ENTRIES:
        raise InvalidRequestError(f"{field} has {len(values)} entries, the limit is {ENTRIES}", param=field)
    for name, value in values.items():
        if not names.fullmatch(name):
            raise InvalidRequestError(
                f"{field} has the name {name!r:.80}, which cannot be one; correct it", param=field
            )
        unfit = "\0" if field == "env" else "\0\r\n"
        if len(value) > VALUE_CHARACTERS or any(character in value for character in unfit):
            raise InvalidRequestError(
                f"the value of {name!r:.80} in {field} has a line break or null, or more than {VALUE_CHARACTERS:,} "
                "characters; correct it",
                param=field,
            )
        if field == "headers" and not value.isascii():
            raise InvalidRequestError(f"the value of {name!r:.80} in headers is not ASCII; encode it", param=field)
