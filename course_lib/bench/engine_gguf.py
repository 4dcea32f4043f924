"""The random model as a GGUF file, for an engine that loads one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from course_lib.bench.engine_weights import KIND, RandomSource
from course_lib.engine.config import ModelConfig
from course_lib.engine.tensor_source import Stored
from course_lib.weight_blocks import BLOCK, BLOCK_BYTES


def write_gguf(path: Path, source: RandomSource, config: ModelConfig,
               on_progress: Callable[[int, int], object] = lambda done, total: None) -> None:
    """Write the tensors of `source`, one at a time, with the hyperparameters of `config`.

    The file has a vocabulary of nameless tokens: whoever reads it feeds token ids.
    `on_progress(done, total)` counts tensors. OSError where the disk is full.
    """
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config.num_hidden_layers)
    try:
        for name, stored in source.stored.items():
            tensor = _stand_in(stored)
            raw = gguf.GGMLQuantizationType.Q8_0 if tensor.dtype == np.uint8 else None
            known = names.get_name(name, try_suffixes=(".weight",))
            assert known is not None, name
            writer.add_tensor_info(known, tensor.shape, tensor.dtype, tensor.nbytes, raw)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for done, name in enumerate(source.stored, 1):
            blocks = source.blocks(name, KIND) if len(source.stored[name].shape) > 1 else None
            writer.write_tensor_data(source.read(name) if blocks is None else blocks)
            on_progress(done, len(source.stored))
    finally:
        writer.close()


def _stand_in(stored: Stored) -> np.ndarray:
    """An array of a tensor's type and size in the file that takes no memory."""
    if len(stored.shape) == 1:
        return np.broadcast_to(np.float32(1), stored.shape)
    rows, columns = stored.shape
    return np.broadcast_to(np.uint8(0), (rows, columns // BLOCK * BLOCK_BYTES[KIND]))
