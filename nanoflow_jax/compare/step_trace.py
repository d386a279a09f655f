"""Profiles some steps of a running engine."""

import dataclasses
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

import jax

from nanoflow_jax.compare.idle import idle_time
from nanoflow_jax.compare.trace import NoDeviceTraceError, read_events


class StepTrace:
    """A context around a loop of steps; the profiler runs for `num_steps` of them from the first `before_step` on.

    Attributes:
      idle: after the loop, `Idle` as a dictionary, or only `why_none`.
    """

    def __init__(self, num_steps: int) -> None:
        self.idle: dict[str, Any] = {}
        self._left = num_steps
        self._running = False

    def __enter__(self) -> "StepTrace":
        self._folder = tempfile.TemporaryDirectory(prefix="nanoflow-jax-trace-")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        with self._folder as folder:
            self._stop()
            try:
                self.idle = dataclasses.asdict(idle_time(read_events(Path(folder))))
            except NoDeviceTraceError as none:
                self.idle = {"why_none": f"no idle time: {none}"}

    def before_step(self) -> None:
        if self._running and self._left == 0:
            self._stop()
        elif self._left and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = options.host_tracer_level = 0
            jax.profiler.start_trace(self._folder.name, profiler_options=options)
            self._running = True
        self._left = max(0, self._left - 1)

    def _stop(self) -> None:
        if self._running:
            jax.profiler.stop_trace()
            self._running, self._left = False, 0
