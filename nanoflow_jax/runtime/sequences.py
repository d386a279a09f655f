"""The engine's view of requests: a `Sequence` per request, and a table of numpy arrays with a row per running sequence.

The table is what makes the host path fast: forming and consuming a step are a few numpy operations over rows, whatever the
number of sequences. A row's index is also the sequence's index in the device's `last_tokens`.
"""

import dataclasses
import enum

import numpy as np

from nanoflow_jax.runtime.kv_load import Load
from nanoflow_jax.runtime.prefix_cache import SessionKey, extend_digests
from nanoflow_jax.runtime.request import MAX_STOP_TOKENS, Request, TokenLogprobs
from nanoflow_jax.runtime.text import TextStream


class Phase(enum.IntEnum):
    """What a table row does next. ENDING: its last token is being computed, nothing is left to launch. LOADING: it waits for
    pages that come from the memory tiers, and prefills then."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    ENDING = 3
    LOADING = 4


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request inside the engine.

    Attributes:
      arrival: order of submission; the youngest has the largest.
      final_length: prompt plus output tokens at which the request ends by length.
      stop_ids: tokens that end it, the model's EOS included unless it ignores them.
      tokens: prompt and output so far while the sequence waits; a running one has them in the table.
      row: its table row, -1 while it waits.
      preemptions: how often it lost its row.
      load: pages on their way to it from the memory tiers; `load_attempts`: how many such loads it has had since it waits.
      digests: names of its full pages so far, for the prefix cache; tokens never change, so neither do these.
      cached_tokens: prompt tokens that it found in the prefix cache when it was first admitted.
      stopped_by_token: its last token is a stop token, which is no part of the text.
      logprobs, undelivered_ids, undelivered_text: output that no event has carried yet; logprobs is None if not asked for.
    """

    request: Request
    arrival: int
    num_prompt_tokens: int
    final_length: int
    stop_ids: tuple[int, ...]
    seed: int
    tokens: np.ndarray
    text: TextStream | None
    submitted_s: float
    row: int = -1
    preemptions: int = 0
    finished: bool = False
    load: Load | None = None
    load_attempts: int = 0
    digests: list[bytes] = dataclasses.field(default_factory=list)
    cached_tokens: int = 0
    stopped_by_token: bool = False
    logprobs: list[TokenLogprobs] | None = None
    undelivered_ids: list[int] = dataclasses.field(default_factory=list)
    undelivered_text: str = ""
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def attended(self) -> bool:
        """Each of its tokens needs work of its own: text to watch, an event to send, log-probabilities to keep."""
        return self.request.stream or self.text is not None or self.logprobs is not None

    @property
    def exact(self) -> bool:
        """Count on final_length, not on an estimate: it says so itself, or a wrong estimate has cost it its row before."""
        return self.request.params.ignore_eos or self.preemptions > 0

    @property
    def session(self) -> SessionKey | None:
        request = self.request
        return None if request.session_id is None else (request.cache_salt, request.session_id)

    def page_digests(self, tokens: np.ndarray, page_size: int, num_pages: int) -> list[bytes]:
        """Names of its first `num_pages` pages, all of them full; `tokens` are its own, wherever they are kept."""
        extend_digests(self.digests, self.request.cache_salt, tokens, page_size, num_pages)
        return self.digests[:num_pages]


class SequenceTable:
    """One row per running sequence.

    Attributes (arrays over rows):
      phase: Phase.
      sequences: the Sequence objects, None where free.
      known: tokens whose ids are on the host.
      kv_len: tokens whose K and V launched steps have computed; a launched sampling step promises token number kv_len.
      target: tokens to prefill, those known when the row was filled.
      prompt_len, final_len, arrival, exact, attended: of the sequence.
      num_pages, block_tables: pages held, and which. The first `num_shared` were found in the prefix cache; the first
        `num_indexed` have been offered to it. None of these is ever written by the row.
      tokens: prompt and output ids.
      stop_ids: padded with -1.
    """

    def __init__(self, num_rows: int, max_length: int, pages_per_seq: int, num_eos: int) -> None:
        self.phase = np.full(num_rows, Phase.FREE, np.int8)
        self.sequences = np.full(num_rows, None, object)
        self.known = np.zeros(num_rows, np.int32)
        self.kv_len = np.zeros(num_rows, np.int32)
        self.target = np.zeros(num_rows, np.int32)
        self.prompt_len = np.zeros(num_rows, np.int32)
        self.final_len = np.zeros(num_rows, np.int32)
        self.arrival = np.zeros(num_rows, np.int64)
        self.exact = np.zeros(num_rows, bool)
        self.attended = np.zeros(num_rows, bool)
        self.num_pages = np.zeros(num_rows, np.int32)
        self.num_shared = np.zeros(num_rows, np.int32)
        self.num_indexed = np.zeros(num_rows, np.int32)
        self.block_tables = np.zeros((num_rows, pages_per_seq), np.int32)
        # Never touched memory is never mapped: the size is an upper bound, not what a short context uses.
        self.tokens = np.empty((num_rows, max_length), np.int32)
        self.stop_ids = np.full((num_rows, MAX_STOP_TOKENS + num_eos), -1, np.int32)
        self.seeds = np.zeros(num_rows, np.uint32)
        self.temperature = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.top_p = np.ones(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.num_logprobs = np.full(num_rows, -1, np.int32)

    @property
    def num_running(self) -> int:
        return int(np.count_nonzero(self.phase))

    def place(self, sequence: Sequence, pages: np.ndarray, num_shared: int, page_size: int) -> int:
        """Fills a free row with a sequence that starts (or starts again) to prefill; returns the row.

        Args:
          pages: for all of its tokens; the first `num_shared`, full and not all of them, hold K and V already.
        """
        row = int(np.argmin(self.phase))
        assert self.phase[row] == Phase.FREE, "no free row"
        params = sequence.request.params
        length = sequence.tokens.size
        self.phase[row] = Phase.PREFILL
        self.sequences[row] = sequence
        self.known[row] = length
        assert num_shared * page_size < length, "the last token is always computed, for its logits"
        self.kv_len[row] = num_shared * page_size
        self.target[row] = length
        self.prompt_len[row] = sequence.num_prompt_tokens
        self.final_len[row] = sequence.final_length
        self.arrival[row] = sequence.arrival
        self.exact[row] = sequence.exact
        self.attended[row] = sequence.attended
        self.num_pages[row] = pages.size
        self.num_shared[row] = self.num_indexed[row] = num_shared
        self.block_tables[row, : pages.size] = pages
        self.tokens[row, :length] = sequence.tokens
        self.stop_ids[row] = -1
        self.stop_ids[row, : len(sequence.stop_ids)] = sequence.stop_ids
        self.seeds[row] = sequence.seed
        self.temperature[row] = params.temperature
        self.top_k[row] = params.top_k
        self.top_p[row] = params.top_p
        self.min_p[row] = params.min_p
        self.num_logprobs[row] = -1 if params.logprobs is None else params.logprobs
        sequence.row = row
        return row

    def clear(self, row: int) -> None:
        """Frees a row; its pages must have been taken away. The sequence takes its tokens with it."""
        assert self.num_pages[row] == 0, "row still owns pages"
        sequence = self.sequences[row]
        sequence.tokens = self.tokens[row, : self.known[row]].copy()
        sequence.row = -1
        self.sequences[row] = None
        self.phase[row] = Phase.FREE

    def take_pages(self, rows: np.ndarray) -> np.ndarray:
        """Takes all pages away from `rows` and returns them."""
        owned = np.arange(self.block_tables.shape[1]) < self.num_pages[rows, None]
        self.num_pages[rows] = 0
        return self.block_tables[rows][owned]

    def held_pages(self) -> np.ndarray:
        """Every page of every row."""
        return self.block_tables[np.arange(self.block_tables.shape[1]) < self.num_pages[:, None]]
