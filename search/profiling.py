"""Measures kernels on the GPU at hand into a profile: alone by tokens and SMs, and in pairs for the interference maps.

What is measured and in which order, what is skipped because the file has it already, what an error or a time limit leaves out
are plain functions over a `Machine`; `profiler.py` has the one that runs kernels, and is with its programs the only part of the
search that imports jax.
"""

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import TILE, Resource
from search import profile_table
from search.hardware import Hardware
from search.interference import MAX_CHANNELS, shipped_maps
from search.measurement import Alone, Load, Program, Reading, Together, is_collective, measured_maps, together
from search.profile_points import Request, fewer_sms_requests, pair_attention, pairs_to_measure, requests
from search.profile_table import Kernel, Pair, Point, ProfileError, ProfileTable, Series, lookup

PHASE_US = 400.0  # of a pair: short GEMMs are called several times, so that a phase's borders do not count
MOST_CALLS = 4
ATTENTION_FITS = (0.85, 1.0, 1.15)  # tried around the amount that should last as long as the GEMMs
NETWORK_FITS = (0.85, 1.1)
BATCH = 40  # programs compiled side by side before their measurements
FAILURES_IN_A_ROW = 5  # after so many the device is taken to be lost
SAVE_S = 5.0

Progress = Callable[[int, int, str], None]


class Machine(Protocol):
    """Compiles and times programs. Times are sustained device time, inputs random normal."""

    num_sms: int
    conditions: str

    def libraries(self) -> dict[str, str]:
        """Versions that the times depend on."""
        ...

    def compile(self, programs: Sequence[Program]) -> dict[Program, str]:
        """Makes programs ready, side by side; returns what went wrong with those that are not."""
        ...

    def time(self, program: Program, load: Load, *, burst: bool = False, energy: bool = False) -> Reading:
        """Times one call (of a pair: one phase) of a program that is ready."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The profile, and how many measurements a time limit left out."""

    table: ProfileTable
    left: int


@dataclasses.dataclass(frozen=True)
class Job:
    """Something to measure once its programs are ready; `measure` leaves the result in the record."""

    label: str
    programs: tuple[Program, ...]
    measure: Callable[[], None]


class Record:
    """What is known so far, and the profile of it."""

    def __init__(self, model: ModelConfig, device: Hardware, tp: int, machine: Machine, known: ProfileTable | None) -> None:
        self._model, self._device, self._tp, self.machine = model, device, tp, machine
        self.series: dict[Kernel, dict[tuple[int, int, float], Point]] = {}
        for s in known.series if known else ():
            self.series[s.kernel] = {(p.tokens, p.num_sms, p.context): p for p in s.points}
        self.pairs: list[Pair] = list(known.pairs) if known else []
        self.failures: dict[str, str] = dict(known.failures) if known else {}

    def has(self, request: Request) -> bool:
        return request.key in self.series.get(request.program.kernel, {})

    def has_pair(self, gemm: Kernel, other: Kernel, sms: int) -> bool:
        return any((p.gemm, p.other, p.other_sms) == (gemm, other, sms) for p in self.pairs)

    def add(self, program: Alone, load: Load, reading: Reading) -> None:
        name = "nccl" if is_collective(program.kernel) else "pallas"
        self.series.setdefault(program.kernel, {})[program.tokens, program.num_sms, load.context] = Point(
            tokens=program.tokens, num_sms=program.num_sms, context=load.context, time_us=reading.time_us,
            burst_us=reading.burst_us, energy_j=reading.energy_j, implementation=name,
        )  # fmt: skip

    def table(self) -> ProfileTable:
        name, libraries = f"{self._device.name}-{self._model.name}-tp{self._tp}", self.machine.libraries()
        source = f"measured on {self._device.name} with {libraries}; network: SMs that GEMMs left, NCCL at its own channels"
        return ProfileTable(
            model=self._model.name, device=self._device.name, tp=self._tp, num_sms=self.machine.num_sms, source="measured",
            libraries=libraries, power=self._device.power, conditions=self.machine.conditions,
            series=tuple(Series(kernel=k, points=tuple(p.values())) for k, p in self.series.items()),
            interference=measured_maps(name, source, self.pairs, shipped_maps()[self._device.interference]),
            pairs=tuple(self.pairs), failures=dict(sorted(self.failures.items())),
        )  # fmt: skip


def measure_profile(
    model: ModelConfig,
    device: Hardware,
    tp: int,
    b_dense: int,
    contexts: Sequence[int],
    machine: Machine,
    known: ProfileTable | None,
    save: Callable[[ProfileTable], None],
    progress: Progress,
    *,
    time_limit_s: float = math.inf,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Measures what `known` lacks, most useful first, saving every few seconds: a run that ends early is resumed.

    What fails is recorded under `failures`, once more tried by the next run, and does not end this one. After `time_limit_s` by
    `clock` nothing new is begun.

    Raises:
      ProfileError: `known` is of another device, number of ranks or library versions, so that times would not compare; or many
        measurements in a row failed, so that the device seems lost (what was measured before is saved).
    """
    if known is not None and known.conditions != machine.conditions:
        raise ProfileError(f"the profile to resume was taken under {known.conditions!r}, not {machine.conditions!r}")
    if known is not None and (known.device, known.tp, known.libraries) != (device.name, tp, machine.libraries()):
        raise ProfileError(
            f"the profile to resume is of {known.tp} x {known.device} with {known.libraries}, "
            f"this machine is {tp} x {device.name} with {machine.libraries()}"
        )
    record = Record(model, device, tp, machine, known)
    sizes = model, tp, b_dense, contexts, machine.num_sms
    wanted = [r for r in requests(*sizes) if not record.has(r)]
    fewer = [r for r in fewer_sms_requests(*sizes) if not record.has(r)]
    pairs = [p for p in pairs_to_measure(*sizes) if not record.has_pair(*p)]
    run = _Run(record, save, progress, clock, clock() + time_limit_s, total=len(wanted) + len(pairs) + len(fewer))
    run.work([_alone_job(record, r) for r in wanted])
    for resource in (Resource.MEMORY, Resource.NETWORK):
        lane = [p for p in pairs if is_collective(p[1]) == (resource is Resource.NETWORK)]
        run.work([job for p in lane if (job := run.prepared(_pair_job, record, b_dense, contexts, *p)) is not None])
    run.work([_alone_job(record, r) for r in fewer])
    run.save()
    return Outcome(table=record.table(), left=run.total - run.done)


@dataclasses.dataclass
class _Run:
    """Works off jobs in batches until the deadline."""

    record: Record
    write: Callable[[ProfileTable], None]
    progress: Progress
    clock: Callable[[], float]
    deadline: float
    total: int
    done: int = 0
    failed_in_a_row: int = 0
    saved_at: float = -math.inf

    def save(self) -> None:
        self.write(self.record.table())
        self.saved_at = self.clock()

    def prepared(self, make: Callable[..., Job], *arguments: object) -> Job | None:
        """The job, or None and a failure on record where what it builds on is missing."""
        if self.clock() >= self.deadline:
            return None
        try:
            return make(*arguments)
        except ProfileError as error:
            self.failed("pair " + " ".join(map(str, arguments[3:])), str(error))
            return None

    def failed(self, label: str, error: str) -> None:
        self.record.failures[label] = error
        self.done += 1
        self.progress(self.done, self.total, f"failed: {label}: {error}")

    def work(self, jobs: Sequence[Job]) -> None:
        for batch in _batches(jobs):
            if self.clock() >= self.deadline:
                return
            programs = list(dict.fromkeys(p for job in batch for p in job.programs))
            self.progress(self.done, self.total, f"compiling {len(programs)} programs, first {programs[0]}")
            errors = self.record.machine.compile(programs)
            for job in batch:
                if self.clock() >= self.deadline:
                    break
                broken = [f"{p}: {errors[p]}" for p in job.programs if p in errors]
                if broken:
                    self.failed(job.label, f"does not compile: {'; '.join(broken)}")
                    continue
                self._measure(job)
                if self.clock() - self.saved_at >= SAVE_S:
                    self.save()
            self.save()

    def _measure(self, job: Job) -> None:
        self.progress(self.done, self.total, job.label)
        try:
            job.measure()
        except ProfileError as error:
            self.failed(job.label, str(error))
        except Exception as error:  # a point that fails is a result, not the end of the others
            self.failed_in_a_row += 1
            self.failed(job.label, f"{type(error).__name__}: {error}"[:500])
            if self.failed_in_a_row >= FAILURES_IN_A_ROW:
                self.save()
                raise ProfileError(f"{FAILURES_IN_A_ROW} measurements in a row failed, the last with {error}") from error
        else:
            self.failed_in_a_row = 0
            self.record.failures.pop(job.label, None)
            self.done += 1


def _batches(jobs: Sequence[Job]) -> Iterator[list[Job]]:
    """Jobs in order, as many at a time as need BATCH programs."""
    batch: list[Job] = []
    for job in jobs:
        batch.append(job)
        if len({p for j in batch for p in j.programs}) >= BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _alone_job(record: Record, request: Request) -> Job:
    program, load = request.program, request.load

    def measure() -> None:
        record.add(program, load, record.machine.time(program, load, burst=request.full, energy=request.energy))

    context = f", {load.context:g} keys" if load.context else ""
    return Job(f"{program}{context}", (program,), measure)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Gemms:
    """The GEMMs of a pair's phase: `calls` times `on`, which take `whole_us` together on the whole device."""

    on: Alone
    calls: int
    whole_us: float


def _pair_job(record: Record, b_dense: int, contexts: Sequence[int], gemm: Kernel, other: Kernel, sms: int) -> Job:
    """The amount of the other kernel is fitted so that both sides end together: the sum of what both keep is largest there.

    Raises:
      ProfileError: times alone that the fit starts from are missing.
    """
    table, rows = record.table(), max(b_dense // 2 // TILE, 1) * TILE
    gemm_us = lookup(table, gemm, rows).time_us
    calls = min(max(round(PHASE_US / gemm_us), 1), MOST_CALLS)
    on = Alone(kernel=gemm, tokens=rows, num_sms=record.machine.num_sms - sms)
    gemms = _Gemms(on=on, calls=calls, whole_us=calls * gemm_us)
    if is_collective(other):
        return _network_pair(record, table, gemms, other, sms, b_dense)
    return _memory_pair(record, table, gemms, pair_attention(other, b_dense, contexts, sms))


def _memory_pair(record: Record, table: ProfileTable, gemms: _Gemms, beside: Alone) -> Job:
    machine, rows, keys = record.machine, beside.tokens, float(beside.max_context)
    whole = dataclasses.replace(beside, num_sms=machine.num_sms)
    pair = Together(gemm=gemms.on, calls=gemms.calls, other=beside)
    row_us = lookup(table, beside.kernel, rows, num_sms=beside.num_sms, context=keys).time_us / rows
    row_us_whole = lookup(table, beside.kernel, rows, context=keys).time_us / rows

    def measure() -> None:
        # Attention without a single key is the GEMM alone on its SMs.
        budgeted = machine.time(pair, Load(context=keys, rows=0))
        record.add(gemms.on, Load(), Reading(time_us=budgeted.time_us / gemms.calls))
        if budgeted.time_us > 1.1 * rows * row_us:
            raise ProfileError(f"{rows} rows of {keys:g} keys end before the GEMMs do: profile with a longer context")
        tried: dict[int, tuple[float, float]] = {}  # rows -> sum of the speeds that both keep, time

        def attempt(amount: float) -> None:
            held = min(max(round(amount), 1), rows)
            if held not in tried:
                time_us = machine.time(pair, Load(context=keys, rows=held)).time_us
                tried[held] = (gemms.whole_us + held * row_us_whole) / time_us, time_us

        for fit in ATTENTION_FITS:
            attempt(fit * budgeted.time_us / row_us)
        best_two = sorted(tried, key=lambda held: tried[held], reverse=True)[:2]
        attempt(sum(best_two) / len(best_two))
        held = max(tried, key=lambda held: tried[held])
        load = Load(context=keys, rows=held)
        record.pairs.append(together(pair, load, tried[held][1], gemms.whole_us, machine.time(whole, load).time_us))

    return Job(str(pair), (pair, whole), measure)


def _network_pair(
    record: Record, table: ProfileTable, gemms: _Gemms, other: Kernel, sms: int, b_dense: int
) -> Job:  # fmt: skip
    # Time is a latency and so much per token.
    small, large = (lookup(table, other, t).time_us for t in (b_dense // 2, b_dense))
    per_token = (large - small) / (b_dense - b_dense // 2)
    if per_token <= 0:
        raise ProfileError(f"{other} takes {small} us for half of the tokens and {large} us for all")
    target = gemms.calls * lookup(table, gemms.on.kernel, gemms.on.tokens, num_sms=gemms.on.num_sms).time_us
    fits = [b_dense + (f * target - large) / per_token for f in NETWORK_FITS]
    amounts = sorted({min(max(round(t / TILE), 1) * TILE, 8 * b_dense) for t in fits})
    alone = [Alone(kernel=other, tokens=t, num_sms=MAX_CHANNELS) for t in amounts]
    pairs = [Together(gemm=gemms.on, calls=gemms.calls, other=dataclasses.replace(a, num_sms=sms)) for a in alone]
    machine = record.machine

    def measure() -> None:
        tried = []
        for program, pair in zip(alone, pairs, strict=True):
            other_us, time_us = machine.time(program, Load()).time_us, machine.time(pair, Load()).time_us
            tried.append(((gemms.whole_us + other_us) / time_us, pair, time_us, other_us))
        _, pair, time_us, other_us = max(tried, key=lambda t: t[0])
        record.pairs.append(together(pair, Load(), time_us, gemms.whole_us, other_us))

    return Job(str(pairs[0]), (*pairs, *alone), measure)


@dataclasses.dataclass
class _Lines:
    """Progress as lines on standard output: what is compiled, each kernel begun, and failures."""

    begun: float = dataclasses.field(default_factory=time.monotonic)
    last: str = ""

    def __call__(self, done: int, total: int, what: str) -> None:
        kind = what.split(" of ")[0] if not what.startswith(("failed", "compiling")) else what
        if kind != self.last:
            print(f"{100 * done // max(total, 1):3d} %  {time.monotonic() - self.begun:4.0f} s  {kind}", flush=True)
            self.last = kind


def profile_command(
    model: ModelConfig, device: Hardware, tp: int, b_dense: int, contexts: Sequence[int], out: Path, time_limit_s: float
) -> None:
    """`python -m search profile`: measures on the GPUs at hand and prints a JSON line.

    Raises:
      ProfileError: no GPUs, a package of the cuda extra is missing, sizes out of range, or as `measure_profile`.
    """
    begun = time.monotonic()
    if b_dense < 2 * TILE or b_dense % TILE:
        raise ProfileError(f"--b-dense {b_dense} is not a multiple of {TILE} of at least {2 * TILE}")
    if min(contexts) < TILE:
        raise ProfileError(f"--context {min(contexts)} is less than {TILE}")
    known = profile_table.decode(out.read_bytes()) if out.exists() else None
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        from search.profiler import GpuMachine

        machine = GpuMachine(tp, device.power.idle_w if device.power else None)
    except ModuleNotFoundError as error:
        raise ProfileError(f"profiling needs the cuda extra of this package: {error}") from error
    left_s = time_limit_s - (time.monotonic() - begun)
    outcome = measure_profile(
        model, device, tp, b_dense, contexts, machine, known, lambda t: _write(out, t), _Lines(begun), time_limit_s=left_s
    )
    table = outcome.table
    record = {
        "model": model.name, "hardware": device.name, "tp": tp, "points": sum(len(s.points) for s in table.series),
        "pairs": len(table.pairs), "failures": len(table.failures), "left": outcome.left,
        "seconds": round(time.monotonic() - begun, 1), "out": str(out),
    }  # fmt: skip
    print(json.dumps(record))


def _write(path: Path, table: ProfileTable) -> None:
    """Replaces the file in one step, so that an interrupted run leaves a whole one."""
    part = path.with_suffix(path.suffix + ".part")
    part.write_bytes(profile_table.encode(table))
    part.replace(path)
