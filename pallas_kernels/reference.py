"""Every kernel in plain jnp with float32 accumulation: the truth in tests, and the path of devices without compiled kernels.

The attentions walk rows, query tiles and KV chunks in loops whose trip counts are data, so work follows the real lengths and no
gathered copy of the cache is ever larger than a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

# Tokens of K and V that one loop iteration reads, and query tokens that share them in prefill.
_KV_CHUNK = 128
_QUERY_TILE = 32
# Decoding rows that go through the loop together, up to the longest of them.
_DECODE_ROWS = 4
_MASKED = -1e30


def gemm(
    a: Float[Array, "M K"],
    b: Float[Array, "K *N"],
    *,
    bias: Float[Array, "*N"] | None = None,
    residual: Float[Array, "M N_out"] | None = None,
    swiglu: bool = False,
    rows: Int[Array, ""] | None = None,
    out_dtype: DTypeLike | None = None,
) -> Float[Array, "M N_out"]:
    """a b, then bias, then silu(gate) * up (`swiglu`: b is [K, 2, N]), then the residual; float32 until the result is stored.

    Axes of b behind the first are kept without `swiglu`, so a projection onto heads comes out as [M, heads, head_dim]. Rows of
    the result from `rows` on (None: M) are undefined: here they are computed like all others. `out_dtype` None is that of a.
    """
    del rows
    out = lax.dot_general(a, b, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)
    if bias is not None:
        out = out + bias.astype(jnp.float32)[None]
    if swiglu:
        out = jax.nn.silu(out[:, 0]) * out[:, 1]
    if residual is not None:
        out = out + residual.astype(jnp.float32)
    return out.astype(a.dtype if out_dtype is None else out_dtype)


def grouped_gemm(
    x: Float[Array, "M K"], w: Float[Array, "E K *N"], group_sizes: Int[Array, " E"], *, swiglu: bool = False
) -> Float[Array, "M N_out"]:
    """Rows of x, sorted by expert, each times its expert's matrix; rows behind the last group are undefined."""
    E, K = w.shape[:2]
    out = lax.ragged_dot(x, w.reshape(E, K, -1), group_sizes, preferred_element_type=jnp.float32)
    if swiglu:
        gate, up = jnp.split(out, 2, axis=1)
        out = jax.nn.silu(gate) * up
    return out.astype(x.dtype)


def rotate(x: Float[Array, "T *heads H"], cos: Float[Array, "T H_2"], sin: Float[Array, "T H_2"]) -> Float[Array, "T *heads H"]:
    """Rotary embedding of the rotate-half form, in float32."""
    spread = (x.shape[0],) + (1,) * (x.ndim - 2) + (cos.shape[1],)
    cos, sin = cos.reshape(spread), sin.reshape(spread)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def append_kv(
    qkv: Float[Array, "T K G_plus_2 H"],
    cos: Float[Array, "T H_2"],
    sin: Float[Array, "T H_2"],
    slots: Int[Array, " T"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    *,
    rows: Int[Array, ""] | None = None,
    with_kv: bool = True,
) -> tuple[
    Float[Array, "T K G H"],
    Float[Array, "T K 2 H"],
    Float[Array, "P K page_size H"],
    Float[Array, "P K page_size H"],
]:
    """Rotates queries and keys, writes keys and values to their slots; slot -1 writes nothing. Slots are distinct.

    Returns the queries, what it wrote (or would have) for each token, and the pages. Without `with_kv` the second may be empty,
    and results of tokens from `rows` on (None: T) are undefined: here they are like all others.
    """
    del rows, with_kv
    num_pages, _, page_size, _ = k_pages.shape
    q, k, v = qkv[:, :, :-2], qkv[:, :, -2], qkv[:, :, -1]
    # A page beyond the pool is what "drop" drops; a negative one would wrap around to the last page.
    page, offset = jnp.where(slots < 0, num_pages, slots // page_size), slots % page_size
    write = functools.partial(_write_slots, page=page, offset=offset)
    k, v = rotate(k, cos, sin).astype(k_pages.dtype), v.astype(v_pages.dtype)
    return rotate(q, cos, sin), jnp.stack([k, v], axis=2), write(k_pages, k), write(v_pages, v)


def _write_slots(pages: Array, rows: Array, *, page: Array, offset: Array) -> Array:
    return pages.at[page, :, offset].set(rows, mode="drop", unique_indices=True)


def decode_attention(
    q: Float[Array, "T K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
) -> Float[Array, "T K G H"]:
    """Attention of one query token per row over its pages; rows with kv_len 0 and tokens behind the rows return zeros."""
    B = kv_lens.shape[0]
    rows = ((0, -B % _DECODE_ROWS), (0, 0))
    tables = jnp.pad(_whole_chunks(block_tables, k_pages.shape[2]), rows)
    last = jnp.pad(kv_lens - 1, rows[:1], constant_values=-1)
    padded = jnp.pad(q, (*rows, (0, 0), (0, 0)))

    def attend(block: Array, out: Array) -> Array:
        first = block * _DECODE_ROWS
        q_rows, last_rows, table_rows = (lax.dynamic_slice_in_dim(x, first, _DECODE_ROWS) for x in (padded, last, tables))
        result = _attend(q_rows[:, None], last_rows[:, None], k_pages, v_pages, table_rows)
        return lax.dynamic_update_slice_in_dim(out, result[:, 0], first, 0)

    blocks = (_used(last >= 0) + _DECODE_ROWS - 1) // _DECODE_ROWS
    return lax.fori_loop(0, blocks, attend, jnp.zeros_like(padded))[: q.shape[0]]


def prefill_attention(
    q: Float[Array, "T K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "S pages"],
    kv_lens: Int[Array, " S"],
    q_starts: Int[Array, " S"],
    q_lens: Int[Array, " S"],
    *,
    out: Float[Array, "T K G H"] | None = None,
) -> Float[Array, "T K G H"]:
    """Causal attention of ragged chunks whose keys, this step's included, are in the cache.

    Query j of row s is token q_starts[s] + j and has position kv_lens[s] - q_lens[s] + j. Tokens of no row keep what
    `out` has for them, or are zero.
    """
    tables = _whole_chunks(block_tables, k_pages.shape[2])
    T = q.shape[0]
    # Room behind the last token, so that a tile that begins near the end is not shifted by the slice's clamping.
    padded, before = (_room_behind(x) for x in (q, jnp.zeros_like(q) if out is None else out))
    lane = jnp.arange(_QUERY_TILE, dtype=jnp.int32)

    def row_body(row: Array, out: Array) -> Array:
        def tile_body(tile: Array, out: Array) -> Array:
            first = tile * _QUERY_TILE
            start = q_starts[row] + first
            covered = first + lane < q_lens[row]
            position = jnp.where(covered, kv_lens[row] - q_lens[row] + first + lane, -1)
            q_tile = lax.dynamic_slice_in_dim(padded, start, _QUERY_TILE)
            result = _attend(q_tile[None], position[None], k_pages, v_pages, lax.dynamic_slice_in_dim(tables, row, 1))
            before = lax.dynamic_slice_in_dim(out, start, _QUERY_TILE)
            merged = jnp.where(covered[:, None, None, None], result[0], before)
            return lax.dynamic_update_slice_in_dim(out, merged, start, 0)

        return lax.fori_loop(0, (q_lens[row] + _QUERY_TILE - 1) // _QUERY_TILE, tile_body, out)

    return lax.fori_loop(0, _used(q_lens > 0), row_body, before)[:T]


def _room_behind(x: Array) -> Array:
    return jnp.pad(x, ((0, _QUERY_TILE), (0, 0), (0, 0), (0, 0)))


def _used(rows: Array) -> Array:
    """One past the last row that is in use: the rows behind it cost nothing, not even an empty iteration."""
    return jnp.max(jnp.where(rows, jnp.arange(rows.shape[0], dtype=jnp.int32) + 1, 0), initial=0)


def _whole_chunks(block_tables: Array, page_size: int) -> Array:
    """Pads tables to a whole number of chunks: a slice past the end would be moved back and read the wrong pages."""
    pages_per_chunk = max(1, _KV_CHUNK // page_size)
    return jnp.pad(block_tables, ((0, 0), (0, -block_tables.shape[1] % pages_per_chunk)))


def _attend(
    q: Float[Array, "B Tq K G H"],
    last: Int[Array, "B Tq"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    tables: Int[Array, "B pages"],
) -> Float[Array, "B Tq K G H"]:
    """Online softmax of each sequence's queries over its positions 0 .. last (inclusive, per query; -1 attends to nothing)."""
    B, Tq, K, G, H = q.shape
    page_size = k_pages.shape[2]
    pages_per_chunk = max(1, _KV_CHUNK // page_size)
    chunk = pages_per_chunk * page_size
    # Heads outermost: both products are then plain matrix products per sequence and head.
    scaled = (q.astype(jnp.float32) * H**-0.5).transpose(0, 2, 1, 3, 4).reshape(B, K, Tq * G, H)
    last_of_query = jnp.repeat(last, G, axis=1)
    batched = ((0, 1), (0, 1))

    def body(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        peak, total, out = carry
        ids = lax.dynamic_slice_in_dim(tables, i * pages_per_chunk, pages_per_chunk, axis=1)
        position = i * chunk + jnp.arange(chunk, dtype=jnp.int32)
        seen = (position[None, None] <= last_of_query[:, :, None])[:, None]
        # Whatever lies behind the end of a sequence (it may be NaN) must not reach the products.
        live = (position[None] <= last.max(1, keepdims=True))[:, None, :, None]

        def load(pages: Array) -> Array:
            rows = pages[ids].transpose(0, 2, 1, 3, 4).reshape(B, K, chunk, H)
            return jnp.where(live, rows, 0).astype(jnp.float32)

        scores = lax.dot_general(scaled, load(k_pages), (((3,), (3,)), batched))
        scores = jnp.where(seen, scores, _MASKED)
        new_peak = jnp.maximum(peak, scores.max(-1))
        weights = jnp.where(seen, jnp.exp(scores - new_peak[..., None]), 0.0)
        shrink = jnp.exp(peak - new_peak)
        gain = lax.dot_general(weights, load(v_pages), (((3,), (2,)), batched))
        return new_peak, total * shrink + weights.sum(-1), out * shrink[..., None] + gain

    start = (
        jnp.full((B, K, Tq * G), _MASKED, jnp.float32),
        jnp.zeros((B, K, Tq * G), jnp.float32),
        jnp.zeros((B, K, Tq * G, H), jnp.float32),
    )
    _, total, out = lax.fori_loop(0, (last.max() + chunk) // chunk, body, start)
    out = out / jnp.where(total == 0, 1.0, total)[..., None]
    return out.reshape(B, K, Tq, G, H).transpose(0, 2, 1, 3, 4).astype(q.dtype)


def gemm_with_decode_attention(
    a: Float[Array, "M K_a"],
    b: Float[Array, "K_a *N"],
    q: Float[Array, "B K G H"],
    k_pages: Float[Array, "P K page_size H"],
    v_pages: Float[Array, "P K page_size H"],
    block_tables: Int[Array, "B pages"],
    kv_lens: Int[Array, " B"],
    *,
    bias: Float[Array, "*N"] | None = None,
    residual: Float[Array, "M N_out"] | None = None,
    swiglu: bool = False,
) -> tuple[Float[Array, "M N_out"], Float[Array, "B K G H"]]:
    """`gemm` and `decode_attention`, which have nothing to do with each other but that one kernel can do both."""
    attended = decode_attention(q, k_pages, v_pages, block_tables, kv_lens)
    return gemm(a, b, bias=bias, residual=residual, swiglu=swiglu), attended
