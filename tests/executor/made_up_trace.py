"""A trace as a GPU would leave it if it kept exactly to a plan."""

from nanoflow_jax.compare.trace import Event
from nanoflow_jax.executor.phases import in_order
from nanoflow_jax.plan import PipelinePlan, Resource

KERNELS = {
    "qkv_proj": "gemm_mosaic_gpu_kernel",
    "decode_attention": "decode_attention_mosaic_gpu_kernel",
    "prefill_attention": "prefill_attention_mosaic_gpu_kernel",
    "o_proj": "gemm_mosaic_gpu_kernel",
    "gate_up_proj": "gemm_mosaic_gpu_kernel",
    "down_proj": "gemm_mosaic_gpu_kernel",
}
STREAMS = {Resource.COMPUTE: "Stream #5", Resource.MEMORY: "Stream #6", Resource.NETWORK: "Stream #7"}


def planned_trace(plan: PipelinePlan, num_layers: int, steps: int) -> list[Event]:
    """Events of every rank: each nano-operation at its planned time, and what frames the layers of a step."""
    events = []
    layers_us = max(placed.end_us for placed in in_order(plan, num_layers))
    head_us = plan.period_us / 4

    def add(device: int, stream: str, name: str, start_us: float, duration_us: float, ctas: int | None = None) -> None:
        events.append(Event(device, stream, name, 1e3 * start_us, 1e3 * duration_us, ctas=ctas))

    for device in range(plan.tp):
        for step in range(steps):
            begin = step * (layers_us + 2 * head_us)
            add(device, "Stream #1", "loop_gather_fusion", begin, head_us / 2)
            if plan.tp > 1:
                add(device, STREAMS[Resource.NETWORK], "ncclDevKernel_AllReduce", begin + head_us / 2, head_us / 4)
            for placed in in_order(plan, num_layers):
                name = KERNELS.get(placed.nano.operation, "ncclDevKernel_AllReduce")
                ctas = None if placed.nano.resource is Resource.NETWORK else placed.nano.num_sms
                start_us = begin + head_us + placed.start_us
                add(device, STREAMS[placed.nano.resource], name, start_us, placed.nano.duration_us, ctas)
                if placed.nano.operation == "decode_attention":
                    name = "decode_attention_combine_mosaic_gpu_kernel"
                    add(device, STREAMS[placed.nano.resource], name, start_us + placed.nano.duration_us, 0.0, ctas)
            add(device, "Stream #1", "nvjet_sm90_tst", begin + head_us + layers_us, head_us / 2, plan.num_sms)
            if plan.tp > 1:
                add(
                    device, STREAMS[Resource.NETWORK], "ncclDevKernel_AllGather", begin + 1.5 * head_us + layers_us, head_us / 4
                )
    return sorted(events, key=lambda event: (event.device, event.start_ns))
