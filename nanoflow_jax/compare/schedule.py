"""XLA's schedule of a step, read from the text of the compiled module: what was in flight together by its order."""

import dataclasses
import re
from collections.abc import Iterator
from typing import Literal

from nanoflow_jax.compare.names import Label, scopes
from nanoflow_jax.compare.trace import resources
from nanoflow_jax.plan import Resource

_COLLECTIVES = "all-reduce|all-gather|reduce-scatter|collective-permute|all-to-all"
# The opcode is the first word with an opening bracket behind the result's type.
_WORK = re.compile(rf"[\s)}}\]]((?:call|async|{_COLLECTIVES})(?:-start|-done)?|custom-call|fusion)\(%?([^\s,)]*)")
_CALLED = re.compile(r"(?:calls|to_apply|called_computations=\{)=?%?([\w.\-]+)")
_KERNEL = re.compile(r'\w+_mosaic_gpu|custom_call_target="(?!mosaic_gpu)[^"]+"|^\s*(?:ROOT )?%?\w*gemm_fusion\w*')


@dataclasses.dataclass(frozen=True)
class Entry:
    """A start or an end of asynchronous work, or work on the main stream."""

    name: str
    what: Literal["start", "done", "blocking"]
    resources: frozenset[Resource]
    started: str = ""
    label: Label | None = None

    def __str__(self) -> str:
        return f"{self.name} ({' and '.join(sorted(self.resources))}{f', {self.label}' if self.label else ''})"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """GEMMs, attention and collectives in the order in which XLA issues them."""

    entries: tuple[Entry, ...]

    def together(self, a: Resource, b: Resource) -> int:
        """How often work of one resource was issued while the other's was under way."""
        pair = {a, b}
        return sum(pair <= entry.resources or bool((pair - entry.resources) & beside) for entry, beside in self._issues(pair))

    def apart(self, a: Resource, b: Resource) -> list[str]:
        """What this schedule says about two resources that never met; empty if it would let them meet."""
        if self.together(a, b):
            return []
        counts = {
            resource: [sum(e.what == what and resource in e.resources for e in self.entries) for what in ("start", "blocking")]
            for resource in (a, b)
        }
        told = [f"{starts} asynchronous and {blocking} blocking pieces of {r}" for r, (starts, blocking) in counts.items()]
        return [f"XLA's schedule has {' and '.join(told)} and never both in flight{self._first_wait(a, b)}"]

    def _issues(self, of: set[Resource]) -> Iterator[tuple[Entry, set[Resource]]]:
        """Each piece of work of these resources when it is issued, with the resources then under way beside it."""
        open_work: dict[str, frozenset[Resource]] = {}
        for entry in self.entries:
            if entry.what == "done":
                open_work.pop(entry.started, None)
                continue
            if entry.resources & of:
                yield entry, set().union(*open_work.values())
            if entry.what == "start":
                open_work[entry.name] = entry.resources

    def _first_wait(self, a: Resource, b: Resource) -> str:
        """The first place where one is waited for and the other issued next."""
        last: Entry | None = None
        for entry in self.entries:
            if not entry.resources & {a, b}:
                continue
            if last is not None and last.what == "done" and entry.what != "done" and not entry.resources & last.resources:
                return f", as {last} comes before {entry}"
            last = entry
        return ""


def read_schedule(text: str) -> Schedule | None:
    """The schedule of `compiled.as_text()`; None if that is not a scheduled module."""
    if "is_scheduled=true" not in text.partition("\n")[0]:
        return None
    held, labels = _resources_of_computations(text), scopes(text)
    entries: list[Entry] = []
    of_start: dict[str, frozenset[Resource]] = {}
    for line in text[text.find("\nENTRY ") :].splitlines():
        name = re.match(r"\s*(?:ROOT )?%?(\S+) = ", line)
        work = _WORK.search(line)
        if name is None or work is None:
            continue
        opcode, operand = work[1], work[2]
        if opcode.endswith("-done"):
            if of_start.get(operand):
                entries.append(Entry(name[1], "done", of_start[operand], operand, labels.get(name[1])))
            continue
        found = frozenset({Resource.NETWORK}) if re.match(_COLLECTIVES, opcode) else _resources_of_line(line, held)
        started = opcode.endswith("-start")
        if started:
            of_start[name[1]] = found
        if found:
            entries.append(Entry(name[1], "start" if started else "blocking", found, label=labels.get(name[1])))
    return Schedule(tuple(entries))


def _resources_of_computations(text: str) -> dict[str, frozenset[Resource]]:
    """What the kernels in each computation keep busy, those that it calls included. Callees come before callers."""
    held: dict[str, frozenset[Resource]] = {}
    current = ""
    for line in text.splitlines():
        if line.endswith("{") and (header := re.match(r"%?([\w.\-]+) \(", line)):
            current = header[1]
            held[current] = frozenset()
        elif line == "}":
            current = ""
        elif current:
            held[current] |= _resources_of_line(line, held)
    return held


def _resources_of_line(line: str, held: dict[str, frozenset[Resource]]) -> frozenset[Resource]:
    own = (resource for kernel in _KERNEL.findall(line) for resource in resources(kernel))
    called = (resource for callee in _CALLED.findall(line) for resource in held.get(callee, ()))
    return frozenset((*own, *called))
