"""XLA's schedule of a step, read from the text of the compiled module: what was in flight together by its order."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from nanoflow_jax.plan import Resource

# The streams of executor.streams.
_RESOURCE_OF_STREAM = {"5": Resource.COMPUTE, "6": Resource.MEMORY}
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclasses.dataclass(frozen=True)
class Entry:
    """A start or an end of asynchronous work, or work that blocks the main stream."""

    name: str
    what: Literal["start", "done", "blocking"]
    resource: Resource
    started: str = ""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Asynchronous work and collectives in the order in which XLA issues them."""

    entries: tuple[Entry, ...]

    def together(self, a: Resource, b: Resource) -> int:
        """How often work of one resource was issued while the other's was under way."""
        return sum(b in under_way if entry.resource is a else a in under_way for entry, under_way in self._issues((a, b)))

    def apart(self, a: Resource, b: Resource) -> list[str]:
        """What this schedule says about two resources that never met; empty if it would let them meet."""
        if self.together(a, b):
            return []
        counts = {r: {what: 0 for what in ("start", "blocking")} for r in (a, b)}
        for entry in self.entries:
            if entry.resource in counts and entry.what != "done":
                counts[entry.resource][entry.what] += 1
        told = [
            f"{n['start']} asynchronous and {n['blocking']} blocking pieces of {r}"
            for r, n in counts.items()
            if any(n.values())
        ]
        if len(told) < 2:
            missing = [str(r) for r, n in counts.items() if not any(n.values())]
            return [f"XLA's schedule puts no {' or '.join(missing)} on a stream of its own"]
        awaited = self._first_wait(a, b)
        return [f"XLA's schedule has {' and '.join(told)} and never both in flight{awaited}"]

    def _issues(self, of: tuple[Resource, Resource]) -> Iterator[tuple[Entry, set[Resource]]]:
        """Each piece of work of these resources when it is issued, with the resources then under way."""
        open_work: dict[str, Resource] = {}
        for entry in self.entries:
            if entry.what == "done":
                open_work.pop(entry.started, None)
                continue
            if entry.resource in of:
                yield entry, set(open_work.values())
            if entry.what == "start":
                open_work[entry.name] = entry.resource

    def _first_wait(self, a: Resource, b: Resource) -> str:
        last: Entry | None = None
        for entry in self.entries:
            if entry.what == "done" and entry.resource in (a, b):
                last = entry
            elif last is not None and entry.resource in (a, b) and entry.resource is not last.resource:
                return f": {last.name} awaits {last.resource} before {entry.name} issues {entry.resource}"
        return ""


def read_schedule(text: str) -> Schedule | None:
    """The schedule of `compiled.as_text()`; None if that is not a scheduled module."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        return None
    body = text[text.find("\nENTRY ") :]
    entries = []
    for line in body.splitlines():
        match = re.match(r"\s*(?:ROOT )?%?(\S+) = ", line)
        # The opcode is the first word with an opening bracket behind the result's type.
        opcode = re.search(r"[\s)}\]]((?:call|async|" + "|".join(_COLLECTIVES) + r")(?:-start|-done)?)\(%?([^\s,)]*)", line)
        if match is None or opcode is None or opcode[1] in ("call", "async"):
            continue
        annotated = re.search(r'_xla_stream_annotation="(\d+)"', line)
        communicates = opcode[1].startswith(_COLLECTIVES)
        resource = Resource.NETWORK if communicates else _RESOURCE_OF_STREAM.get(annotated[1]) if annotated else None
        if resource is None:
            continue
        what: Literal["start", "done", "blocking"] = (
            "start" if opcode[1].endswith("-start") else "done" if opcode[1].endswith("-done") else "blocking"
        )
        entries.append(Entry(match[1], what, resource, opcode[2] if what == "done" else ""))
    return Schedule(tuple(entries))
