"""What scheduling costs the host: `python -m nanoflow_jax.runtime.bench --sequences 1024 --b-dense 2048`.

The engine runs as always, over a device that takes no time: forming a batch, packing it for the upload and consuming its tokens
are all that is left. Reported are full steps in which prompts still wait, the busiest there are: percentiles over steps of the
thread's own processor time, which other processes on the machine do not change much. The last line is one JSON object.
"""

import argparse
import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape, pack
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import PlanSet
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.request import Request, SamplingParams

_PERCENTILES = (50, 90, 99)


class NullRunner:
    """A device that takes no time: answers each row of every batch with the same token.

    Attributes:
      launched: called with each batch and the index of its plan.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        shapes: tuple[BatchShape, ...],
        max_sequences: int,
        page_size: int,
        num_pages: int,
        launched: Callable[[Batch, int | None], None],
        plans: PlanSet | None = None,
    ) -> None:
        self.config = config
        self.shapes = shapes
        self.pages_per_seq = shapes[-1].pages_per_seq
        self.max_context = config.max_context
        self.max_sequences = max_sequences
        self.page_size = page_size
        self.num_pages = num_pages
        self.num_compilations = 0
        self.plan_set = plans
        self.launched = launched

    def launch(self, batch: Batch, *, num_logprobs: int = 0, plan: int | None = None, offload: bool = False) -> SimpleNamespace:
        self.launched(batch, plan)
        token_ids = np.full(batch.shape.num_rows, 7, np.int32)
        result = SimpleNamespace(
            token_ids=token_ids, logprobs=np.zeros(token_ids.size, np.float32), top_ids=None, top_logprobs=None
        )
        return SimpleNamespace(result=lambda: result)


def measure(*, sequences: int, b_dense: int, context: int, page_size: int, steps: int, stream: bool) -> np.ndarray:
    """float64[steps, 2]: processor seconds of the whole step and of packing, in full steps with a waiting queue."""
    config = ModelConfig(
        name="none", vocab_size=32000, d_model=2, d_ff=2, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
        max_context=context, eos_token_ids=(2,),
    )  # fmt: skip
    num_pages = 1 + sequences * 1024 // page_size
    pack_s = 0.0

    def timed_pack(batch: Batch, plan: int | None) -> None:
        nonlocal pack_s
        start = time.thread_time()
        pack(batch)
        pack_s = time.thread_time() - start

    runner = NullRunner(
        config,
        shapes=(BatchShape(b_dense, sequences, -(-context // page_size)),),
        max_sequences=sequences,
        page_size=page_size,
        num_pages=num_pages,
        launched=timed_pack,
    )
    engine = Engine(runner)
    rng = np.random.default_rng(0)
    rows, added = [], 0
    while len(rows) < steps:
        while len(engine.batcher.admission.waiting) < 64:
            params = SamplingParams(max_tokens=int(rng.integers(200, 800)), ignore_eos=bool(added % 2))
            prompt = rng.integers(3, 32000, 512)
            engine.add(Request(request_id=str(added), prompt_token_ids=prompt, params=params, stream=stream))  # pyright: ignore
            added += 1
        before = engine.batcher.table.num_running
        start = time.thread_time()
        engine.step()
        seconds = time.thread_time() - start
        if before >= 0.95 * sequences:
            rows.append((seconds, pack_s))
    return np.array(rows)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m nanoflow_jax.runtime.bench", description="Host time of a step.")
    parser.add_argument("--sequences", type=int, default=1024, help="running at once (default %(default)s)")
    parser.add_argument("--b-dense", type=int, default=2048, help="tokens per step (default %(default)s)")
    parser.add_argument("--context", type=int, default=8192, help="of the model, sets the block tables' width (%(default)s)")
    parser.add_argument("--page-size", type=int, default=16, help="tokens per KV page (default %(default)s)")
    parser.add_argument("--steps", type=int, default=500, help="steps to measure (default %(default)s)")
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        if value < 1:
            parser.error(f"--{name.replace('_', '-')} {value} must be at least 1")
    if args.sequences > args.b_dense:
        parser.error(f"--sequences {args.sequences} exceeds --b-dense {args.b_dense}; each takes a token of every step")
    if args.context < 1312:
        parser.error(f"--context {args.context} must hold the load's longest request, 512 tokens in and 800 out")
    report: dict = {**vars(args), "milliseconds": {}}
    print(f"{'':<10}" + "".join(f"{f'p{p} ms':>10}" for p in _PERCENTILES) + f"{'packing':>10}")
    for stream in (False, True):
        rows = measure(**vars(args), stream=stream)
        name = "streamed" if stream else "whole"
        values = [1e3 * float(value) for value in np.percentile(rows[:, 0], _PERCENTILES)]
        packing = 1e3 * float(np.median(rows[:, 1]))
        print(f"{name:<10}" + "".join(f"{value:>10.3f}" for value in (*values, packing)))
        report["milliseconds"][name] = {
            **{f"p{p}": v for p, v in zip(_PERCENTILES, values, strict=True)},
            "packing_p50": packing,
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
