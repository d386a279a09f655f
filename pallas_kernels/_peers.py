"""The ranks of a mesh axis as the CTAs of a kernel see them: where a peer's copy of an array lies, and signals between ranks.

Every rank launches the same kernel. XLA gives each the addresses of all ranks' operands and results, and lets no rank start
before all have come that far; so an array that a kernel writes may be written by its peers, from the first instruction on and
until the rank ends.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._collective_schedule import CollectiveSchedule


@dataclasses.dataclass(frozen=True)
class Peers:
    """All ranks of mesh axis `axis`; with `scatter` each keeps its own part of the result."""

    axis: str
    ranks: int
    scatter: bool = False
    interpreted: ClassVar[bool] = False

    def array(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """What each rank's kernel returns."""
        return jax.ShapeDtypeStruct(shape, dtype)

    def launched(self, ctas: int) -> int:
        return ctas

    def tables(self, plan: CollectiveSchedule) -> tuple[np.ndarray, np.ndarray]:
        """Segments and tasks, a row for each CTA of each rank."""
        return plan.segments.reshape(-1, *plan.segments.shape[2:]), plan.tasks.reshape(-1, *plan.tasks.shape[2:])

    def table_row(self, ctas: int) -> Array:
        return self.me() * ctas + lax.axis_index("sm")

    def me(self) -> Array:
        return lax.axis_index(self.axis)

    def mine(self, ref: Any) -> Any:
        """This rank's copy of an array."""
        return ref

    def of(self, rank: Array, ref: Any) -> Any:
        """The copy of a rank, perhaps this one; to be written."""
        return plgpu.remote_ref(ref, self._device(rank))

    def readers(self, out: Any) -> list[Any]:
        """The copies of the result that a sum goes to, this rank's first and then each next one's."""
        return [out, *([] if self.scatter else [self.of(self._next(i), out) for i in range(1, self.ranks)])]

    def semaphores(self, count: int) -> Any:
        """As many counters on each rank, zero at first."""
        return pl.get_global(plgpu.SemaphoreType.REGULAR((count,)))

    def signal(self, semaphores: Any, index: Any, rank: Array) -> None:
        """One more at `rank`, once it can see what this warpgroup wrote, and what others wrote that it has seen."""
        plgpu.semaphore_signal(semaphores.at[index], device_id=self._device(rank))

    def wait(self, semaphores: Any, index: Any, value: int) -> None:
        plgpu.semaphore_wait(semaphores.at[index], value, decrement=False)

    def meet(self, done: Any, ctas: int) -> None:
        """Ends once the peers have ended theirs; what they wrote here is complete then. For one warpgroup of each CTA."""
        if self.scatter:
            return
        for i in range(1, self.ranks):
            self.signal(done, 0, self._next(i))

        @pl.when(lax.axis_index("sm") == 0)
        def _() -> None:
            self.wait(done, 0, (self.ranks - 1) * ctas)

    def _next(self, i: int) -> Array:
        return lax.rem(self.me() + i, self.ranks)

    def _device(self, rank: Array) -> Any:
        return {self.axis: rank}
