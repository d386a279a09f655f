"""What each step of a benchmark computed and took, and rates over many of them."""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

from nanoflow_jax.runtime.engine import EngineStats

HOST_PARTS = ("form_s", "launch_s", "consume_s", "wait_s")
_QUARTERS = 4


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One call of `Engine.step`: the step whose results it read, and where the call's time went.

    `prompt_tokens` and `decode_tokens` are what that step computed, `output_tokens` what came out: a prompt's last chunk gives
    the first token of its output. `planned` says whether it was executed by a plan.
    """

    prompt_tokens: int
    decode_tokens: int
    planned: bool
    output_tokens: int
    waiting: int
    finished: int
    total_s: float
    form_s: float
    launch_s: float
    consume_s: float
    wait_s: float

    @property
    def read_a_step(self) -> bool:
        """False for the first call in asynchronous mode, which only launches."""
        return self.prompt_tokens + self.decode_tokens > 0


# By what a step computed.
KINDS: dict[str, Callable[[StepRecord], bool]] = {
    "prefill": lambda r: r.prompt_tokens > 0 and r.decode_tokens == 0,
    "mixed": lambda r: r.prompt_tokens > 0 and r.decode_tokens > 0,
    "decode": lambda r: r.prompt_tokens == 0 and r.decode_tokens > 0,
}


def summarise(records: list[StepRecord], stats: EngineStats) -> dict:
    """Rates and times of the whole run, the steady state and each kind of step, as a dictionary for JSON."""
    return {
        "whole": rates(records),
        "steady": rates(steady_state(records)),
        "by_kind": {name: rates(filter(is_kind, records)) for name, is_kind in KINDS.items()},
        "batch_fill": stats.batch_tokens / max(1, stats.padded_tokens),
        "preemptions": stats.preemptions,
        "num_pages": stats.num_pages,
        "b_dense": stats.b_dense,
        "num_compilations": stats.num_compilations,
    }


def steady_state(records: list[StepRecord]) -> list[StepRecord]:
    """From the first finished request to the last admission: the batch is as full as it gets. May be empty."""
    first = next((i for i, r in enumerate(records) if r.finished), len(records))
    last = max((i for i, r in enumerate(records) if r.waiting), default=-1)
    return records[first + 1 : last + 1]


def shares(records: Sequence[StepRecord], max_sequences: int) -> list[dict]:
    """Where the time goes: a row per kind of step and quarter of `max_sequences` that decode, those without steps left out."""
    rows = []
    for (kind, is_kind), quarter in itertools.product(KINDS.items(), range(_QUARTERS + 1)):
        members = [r for r in records if is_kind(r) and -(-_QUARTERS * r.decode_tokens // max_sequences) == quarter]
        if members:
            low, high = (max_sequences * q // _QUARTERS for q in (quarter - 1, quarter))
            rows.append(
                {
                    "kind": kind,
                    "decoding": f"{low + 1}-{high}" if quarter else "0",
                    "steps": len(members),
                    "planned": sum(r.planned for r in members),
                    "tokens": sum(r.prompt_tokens + r.decode_tokens for r in members),
                    "seconds": sum(r.total_s for r in members),
                }
            )
    return rows


def rates(records: Iterable[StepRecord]) -> dict | None:
    """Steps, seconds, tokens/s and the share of each part of the host's time; None without steps."""
    records = list(records)
    seconds = sum(r.total_s for r in records)
    if not seconds:
        return None
    parts = {part: sum(getattr(r, part) for r in records) for part in HOST_PARTS}
    prompt_tokens, output_tokens = sum(r.prompt_tokens for r in records), sum(r.output_tokens for r in records)
    return {
        "steps": len(records),
        "seconds": seconds,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "step_ms": 1e3 * seconds / len(records),
        **{part.replace("_s", "_ms"): 1e3 * value / len(records) for part, value in parts.items()},
        "scheduling_share": (parts["form_s"] + parts["consume_s"]) / seconds,
        "wait_share": parts["wait_s"] / seconds,
    }
