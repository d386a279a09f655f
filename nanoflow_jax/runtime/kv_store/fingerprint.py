"""What a stored page depends on besides its tokens, in 32 bytes: a cache of another model is never read."""

import dataclasses
import hashlib
import json

from nanoflow_jax.config import ModelConfig

FORMAT_VERSION = 1
FINGERPRINT_BYTES = 32
# Every other field of a ModelConfig, present or future, is taken to change K and V.
_WITHOUT_EFFECT = ("name", "max_context", "bos_token_id", "eos_token_ids")


def fingerprint(config: ModelConfig, *, weights: str, dtype: str, page_size: int, page_layout: str) -> bytes:
    """32 bytes that agree exactly when stored pages may be exchanged.

    Args:
      config: sizes and numerics of the model; rotary base and scaling are part of it.
      weights: identity of the weights, such as a checksum of the loaded parameters. Two models of equal sizes differ only here.
      dtype: of the stored elements.
      page_size: tokens per page.
      page_layout: order of the axes within a page's bytes, and anything else that changes their meaning.
    """
    for name, value in (("weights", weights), ("dtype", dtype), ("page_layout", page_layout)):
        if not value:
            raise ValueError(f"{name}={value!r} must not be empty")
    numerics = {name: value for name, value in dataclasses.asdict(config).items() if name not in _WITHOUT_EFFECT}
    facts = {
        "config": numerics,
        "weights": weights,
        "dtype": dtype,
        "page_size": page_size,
        "page_layout": page_layout,
        "format": FORMAT_VERSION,
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=FINGERPRINT_BYTES).digest()
