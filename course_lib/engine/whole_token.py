"""A decoded token through all layers in one call of a compiled kernel.

`Model.hidden` with `DecodeAttention` is the definition, and its bits are these. Called layer by
layer, a token of a 0.6B model spends a tenth of its time between the kernels.
"""

from __future__ import annotations

import numpy as np

from course_lib import backend, sparse
from course_lib.engine.decode import DecodeAttention
from course_lib.engine.layers import columns, matrix_parts, rope_tables
from course_lib.engine.model import Model, rows_of
from course_lib.engine.weights import DenseMLP, LayerWeights
from course_lib.quant import ROUNDING_RULES
from course_lib.sparse_kernels import Chosen


def whole_token(model: Model, token: int, attend: DecodeAttention,
                traced: bool = False) -> np.ndarray | None:
    """Hidden state `[1, hidden]` of `token` after the last layer, its rows in the cache.

    `attend` then has its cost and, if `traced`, its Selections. None, with nothing changed, where
    that takes `Model.hidden`: without the kernel; for a model or an attention of another class,
    which may look at each layer; with forced blocks; for a mixture of experts; for sizes that the
    kernel does not take; and where something is wrong, as a number that is not finite, which
    `Model.hidden` then names.
    """
    compiled = backend.kernel("decoder_layers")
    if compiled is None or type(model) is not Model or type(attend) is not DecodeAttention:
        return None
    if len(attend.force_blocks) or not _sizes_fit(model):
        return None
    config, cache = model.config, attend.cache
    if not cache.holds_whole_tokens:
        return None
    weights = [_arrays(layer) for layer in model.weights.layers]
    x, n = rows_of(model.weights.embedding, [token]), cache.length
    cos, sin = rope_tables(np.array([n]), config.head_dim, config.rope_theta, config.rope)
    try:
        choice = None if attend.k is None else _Choice(attend, len(weights),
                                                       config.num_attention_heads)
        finite, seconds = compiled(
            x, config.rms_norm_eps, cos, sin, config.num_attention_heads, weights,
            cache.with_room(), n, ROUNDING_RULES.index(cache.rule),
            *(_EVERY_ROW if choice is None else choice.arguments))
    except ValueError:
        return None
    if not finite:
        return None
    cache.count_token()
    attend.seconds = seconds
    heads = len(weights) * config.num_attention_heads
    attend.blocks_read = [attend.n_blocks if choice is None else choice.blocks] * heads
    if traced:
        attend.selections = [[] for _ in weights] if choice is None else choice.selections()
    return x


_EVERY_ROW = (None,) * 10


class _Choice:
    """What the kernel needs to choose blocks in every layer, and what it has chosen."""

    def __init__(self, attend: DecodeAttention, num_layers: int, num_heads: int) -> None:
        assert attend.k is not None
        n, count = attend.cache.length + 1, attend.n_blocks
        self._sums = (None if attend.importance is None
                      else sparse.importance_sums(attend.importance, attend.block_size))
        self._probe = np.empty((num_layers, num_heads, count), np.float32)
        self._chosen = Chosen(num_heads, count, attend.k, (num_layers,))
        self.blocks = self._chosen.ids.shape[-1]
        samples = (attend.cache.probe_samples(attend.n_probe)
                   if attend.probes_copies and attend.block_size == attend.cache.block_size else ())
        self.arguments = (self._sums, self._chosen.k_blocks, min(attend.block_size, n),
                          min(attend.n_probe, n), samples, self._probe, *self._chosen.arrays)

    def selections(self) -> list[list[sparse.Selection]]:
        """The Selections as [layer][head]."""
        return [sparse.selections_of(probe, self._sums, self._chosen.of_layer(layer))
                for layer, probe in enumerate(self._probe)]


def _sizes_fit(model: Model) -> bool:
    config = model.config
    width = config.num_attention_heads * config.head_dim
    return (not config.hidden_size % 32 and not config.head_dim % 16 and not width % 32
            and all(isinstance(layer.mlp, DenseMLP) and not columns(layer.mlp.down_proj) % 32
                    for layer in model.weights.layers))


def _arrays(layer: LayerWeights) -> tuple[np.ndarray | None, ...]:
    """A layer's weights in the kernel's order."""
    assert isinstance(layer.mlp, DenseMLP)
    return (layer.input_norm, *matrix_parts(layer.qkv_proj), layer.q_norm, layer.k_norm,
            *matrix_parts(layer.o_proj), layer.post_attention_norm,
            *matrix_parts(layer.mlp.gate_up_proj), *matrix_parts(layer.mlp.down_proj))
