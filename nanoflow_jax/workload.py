"""What the requests look like: mean prompt and output lengths, and the mix of a dense batch in steady state."""

import dataclasses

import msgspec


class WorkloadError(ValueError):
    """A workload that is neither a known name nor `prompt:output`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workload:
    """Mean lengths of a request in tokens; `output_tokens == 0` is prompt processing alone."""

    name: str
    prompt_tokens: int
    output_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 0 or self.output_tokens < 0 or self.prompt_tokens + self.output_tokens <= 0:
            raise WorkloadError(
                f"workload {self.name!r}: lengths {self.prompt_tokens}:{self.output_tokens} must be >= 0, not both 0"
            )

    def __str__(self) -> str:
        return self.name

    @property
    def decode_fraction(self) -> float:
        """Share of decoding tokens in a batch: a request spends `output` of its `prompt + output` tokens decoding."""
        return self.output_tokens / (self.prompt_tokens + self.output_tokens)

    @property
    def decode_context(self) -> float:
        """Mean tokens in the cache of a decoding sequence, if all requests had the mean length: prompt + output / 2."""
        return self.prompt_tokens + self.output_tokens / 2

    @property
    def prefill_context(self) -> float:
        """Mean number of keys that a prompt token attends to (causal)."""
        return self.prompt_tokens / 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchMix:
    """One step's dense batch: `decode_tokens` first, prompt tokens behind; contexts are means per token, in tokens."""

    b_dense: int
    decode_tokens: int
    decode_context: float
    prefill_context: float

    @property
    def prefill_tokens(self) -> int:
        return self.b_dense - self.decode_tokens


class StepMix(msgspec.Struct, frozen=True, array_like=True):
    """What one step computes; contexts are mean keys per token.

    `padded_tokens` is the compiled shape, what collectives send; `gemm_tokens` are those that GEMMs multiply, `logit_rows` the
    rows whose logits are computed, `rows` those in use.
    """

    padded_tokens: int
    gemm_tokens: int
    logit_rows: int
    rows: int
    decode_tokens: int
    decode_context: float
    prefill_tokens: int
    prefill_context: float

    def __post_init__(self) -> None:
        counts = (self.decode_tokens, self.prefill_tokens, self.decode_context, self.prefill_context)
        if min(counts) < 0 or not 0 < self.tokens <= self.gemm_tokens <= self.padded_tokens:
            raise ValueError(f"{self}: of {self.padded_tokens} tokens, some must be computed, and GEMMs multiply all of these")
        if not 0 < self.rows <= self.logit_rows:
            raise ValueError(f"{self}: of {self.logit_rows} rows of logits, some must be in use")

    @property
    def tokens(self) -> int:
        return self.decode_tokens + self.prefill_tokens


# Means of the traces as the NanoFlow paper's Table 4 prints them.
TRACES = {
    w.name: w
    for w in (
        Workload(name="sharegpt", prompt_tokens=246, output_tokens=322),
        Workload(name="lmsys", prompt_tokens=102, output_tokens=222),
        Workload(name="splitwise", prompt_tokens=1155, output_tokens=211),
    )
}


def parse_workload(text: str) -> Workload:
    """`sharegpt`, `lmsys`, `splitwise` or `PROMPT:OUTPUT` in tokens.

    Raises:
      WorkloadError: anything else.
    """
    if text in TRACES:
        return TRACES[text]
    parts = text.split(":")
    if len(parts) != 2 or not all(p.isdecimal() for p in parts):
        raise WorkloadError(f"unknown workload {text!r}: expected PROMPT:OUTPUT or one of {', '.join(TRACES)}")
    return Workload(name=text, prompt_tokens=int(parts[0]), output_tokens=int(parts[1]))


def steady_mix(workload: Workload, b_dense: int) -> BatchMix:
    """The dense batch of `b_dense` tokens when requests of `workload` are abundant (paper, section 3.1)."""
    return BatchMix(
        b_dense=b_dense,
        decode_tokens=round(b_dense * workload.decode_fraction),
        decode_context=workload.decode_context,
        prefill_context=workload.prefill_context,
    )
