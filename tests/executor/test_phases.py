"""Phases: every operation once and in order, nothing waits for another chain of its phase, and no cheaper cut exists."""

import itertools
from importlib import resources

import msgspec
import numpy as np
import pytest

from nanoflow_jax.executor.phases import BARRIER_US, Phase, Placed, group, in_order
from nanoflow_jax.plan import Resource, edges
from nanoflow_jax.plan_files import decode_plan_set
from tests.executor.plans import random_plan


def conflicts(phase: Phase, plan) -> bool:
    """Whether a member needs what another chain, or a write of the pool, of the same phase gives, from the plan's own edges, or
    attention or a collective needs SMs that a GEMM had before it."""
    members = {placed.key: placed for placed in phase}
    for producer, consumer, previous_layer in edges(plan):
        for placed in phase:
            if (placed.nano.operation, placed.nano.nano_batch) != (consumer.operation, consumer.nano_batch):
                continue
            other = members.get((placed.layer - previous_layer, producer.operation, producer.nano_batch))
            if other and (other.nano.resource != placed.nano.resource or other.nano.operation == "qkv_proj"):
                return True
    return any(
        one.nano.num_sms + other.nano.num_sms > plan.num_sms
        and one.nano.resource is Resource.COMPUTE
        and other.nano.resource is not Resource.COMPUTE
        for one, other in itertools.combinations(sorted(phase, key=lambda placed: placed.start_us), 2)
        if one.end_us <= other.start_us + 1e-3
    )


def time_us(phase: Phase | list[Placed]) -> float:
    return BARRIER_US + max(sum(p.nano.duration_us for p in phase if p.nano.resource is resource) for resource in Resource)


@pytest.mark.parametrize("seed", range(12))
def test_no_other_cut_is_cheaper(seed: int) -> None:
    rng = np.random.default_rng(seed)
    plan = random_plan(rng, b_dense=16, decode_tokens=8, tp=1 + seed % 2, moe=False, partition=["none", "all_reduce"][seed % 2],
                       tile=8, model="m")  # fmt: skip
    order = list(in_order(plan, 1))
    phases = group(plan, 1)
    assert [placed for phase in phases for placed in phase] == order
    assert not any(conflicts(phase, plan) for phase in phases)
    least = float("inf")
    for cut in itertools.product((False, True), repeat=len(order) - 1):
        stops = [i + 1 for i, here in enumerate(cut) if here] + [len(order)]
        parts = [tuple(order[a:b]) for a, b in zip([0, *stops], stops, strict=False)]
        total = sum(time_us(part) for part in parts)
        if total < least and not any(conflicts(part, plan) for part in parts):
            least = total
    assert sum(time_us(phase) for phase in phases) == pytest.approx(least, rel=1e-4)


def test_attention_that_waits_for_a_gemm_on_all_sms_has_a_phase_of_its_own() -> None:
    """Side by side the two would wait for each other's SMs. On the SMs that attention leaves, the GEMM does share its phase."""
    plans = decode_plan_set((resources.files("nanoflow_jax") / "plans/h200-llama3-8b-tp1.json").read_bytes()).plans
    plan = next(plan for plan in plans if plan.decode_tokens == plan.b_dense)
    first = {n.operation: n for n in reversed(plan.nano_operations)}
    gemm, attention = first["o_proj"], first["decode_attention"]
    for sms, shared in ((gemm.num_sms, True), (plan.num_sms, False)):
        changed = {
            id(gemm): msgspec.structs.replace(gemm, num_sms=sms),
            id(attention): msgspec.structs.replace(attention, start_us=gemm.start_us + gemm.duration_us),
        }
        later = msgspec.structs.replace(plan, nano_operations=tuple(changed.get(id(n), n) for n in plan.nano_operations))
        kinds = [{(p.nano.operation, p.nano.nano_batch) for p in phase} for phase in group(later, 4)]
        both = {(n.operation, n.nano_batch) for n in (gemm, attention)}
        assert any(both <= kind for kind in kinds) == shared
