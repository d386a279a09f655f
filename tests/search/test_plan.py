"""Plans as data: what validation refuses, how a plan unrolls over layers, and which plan a batch gets."""

import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanoflow_jax.plan import PipelinePlan, PlanError, PlanSet, SequentialTime, edges, layer_graph, token_range, unroll
from nanoflow_jax.plan_files import decode_plan, decode_plan_set, encode, validate
from tests.search.hand_made import hand_plan, rotate

replace = msgspec.structs.replace


@st.composite
def hand_plans(draw: st.DrawFn) -> PipelinePlan:
    """Random splits, orders, partitions and window starts, with a tile of 4 tokens."""
    partition = draw(st.sampled_from(["none", "all_reduce", "all_gather"]))
    moe = draw(st.booleans())
    tile, tiles = 4, draw(st.integers(1, 6))
    b_dense, decode = tile * tiles, draw(st.integers(0, tile * tiles))
    batches = {}
    for op in layer_graph(moe=moe, partition=partition):
        whole = token_range(op.tokens, b_dense, decode)
        inner = [t for t in range(tile, b_dense, tile) if whole.start < t < whole.stop]
        cuts = sorted(draw(st.sets(st.sampled_from(inner), max_size=3))) if inner else []
        if whole.tokens:
            batches[op.name] = list(itertools.pairwise([whole.start, *cuts, whole.stop]))
    pairs = [(name, i) for name, ranges in batches.items() for i in range(len(ranges))]
    plan = hand_plan(
        nano_batches=batches, priority=draw(st.permutations(pairs)), partition=partition,
        tp=1 if partition == "none" else 2, moe=moe, tile=tile,
        durations_us={name: draw(st.integers(1, 5)) / 3 for name in batches},
    )  # fmt: skip
    return rotate(plan, draw(st.integers(0, len(plan.phases) - 1)))


@given(hand_plans())
def test_plans_survive_json(plan: PipelinePlan) -> None:
    assert decode_plan(encode(plan)) == plan


@given(hand_plans(), st.integers(1, 4))
def test_unrolling_runs_every_nano_operation_of_every_layer_after_what_it_needs(plan: PipelinePlan, num_layers: int) -> None:
    done = []
    needs: dict[tuple[str, int], list[tuple[str, int, int]]] = {}
    for producer, consumer, previous in edges(plan):
        needs.setdefault((consumer.operation, consumer.nano_batch), []).append(
            (producer.operation, producer.nano_batch, int(previous))
        )
    for window, layer, nano in unroll(plan, num_layers):
        assert window == layer + nano.layer_offset
        for operation, batch, back in needs.get((nano.operation, nano.nano_batch), []):
            assert layer == back - 1 or (layer - back, operation, batch) in done
        done.append((layer, nano.operation, nano.nano_batch))
    assert len(done) == len(set(done)) == num_layers * len(plan.nano_operations)


def two_way() -> PipelinePlan:
    """Two nano-batches of one GPU: decode attention of the first runs beside the second's qkv_proj."""
    halves = [(0, 256), (256, 512)]
    return hand_plan(
        nano_batches={
            "qkv_proj": halves, "decode_attention": [(0, 256), (256, 300)], "prefill_attention": [(300, 512)], "o_proj": halves,
            "gate_up_proj": halves, "down_proj": halves,
        }
    )  # fmt: skip


def _change(plan: PipelinePlan, operation: str, index: int, **changes) -> PipelinePlan:
    nanos = [replace(n, **changes) if (n.operation, n.nano_batch) == (operation, index) else n for n in plan.nano_operations]
    return replace(plan, nano_operations=tuple(nanos))


def _batches(plan: PipelinePlan, **changes) -> PipelinePlan:
    built = {name: tuple(type(plan.nano_batches["o_proj"][0])(start=a, stop=b) for a, b in r) for name, r in changes.items()}
    return replace(plan, nano_batches=plan.nano_batches | built)


def test_overlap_inside_the_hand_plan() -> None:
    plan = two_way()
    names = [{plan.nano_operations[r.nano_operation].operation for r in p.running} for p in plan.phases]
    assert any({"qkv_proj", "decode_attention"} <= n for n in names)
    assert plan.max_layer_offset == 0


BROKEN = {
    "does not continue": lambda p: _batches(p, o_proj=[(0, 256), (300, 512)]),
    "not a multiple of tile": lambda p: _batches(p, o_proj=[(0, 200), (200, 512)]),
    "nano-batches end at": lambda p: _batches(p, o_proj=[(0, 128), (128, 256)]),
    "nano-batches .* placed": lambda p: replace(p, nano_operations=p.nano_operations[:-1]),
    "its resource is": lambda p: _change(p, "decode_attention", 0, resource="compute"),
    "dependency": lambda p: _change(p, "o_proj", 0, start_us=0.0),
    "overlap on compute": lambda p: _change(p, "qkv_proj", 1, start_us=0.5),
    "SMs in use": lambda p: replace(p, num_sms=5),
    "num_sms=9": lambda p: _change(p, "o_proj", 0, num_sms=9),
    "shares sum": lambda p: _shares(p, 0.6),
    "not a multiple of tile=": lambda p: replace(p, b_dense=500),
    "decode_tokens=": lambda p: replace(p, decode_tokens=600),
    "decode_context=0": lambda p: replace(p, decode_context=0.0),
    "period_us=": lambda p: replace(p, period_us=float("nan")),
    "phases end at": lambda p: replace(p, phases=p.phases[:-1]),
    "of its work": lambda p: _change(p, "o_proj", 0, best_us=0.25),
    "layer_offset": lambda p: _change(p, "o_proj", 0, layer_offset=-1),
    "does not fit tp": lambda p: replace(p, tp=2),
    "the layer has": lambda p: replace(p, moe=True),
}  # fmt: skip


def _shares(plan: PipelinePlan, share: float) -> PipelinePlan:
    phases = [replace(p, running=tuple(replace(r, share=share) for r in p.running)) for p in plan.phases]
    return replace(plan, phases=tuple(phases))


@pytest.mark.parametrize("message", BROKEN)
def test_validation_refuses(message: str) -> None:
    plan = two_way()
    validate(plan)
    with pytest.raises(PlanError, match=message):
        validate(BROKEN[message](plan))


def test_causal_prompt_attention_waits_for_earlier_prompt_tokens() -> None:
    """Two prompt nano-batches: the second reads keys of the first, so it waits for both of qkv_proj's."""
    halves = [(0, 256), (256, 512)]
    names = ("qkv_proj", "prefill_attention", "o_proj", "gate_up_proj", "down_proj")
    plan = hand_plan(nano_batches=dict.fromkeys(names, halves))
    pairs = {(p.operation, p.nano_batch, c.operation, c.nano_batch) for p, c, _ in edges(plan)}
    assert ("qkv_proj", 0, "prefill_attention", 1) in pairs
    assert ("qkv_proj", 1, "prefill_attention", 0) not in pairs


def test_unknown_fields_and_versions_are_refused() -> None:
    text = encode(two_way())
    with pytest.raises(PlanError, match="streams"):
        decode_plan(text.replace(b'"tp": 1', b'"tp": 1, "streams": 3'))
    with pytest.raises(PlanError, match="format_version=2"):
        decode_plan(text.replace(b'"format_version": 1', b'"format_version": 2'))
    with pytest.raises(PlanError):
        decode_plan(b"{}")


def _plan_set(crossover: int | None = 300) -> PlanSet:
    plan = two_way()
    small = replace(plan, period_us=plan.period_us)
    sequential = (
        SequentialTime(b_dense=256, decode_tokens=150, layer_us=plan.period_us / 2),
        SequentialTime(b_dense=512, decode_tokens=300, layer_us=plan.period_us * 2),
    )
    return PlanSet(
        model=plan.model, device=plan.device, tp=1, plans=(small,), sequential=sequential, crossover_tokens=crossover
    )


def test_a_set_holds_plans_of_one_machine() -> None:
    with pytest.raises(PlanError, match="other"):
        decode_plan_set(encode(replace(_plan_set(), device="other")))
