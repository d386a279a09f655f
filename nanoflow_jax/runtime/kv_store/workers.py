"""Background threads with bounded work. Daemons, so that a call stuck in the kernel never keeps the process from ending."""

import threading
import time
from collections import deque
from collections.abc import Callable

from nanoflow_jax.runtime.kv_store.faults import Fault, FaultLog


class Workers:
    """Runs calls in the order of submission on `num_threads` threads."""

    def __init__(self, name: str, num_threads: int, *, max_waiting: int, faults: FaultLog) -> None:
        """`max_waiting` bounds the sum of the weights of calls that wait or run."""
        self._max_waiting = max_waiting
        self._faults = faults
        self._condition = threading.Condition()
        self._calls: deque[tuple[Callable[[], None], int]] = deque()
        self._waiting = 0
        self._running: dict[int, float] = {}
        self._stopping = False
        self._threads = [
            threading.Thread(target=self._run, args=(i,), name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], None], *, weight: int = 1, follow_up: bool = False) -> bool:
        """Queues a call; never blocks. False when too much waits or after `stop`.

        A call heavier than the bound is taken when nothing else waits. A `follow_up` is part of work that was let in already.
        """
        with self._condition:
            full = self._waiting > 0 and self._waiting + weight > self._max_waiting
            if self._stopping or (full and not follow_up):
                return False
            self._calls.append((call, weight))
            self._waiting += weight
            self._condition.notify_all()  # whoever drains waits on the same condition
            return True

    @property
    def waiting(self) -> int:
        """Weight of the calls that wait or run."""
        return self._waiting

    def longest_running_s(self) -> float:
        """Age of the call that has been running longest; 0 when none runs."""
        with self._condition:
            return time.monotonic() - min(self._running.values()) if self._running else 0.0

    def drain(self, timeout_s: float) -> bool:
        """Waits until no call waits or runs; False if that took longer."""
        with self._condition:
            return self._condition.wait_for(lambda: self._waiting == 0, timeout_s)

    def stop(self, timeout_s: float) -> bool:
        """Takes no more calls, lets those taken finish and joins the threads; False if one has not ended in time."""
        with self._condition:
            self._stopping = True
            self._condition.notify_all()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self, index: int) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._calls or self._stopping)
                if not self._calls:
                    return
                call, weight = self._calls.popleft()
                self._running[index] = time.monotonic()
            try:
                call()
            except Exception as error:
                self._faults.count(Fault.INTERNAL, error)
            del call  # and with it the arrays that it holds
            with self._condition:
                del self._running[index]
                self._waiting -= weight
                self._condition.notify_all()
