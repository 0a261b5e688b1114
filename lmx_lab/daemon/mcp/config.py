"""Check and change the configurations of MCP servers, and hide their secrets."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import ValidationError

from lmx_lab.daemon.mcp.failure import McpFailure
from lmx_lab.daemon.mcp.process import find_program
from lmx_lab.errors import InvalidRequestError
from lmx_lab.wire.mcp import REDACTED, ChangeMcpServer, McpServerConfig

NO_RESTART = frozenset({"name", "permission"})
"""Fields that can be changed while a server runs. A change of other fields restarts it."""
ENTRIES = 256
"""Maximum number of entries of ``env`` and of ``headers``."""
VALUE_CHARACTERS = 32_768
_VARIABLE_NAME = re.compile(r"[^=\0]{1,256}")
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,256}")


def check(config: McpServerConfig) -> None:
    """Refuse a configuration that can never start. Blocking.

    A program that does not exist is accepted, since it may be installed later. Starting it then fails.

    Raises:
        InvalidRequestError: The configuration is invalid. The message names the field.
    """
    if config.transport == "http":
        _check_url(config.url or "")
        _check_entries("headers", config.headers, _HEADER_NAME)
        return
    for field, text in (("command", config.command or ""), *(("args", arg) for arg in config.args)):
        if "\0" in text:
            raise InvalidRequestError(f"{field} contains a null character; remove it", param=field)
    if config.cwd is not None:
        _check_folder(config.cwd)
    _check_entries("env", config.env, _VARIABLE_NAME)
    try:
        find_program(config)
    except McpFailure as failure:
        if failure.kind == "invalid":
            raise InvalidRequestError(failure.message, param="command") from failure


def redact_values(values: dict[str, str]) -> dict[str, str]:
    """Replace all values of ``env`` or ``headers``."""
    return dict.fromkeys(values, REDACTED)


def restore_secrets(config: McpServerConfig, previous: McpServerConfig | None) -> McpServerConfig:
    """Replace the redacted values of a configuration by those of the previous one.

    Raises:
        InvalidRequestError: A value is redacted, and the previous configuration has none of that name.
    """
    env, headers = (previous.env, previous.headers) if previous is not None else ({}, {})
    changes = {"env": _restore("env", config.env, env), "headers": _restore("headers", config.headers, headers)}
    return config.model_copy(update=changes)


def apply_change(config: McpServerConfig, change: ChangeMcpServer) -> McpServerConfig:
    """Return the configuration with the fields that the change contains.

    Raises:
        InvalidRequestError: The result is not a valid configuration, or has a redacted value without a previous one.
    """
    fields = {name: getattr(change, name) for name in change.model_fields_set}
    # Null leaves a field unchanged, except for cwd, which can be null.
    fields = {name: value for name, value in fields.items() if value is not None or name == "cwd"}
    try:
        changed = McpServerConfig.model_validate({**config.model_dump(), **fields})
    except ValidationError as exc:
        raise InvalidRequestError(describe_error(exc)) from None
    return restore_secrets(changed, config)


def describe_error(exc: ValidationError) -> str:
    """Return field and message of the first error, without the input, which may contain secrets."""
    error = exc.errors(include_input=False, include_url=False)[0]
    field = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    return f"{field}: {message}" if field else message


def _restore(field: str, values: dict[str, str], previous: dict[str, str]) -> dict[str, str]:
    for name, value in values.items():
        if value == REDACTED and name not in previous:
            raise InvalidRequestError(
                f"{field} has {REDACTED!r} for {name!r:.80}, which keeps the previous value, but there is none; send "
                "the value",
                param=field,
            )
    return {name: previous[name] if value == REDACTED else value for name, value in values.items()}


def _check_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as exc:
        raise InvalidRequestError(f"url is not a valid address: {exc}", param="url") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or any(map(_is_blank, url)):
        raise InvalidRequestError(
            f"url is {url!r:.200}; it must begin with http:// or https:// and contain a host", param="url"
        )
    if parts.username is not None or parts.password is not None:
        raise InvalidRequestError(
            "url contains a user name or password, which would be displayed; use an Authorization header in headers",
            param="url",
        )


def _is_blank(character: str) -> bool:
    return character.isspace() or ord(character) < 32


def _check_folder(cwd: str) -> None:
    try:
        is_folder = Path(cwd).is_dir()
    except (OSError, ValueError):
        is_folder = False
    if not is_folder:
        raise InvalidRequestError(
            f"cwd is {cwd!r:.200}, which is not an existing folder; create it or correct cwd", param="cwd"
        )


def _check_entries(field: str, values: dict[str, str], names: re.Pattern[str]) -> None:
    if len(values) > ENTRIES:
        raise InvalidRequestError(f"{field} has {len(values)} entries, the limit is {ENTRIES}", param=field)
    for name, value in values.items():
        if not names.fullmatch(name):
            raise InvalidRequestError(f"{field} has the invalid name {name!r:.80}; correct it", param=field)
        forbidden = "\0" if field == "env" else "\0\r\n"
        if len(value) > VALUE_CHARACTERS or any(character in value for character in forbidden):
            raise InvalidRequestError(
                f"the value of {name!r:.80} in {field} contains a line break or null character, or has more than "
                f"{VALUE_CHARACTERS:,} characters; correct it",
                param=field,
            )
        if field == "headers" and not value.isascii():
            raise InvalidRequestError(
                f"the value of {name!r:.80} in headers contains characters that are not ASCII; encode it", param=field
            )
