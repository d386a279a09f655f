"""Offline generation: `LLM(model).generate(prompts, params)`, the engine stepped by the caller's own thread."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from nanoflow_jax.checkpoints import load_model
from nanoflow_jax.executor.runner import ModelRunner
from nanoflow_jax.executor.runner import RunnerConfig as RunnerConfig
from nanoflow_jax.executor.step import ExecutionMode as ExecutionMode
from nanoflow_jax.kernels import KernelChoice as KernelChoice
from nanoflow_jax.parallel import make_mesh
from nanoflow_jax.runtime.engine import Engine
from nanoflow_jax.runtime.kv_tiers import TierOptions as TierOptions
from nanoflow_jax.runtime.kv_tiers import open_store
from nanoflow_jax.runtime.plan_choice import wants_gathered_o_proj
from nanoflow_jax.runtime.request import (
    FinishReason,
    Request,
    RequestEvent,
    RequestRejected,
    SamplingParams,
    Timing,
    TokenLogprobs,
    Usage,
    validate,
)

# Text, token ids, or a chat: messages with "role" and "content".
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Completion:
    """What became of one prompt. Fields are those of `RequestEvent`; `text` is empty for a model without a tokenizer."""

    prompt_token_ids: list[int]
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] | None
    finish_reason: FinishReason
    error: str | None
    usage: Usage
    timing: Timing


class LLM:
    """A model with its engine. Not thread-safe; `serve` or `EngineService` are for that.

    Attributes:
      engine: its `stats()` tell what was done; its `tokenizer` is None for presets.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        random_weights: bool = False,
        seed: int = 0,
        dtype: str = "auto",
        tp_size: int = 1,
        options: RunnerConfig | None = None,
        sync: bool = False,
        prefix_cache: bool = True,
        kv_tiers: TierOptions | None = None,
        models_dir: Path | None = None,
        cache_dir: Path | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        """Loads the model and compiles every step.

        Args:
          model, random_weights, seed, models_dir: see `checkpoints.load_model`.
          dtype: of weights and cache; "auto" is float32 on a CPU and bfloat16 elsewhere.
          options: sizes of steps and pool.
          cache_dir: keep compiled steps there, so that the next start of the same model loads them. Loading can run code:
            nobody else may write there. Unused where jax's own cache is on.
          sync: read each step's tokens before the next is formed.
          prefix_cache: reuse what is cached of prompts that begin alike, from call to call too.
          kv_tiers: keep what the pool cannot in host memory and on SSD; `close` when done. Compiles steps with offload.
          progress: called with (what, done, total) while loading and compiling.

        Raises:
          CheckpointError, TokenizerError, ChatTemplateError: the model cannot be loaded.
          ValueError: it cannot be divided over `tp_size` devices, or an option does not fit it.
          DirectoryInUseError, OSError: the SSD tier's directory belongs to another engine, or cannot be used.
          MemoryError: the host tier is larger than the memory that can be had, or pinned.
        """
        if kv_tiers is not None and not prefix_cache:
            raise ValueError("memory tiers need the prefix cache: it is how their pages are found")
        options = options or RunnerConfig()
        if kv_tiers is not None and options.kv_offload == "off":
            options = dataclasses.replace(options, kv_offload="on")
        if dtype == "auto":
            dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        mesh = make_mesh(tp_size)
        loaded = load_model(
            model, mesh=mesh, dtype=dtype, random_weights=random_weights, seed=seed, progress=progress, models_dir=models_dir,
            gathered_o_proj=wants_gathered_o_proj(options.plans),
        )  # fmt: skip
        runner = ModelRunner(loaded.config, loaded.layout, mesh, loaded.decoder, options, jax.numpy.dtype(dtype))
        store = None if kv_tiers is None else open_store(runner, kv_tiers)  # which may be refused: before steps are compiled
        runner.warm_up(progress, cache_dir)
        self.engine = Engine(runner, loaded.tokenizer, sync=sync, prefix_cache=prefix_cache, kv_store=store)

    def close(self, timeout_s: float = 30.0) -> bool:
        """Closes the memory tiers, if there are any; see `Engine.close`."""
        return self.engine.close(timeout_s)

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[Completion]:
        """Completions of `prompts`, in their order.

        Args:
          params: one for all, or one per prompt.
          progress: show a bar on standard error.

        Raises:
          RequestRejected: a prompt or its parameters are refused; nothing was generated. The message gives its index.
          TokenizerError, ChatTemplateError: a prompt cannot be made into tokens.
        """
        return generate(self.engine, prompts, params, progress=progress)


def generate(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams] | None = None,
    *,
    progress: bool = False,
) -> list[Completion]:
    """`LLM.generate` on any engine that nobody else steps."""
    requests = _requests(engine, prompts, params)
    indices = {request.request_id: i for i, request in enumerate(requests)}
    completions: dict[int, Completion] = {}
    try:
        for request in requests:
            engine.add(request)
        with tqdm(total=len(requests), unit="request", disable=not progress) as bar:
            while engine.busy:
                for event in engine.step():
                    index = indices[event.request_id]
                    completions[index] = _completion(requests[index], event)
                    bar.update()
    finally:  # an interrupted run leaves nothing behind in the engine
        for request in requests:
            engine.cancel(request.request_id)
    return [completions[i] for i in range(len(requests))]


def _requests(
    engine: Engine, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[Request]:
    if isinstance(prompts, str):
        raise ValueError("prompts must be a list of prompts; put a single one into a list")
    each = [params or SamplingParams()] * len(prompts) if params is None or isinstance(params, SamplingParams) else params
    if len(each) != len(prompts):
        raise ValueError(f"{len(prompts)} prompts and {len(each)} sampling parameters; give one for all or one for each")
    requests = []
    for i, (prompt, chosen) in enumerate(zip(prompts, each, strict=True)):
        request = Request(request_id=f"prompt-{i}", prompt_token_ids=_token_ids(engine, prompt, i), params=chosen, stream=False)
        try:
            validate(request, engine.limits)
        except RequestRejected as refusal:
            raise RequestRejected(refusal.code, f"prompt {i}: {refusal}", field=refusal.field, value=refusal.value) from None
        requests.append(request)
    return requests


def _token_ids(engine: Engine, prompt: Prompt, index: int) -> Sequence[int]:
    is_text = isinstance(prompt, str)
    if not is_text and not (len(prompt) > 0 and isinstance(prompt[0], Mapping)):
        return prompt  # pyright: ignore[reportReturnType]
    if engine.tokenizer is None:
        raise ValueError(f"prompt {index}: this model has no tokenizer; give token ids")
    return engine.tokenizer.encode(prompt) if is_text else engine.tokenizer.apply_chat_template(prompt)  # pyright: ignore


def _completion(request: Request, event: RequestEvent) -> Completion:
    assert event.finish_reason is not None
    assert event.usage is not None
    assert event.timing is not None
    return Completion(
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=event.token_ids,
        text=event.text,
        logprobs=event.logprobs,
        finish_reason=event.finish_reason,
        error=event.error,
        usage=event.usage,
        timing=event.timing,
    )
