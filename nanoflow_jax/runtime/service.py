"""The engine as a service: one thread that steps it, and thread-safe calls around it."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from nanoflow_jax.runtime.engine import Engine, EngineStats
from nanoflow_jax.runtime.request import FinishReason, RejectCode, Request, RequestEvent, RequestRejected, validate

_log = logging.getLogger(__name__)

OnEvent = Callable[[RequestEvent], None]


class Health(msgspec.Struct, frozen=True):
    """`state` is "running", "draining", "stopped" or "failed"; `error` says why it failed.

    `step_age_s` is how long the engine has been in its current step, 0 when idle: a large value means a hung device.
    """

    state: str
    error: str | None
    step_age_s: float


@dataclasses.dataclass(eq=False)
class _Open:
    """A request that has not had its last event."""

    request: Request
    prompt: np.ndarray
    on_event: OnEvent
    submitted_s: float


class EngineService:
    """Owns one engine thread. Events are delivered on that thread; a callback must not block.

    A request's callback gets any number of events, the last with a finish reason, and none after it. A callback that raises
    loses its request and harms no other. If the engine itself fails, every open request gets an error event and `health` tells.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        """Starts the thread. The engine must be warm. `max_waiting` bounds the requests that wait for admission."""
        if max_waiting < 1:
            raise ValueError(f"{max_waiting=} must be positive")
        self._engine = engine
        self._max_waiting = max_waiting
        # Guards everything below; the engine itself belongs to the thread alone.
        self._condition = threading.Condition()
        self._open: dict[str, _Open] = {}
        self._submitted: list[_Open] = []
        self._cancelled: list[_Open] = []
        self._state = "running"
        self._error: str | None = None
        self._step_began_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Queues a request.

        Raises:
          RequestRejected: it is invalid, its id is in use, the queue is full, or the service is draining, stopped or failed.
        """
        prompt = validate(request, self._engine.limits)
        with self._condition:
            if self._state != "running":
                raise RequestRejected(RejectCode.SHUTTING_DOWN, f"the engine is {self._state}")
            if request.request_id in self._open:
                raise RequestRejected(RejectCode.DUPLICATE_ID, f"request_id={request.request_id!r} is in use")
            waiting = len(self._open) - self._engine.num_running
            if waiting >= self._max_waiting:
                raise RequestRejected(RejectCode.OVERLOADED, f"{waiting} requests are waiting, no more are taken")
            entry = _Open(request, prompt, on_event, time.perf_counter())
            self._open[request.request_id] = entry
            self._submitted.append(entry)
            self._condition.notify_all()

    def cancel(self, request_id: str) -> bool:
        """Ends a request with reason `cancelled`; its last event follows soon. False if no such request is open."""
        with self._condition:
            entry = self._open.get(request_id)
            if entry is None:
                return False
            self._cancelled.append(entry)
            self._condition.notify_all()
            return True

    def stats(self) -> EngineStats:
        """The engine's statistics; counters read while a step is under way may be a step apart."""
        return self._engine.stats()

    def health(self) -> Health:
        with self._condition:
            began = self._step_began_s
            return Health(self._state, self._error, 0.0 if began is None else time.perf_counter() - began)

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until the open ones have finished. False if some had not after `timeout_s`."""
        with self._condition:
            if self._state == "running":
                self._state = "draining"
            return self._condition.wait_for(lambda: not self._open, timeout_s)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Cancels every open request, delivers their last events and joins the thread. Safe to call twice.

        False if the thread had not ended after `timeout_s`, which means that the device hangs.
        """
        with self._condition:
            if self._state != "failed":
                self._state = "stopped"
            self._condition.notify_all()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._take_orders()
                for event in self._engine.step():
                    self._deliver(event)
            for request_id in list(self._open):
                self._cancel(request_id)
        except BaseException as error:
            _log.exception("the engine failed")
            self._fail(f"{type(error).__name__}: {error}")

    def _wait_for_work(self) -> bool:
        """Blocks while there is nothing to do; false when the service has been stopped."""
        with self._condition:
            self._step_began_s = None
            self._condition.wait_for(
                lambda: self._submitted or self._cancelled or self._engine.busy or self._state == "stopped"
            )
            if self._state == "stopped":
                return False
            self._step_began_s = time.perf_counter()
            return True

    def _take_orders(self) -> None:
        with self._condition:
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
        for entry in submitted:
            self._engine.add(entry.request, prompt=entry.prompt, submitted_s=entry.submitted_s)
        for entry in cancelled:
            # The id may have been used again since its owner ended.
            if self._open.get(entry.request.request_id) is entry:
                self._cancel(entry.request.request_id)

    def _cancel(self, request_id: str) -> None:
        event = self._engine.cancel(request_id)
        # A request that the stopped thread never took over is unknown to the engine.
        self._deliver(event or RequestEvent(request_id=request_id, finish_reason=FinishReason.CANCELLED))

    def _deliver(self, event: RequestEvent) -> None:
        entry = self._open.get(event.request_id)
        if entry is None:
            return  # its callback raised in this very step
        try:
            entry.on_event(event)
        except Exception:
            _log.exception("the callback of request %r raised; the request is cancelled", event.request_id)
            if event.finish_reason is None:
                self._engine.cancel(event.request_id)
                self._close(event.request_id)
        if event.finish_reason is not None:
            self._close(event.request_id)

    def _close(self, request_id: str) -> None:
        with self._condition:
            del self._open[request_id]
            self._condition.notify_all()

    def _fail(self, error: str) -> None:
        with self._condition:
            self._state, self._error, self._step_began_s = "failed", error, None
            entries = list(self._open.values())
        for entry in entries:
            self._deliver(
                RequestEvent(
                    request_id=entry.request.request_id,
                    finish_reason=FinishReason.ERROR,
                    error=f"the engine failed: {error}",
                )
            )
