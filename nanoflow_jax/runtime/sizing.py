"""How large a step should be: what the KV pool can keep busy, for requests of known lengths."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from nanoflow_jax.config import ModelConfig
from nanoflow_jax.executor.runner import RunnerConfig

_B_DENSE_MULTIPLE = 128
# Beyond this many tokens a GEMM gains nothing, while tokens wait longer for their step.
_LARGEST_B_DENSE = 2048


class DoesNotFitError(ValueError):
    """A load that the context or the pool cannot hold."""


@dataclasses.dataclass(frozen=True)
class StepSizes:
    """See `executor.runner.RunnerConfig`."""

    b_dense: int
    max_sequences: int


def steady_sizes(pool_tokens: int, input_tokens: int, output_tokens: int) -> StepSizes:
    """The dense batch of the steady state in which the pool is full (paper, section 3.1), in multiples of 128 tokens.

    A decoding request holds `input + output / 2` tokens on average and takes one token of a step, while `input / output` prompt
    tokens enter on its behalf. More requests than the mean allows may run at once, as long as they are young.

    Raises:
      ValueError: the pool does not hold one request.
    """
    if input_tokens + output_tokens > pool_tokens:
        raise ValueError(f"a pool of {pool_tokens} tokens does not hold {input_tokens} tokens in and {output_tokens} out")
    sequences = int(pool_tokens / (input_tokens + output_tokens / 2))
    sustained = int(sequences * (input_tokens + output_tokens) / output_tokens)
    multiples = max(1, round(min(sustained, _LARGEST_B_DENSE) / _B_DENSE_MULTIPLE))
    b_dense = multiples * _B_DENSE_MULTIPLE
    return StepSizes(b_dense, min(b_dense, _up(sequences * 5 // 4, 64)))


def serving_sizes(*, on_gpu: bool) -> dict[str, int]:
    """b_dense, max_sequences and page_size of `RunnerConfig` where nothing is known of the requests.

    A GPU multiplies 2048 tokens at its full rate, and its memory keeps some thousand sequences of an 8B model.
    """
    if on_gpu:
        return {"b_dense": _LARGEST_B_DENSE, "max_sequences": 1024, "page_size": 64}
    return {name: getattr(RunnerConfig, name) for name in ("b_dense", "max_sequences", "page_size")}


def complete_sizes(device_s: Mapping[str, int], planned: int | None, told: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes as told, else the largest planned batch, else the device's; no more sequences than a step has tokens."""
    sizes = {**device_s, **({"b_dense": planned} if planned else {}), **told}
    return sizes | {"max_sequences": min(sizes["max_sequences"], sizes["b_dense"])}


def sizes_from(text: str) -> tuple[int, ...]:
    """Step sizes as options give them, such as 256,512,2048. Raises ValueError."""
    return tuple(int(size) for size in text.split(","))


def pool_tokens(config: ModelConfig, tp: int, free_bytes: int, itemsize: int) -> int:
    """Tokens of KV cache that fit on `tp` devices of `free_bytes` each, before the weights are there."""
    weights, per_token = config.num_params * itemsize, config.kv_bytes_per_token(itemsize)
    return max(0, int((tp * free_bytes - weights) / per_token))


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
