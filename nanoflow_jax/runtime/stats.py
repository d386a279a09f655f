"""What an engine tells about itself."""

import msgspec

from nanoflow_jax.runtime.kv_tiers import KVTierStats


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters since the start, and the present state. Seconds are the host's.

    Attributes:
      steps, batch_tokens: steps launched and the tokens they computed; `planned_steps` were executed by a plan;
      `padded_tokens` is the size of their shapes.
      prompt_tokens: prompt tokens of admitted requests; `prefill_tokens` counts those computed, recomputed ones again.
      output_tokens: tokens delivered (and billed); `dropped_tokens` were computed for requests that had ended.
      finished: requests by finish reason.
      form_s, launch_s, consume_s: host work; wait_s: time spent waiting for the device.
      free_pages: pages that no request holds; cached contents do not keep a page from being used for something else.
      prefix_hits, prefix_misses: admissions that found a cached prefix, or none; of a preempted request each counts.
      reused_tokens: tokens found in the cache or loaded from the memory tiers, and therefore not computed.
      cached_pages: pages that can be found, held or not; `evicted_pages`: those whose contents gave way to others.
      kept_sessions: sessions for which something is kept.
      kv_tiers: the memory tiers, if there are any.
    """

    steps: int
    planned_steps: int
    batch_tokens: int
    padded_tokens: int
    prompt_tokens: int
    prefill_tokens: int
    output_tokens: int
    dropped_tokens: int
    preemptions: int
    finished: dict[str, int]
    form_s: float
    launch_s: float
    consume_s: float
    wait_s: float
    waiting: int
    running: int
    num_pages: int
    free_pages: int
    prefix_hits: int
    prefix_misses: int
    reused_tokens: int
    cached_pages: int
    evicted_pages: int
    kept_sessions: int
    b_dense: int
    num_compilations: int
    kv_tiers: KVTierStats | None
