"""A runner whose "model" is a hash of what it reads through block tables: any wrong page, slot, position or token shows.

Each token leaves one number in a pool of slots, a function of the token, its position and, as in a model, all tokens before it
(by way of the number that the block table gives for the one before). A row's next token is a hash of the numbers that its
block table and kv_len lead to. `plain_decode` computes the same from a plain list of tokens.
"""

import copy
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable
from types import SimpleNamespace

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.runtime.request import SamplingParams

_PRIME = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def tiny_config(vocab_size: int = 97, max_context: int = 512, eos_token_ids: tuple[int, ...] = (1, 5)) -> ModelConfig:
    return ModelConfig(
        name="mock", vocab_size=vocab_size, d_model=4, d_ff=4, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=2,
        max_context=max_context, eos_token_ids=eos_token_ids,
    )  # fmt: skip


def _mix(x: int) -> int:
    x = (x ^ (x >> 31)) * _PRIME & _MASK
    return x ^ (x >> 29)


def _kv_values(tokens: Iterable[int], first_position: int, previous: int) -> list[int]:
    """Numbers of consecutive tokens; `previous` is that of the token before them, 0 at the start."""
    values = []
    for position, token in enumerate(tokens, first_position):
        previous = _mix(previous ^ (token + 1) * _PRIME + position * 0xD1B54A32D192ED03 & _MASK)
        values.append(previous)
    return values


def _next_token(kv: np.ndarray, temperature: float, seed: int, vocab_size: int) -> tuple[int, int]:
    """(token, hash) of a sequence whose cache holds `kv`, oldest first."""
    with np.errstate(over="ignore"):
        powers = np.cumprod(np.full(kv.size, 0x100000001B3, np.uint64))
        state = _mix(int((kv * powers).sum(dtype=np.uint64)))
    if temperature > 0:
        state = _mix(state ^ _mix(seed * 2 + 1 + (kv.size << 33)))
    return state % vocab_size, state


def plain_decode(config: ModelConfig, prompt, params: SamplingParams, *, pool_tokens: int = 1 << 30) -> list[int]:
    """The whole output by full recomputation, one sequence alone."""
    tokens = list(prompt)
    limit = min(params.max_tokens, config.max_context - len(tokens), pool_tokens + 1 - len(tokens))
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(config.eos_token_ids))
    output: list[int] = []
    kv = _kv_values(tokens, 0, 0)
    while len(output) < limit and not (output and output[-1] in stops):
        token, _ = _next_token(np.array(kv, np.uint64), params.temperature, params.seed or 0, config.vocab_size)
        kv += _kv_values([token], len(kv), kv[-1])
        output.append(token)
    return output


@dataclasses.dataclass
class MockResult:
    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class OnDevice:
    """Half of each token's number, once the step has run; whoever reads it waits for that, on any thread."""

    def __init__(self, runner: "MockRunner", group: int, num_tokens: int) -> None:
        self._runner, self._group = runner, group
        self._values: np.ndarray | None = None
        self._run = threading.Event()
        self.nbytes = 4 * num_tokens

    def set(self, numbers: np.ndarray) -> None:
        self._values = numbers.view(np.uint32).reshape(-1, 2)[:, self._group : self._group + 1].copy()
        self._run.set()

    def copy_to_host_async(self) -> None:
        self._runner.num_copies += 1

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        assert self._run.wait(30.0), "the step never ran"
        self._runner.before_copy()
        assert self._values is not None
        return self._values


class Staged:
    """Pages on their way to the device, which reads them as late as it may: when it is waited for."""

    def __init__(self, runner: "MockRunner", pages: np.ndarray) -> None:
        self._runner, self._source = runner, pages
        self.pages = np.zeros((0, 0), np.uint8)

    def block_until_ready(self) -> None:
        self._runner.before_copy()
        self.pages = self._source.copy()


class MockStep:
    def __init__(self, runner: "MockRunner", num_groups: int, num_tokens: int) -> None:
        self._runner = runner
        self._result: MockResult | None = None
        self.new_kv = tuple(OnDevice(runner, group, num_tokens) for group in range(num_groups))

    def set(self, result: MockResult, numbers: np.ndarray) -> None:
        self._result = result
        for array in self.new_kv:
            array.set(numbers)

    def result(self) -> MockResult:
        if self._runner.step_gate is not None:
            self._runner.gate_reached.set()
            self._runner.step_gate.wait()
        if self._runner.step_time_s:
            time.sleep(self._runner.step_time_s)
        self._runner.run_through(self)
        if self._runner.fail_result_at == self._runner.num_results:
            raise RuntimeError("the mock device was told to fail")
        self._runner.num_results += 1
        assert self._result is not None
        return self._result


class MockRunner:
    """`lazy` runs a step only when its result is read, as late as a device may; otherwise at launch, as early as it may."""

    def __init__(
        self,
        config: ModelConfig | None = None,
        *,
        b_dense: int = 16,
        max_sequences: int = 8,
        page_size: int = 4,
        num_pages: int = 33,
        max_context: int | None = None,
        lazy: bool = False,
        step_time_s: float = 0.0,
    ) -> None:
        self.config = config or tiny_config()
        self.max_context = min(max_context or self.config.max_context, self.config.max_context)
        self.page_size = page_size
        self.num_pages = num_pages
        self.max_sequences = min(max_sequences, b_dense)
        self.pages_per_seq = -(-self.max_context // page_size)
        sizes = sorted({max(1, b_dense // 4), max(1, b_dense // 2), b_dense})
        self.shapes = tuple(BatchShape(n, min(n, self.max_sequences), self.pages_per_seq) for n in sizes)
        self.num_compilations = len(self.shapes)
        self.plan_set = None
        self.lazy = lazy
        self.step_time_s = step_time_s
        self.step_gate: threading.Event | None = None
        self.gate_reached = threading.Event()
        self.fail_result_at = -1
        self.num_results = 0
        self.batches: list[Batch] = []
        self._pool = np.random.default_rng(0).integers(0, 1 << 63, num_pages * page_size, np.uint64)
        self._last_tokens = np.full(self.max_sequences, 7, np.int64)
        # Steps and writes of pages, in the order of launches.
        self._pending: list[tuple[Batch, int, MockStep] | tuple[Staged, np.ndarray]] = []
        self.page_format = SimpleNamespace(
            num_groups=2, page_bytes=8 * page_size, chunk_sizes=(1, 3), dtype=np.dtype(np.uint32), describe=lambda: "mock"
        )
        self.before_copy: Callable[[], None] = lambda: None
        self.num_copies = 0

    def warm_up(self, progress=None) -> None:
        pass

    def weights_checksum(self) -> str:
        return "mock"

    def transfer_memory(self, num_bytes: int) -> np.ndarray:
        return np.zeros(num_bytes, np.uint8)

    def stage_pages(self, pages: np.ndarray) -> Staged:
        assert len(pages) in self.page_format.chunk_sizes
        return Staged(self, pages)

    def write_pages(self, staged: Staged, page_ids: np.ndarray) -> None:
        assert 0 < page_ids.size <= len(staged.pages)
        assert (page_ids > 0).all(), "nobody owns the dummy page"
        self._pending.append((staged, page_ids.copy()))
        if not self.lazy:
            self._write_first_pages()

    def launch(self, batch: Batch, *, num_logprobs: int = 0, plan: int | None = None, offload: bool = False) -> MockStep:
        assert batch.shape in self.shapes
        step = MockStep(self, self.page_format.num_groups if offload else 0, batch.shape.num_tokens)
        batch = copy.deepcopy(batch)
        self.batches.append(batch)
        self._pending.append((batch, num_logprobs, step))
        if not self.lazy:
            self.run_through(step)
        return step

    def run_through(self, step: MockStep) -> None:
        """Runs launched steps in order up to `step`."""
        if all(step is not pending[-1] for pending in self._pending):
            return
        while True:
            self._write_first_pages()
            batch, num_logprobs, pending = self._pending.pop(0)  # pyright: ignore[reportAssignmentType]
            result, numbers = self._execute(batch, num_logprobs)
            pending.set(result, numbers)
            if pending is step:
                return

    def _write_first_pages(self) -> None:
        while self._pending and isinstance(self._pending[0][0], Staged):
            staged, page_ids = self._pending.pop(0)  # pyright: ignore[reportAssignmentType]
            halves = staged.pages.view(np.uint32).reshape(-1, 2, self.page_size)
            numbers = np.ascontiguousarray(halves.swapaxes(1, 2)).view(np.uint64)[:, :, 0]
            self._pool.reshape(-1, self.page_size)[page_ids] = numbers[: page_ids.size]

    def _execute(self, batch: Batch, num_logprobs: int) -> tuple[MockResult, np.ndarray]:
        """The results, and uint64[T], what each token left in the pool."""
        check_batch(batch, self.page_size)
        tokens = np.where(batch.token_rows >= 0, self._last_tokens[batch.token_rows], batch.token_ids)
        self._write_kv(batch, tokens)
        num_rows = batch.kv_lens.size
        token_ids = np.full(num_rows, -12345, np.int64)
        logprobs = np.zeros(num_rows, np.float32)
        states = [0] * num_rows
        for row in np.flatnonzero(batch.sequence_rows >= 0):
            positions = np.arange(batch.kv_lens[row])
            slots = batch.block_tables[row, positions // self.page_size] * self.page_size + positions % self.page_size
            token_ids[row], states[row] = _next_token(
                self._pool[slots], float(batch.temperature[row]), int(batch.seeds[row]), self.config.vocab_size
            )
            logprobs[row] = -float(states[row] % 1000) / 1000
        sampling = batch.sequence_rows >= 0
        self._last_tokens[batch.sequence_rows[sampling]] = token_ids[sampling]
        numbers = np.where(batch.slots >= 0, self._pool[batch.slots], 0)
        if not num_logprobs:
            return MockResult(token_ids, logprobs, None, None), numbers
        top = (token_ids[:, None] + np.arange(num_logprobs)) % self.config.vocab_size
        top_logprobs = logprobs[:, None] - np.arange(num_logprobs, dtype=np.float32)
        return MockResult(token_ids, logprobs, top, top_logprobs), numbers

    def _write_kv(self, batch: Batch, tokens: np.ndarray) -> None:
        for row in np.flatnonzero(batch.q_lens):
            span = slice(batch.q_starts[row], batch.q_starts[row] + batch.q_lens[row])
            first = int(batch.positions[span.start])
            page, offset = divmod(first - 1, self.page_size)
            previous = int(self._pool[batch.block_tables[row, page] * self.page_size + offset]) if first else 0
            self._pool[batch.slots[span]] = _kv_values(tokens[span].tolist(), first, previous)


def check_batch(batch: Batch, page_size: int) -> None:
    """The contract of `Batch`, beyond what the hash sees: order of rows, padding, one writer per slot, the dummy page."""
    num_decode = int(batch.num_decode)
    used = batch.q_lens > 0
    num_used = int(used.sum())
    assert used[:num_used].all(), "used rows come first"
    assert (batch.q_lens[:num_decode] == 1).all()
    assert (batch.token_rows[:num_decode] >= 0).all()
    assert (batch.token_rows[num_decode:] == -1).all()
    assert (batch.q_starts[:num_used] == np.cumsum(batch.q_lens[:num_used]) - batch.q_lens[:num_used]).all()
    num_tokens = int(batch.q_lens.sum())
    assert (batch.slots[:num_tokens] >= page_size).all(), "nobody owns the dummy page"
    assert (batch.slots[num_tokens:] == -1).all(), "padding writes nothing"
    assert np.unique(batch.slots[:num_tokens]).size == num_tokens
    for name, value in (("kv_lens", 0), ("sequence_rows", -1), ("temperature", 0), ("top_k", 0), ("top_p", 1), ("min_p", 0)):
        assert (getattr(batch, name)[num_used:] == value).all(), f"unused rows have neutral {name}"
    assert (batch.block_tables[num_used:] == 0).all()
    for row in range(num_used):
        start, length, kv_len = int(batch.q_starts[row]), int(batch.q_lens[row]), int(batch.kv_lens[row])
        positions = batch.positions[start : start + length]
        assert (positions == np.arange(kv_len - length, kv_len)).all()
        slots = batch.block_tables[row, positions // page_size] * page_size + positions % page_size
        assert (batch.slots[start : start + length] == slots).all()
        # A row owns the pages of its whole prompt from the start: used entries first, unused ones 0.
        owned = int(np.count_nonzero(batch.block_tables[row]))
        assert owned >= -(-kv_len // page_size)
        assert (batch.block_tables[row, :owned] > 0).all()
        assert np.unique(batch.block_tables[row, :owned]).size == owned, "a page is twice in a block table"
    holders = np.bincount(batch.block_tables[batch.block_tables > 0])
    assert (holders[batch.slots[batch.slots >= 0] // page_size] == 1).all(), "a page is written that two sequences hold"
    live = batch.sequence_rows[batch.sequence_rows >= 0]
    assert np.unique(live).size == live.size
