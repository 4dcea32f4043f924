"""Explorers and pictures of the lessons: one style, a text twin for every picture."""

from course_lib.show.block_selection import BlockSelectionExplorer
from course_lib.show.explorer import Explorer
from course_lib.show.importance_map import ImportanceMapExplorer
from course_lib.show.k_sweep import KSweepExplorer
from course_lib.show.kv_ledger import KVLedgerExplorer
from course_lib.show.lse_merge import LseMergeExplorer
from course_lib.show.online_softmax import OnlineSoftmaxExplorer
from course_lib.show.picture import Picture
from course_lib.show.prefill_mask import PrefillMaskExplorer
from course_lib.show.quantization import QuantizationErrorExplorer
from course_lib.show.ring_timeline import RingTimelineExplorer
from course_lib.show.roofline import RooflineExplorer
from course_lib.show.rounding import RoundingBiasExplorer
from course_lib.show.vote import VoteExplorer
from course_lib.show.weight_block import WeightBlockExplorer

__all__ = [
    "BlockSelectionExplorer",
    "Explorer",
    "ImportanceMapExplorer",
    "KSweepExplorer",
    "KVLedgerExplorer",
    "LseMergeExplorer",
    "OnlineSoftmaxExplorer",
    "Picture",
    "PrefillMaskExplorer",
    "QuantizationErrorExplorer",
    "RingTimelineExplorer",
    "RooflineExplorer",
    "RoundingBiasExplorer",
    "VoteExplorer",
    "WeightBlockExplorer",
]
