"""Continuous batching with a constant dense batch: who runs, which pages they own, and what the next step computes.

Decoding sequences come first, one token each; chunks of prompts fill the rest of the dense batch, in order of arrival. A
request is admitted (see `admission`) with the pages of its whole prompt at once, so that only decoding ever asks for more. If
that fails after all, the youngest sequence gives up its pages and is computed again, from what is still cached of it.
"""

import dataclasses

import numpy as np

from nanoflow_jax.batch import Batch, BatchShape, empty_batch
from nanoflow_jax.plan import PlanSet
from nanoflow_jax.runtime.admission import Admission
from nanoflow_jax.runtime.kv_load import Loads
from nanoflow_jax.runtime.plan_choice import choose_plan
from nanoflow_jax.runtime.prefix_cache import PrefixCache, SessionKey, extend_digests
from nanoflow_jax.runtime.sequences import Phase, Sequence, SequenceTable


@dataclasses.dataclass(frozen=True)
class FormedStep:
    """A batch to launch, and whom its samples belong to: sample `batch_rows[i]` is the next token of `sequences[i]`, which sat
    in table row `rows[i]` when the batch was formed. `plan` is the index of the plan to execute it by, None if sequentially.

    Row i of the batch computes tokens of `members[i]`, in table row `member_rows[i]`.
    """

    batch: Batch
    num_tokens: int
    num_prefill_tokens: int
    batch_rows: np.ndarray
    rows: np.ndarray
    sequences: np.ndarray
    member_rows: np.ndarray
    members: np.ndarray
    num_logprobs: int
    plan: int | None


class Batcher:
    """Host state of scheduling. Nothing here knows about the device."""

    def __init__(
        self,
        shapes: tuple[BatchShape, ...],
        *,
        num_pages: int,
        page_size: int,
        max_sequences: int,
        max_length: int,
        num_eos: int,
        prefix_cache: bool = True,
        plans: PlanSet | None = None,
        loads: Loads | None = None,
    ) -> None:
        largest = shapes[-1]
        if any((a.num_rows, a.pages_per_seq) > (largest.num_rows, largest.pages_per_seq) for a in shapes):
            raise ValueError(f"the last of {shapes=} must hold what any other holds")
        self.shapes = shapes
        self.plans = plans
        self.b_dense = largest.num_tokens
        self.page_size = page_size
        self.max_running = min(max_sequences, largest.num_rows)
        self.reuses_prefixes = prefix_cache
        self.cache = PrefixCache(num_pages)
        self.table = SequenceTable(self.max_running, max_length, largest.pages_per_seq, num_eos)
        self.admission = Admission(
            self.table, self.cache, b_dense=self.b_dense, page_size=page_size, reuses_prefixes=prefix_cache, loads=loads
        )
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.admission.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Takes a finished or cancelled sequence out, wherever it is; its row and pages are free at once.

        A step in flight may still write those pages. That is safe: steps run in order, so whoever gets them writes later.
        """
        if sequence.row < 0:
            self.admission.remove(sequence)
        else:
            self.admission.drop_load(sequence)
            self._release_pages(sequence.row, sequence.session)
            self.table.clear(sequence.row)
        self.admission.held = False

    def form(self) -> FormedStep | None:
        """The next step, or None when there is nothing to launch. Advances the state as if it had run."""
        table = self.table
        self.admission.advance_loads()
        decoding = self._grow_decoding()
        budget = self.b_dense - decoding.size
        room, num_rows = self.admission.room(budget)
        if num_rows:
            self._index_full_pages()
            self.admission.admit(room, num_rows)
        plan, budget = self._choose_plan(decoding, budget)
        prefilling, chunks = self._prefill_chunks(budget)
        num_tokens = decoding.size + int(chunks.sum())
        if num_tokens == 0:
            return None
        rows = np.concatenate((decoding, prefilling))
        lengths = np.concatenate((np.ones_like(decoding), chunks))
        batch = self._fill(rows, lengths, decoding.size, plan)
        written = batch.slots[batch.slots >= 0] // self.page_size
        assert self.cache.are_private(written), "a step writes a page that others may read"
        table.kv_len[rows] += lengths
        batch_rows = np.flatnonzero(table.kv_len[rows] >= table.target[rows])
        sampled = rows[batch_rows]
        self._fill_sampling(batch, batch_rows, sampled)
        table.phase[sampled] = Phase.DECODE
        ending = sampled[table.kv_len[sampled] + 1 >= table.final_len[sampled]]
        table.phase[ending] = Phase.ENDING
        for row, sequence in zip(ending.tolist(), table.sequences[ending], strict=True):
            self._release_pages(row, sequence.session)
        return FormedStep(
            batch=batch,
            num_tokens=num_tokens,
            num_prefill_tokens=num_tokens - decoding.size,
            batch_rows=batch_rows,
            rows=sampled,
            sequences=table.sequences[sampled],
            member_rows=rows,
            members=table.sequences[rows],
            num_logprobs=int(table.num_logprobs[sampled].max(initial=0)),
            plan=plan,
        )

    def check_integrity(self) -> None:
        """Checks that pages and rows add up.

        Raises:
          AssertionError: they do not.
        """
        table = self.table
        self.cache.check_integrity(table.held_pages(), self._names_of_held_pages())
        for row in range(table.phase.size):
            sequence = table.sequences[row]
            assert (sequence is None) == (table.phase[row] == Phase.FREE), f"{row=}"
            assert sequence is None or (sequence.row == row and not sequence.finished), f"{row=}"
        running = table.phase != Phase.FREE
        assert (table.num_pages[~running | (table.phase == Phase.ENDING)] == 0).all(), "pages of a sequence that needs none"
        needed = -(-np.maximum(table.kv_len, table.target) // self.page_size)
        holding = running & (table.phase != Phase.ENDING)
        assert (table.num_pages[holding] == needed[holding]).all(), "a sequence owns too many or too few pages"
        assert all(sequence.row == -1 and not sequence.finished for sequence in self.admission.waiting)
        loading = {id(sequence.load) for sequence in table.sequences[table.phase == Phase.LOADING]}
        held = [sequence.load for sequence in table.sequences if sequence is not None and sequence.load is not None]
        assert {id(load) for load in held} == loading, "rows load if and only if they have a load"

    def _grow_decoding(self) -> np.ndarray:
        """Gives each decoding row the page that its next token needs, preempting the youngest while there are too few."""
        table = self.table
        while True:
            decoding = np.flatnonzero(table.phase == Phase.DECODE)
            needy = decoding[table.kv_len[decoding] == table.num_pages[decoding] * self.page_size]
            if needy.size <= self.cache.num_available:
                break
            self._preempt_youngest()
        table.block_tables[needy, table.num_pages[needy]] = self.cache.allocate(needy.size)
        table.num_pages[needy] += 1
        return decoding

    def _preempt_youngest(self) -> None:
        """Sends the youngest row that holds pages back to the head of the queue, to be computed again from its tokens.

        Admission then waits until a sequence ends, as one will, for the oldest is never preempted: there are no more rounds of
        preemption than finished requests. The victim's token of a step in flight is still valid, and is appended when that step
        is consumed, before the next `form`.
        """
        candidates = np.flatnonzero((self.table.phase != Phase.FREE) & (self.table.phase != Phase.ENDING))
        row = int(candidates[np.argmax(self.table.arrival[candidates])])
        sequence = self.table.sequences[row]
        self.admission.drop_load(sequence)
        sequence.load_attempts = 0
        self._release_pages(row, None)
        self.table.clear(row)
        sequence.preemptions += 1
        self.num_preemptions += 1
        self.admission.held = True
        self.admission.waiting.appendleft(sequence)

    def _release_pages(self, row: int, session: SessionKey | None) -> None:
        """Takes a row's pages away. Full ones can be found from now on, until somebody else needs them."""
        table = self.table
        if not table.num_pages[row]:
            return  # it was ending
        digests = self._digests(row, int(self._num_full(np.array([row]))[0]))
        pages = table.take_pages(np.array([row]))
        self.cache.index(pages[: len(digests)].tolist(), digests)
        self.cache.release(pages, digests, session)

    def _digests(self, row: int, num_pages: int) -> list[bytes]:
        """Names of a running sequence's first pages."""
        sequence: Sequence = self.table.sequences[row]  # pyright: ignore[reportAssignmentType]
        return sequence.page_digests(self.table.tokens[row], self.page_size, num_pages)

    def _num_full(self, rows: np.ndarray) -> np.ndarray:
        """int32: pages of `rows` that can be reused, full in K and V and with ids that the host knows; 0 without reuse."""
        table = self.table
        return np.minimum(table.known[rows], table.kv_len[rows]) // self.page_size * self.reuses_prefixes

    def _index_full_pages(self) -> None:
        """Lets requests that are admitted now find the pages that running sequences have filled.

        The device may not have computed them yet. But the steps that do have been launched, for these are what `kv_len` counts
        before this step is filled, and the device runs steps in the order of their launch: whoever finds a page reads it in a
        later step than the one that writes it.
        """
        table = self.table
        rows = np.flatnonzero((table.phase == Phase.PREFILL) | (table.phase == Phase.DECODE))
        full, indexed = self._num_full(rows), table.num_indexed[rows]
        grown = full > indexed
        pages: list[int] = []
        digests: list[bytes] = []
        for row, first, num_full in zip(rows[grown].tolist(), indexed[grown].tolist(), full[grown].tolist(), strict=True):
            pages += table.block_tables[row, first:num_full].tolist()
            digests += self._digests(row, num_full)[first:]
        self.cache.index(pages, digests)
        table.num_indexed[rows[grown]] = full[grown]

    def _names_of_held_pages(self) -> dict[int, bytes]:
        """What the full pages of running sequences must be called, computed anew from their tokens."""
        names = {}
        for row in np.flatnonzero(self.table.num_pages).tolist():
            digests: list[bytes] = []
            sequence: Sequence = self.table.sequences[row]  # pyright: ignore[reportAssignmentType]
            num_full = int(self._num_full(np.array([row]))[0])
            extend_digests(digests, sequence.request.cache_salt, self.table.tokens[row], self.page_size, num_full)
            names |= dict(zip(self.table.block_tables[row].tolist(), digests, strict=False))
        return names

    def _prefill_chunks(self, budget: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows that prefill in this step, oldest first, and the tokens that each gets of `budget`."""
        table = self.table
        rows = np.flatnonzero(table.phase == Phase.PREFILL)
        rows = rows[np.argsort(table.arrival[rows])]
        wanted = table.target[rows] - table.kv_len[rows]
        before = np.cumsum(wanted) - wanted
        chunks = np.clip(budget - before, 0, wanted).astype(np.int32)
        taken = chunks > 0
        return rows[taken], chunks[taken]

    def _shape_for(self, num_tokens: int, num_rows: int, num_pages: int) -> BatchShape:
        """The smallest compiled shape that holds a step."""
        for shape in self.shapes:
            if shape.num_tokens >= num_tokens and shape.num_rows >= num_rows and shape.pages_per_seq >= num_pages:
                return shape
        raise AssertionError(f"no shape holds {num_tokens=} {num_rows=} {num_pages=}")

    def _choose_plan(self, decoding: np.ndarray, budget: int) -> tuple[int | None, int]:
        """The plan of a step in which rows `decoding` decode, and the prompt tokens that it takes."""
        filling = self.table.phase == Phase.PREFILL
        wanted = min(budget, int((self.table.target[filling] - self.table.kv_len[filling]).sum()))
        if self.plans is None:
            return None, wanted
        context = float(self.table.kv_len[decoding].mean()) + 1 if decoding.size else None
        return choose_plan(self.plans, decoding.size, wanted, context)

    def _fill(self, rows: np.ndarray, lengths: np.ndarray, num_decode: int, plan: int | None) -> Batch:
        """The arrays of a step in which row i computes `lengths[i]` tokens after its kv_len; the first `num_decode` decode.

        Prompt tokens follow the decoding ones at once, or begin where `plan` has them.
        """
        table = self.table
        num_tokens = int(lengths.sum())
        columns = int(table.num_pages[rows].max())
        first_prompt = num_decode
        if plan is None or self.plans is None:
            shape = self._shape_for(num_tokens, rows.size, columns)
        else:
            first_prompt = self.plans.plans[plan].decode_tokens
            shape = self._shape_for(self.plans.plans[plan].b_dense, rows.size, columns)
        batch = empty_batch(shape)
        starts = np.cumsum(lengths) - lengths
        token_row = np.repeat(rows, lengths)
        positions = np.arange(num_tokens) - np.repeat(starts - table.kv_len[rows], lengths)
        place = np.arange(num_tokens)
        place[num_decode:] += first_prompt - num_decode
        starts[num_decode:] += first_prompt - num_decode
        batch.num_decode[...] = num_decode  # pyright: ignore[reportIndexIssue]
        batch.token_rows[:num_decode] = rows[:num_decode]
        prompt = slice(num_decode, num_tokens)
        batch.token_ids[place[prompt]] = table.tokens[token_row[prompt], positions[prompt]]
        batch.positions[place] = positions
        page, offset = np.divmod(positions, self.page_size)
        batch.slots[place] = table.block_tables[token_row, page] * self.page_size + offset
        batch.kv_lens[: rows.size] = table.kv_len[rows] + lengths
        batch.q_starts[: rows.size] = starts
        batch.q_lens[: rows.size] = lengths
        batch.block_tables[: rows.size, :columns] = table.block_tables[rows, :columns]
        # Entries past a row's pages are left over from earlier owners.
        batch.block_tables[: rows.size, :columns][np.arange(columns) >= table.num_pages[rows, None]] = 0
        return batch

    def _fill_sampling(self, batch: Batch, batch_rows: np.ndarray, rows: np.ndarray) -> None:
        """Sampling parameters of the batch rows that sample; the others keep the neutral ones of an empty batch."""
        table = self.table
        batch.sequence_rows[batch_rows] = rows
        batch.seeds[batch_rows] = table.seeds[rows]
        batch.temperature[batch_rows] = table.temperature[rows]
        batch.top_k[batch_rows] = table.top_k[rows]
        batch.top_p[batch_rows] = table.top_p[rows]
        batch.min_p[batch_rows] = table.min_p[rows]
