"""The step loop."""

import msgspec


class EngineStats(msgspec.Struct):
    """Filled in with the engine."""


class Engine:
    """Filled in with the step loop."""
