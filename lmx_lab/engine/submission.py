"""Submit a request to the model in memory that answers it. In swap mode, the model may be loaded first."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, TypeVar

from lmx_lab.engine.admission import Permit
from lmx_lab.engine.find import ModelFinder
from lmx_lab.engine.model_control import ModelControl
from lmx_lab.engine.model_lookup import (
    CHAT,
    Kinds,
    is_idle_path,
    loaded_id,
    refusal,
    unknown_model,
    with_models_on_disk,
    wrong_kind,
)
from lmx_lab.engine.requests import EmbeddingRequest, GenerationRequest, RerankRequest, TraceRequest
from lmx_lab.engine.residents import Resident, Residents
from lmx_lab.engine.swap import SwapTurn
from lmx_lab.errors import (
    GenerationTimeoutError,
    InvalidRequestError,
    LabError,
    ModelBusyError,
    ModelNotFoundError,
    NotLoadedError,
)
from lmx_lab.settings import Settings
from lmx_lab.values.engine import EngineSnapshot
from lmx_lab.values.models import LoadSpec, ModelEntry

T = TypeVar("T")
TRIES = 3
"""Maximum number of attempts to submit a request in swap mode, in case other loads replace its model in the
meantime."""


class RunOnControlLoop(Protocol):
    """Run work on the loop of ``ModelControl``, and return its result."""

    async def __call__(self, work: Callable[[ModelControl], Coroutine[Any, Any, T]]) -> T: ...


@dataclass(frozen=True, kw_only=True)
class Submission(Generic[T]):
    """A request, and how it is submitted."""

    request: GenerationRequest | EmbeddingRequest | RerankRequest | TraceRequest
    kinds: Kinds
    """Kinds of models that can answer, the preferred ones first."""
    submit: Callable[[Resident, Sequence[Permit]], Awaitable[T]]
    """Submit the request to the engine of a model, with a permit for each answer."""
    count: int = 1
    """Number of answers."""

    async def to(self, resident: Resident) -> T:
        """Admit the request and submit it to a model. If that fails, its permits are released.

        Raises:
            QueueFullError: too many requests wait.
            NotLoadedError: the model is being unloaded.
        """
        admission = resident.admission
        if self.request.caller.patient:
            await admission.until_room(self.count)
        permits = admission.admit(self.count, slot_free_s=lambda: resident.slot_free_s)
        try:
            return await self.submit(resident, permits)
        except BaseException:
            for permit in permits:
                permit.release()
            raise


class Submitter:
    """Finds the model that answers a request, and submits the request to its engine.

    Args:
        residents: Return the models in memory.
        snapshot: Return the state of all engines.
        run: Run work on the control loop.
    """

    def __init__(
        self,
        settings: Settings,
        finder: ModelFinder,
        *,
        residents: Callable[[], Residents],
        snapshot: Callable[[], EngineSnapshot],
        run: RunOnControlLoop,
    ) -> None:
        self._settings = settings
        self._finder = finder
        self._residents = residents
        self._snapshot = snapshot
        self._run = run
        self._ids_by_alias = settings.ids_by_alias

    async def submit(self, submission: Submission[T]) -> T:
        """Submit a request. With ``Settings.any_model``, the loaded model answers one that names an unknown model.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        name = submission.request.model
        if name is not None and name in self._ids_by_alias:
            submission = _renamed(submission, self._ids_by_alias[name])
        try:
            return await self._submit_to_named(submission)
        except ModelNotFoundError:
            if not self._settings.any_model:
                raise
        return await self._submit_to_named(_renamed(submission, None))

    async def _submit_to_named(self, submission: Submission[T]) -> T:
        now, swap, local = self._residents(), self._settings.swap, submission.request.caller.local
        resident = now.find(submission.request.model, submission.kinds, local=local)
        if resident is not None and (now.stable or not swap or resident in now.pinned):
            try:
                return await submission.to(resident)
            except NotLoadedError as exc:
                # In swap mode, a load may have begun in the meantime.
                if not swap or resident in now.pinned:
                    raise await self._extend_refusal(exc, submission) from exc
        elif not swap:
            error = self._refusal_error(submission.request.model, submission.kinds, local=local)
            raise await self._extend_refusal(error, submission)
        return await self._submit_in_turn(submission)

    async def _submit_in_turn(self, submission: Submission[T]) -> T:
        """Wait for the turn of a request in swap mode, load its model if necessary, and submit it."""
        limit_s = submission.request.timeout_s or self._settings.request_timeout_s
        caller, kinds = submission.request.caller, submission.kinds
        name = self._loaded_id(submission.request.model, local=caller.local)
        try:
            async with asyncio.timeout(limit_s):
                turn = await self._run(
                    lambda control: self._take_turn(control, name, kinds, limited=not caller.patient)
                )
                try:
                    return await self._load_and_submit(submission, turn.model, name)
                finally:
                    turn.close()
        except TimeoutError:
            message = f"the model was not loaded within the request's time limit of {limit_s:g} s; load it first"
            raise GenerationTimeoutError(message, param="model") from None
        except NotLoadedError as exc:
            if name is not None:
                raise
            raise await self._extend_refusal(exc, submission) from exc

    async def _load_and_submit(self, submission: Submission[T], model: str | None, name: str | None) -> T:
        for attempt in range(TRIES):
            resident = self._residents().find(model, submission.kinds, local=False)
            error = self._refusal_error(model, submission.kinds, local=False) if resident is None else None
            if resident is not None:
                try:
                    return await submission.to(resident)
                except NotLoadedError as exc:
                    error = exc
            assert error is not None
            if attempt == TRIES - 1 or not isinstance(error, NotLoadedError):
                raise error
            # An administrator has unloaded or replaced the model.
            model = await self._run(lambda control: self._load(control, name, submission.kinds))
        raise AssertionError("unreachable")

    def _refusal_error(self, name: str | None, kinds: Kinds, *, local: bool) -> LabError:
        """Return the error of a request that no model in memory can answer."""
        now = self._residents()
        failure = now.engine.failure if now.engine is not None else None
        snapshot = self._snapshot()
        if failure is not None and snapshot.entry is None and snapshot.state != "loading":
            return type(failure)(failure.message)
        return refusal(snapshot, self._loaded_id(name, local=local), kinds)

    async def _extend_refusal(self, error: LabError, submission: Submission[T]) -> LabError:
        """Return the error, extended by the next step that the models on disk allow."""
        name, kinds = submission.request.model, submission.kinds
        if not isinstance(error, NotLoadedError) or (name is None and kinds == CHAT):
            return error
        name = self._loaded_id(name, local=submission.request.caller.local)
        return with_models_on_disk(error, name, await self._finder.on_disk(), self._snapshot(), kinds)

    def _loaded_id(self, name: str | None, *, local: bool) -> str | None:
        return loaded_id(name, [resident.entry for resident in self._residents()], local=local)

    # On the control loop, in swap mode

    async def _take_turn(self, control: ModelControl, name: str | None, kinds: Kinds, *, limited: bool) -> SwapTurn:
        """Wait for the turn of a request (see ``SwapQueue``), load its model, and return the turn.

        Raises:
            LabError: see ``ModelManager.submit_all``.
        """
        ticket = control.swaps.ticket(name, limited=limited)
        try:
            # Checked before the wait, so that a request for a model that does not exist does not delay others.
            if name is not None and name != self._snapshot().model:
                await self._resolve(name, kinds, local=is_idle_path(name, self._snapshot()))
            await control.swaps.wait(ticket)
            model = await self._load(control, name, kinds)
        except BaseException:
            control.swaps.leave(ticket)
            raise
        return control.swaps.turn(ticket, model)

    async def _load(self, control: ModelControl, name: str | None, kinds: Kinds) -> str | None:
        """Load the model that a request names, or the one that was unloaded because it was idle; return its id.

        A model that cannot answer the request is not loaded.
        """
        await control.wait_for_change()
        now = self._snapshot()
        model = name or now.idle_model
        if model is None or model == now.model:
            return model
        # Decided before the load, after which the snapshot no longer shows that this was the idle model.
        local, idle_spec = is_idle_path(model, now), control.idle_spec if model == now.idle_model else None
        try:
            entry = await self._resolve(model, kinds, local=local)
        except (ModelNotFoundError, InvalidRequestError):
            if name is None:
                return None
            raise
        while True:
            started = time.perf_counter()
            try:
                spec = idle_spec or LoadSpec(model=model if entry.has_alias(model) else entry.id)
                report = await control.load(spec, None, local=local, finish_queued=True, if_busy="wait")
            except ModelBusyError:
                # This request joined a load that does not wait for others.
                await control.wait_for_change()
                continue
            control.swaps.swap_s = time.perf_counter() - started
            return report.model

    async def _resolve(self, name: str, kinds: Kinds, *, local: bool) -> ModelEntry:
        try:
            entry = await self._finder.resolve(name, local=local)
        except ModelNotFoundError as exc:
            raise unknown_model(name, self._snapshot(), kinds) from exc
        if not entry.answers(kinds):
            raise wrong_kind(entry, kinds)
        return entry


def _renamed(submission: Submission[T], model: str | None) -> Submission[T]:
    """Return the submission of a request that names another model, or none."""
    return replace(submission, request=replace(submission.request, model=model))
