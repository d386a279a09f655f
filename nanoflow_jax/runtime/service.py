"""The engine as a service: one thread that steps it, and thread-safe calls around it."""

from collections.abc import Callable

import msgspec

from nanoflow_jax.runtime.engine import Engine, EngineStats
from nanoflow_jax.runtime.request import Request, RequestEvent


class Health(msgspec.Struct, frozen=True):
    """`state` is "running", "draining", "stopped" or "failed"; `error` says why it failed.

    `step_age_s` is how long the engine has been in its current step, 0 when idle: a large value means a hung device.
    """

    state: str
    error: str | None
    step_age_s: float


class EngineService:
    """Owns one engine thread. Events are delivered on that thread; a callback must not block.

    A request's callback gets any number of events, the last with a finish reason, and none after it.
    """

    def __init__(self, engine: Engine, *, max_waiting: int = 1024) -> None:
        """Starts the thread. The engine must be warm. `max_waiting` bounds the requests that wait for admission."""
        raise NotImplementedError

    def submit(self, request: Request, on_event: Callable[[RequestEvent], None]) -> None:
        """Queues a request.

        Raises:
          RequestRejected: it is invalid, its id is in use, the queue is full, or the service is draining, stopped or failed.
        """
        raise NotImplementedError

    def cancel(self, request_id: str) -> bool:
        """Ends a request with reason `cancelled`; its last event follows soon. False if no such request is open."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def health(self) -> Health:
        raise NotImplementedError

    def drain(self, timeout_s: float) -> bool:
        """Refuses new requests and waits until the open ones have finished. False if some had not after `timeout_s`."""
        raise NotImplementedError

    def stop(self) -> None:
        """Cancels every open request, delivers their last events and joins the thread. Safe to call twice."""
        raise NotImplementedError
