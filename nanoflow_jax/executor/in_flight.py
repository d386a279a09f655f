"""A launched step, and what it sampled."""

import dataclasses
import time

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class StepResult:
    """What a step sampled, per batch row; rows that sample nothing hold arbitrary values.

    `logprobs` is the log-softmax of the raw logits at the token; `top_ids`, `top_logprobs` are `[S, n]` or None.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


class InFlightStep:
    """A launched step. `result` waits for it; `wait_s` then tells how long the host waited for the device. `new_kv` is K and V
    of its tokens by group of layers, see `kv_transfer`; empty without offload."""

    def __init__(self, packed_result: jax.Array, num_logprobs: int, new_kv: tuple[jax.Array, ...]):
        self.new_kv = new_kv
        self._packed_result = packed_result
        self._num_logprobs = num_logprobs
        self.wait_s = 0.0

    def result(self) -> StepResult:
        start = time.perf_counter()
        packed = np.asarray(self._packed_result)
        self.wait_s = time.perf_counter() - start
        n = self._num_logprobs
        token_ids, logprobs = packed[:, 0], packed[:, 1].view(np.float32)
        if n == 0:
            return StepResult(token_ids, logprobs, None, None)
        return StepResult(token_ids, logprobs, packed[:, 2 : 2 + n], packed[:, 2 + n :].view(np.float32))
