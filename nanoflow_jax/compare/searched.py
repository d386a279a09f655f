"""Asks the search, a program of its own, for a plan and for the optimal throughput."""

import json
import subprocess
import sys
from pathlib import Path

from nanoflow_jax.workload import Workload


class SearchError(RuntimeError):
    """The search refused; the message is its own."""


def find_plan(
    model: str, hardware: str, tp: int, b_dense: int, workload: Workload, *, profile: str, shares: str, out: Path
) -> bytes:
    """The plan of `python -m search plan` as JSON; it also lies at `out`.

    Raises:
      SearchError: unknown hardware, infeasible batch, a profile that does not fit.
    """
    _search("plan", model, hardware, tp, b_dense, workload, "--profile", profile, "--shares", shares, "--out", str(out))
    return out.read_bytes()


def optimal_throughput(model: str, hardware: str, tp: int, b_dense: int, workload: Workload) -> tuple[float, str]:
    """Compute / 2P in tokens/s per GPU (paper, section 3.5), and which compute rate that uses.

    The rate measured on sustained GEMMs where the hardware table has one, the datasheet's elsewhere.

    Raises:
      SearchError: as `find_plan`.
    """
    found = json.loads(_search("cost", model, hardware, tp, b_dense, workload).splitlines()[-1])
    if found["optimal_measured"] is not None:
        return found["optimal_measured"], "measured sustained GEMM rate"
    return found["optimal_datasheet"], "datasheet rate"


def _search(command: str, model: str, hardware: str, tp: int, b_dense: int, workload: Workload, *options: str) -> str:
    line = [
        sys.executable, "-m", "search", command, "--model", model, "--hardware", hardware, "--tp", str(tp),
        "--b-dense", str(b_dense), "--workload", str(workload), *options,
    ]  # fmt: skip
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise SearchError(f"search {command}: {last[0].removeprefix('error: ')}")
    return done.stdout
