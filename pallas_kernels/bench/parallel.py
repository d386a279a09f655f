"""Compiles on all cores, measures one at a time: hundreds of kernels take far longer to compile than to time."""

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from multiprocessing.connection import Connection
from typing import Any


def run(
    jobs: Sequence[Any],
    prepare: Callable[[Any, AbstractContextManager[Any]], Any],
    measure: Callable[[Any, Any], Any],
    *,
    workers: int,
    compile_seconds: float = 600.0,
    job_seconds: float = 60.0,
) -> Iterator[tuple[Any, Any]]:
    """Yields each job, in order, with `measure(job, prepare(job, quiet))`, or with the exception of a job that failed.

    Preparation runs in `workers` processes at once and stops after `compile_seconds`; jobs not prepared by then are left out.
    One of them at a time can hold `quiet`, for what times things itself. Measuring starts when all are done, one job at a time,
    with every other process asleep: what runs beside disturbs launches. A job that measures for over `job_seconds` fails, and
    with it what its process had yet to measure.
    """
    context = multiprocessing.get_context("spawn")
    workers = min(workers, len(jobs))
    pipes, processes = [], []
    quiet = context.Lock()
    deadline = time.time() + compile_seconds
    for w in range(workers):
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, jobs[w::workers], prepare, measure, quiet, deadline), daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    try:
        prepared = [pipe.recv() for pipe in pipes]
        for index, job in enumerate(jobs):
            worker, position = index % workers, index // workers
            if position >= prepared[worker]:
                continue
            pipes[worker].send(position)
            if pipes[worker].poll(job_seconds):
                yield job, pipes[worker].recv()
            else:
                processes[worker].kill()
                prepared[worker] = 0
                yield job, TimeoutError(f"no result in {job_seconds:.0f} s")
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _work(
    pipe: Connection,
    jobs: Sequence[Any],
    prepare: Callable[[Any, AbstractContextManager[Any]], Any],
    measure: Callable[[Any, Any], Any],
    quiet: AbstractContextManager[Any],
    deadline: float,
) -> None:
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # the workers share one device: none may take all of its memory
    prepared = []
    for job in jobs:
        if time.time() > deadline:
            break
        prepared.append(_caught(prepare, job, quiet))
    pipe.send(len(prepared))
    while True:
        position = pipe.recv()
        ready = prepared[position]
        pipe.send(ready if isinstance(ready, Exception) else _caught(measure, jobs[position], ready))


def _caught(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except Exception as error:  # one job's failure is its result, not the end of the others
        return RuntimeError(f"{type(error).__name__}: {str(error)[:500]}")
