"""The K rows that block selection samples, copied together.

A probe reads one row in four of K. In the cache these lie apart, and memory hands them over at a
quarter of its rate; a copy that is read in order costs a quarter of K's memory. A full block's
samples never change, so the copy only grows; a last block that still grows is sampled in the cache.
"""

import numpy as np

from course_lib.arrays import F32, LayerRows, positive_int

ProbeArrays = tuple[np.ndarray | None, np.ndarray | None]


class ProbeKeys:
    """Samples of the full blocks of one layer's cache, for sparse_attention(probe_keys=...).

    block_size and n_probe are those of the selection. ``update`` copies what has become full since
    the last call; after a cache was truncated, or given other rows, start anew.
    """

    def __init__(self, block_size: int = 32, n_probe: int = 8):
        self.block_size = positive_int(block_size, "block_size")
        self.n_probe = positive_int(n_probe, "n_probe")
        self.step = max(1, self.block_size // self.n_probe)
        self.per_block = -(-self.block_size // self.step)
        self._k: np.ndarray | None = None
        self._scale: np.ndarray | None = None
        self.rows = 0  # sampled rows held of each KV head

    def update(self, rows: LayerRows) -> None:
        """Copy the samples of the blocks of ``rows`` that are full and not held yet.

        rows: k float32 or int8 [num_kv_heads, n, head_dim], with k_scale for int8, of which the
        first tokens are those of the last call. ValueError for rows of another type or shape than
        the samples held.
        """
        self._require_alike(rows)
        held, full = self.blocks, rows.k.shape[1] // self.block_size
        if full <= held:
            return
        new = slice(held * self.per_block, full * self.per_block)
        span = slice(held * self.block_size, full * self.block_size)
        self._k = self._with_room(self._k, rows.k, new.stop)
        self._k[:, new] = self._sampled(rows.k[:, span])
        if rows.k_scale is not None:
            self._scale = self._with_room(self._scale, rows.k_scale, new.stop)
            self._scale[:, new] = self._sampled(rows.k_scale[:, span])
        self.rows = new.stop

    def require_fit(self, rows: LayerRows, block_size: int, n_probe: int) -> None:
        """ValueError unless these can be samples of blocks that a context of these rows has."""
        n = rows.k.shape[1]
        self._require_alike(rows)
        if (self.block_size, self.n_probe) != (block_size, n_probe):
            raise ValueError(f"probe_keys samples blocks of {self.block_size} in {self.n_probe} "
                             f"places, not {block_size} in {n_probe}.")
        if self.blocks > n // block_size:
            raise ValueError(f"probe_keys holds {self.blocks} full blocks, but {n} "
                             "tokens have fewer; start anew after a cache was truncated.")

    def _require_alike(self, rows: LayerRows) -> None:
        k, scale = rows.k, rows.k_scale
        if k.ndim != 3 or k.dtype not in (F32, np.int8):
            raise ValueError("probe_keys samples rows of float32 or int8 [num_kv_heads, n, "
                             f"head_dim], not {k.dtype} {k.shape}.")
        if (scale is None) != (k.dtype == F32):
            raise ValueError("probe_keys needs k_scale with int8 rows, and none with float32.")
        if scale is not None and (scale.dtype != F32 or scale.shape != k.shape[:2]):
            raise ValueError(f"k_scale must be float32 {k.shape[:2]}, not {scale.dtype} "
                             f"{scale.shape}.")
        held = self._k
        if held is not None and (held.dtype, len(held), held.shape[2]) != (
                k.dtype, len(k), k.shape[2]):
            raise ValueError(f"probe_keys holds samples of {held.dtype} rows of {held.shape[2]} "
                             f"values in {len(held)} KV heads, but k has {k.dtype} rows of "
                             f"{k.shape[2]} in {len(k)}; start anew.")

    def _sampled(self, a: np.ndarray) -> np.ndarray:
        blocks = a.reshape(len(a), -1, self.block_size, *a.shape[2:])[:, :, :: self.step]
        return blocks.reshape(len(a), -1, *a.shape[2:])

    def _with_room(self, held: np.ndarray | None, like: np.ndarray, size: int) -> np.ndarray:
        if held is not None and held.shape[1] >= size:
            return held
        bigger = np.empty((len(like), size + size // 2, *like.shape[2:]), like.dtype)
        if held is not None:
            bigger[:, : self.rows] = held[:, : self.rows]
        return bigger

    @property
    def blocks(self) -> int:
        """Full blocks of which samples are held."""
        return self.rows // self.per_block

    @property
    def arrays(self) -> ProbeArrays:
        """Samples [num_kv_heads, rows, head_dim] and their scales [num_kv_heads, rows], as views
        of what is held; None where there is nothing."""
        return (None if self._k is None else self._k[:, : self.rows],
                None if self._scale is None else self._scale[:, : self.rows])

    @property
    def nbytes(self) -> int:
        """Bytes of the samples and scales held, for the ledger of a cache (room not counted)."""
        return sum(a.nbytes for a in self.arrays if a is not None)
