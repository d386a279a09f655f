"""The step loop: form and launch step i+1, then read the tokens of step i.

Tokens travel from step to step on the device, so the host never waits before it launches. What that costs is exact and small: a
request whose last token (EOS, stop string) is read in step i is in step i+1 once more, and that extra token is dropped.
"""

import secrets
import time
from typing import Any, Protocol

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape
from nanoflow_jax.config import ModelConfig
from nanoflow_jax.plan import PlanSet
from nanoflow_jax.runtime.batcher import Batcher, FormedStep
from nanoflow_jax.runtime.kv_load import WorthLoading, is_faster
from nanoflow_jax.runtime.kv_store import KVStore
from nanoflow_jax.runtime.kv_tiers import KVTiers
from nanoflow_jax.runtime.request import (
    FinishReason,
    Limits,
    Request,
    RequestEvent,
    Timing,
    TokenLogprobs,
    Usage,
    validate,
)
from nanoflow_jax.runtime.sequences import Sequence
from nanoflow_jax.runtime.stats import EngineStats
from nanoflow_jax.runtime.text import TextStream
from nanoflow_jax.tokenizer import Tokenizer

# Longest sleep while loads are all there is to do: new requests and cancels are noticed after it.
_LOAD_WAIT_S = 0.005


class Runner(Protocol):
    """What the engine needs of `executor.runner.ModelRunner`; see there. `shapes` ascend, the last has B_dense tokens."""

    config: ModelConfig
    shapes: tuple[BatchShape, ...]
    num_pages: int
    page_size: int
    pages_per_seq: int
    max_context: int
    max_sequences: int
    num_compilations: int
    plan_set: PlanSet | None

    def launch(self, batch: Batch, *, num_logprobs: int = 0, plan: int | None = None, offload: bool = False) -> Any: ...


class Engine:
    """Requests in, events out, one step at a time. Not thread-safe; `EngineService` puts a thread around it."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        *,
        sync: bool = False,
        prefix_cache: bool = True,
        kv_store: KVStore | None = None,
        worth_loading: WorthLoading = is_faster,
    ) -> None:
        """A fresh engine with an empty pool.

        Args:
          sync: consume each step before the next is formed: the same tokens, without overlap of host and device.
          prefix_cache: reuse K and V of prompts that begin alike, and of conversations.
          kv_store: memory tiers for what the pool cannot keep. The engine owns the store; `close` closes it. The runner must
            have been compiled with offload.
          worth_loading: given seconds that a load and computing instead are expected to take, whether to load.

        Raises:
          ValueError: a store without prefix cache.
        """
        if kv_store is not None and not prefix_cache:
            raise ValueError("memory tiers need the prefix cache: it is how their pages are found")
        self.runner = runner
        self.tokenizer = tokenizer
        self.sync = sync
        self.limits = Limits(
            vocab_size=runner.config.vocab_size,
            max_context=runner.max_context,
            pool_tokens=(runner.num_pages - 1) * runner.page_size,
            has_tokenizer=tokenizer is not None,
        )
        num_rows = min(runner.max_sequences, runner.shapes[-1].num_rows)
        self.tiers = None if kv_store is None else KVTiers(runner, kv_store, num_rows=num_rows, worth=worth_loading)
        self.batcher = Batcher(
            runner.shapes,
            num_pages=runner.num_pages,
            page_size=runner.page_size,
            max_sequences=runner.max_sequences,
            max_length=runner.max_context,
            num_eos=len(runner.config.eos_token_ids),
            prefix_cache=prefix_cache,
            plans=runner.plan_set,
            loads=self.tiers.loads if self.tiers else None,
        )
        self._in_flight: tuple[FormedStep, Any] | None = None
        self._launched_s = 0.0
        self._sequences: dict[str, Sequence] = {}
        self._num_arrivals = 0
        self._counts = dict.fromkeys(
            (
                "steps",
                "planned_steps",
                "batch_tokens",
                "padded_tokens",
                "prompt_tokens",
                "prefill_tokens",
                "output_tokens",
                "dropped_tokens",
            ),
            0,
        )
        self._seconds = dict.fromkeys(("form_s", "launch_s", "consume_s", "wait_s"), 0.0)
        self._finished = {reason.value: 0 for reason in FinishReason}

    @property
    def busy(self) -> bool:
        """A call of `step` would do something."""
        return bool(self._sequences) or self._in_flight is not None

    @property
    def num_running(self) -> int:
        """Requests that have been admitted and not ended."""
        return len(self._sequences) - len(self.batcher.admission.waiting)

    def add(self, request: Request, *, prompt: np.ndarray | None = None, submitted_s: float | None = None) -> None:
        """Queues a request. The caller keeps ids unique.

        Args:
          prompt: what `validate` returned, for a caller that has validated it already.
          submitted_s: `time.perf_counter()` when it came, if that was earlier.

        Raises:
          RequestRejected: see `request.validate`.
        """
        prompt = validate(request, self.limits) if prompt is None else prompt
        assert request.request_id not in self._sequences, f"{request.request_id=} is in use"
        params = request.params
        eos = () if params.ignore_eos else self.runner.config.eos_token_ids
        has_text = self.tokenizer is not None and (request.stream or bool(params.stop))
        sequence = Sequence(
            request=request,
            arrival=self._num_arrivals,
            num_prompt_tokens=prompt.size,
            final_length=prompt.size + self.limits.output_limit(prompt.size, params.max_tokens),
            stop_ids=(*eos, *params.stop_token_ids),
            seed=secrets.randbits(32) if params.seed is None else params.seed,
            tokens=prompt,
            text=TextStream(self.tokenizer, params.stop) if has_text and self.tokenizer else None,
            submitted_s=time.perf_counter() if submitted_s is None else submitted_s,
            logprobs=None if params.logprobs is None else [],
        )
        self._num_arrivals += 1
        self._sequences[request.request_id] = sequence
        self.batcher.add(sequence)

    def cancel(
        self, request_id: str, reason: FinishReason = FinishReason.CANCELLED, error: str | None = None
    ) -> RequestEvent | None:
        """Ends a request wherever it is and returns its last event; None if it is not open."""
        sequence = self._sequences.get(request_id)
        return None if sequence is None else self._finish(sequence, reason, error=error)

    def step(self) -> list[RequestEvent]:
        """Launches the next step, consumes the one before it (with `sync`, the same one), and returns what became known."""
        launched = self._launch()
        consumed = launched if self.sync else self._in_flight
        self._in_flight = None if self.sync else launched
        events = self._consume(consumed) if consumed else []
        if self.tiers is not None and launched is not None:
            formed, handle = launched
            self.tiers.take(formed, handle.new_kv, self.batcher.table)  # the ids of its tokens are known from here on
        elif self.tiers is not None and consumed is None and self._sequences:
            self.tiers.loads.wait(_LOAD_WAIT_S)  # nothing to run until a load comes
        return events

    def clear_prefix_cache(self) -> None:
        """Forgets what the pool caches and nobody uses. The memory tiers keep what they have."""
        self.batcher.cache.clear()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Cancels what is open and closes the memory tiers, if any: what is in host memory goes to SSD.

        False if that took longer. The engine is of no use afterwards.
        """
        for request_id in list(self._sequences):
            self.cancel(request_id)
        return self.tiers is None or self.tiers.close(timeout_s)

    def stats(self) -> EngineStats:
        return EngineStats(
            **self._counts,
            **self._seconds,
            finished=dict(self._finished),
            preemptions=self.batcher.num_preemptions,
            waiting=len(self.batcher.admission.waiting),
            running=self.batcher.table.num_running,
            num_pages=self.batcher.cache.num_pages,
            free_pages=self.batcher.cache.num_available,
            prefix_hits=self.batcher.admission.num_prefix_hits,
            prefix_misses=self.batcher.admission.num_prefix_misses,
            reused_tokens=self.batcher.admission.num_reused_tokens,
            cached_pages=self.batcher.cache.num_cached,
            evicted_pages=self.batcher.cache.num_evicted,
            kept_sessions=self.batcher.cache.num_sessions,
            b_dense=self.batcher.b_dense,
            num_compilations=self.runner.num_compilations,
            kv_tiers=self.tiers.stats() if self.tiers else None,
        )

    def _launch(self) -> tuple[FormedStep, Any] | None:
        start = self._launched_s = time.perf_counter()
        formed = self.batcher.form()
        middle = time.perf_counter()
        self._seconds["form_s"] += middle - start
        if formed is None:
            return None
        handle = self.runner.launch(
            formed.batch, num_logprobs=formed.num_logprobs, plan=formed.plan, offload=self.tiers is not None
        )
        self._seconds["launch_s"] += time.perf_counter() - middle
        self._counts["steps"] += 1
        self._counts["planned_steps"] += formed.plan is not None
        self._counts["batch_tokens"] += formed.num_tokens
        self._counts["padded_tokens"] += formed.batch.shape.num_tokens
        self._counts["prefill_tokens"] += formed.num_prefill_tokens
        return formed, handle

    def _consume(self, launched: tuple[FormedStep, Any]) -> list[RequestEvent]:
        """Reads a step's tokens and hands them to their sequences."""
        formed, handle = launched
        start = time.perf_counter()
        result = handle.result()
        now = time.perf_counter()
        self._seconds["wait_s"] += now - start
        if self.tiers is not None and formed.num_prefill_tokens:
            self.tiers.loads.note_step(formed.num_tokens, now - self._launched_s)

        table = self.batcher.table
        token_ids = result.token_ids[formed.batch_rows]
        in_place = table.sequences[formed.rows] == formed.sequences
        rows, new_ids = formed.rows[in_place], token_ids[in_place]
        first = table.known[rows] == table.prompt_len[rows]
        table.tokens[rows, table.known[rows]] = new_ids
        table.known[rows] += 1
        stops = (table.stop_ids[rows] == new_ids[:, None]).any(axis=1)
        full = table.known[rows] >= table.final_len[rows]
        self._counts["output_tokens"] += rows.size

        events = []
        samples = np.flatnonzero(in_place)
        for i in np.flatnonzero(table.attended[rows] | stops | full | first):
            sequence: Sequence = formed.sequences[samples[i]]  # pyright: ignore[reportAssignmentType]
            if first[i]:
                self._note_first_token(sequence, now)
            events += self._deliver(sequence, formed, result, int(samples[i]), bool(stops[i]), bool(full[i]))
        for i in np.flatnonzero(~in_place):
            events += self._consume_displaced(formed, result, int(i), now)
        self._seconds["consume_s"] += time.perf_counter() - now
        return events

    def _consume_displaced(self, formed: FormedStep, result: Any, sample: int, now: float) -> list[RequestEvent]:
        """A token whose sequence left its row after the launch: dropped if it ended, kept if it was preempted."""
        sequence: Sequence = formed.sequences[sample]
        if sequence.finished:
            self._counts["dropped_tokens"] += 1
            return []
        token_id = result.token_ids[formed.batch_rows[sample]]
        if sequence.tokens.size == sequence.num_prompt_tokens:
            self._note_first_token(sequence, now)
        sequence.tokens = np.append(sequence.tokens, token_id)
        self._counts["output_tokens"] += 1
        full = sequence.tokens.size >= sequence.final_length
        return self._deliver(sequence, formed, result, sample, int(token_id) in sequence.stop_ids, full)

    def _note_first_token(self, sequence: Sequence, now: float) -> None:
        sequence.first_token_s = now
        self._counts["prompt_tokens"] += sequence.num_prompt_tokens

    def _deliver(
        self, sequence: Sequence, formed: FormedStep, result: Any, sample: int, stop_token: bool, full: bool
    ) -> list[RequestEvent]:
        """The event, if any, that one new token causes. A failure here ends this request and no other."""
        batch_row = formed.batch_rows[sample]
        token_id = int(result.token_ids[batch_row])
        sequence.stopped_by_token = stop_token
        try:
            if sequence.logprobs is not None:
                sequence.logprobs.append(_token_logprobs(result, batch_row, sequence.request.params.logprobs or 0))
            delta = sequence.text.push(token_id) if sequence.text and not stop_token else ""
            sequence.undelivered_ids.append(token_id)
            sequence.undelivered_text += delta
        except Exception as error:  # the tokenizer's, for this output
            return [self._finish(sequence, FinishReason.ERROR, error=_describe(error))]
        if stop_token or (sequence.text and sequence.text.stopped):
            return [self._finish(sequence, FinishReason.STOP)]
        if full:
            return [self._finish(sequence, FinishReason.LENGTH)]
        return [self._news(sequence)] if sequence.request.stream else []

    def _news(self, sequence: Sequence, **last: Any) -> RequestEvent:
        """An event with everything not delivered yet."""
        event = RequestEvent(
            request_id=sequence.request.request_id,
            token_ids=sequence.undelivered_ids,
            text=sequence.undelivered_text,
            logprobs=sequence.logprobs,
            **last,
        )
        sequence.undelivered_ids = []
        sequence.undelivered_text = ""
        sequence.logprobs = None if sequence.logprobs is None else []
        return event

    def _finish(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> RequestEvent:
        """Takes the request out of the engine and returns its last event."""
        self.batcher.remove(sequence)
        output_ids = sequence.tokens[sequence.num_prompt_tokens :].tolist()
        if not sequence.request.stream:
            sequence.undelivered_ids = output_ids
        try:
            sequence.undelivered_text += self._last_text(sequence, output_ids)
        except Exception as failure:  # the tokenizer's, for this output
            reason, error = FinishReason.ERROR, error or _describe(failure)
        sequence.finished = True
        del self._sequences[sequence.request.request_id]
        self._finished[reason.value] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not sequence.request.params.ignore_eos:
            self.batcher.admission.output_lengths.record(len(output_ids))
        submitted = sequence.submitted_s
        return self._news(
            sequence,
            finish_reason=reason,
            error=error,
            usage=Usage(sequence.num_prompt_tokens, len(output_ids), sequence.cached_tokens),
            timing=Timing(
                admitted_s=None if sequence.admitted_s is None else sequence.admitted_s - submitted,
                first_token_s=None if sequence.first_token_s is None else sequence.first_token_s - submitted,
                finished_s=time.perf_counter() - submitted,
            ),
        )

    def _last_text(self, sequence: Sequence, output_ids: list[int]) -> str:
        """What the end of the output adds to its text: what was held back, or all of it if nobody watched the text grow."""
        if sequence.text is not None:
            return sequence.text.flush()
        if self.tokenizer is None or sequence.request.stream:
            return ""
        return self.tokenizer.decode(output_ids[:-1] if sequence.stopped_by_token else output_ids)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _token_logprobs(result: Any, batch_row: int, num_top: int) -> TokenLogprobs:
    top = []
    if num_top:
        ids, logprobs = result.top_ids[batch_row, :num_top], result.top_logprobs[batch_row, :num_top]
        top = list(zip(ids.tolist(), logprobs.tolist(), strict=True))
    return TokenLogprobs(int(result.token_ids[batch_row]), float(result.logprobs[batch_row]), top)
