"""Which plan, if any, the next step is executed by; plans from files, and those that come with the program."""

import functools
from importlib import resources
from typing import Any, Literal, NamedTuple

import numpy as np

from nanoflow_jax.config import PRESETS, ModelConfig
from nanoflow_jax.executor.step import ExecutionMode
from nanoflow_jax.parallel import device_name
from nanoflow_jax.plan import PlanError, PlanSet, SequentialTime, period_of_batch_us
from nanoflow_jax.plan_files import decode_plan_set


def choose_plan(
    plans: PlanSet, decode_tokens: int, prefill_tokens: int, decode_context: float | None = None
) -> tuple[int | None, int]:
    """The index of the plan that computes most tokens per second, and how many prompt tokens the step takes with it.

    A plan has its own places for decoding and for prompt tokens, so it may take fewer prompt tokens than there are, and it is
    priced for the places that the batch fills. None is sequential execution, which takes all.

    Args:
      decode_context: tokens in the cache of a decoding sequence, on average; None: as many as the plans were made for. It
        counts where both sides know its cost: plans by their own contexts, sequential execution by records of several mixes.
    """
    tokens = decode_tokens + prefill_tokens
    if plans.crossover_tokens is None or tokens == 0:
        return None, prefill_tokens
    sequential = _fitted(plans.sequential)
    if sequential.usual_context is None or any(plan.decode_context is None for plan in plans.plans):
        decode_context = None
    best = (tokens / sequential.layer_us(decode_tokens, prefill_tokens, decode_context), None, prefill_tokens)
    for index, plan in enumerate(plans.plans):
        taken = min(prefill_tokens, plan.b_dense - plan.decode_tokens)
        fits = decode_tokens <= plan.decode_tokens and decode_tokens + taken > 0
        if fits and plan.b_dense >= plans.crossover_tokens:
            rate = (decode_tokens + taken) / period_of_batch_us(plan, decode_tokens, taken, decode_context)
            best = max(best, (rate, index, taken), key=lambda choice: choice[0])
    return best[1], best[2]


class _Fit(NamedTuple):
    """Microseconds of a layer whatever the batch, for each token, and how many more for each that decodes in `usual_context`,
    which is None where contexts are not told apart."""

    constant: float
    per_token: float
    per_decoding: float
    usual_context: float | None

    def layer_us(self, decode_tokens: int, prefill_tokens: int, decode_context: float | None) -> float:
        longer = decode_context / self.usual_context if decode_context and self.usual_context else 1.0
        tokens = decode_tokens + prefill_tokens
        return self.constant + self.per_token * tokens + self.per_decoding * longer * decode_tokens


@functools.lru_cache(maxsize=8)
def _fitted(recorded: tuple[SequentialTime, ...]) -> _Fit:
    """Least squares over relative errors.

    Steps are rarely of a recorded mix, and one of mostly prompt tokens takes far less time than one of as many tokens that
    decode. Fewer records say less: those of one mix can only be scaled.
    """
    if len({s.decode_tokens / s.b_dense for s in recorded}) < 2:
        largest = max(recorded, key=lambda s: s.b_dense)
        return _Fit(0.0, largest.layer_us / largest.b_dense, 0.0, None)
    contexts = [s.decode_context for s in recorded if s.decode_context]
    usual = sum(contexts) / len(contexts) if len(contexts) == len(recorded) else None
    weights = [s.decode_context / usual if usual and s.decode_context else 1.0 for s in recorded]
    terms = np.array([[1.0, s.b_dense, w * s.decode_tokens] for s, w in zip(recorded, weights, strict=True)])
    terms /= [[s.layer_us] for s in recorded]
    constant, per_token, per_decoding = np.linalg.lstsq(terms, np.ones(len(recorded)), rcond=None)[0]
    if np.linalg.matrix_rank(terms) < terms.shape[1] or constant < 0:
        constant = 0.0
        per_token, per_decoding = np.linalg.lstsq(terms[:, 1:], np.ones(len(recorded)), rcond=None)[0]
    return _Fit(float(constant), float(per_token), float(per_decoding), usual)


def shipped_plans(config: ModelConfig, device: Any, tp_size: int) -> PlanSet | None:
    """The plans that come with this program for a model with these layers on such devices; None if there are none.

    They are those that were measured to be faster than sequential execution (docs/performance.md).
    """
    for entry in sorted(resources.files("nanoflow_jax").joinpath("plans").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".json"):
            plans = decode_plan_set(entry.read_bytes())
            if (plans.device, plans.tp) == (device_name(device), tp_size) and PRESETS[plans.model].same_layer(config):
                return plans
    return None


def default_mode(plans: PlanSet | None) -> Literal["auto", "sequential"]:
    """What goes for a user who names no mode: who gives plans wants them used."""
    return "auto" if plans else "sequential"


def resolve_mode(
    mode: ExecutionMode | Literal["auto"], plans: PlanSet | None, config: ModelConfig, device: Any, tp_size: int
) -> tuple[ExecutionMode, PlanSet | None]:
    """The mode, and the plans that go with it.

    "auto" takes the best known: plans on streams, the given ones or else the shipped ones (on a CPU, which has no streams, one
    nano-operation after another), and without plans sequential execution.
    """
    if mode != "auto":
        return mode, plans
    plans = plans or shipped_plans(config, device, tp_size)
    if plans is None:
        return "sequential", None
    return "streams" if device.platform == "gpu" else "nano", plans


def largest_b_dense(plans: PlanSet | None) -> int | None:
    """Tokens of the largest planned batch: what a step should hold unless told otherwise. None without plans."""
    return max((plan.b_dense for plan in plans.plans), default=None) if plans else None


def wants_gathered_o_proj(plans: PlanSet | None) -> bool:
    """Whether the plans need the attention output projection divided by columns.

    Raises:
      PlanError: some do and some do not; weights are on the devices only once.
    """
    wanted = {plan.partition == "all_gather" for plan in plans.plans} if plans else {False}
    if len(wanted) > 1:
        raise PlanError("the plans divide the attention output projection in different ways; serve them separately")
    return wanted.pop() if wanted else False
