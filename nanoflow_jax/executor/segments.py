"""Named values of a dense batch, held in pieces: nano-operations of different splits write and read token ranges of them."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array


@dataclasses.dataclass(frozen=True)
class Segment:
    """Rows of a value that belong to tokens [start, stop), of an array that may have others before and behind them."""

    start: int
    stop: int
    array: Array
    first_row: int


class Segments:
    """One value over the token axis. A later write hides earlier ones where they overlap."""

    def __init__(self) -> None:
        self._newest_first: list[Segment] = []

    def write(self, start: int, stop: int, array: Array, first_row: int = 0) -> None:
        """`first_row`: of the array, that of token `start`."""
        assert array.shape[0] >= first_row + stop - start, f"{array.shape=} for tokens [{start}, {stop}) from row {first_row}"
        kept = [s for s in self._newest_first if not (start <= s.start and s.stop <= stop)]
        self._newest_first = [Segment(start, stop, array, first_row), *kept]

    def covers(self, start: int, stop: int) -> bool:
        """Whether every token of the range was written."""
        at = start
        while at < stop:
            ends = [s.stop for s in self._newest_first if s.start <= at < s.stop]
            if not ends:
                return False
            at = max(ends)
        return True

    def copy(self) -> "Segments":
        """Another value with the same pieces."""
        other = Segments()
        other._newest_first = list(self._newest_first)
        return other

    def read(self, start: int, stop: int) -> Array:
        """Rows of tokens [start, stop): the array itself where one segment is just that range, else slices side by side.

        Raises:
          KeyError: a token of the range was never written, which means that an order breaks a dependency.
        """
        parts: list[Array] = []
        at = start
        while at < stop:
            newest, segment = next(((i, s) for i, s in enumerate(self._newest_first) if s.start <= at < s.stop), (None, None))
            if newest is None or segment is None:
                raise KeyError(f"token {at} of [{start}, {stop}) was never written")
            # Newer segments that begin inside this one hide its rest.
            until = min([stop, segment.stop, *(s.start for s in self._newest_first[:newest] if at < s.start)])
            before = segment.start - segment.first_row
            parts.append(segment.array[at - before : until - before])
            at = until
        if len(parts) == 1:
            return parts[0]
        return jnp.concatenate(parts)
