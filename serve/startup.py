"""From options to a warm engine: everything that happens before the first client."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
from tqdm import tqdm

from nanoflow_jax.checkpoints import read_config
from nanoflow_jax.kv_cache import claim_device_memory
from nanoflow_jax.plan import PlanSet
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.llm import LLM, ExecutionMode, RunnerConfig, TierOptions
from nanoflow_jax.runtime.plan_choice import largest_b_dense, resolve_mode
from nanoflow_jax.runtime.sizing import complete_sizes, serving_sizes
from serve import protocol

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What to serve and how; `LLM` describes most fields.

    Attributes:
      mode, plans: see `plan_choice.resolve_mode`.
      told: fields of `RunnerConfig` that are not left to the device at hand.
      cache_dir: where compiled steps are kept; None: nowhere.
    """

    model: str
    random_weights: bool
    seed: int
    models_dir: Path | None
    dtype: str
    tp_size: int
    mode: ExecutionMode | Literal["auto"]
    plans: PlanSet | None
    told: Mapping[str, Any]
    sync: bool
    prefix_cache: bool
    kv_tiers: TierOptions | None
    cache_dir: Path | None


def default_cache_dir() -> Path:
    """Where compiled steps are kept between runs: `nanoflow-jax/executables` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoflow-jax" / "executables"


def start_engine(options: EngineOptions) -> tuple[Engine, protocol.ModelDescription]:
    """Loads the model, makes the pool, compiles every step; progress goes to standard error. Errors are those of `LLM`."""
    if options.tp_size > 1:
        jax.config.update("jax_num_cpu_devices", options.tp_size)  # of no effect on other platforms
    claim_device_memory(options.tp_size)
    dtype = options.dtype if options.dtype != "auto" else "float32" if jax.default_backend() == "cpu" else "bfloat16"
    runner = runner_config(options, jax.devices()[0])
    _log.info("steps of up to %d tokens, mode %s", runner.b_dense, runner.mode)
    with _progress_bars("loading", "compiling") as progress:
        llm = LLM(
            options.model,
            random_weights=options.random_weights,
            seed=options.seed,
            dtype=dtype,
            tp_size=options.tp_size,
            options=runner,
            sync=options.sync,
            prefix_cache=options.prefix_cache,
            kv_tiers=options.kv_tiers,
            models_dir=options.models_dir,
            cache_dir=options.cache_dir,
            progress=progress,
        )
    return llm.engine, describe(llm.engine, dtype, options.tp_size)


def runner_config(options: EngineOptions, device: Any) -> RunnerConfig:
    """What the options leave open is decided by the device.

    Raises:
      CheckpointError: the model, which decides what "auto" is, is unknown or unsound.
      ValueError: an option is out of range, or does not go with another.
    """
    mode, plans = options.mode, options.plans
    if mode == "auto":
        config = read_config(options.model, options.models_dir)
        mode, plans = resolve_mode(mode, plans, config, device, options.tp_size)
    sizes = serving_sizes(on_gpu=device.platform == "gpu")
    return RunnerConfig(mode=mode, plans=plans, **complete_sizes(sizes, largest_b_dense(plans), options.told))


def describe(engine: Engine, dtype: str, tp_size: int) -> protocol.ModelDescription:
    """What clients are told about the engine's model."""
    config, limits, tokenizer = engine.runner.config, engine.limits, engine.tokenizer
    return protocol.ModelDescription(
        name=config.name,
        vocab_size=config.vocab_size,
        num_params=config.num_params,
        num_layers=config.num_layers,
        max_context=limits.max_context,
        pool_tokens=limits.pool_tokens,
        page_size=engine.runner.page_size,
        b_dense=engine.runner.shapes[-1].num_tokens,
        tp_size=tp_size,
        dtype=dtype,
        eos_token_ids=list(config.eos_token_ids),
        has_tokenizer=tokenizer is not None,
        has_chat_template=tokenizer is not None and tokenizer.chat_template is not None,
    )


@contextlib.contextmanager
def _progress_bars(*phases: str) -> Iterator[Callable[[str, int, int], None]]:
    """Bars on standard error, one per phase, fed with (name of an item, items done, items in all)."""
    names = iter(phases)
    bar: tqdm | None = None

    def report(item: str, done: int, total: int) -> None:
        nonlocal bar
        if bar is None or done < bar.n or total != bar.total:
            if bar is not None:
                bar.close()
            bar = tqdm(desc=next(names, phases[-1]), total=total, mininterval=0.5)
        bar.set_postfix_str(item, refresh=False)
        bar.update(done - bar.n)

    try:
        yield report
    finally:
        if bar is not None:
            bar.close()
