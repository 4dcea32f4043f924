"""Prefill policies: which blocks of history a chunk of a prompt reads, and the attention over them.

A policy (`FullAttentionPolicy`, `QuestPolicy`, `XAttentionBSAPolicy`, or one of your own) chooses
blocks of a `BlockStore`, in memory or in a file; `ChunkedPrefill` attends to them one by one and
merges the parts. `Engine.prefill(policy=…)` runs a model this way. Arrays are float32: q
`[num_heads, tokens, d]`, k and v `[num_kv_heads, tokens, d]`; query head h reads KV head
h · num_kv_heads // num_heads. Sources: XAttention (Xu et al. 2025), Quest (Tang et al. 2024), and
the policy design that the course quotes.
"""

from course_lib.prefill.aggregate import AGGREGATORS, aggregate
from course_lib.prefill.chunked import ChunkedPrefill
from course_lib.prefill.density import ChunkDensity, DensityStats
from course_lib.prefill.file_store import BlockFile
from course_lib.prefill.find_blocks import check_threshold, find_blocks_chunked
from course_lib.prefill.lse import merge_attention_outputs, partial_attention
from course_lib.prefill.policies import FullAttentionPolicy, QuestPolicy
from course_lib.prefill.policy import POLICIES, BlockChoice, PrefillPolicy, make_policy, register
from course_lib.prefill.quest import page_bounds, quest_page_scores
from course_lib.prefill.schedule import ring_schedule
from course_lib.prefill.scores import flat_group_gemm_fuse_reshape, softmax_fuse_block_sum
from course_lib.prefill.store import BlockStore, Slot
from course_lib.prefill.trace import BlockTrace, Trace
from course_lib.prefill.xattn import xattn_estimate
from course_lib.prefill.xattn_policy import XAttentionBSAPolicy

__all__ = [
    "AGGREGATORS",
    "POLICIES",
    "BlockChoice",
    "BlockFile",
    "BlockStore",
    "BlockTrace",
    "ChunkDensity",
    "ChunkedPrefill",
    "DensityStats",
    "FullAttentionPolicy",
    "PrefillPolicy",
    "QuestPolicy",
    "Slot",
    "Trace",
    "XAttentionBSAPolicy",
    "aggregate",
    "check_threshold",
    "find_blocks_chunked",
    "flat_group_gemm_fuse_reshape",
    "make_policy",
    "merge_attention_outputs",
    "page_bounds",
    "partial_attention",
    "quest_page_scores",
    "register",
    "ring_schedule",
    "softmax_fuse_block_sum",
    "xattn_estimate",
]
