"""What XLA schedules for H200s, compiled on a CPU: the plan's pairs are in flight together on streams, and only there."""

import functools
import json
import subprocess
import sys
import tempfile

import pytest

from nanoflow_jax.config import preset
from nanoflow_jax.executor.fused import beside, gemms
from nanoflow_jax.executor.phases import group
from nanoflow_jax.kv_cache import step_bytes
from nanoflow_jax.parallel import parallel_layout
from nanoflow_jax.plan_files import decode_plan
from tests.executor.h200_schedule import NUM_LAYERS, PLANS
from tests.kernels.aot import child_environment

pytestmark = pytest.mark.aot
ONE_GPU, FOUR_GPUS, EIGHT_GPUS = "llama3-8b-h200-tp1", "llama3-70b-h200-tp4", "llama3-70b-h200-tp8"
DECODING, TWO_GPUS_BY_HAND = "llama3-8b-h200-decoding-hand", "llama3-70b-h200-tp2-hand"
_WITH_NETWORK = {"compute+memory", "compute+network"}


@functools.cache
def schedule(plan: str, mode: str) -> dict:
    environment = child_environment()
    with tempfile.TemporaryDirectory() as dump:
        environment["XLA_FLAGS"] = f"--xla_dump_to={dump}"
        command = [sys.executable, "-m", "tests.executor.h200_schedule", plan, mode, dump]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("plan", "pairs"), [(ONE_GPU, {"compute+memory"}), (FOUR_GPUS, _WITH_NETWORK), (EIGHT_GPUS, _WITH_NETWORK)]
)
def test_streams_keep_the_pairs_of_the_plan_in_flight(plan: str, pairs: set[str]) -> None:
    found = schedule(plan, "streams")["pairs"]
    assert pairs <= found.keys()
    assert min(found[pair] for pair in pairs) >= 3, "once per layer"


def test_gemms_that_sum_over_the_ranks_leave_no_collectives_to_a_layer() -> None:
    """In the layers attention runs beside them, and NCCL is left to the embedding and the logits."""
    assert schedule(TWO_GPUS_BY_HAND, "streams")["pairs"] == {"compute+memory": NUM_LAYERS}


@pytest.mark.parametrize("plan", [ONE_GPU, FOUR_GPUS])
def test_a_profile_can_tell_whose_kernels_are_whose(plan: str) -> None:
    assert len(schedule(plan, "streams")["unnamed_kernels"]) == 1, "logits belong to no nano-operation"


@pytest.mark.parametrize("plan", [ONE_GPU, FOUR_GPUS])
def test_nothing_waits_for_regions_that_do_nothing(plan: str) -> None:
    """XLA makes such ones of what a region has for results if there are several."""
    assert schedule(plan, "streams")["empty_starts"] == 0


@pytest.mark.parametrize(("plan", "others"), [(ONE_GPU, set()), (FOUR_GPUS, {"compute+network"})])
def test_pairs_of_the_plan_are_fused_and_collectives_stay_beside(plan: str, others: set[str]) -> None:
    found = schedule(plan, "fused")
    found_plan = decode_plan((PLANS / f"{plan}.json").read_bytes())
    pairs = sum(len(beside(phase, gemms(found_plan))) for phase in group(found_plan, NUM_LAYERS))
    assert found["fused_calls"] == pairs >= NUM_LAYERS
    assert others <= found["pairs"].keys()


@pytest.mark.parametrize("plan", [ONE_GPU, DECODING])
def test_in_a_graph_no_gemm_can_run_beside_another(plan: str) -> None:
    """Streams and barriers say so, but a graph's kernels wait for data alone: two might share too few SMs for either."""
    for unordered, kernels in schedule(plan, "streams")["unordered"].values():
        assert unordered == 0
        assert kernels >= NUM_LAYERS


def test_the_split_alone_is_no_order_of_data() -> None:
    """Where nano-batches did depend on each other, the test above would see nothing."""
    assert schedule(ONE_GPU, "nano")["unordered"]["gemm"][0] >= NUM_LAYERS


def test_a_layer_in_sequence_is_ten_kernels() -> None:
    """Two norms, four GEMMs, append_kv, decode attention and what adds up its parts, prompt attention."""
    assert schedule(ONE_GPU, "sequential")["launches"] == 10 * NUM_LAYERS + 7


@pytest.mark.parametrize(("plan", "mode", "kinds"), [(ONE_GPU, "sequential", 9), (TWO_GPUS_BY_HAND, "sequential", 9)])
def test_layers_share_kernels(plan: str, mode: str, kinds: int) -> None:
    """XLA compiles each kernel that it has not seen, which takes most of a second."""
    assert schedule(plan, mode)["kernels"] == kinds


@pytest.mark.parametrize("plan", [ONE_GPU, FOUR_GPUS])
def test_the_split_alone_overlaps_nothing(plan: str) -> None:
    assert not schedule(plan, "nano")["pairs"]


def test_attention_s_queries_are_not_copied() -> None:
    """Those of decoding and of prompt tokens lie side by side in what one nano-batch of qkv gave."""
    assert schedule(TWO_GPUS_BY_HAND, "streams")["copies"] < 3 * NUM_LAYERS


@pytest.mark.parametrize("mode", ["sequential", "nano", "streams", "fused"])
def test_the_pool_is_not_copied(mode: str) -> None:
    """Temporaries grow with the batch; a second pool, or a layer's, would show beside them."""
    found = schedule(ONE_GPU, mode)
    assert found["temp_bytes"] < found["pool_bytes"] / 3


@pytest.mark.parametrize(
    ("name", "mode"), [*((ONE_GPU, mode) for mode in ("sequential", "nano", "streams", "fused")), (FOUR_GPUS, "streams")]
)
def test_what_a_step_needs_beside_the_pool_is_reserved(name: str, mode: str) -> None:
    plan = decode_plan((PLANS / f"{name}.json").read_bytes())
    config = preset(plan.model)
    layout = parallel_layout(config, plan.tp)
    reserved = step_bytes(config, layout, b_dense=plan.b_dense, num_rows=plan.b_dense, greedy_only=True)
    logits = 4 * plan.b_dense * layout.padded_vocab_size
    assert schedule(name, mode)["temp_bytes"] + 2 * logits <= reserved


def test_what_sampling_needs_is_reserved() -> None:
    config, rows = preset("llama3-8b"), 512
    command = [sys.executable, "-m", "tests.executor.h200_sampling", str(rows), str(config.vocab_size)]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    temporary = json.loads(done.stdout.splitlines()[-1])
    sizes = {"b_dense": rows, "num_rows": rows}
    reserved = {greedy: step_bytes(config, parallel_layout(config, 1), **sizes, greedy_only=greedy) for greedy in (False, True)}
    logits = 4 * rows * config.vocab_size
    assert max(temporary.values()) + 2 * logits <= reserved[False]
    assert temporary["greedy 0"] + 2 * logits <= reserved[True]
    assert max(temporary.values()) > logits, "sampling with filters needs less than it did: reserve less"


@pytest.mark.parametrize("mode", ["sequential", "nano"])
def test_kernels_get_aligned_pointers(mode: str) -> None:
    """Mosaic kernels refuse arguments that do not begin at a multiple of 256 bytes."""
    offsets = schedule(ONE_GPU, mode)["kernel_slice_offsets"]
    assert offsets, "XLA no longer fuses slices into kernels, so this test sees nothing"
    assert all(offset % 256 == 0 for offset in offsets), offsets
