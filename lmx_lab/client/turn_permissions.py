"""Decide on the permissions that the tool calls of a turn need, by the caller's policy."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Literal, TypeVar

from lmx_lab.client.backoff import Backoff
from lmx_lab.client.daemon_routes import DaemonRoutes
from lmx_lab.errors import (
    AlreadyResolvedError,
    GoneError,
    InvalidRequestError,
    NotFoundError,
    UnavailableError,
    WrongServerError,
)
from lmx_lab.wire.sessions import Decision, PermissionRecord

T = TypeVar("T")
AllowOrDeny = Literal["allow", "deny"]
Verdict = bool | AllowOrDeny | Decision
"""A decision on one permission. Only a ``Decision`` can apply to the whole session."""
OnPermission = AllowOrDeny | Callable[[PermissionRecord], Verdict | Awaitable[Verdict]]
"""One decision for all permissions, or a function or coroutine function that decides on each."""
_ALLOW_OR_DENY: dict[object, AllowOrDeny] = {True: "allow", False: "deny", "allow": "allow", "deny": "deny"}


class TurnPermissions:
    """The permissions of one turn. Each is decided in a separate task, while events continue to arrive.

    If another client decides first, its decision counts.

    Args:
        policy: None leaves all decisions to other clients.

    Raises:
        InvalidRequestError: the policy is not valid.
    """

    def __init__(self, routes: DaemonRoutes, turn_id: str, policy: OnPermission | None) -> None:
        self._routes = routes
        self._turn_id = turn_id
        if not (policy is None or callable(policy) or policy in ("allow", "deny")):
            raise InvalidRequestError(
                f"on_permission is {policy!r:.80}; give 'allow', 'deny', or a function that takes a permission",
                param="on_permission",
            )
        self._policy = policy
        self._tasks: dict[str, asyncio.Task[None]] = {}

    @property
    def has_policy(self) -> bool:
        """Whether decisions are made here, and not left to other clients."""
        return self._policy is not None

    def decide_on(self, *permissions: PermissionRecord) -> None:
        """Start to decide on those permissions that belong to this turn and are new."""
        if self._policy is None:
            return
        for permission in permissions:
            if permission.turn_id == self._turn_id and permission.permission_id not in self._tasks:
                work = self._decide(permission, self._policy)
                self._tasks[permission.permission_id] = asyncio.create_task(work, name="lmx-lab permission of a turn")

    def withdraw(self, permission_id: str) -> None:
        """Cancel a decision in progress, because another client has decided."""
        if (task := self._tasks.get(permission_id)) is not None:
            task.cancel()

    async def run_while_deciding(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T | None:
        """Run a coroutine, which is cancelled if a decision fails.

        Returns:
            The coroutine's result, or None after the time limit.
        """
        task = asyncio.ensure_future(work)
        try:
            now = asyncio.get_running_loop().time
            until = now() + timeout_s
            while not task.done():
                if (left_s := until - now()) <= 0:
                    return None
                deciding = {decision for decision in self._tasks.values() if not decision.done()}
                await asyncio.wait({task, *deciding}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
                self._raise_failures()
            return task.result()
        finally:
            if task.cancel():
                await asyncio.wait([task])

    async def aclose(self) -> None:
        """Cancel all decisions in progress. Idempotent."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _raise_failures(self) -> None:
        for task in self._tasks.values():
            # A cancellation that was not requested here comes from the policy, and is raised as well.
            if task.done() and not (task.cancelled() and task.cancelling()):
                task.result()

    async def _is_pending(self, permission: PermissionRecord) -> bool:
        """Whether the permission still needs a decision: its request may be an old event that is read again."""
        try:
            pending = await self._routes.permissions()
        except UnavailableError:
            return True
        return any(other.permission_id == permission.permission_id for other in pending)

    async def _decide(self, permission: PermissionRecord, policy: OnPermission) -> None:
        if not isinstance(policy, str) and not await self._is_pending(permission):
            return
        verdict = policy if isinstance(policy, str) else policy(permission)
        if inspect.isawaitable(verdict):
            verdict = await verdict
        decision = _as_decision(verdict)
        backoff = Backoff()
        while True:
            try:
                await self._routes.decide(permission.permission_id, decision.decision, scope=decision.scope)
                return
            except (AlreadyResolvedError, GoneError, NotFoundError):
                return
            except UnavailableError as exc:
                if isinstance(exc, WrongServerError):
                    raise
                await asyncio.sleep(backoff.next_delay_s(exc.retry_after_s))


def _as_decision(verdict: object) -> Decision:
    if isinstance(verdict, Decision):
        return verdict
    if not isinstance(verdict, bool | str) or verdict not in _ALLOW_OR_DENY:
        raise InvalidRequestError(
            f"on_permission returned {verdict!r:.80}; it must return 'allow', 'deny', True, False or a Decision",
            param="on_permission",
        )
    return Decision(decision=_ALLOW_OR_DENY[verdict])
