"""How sparse a prefill was: three densities, which are three different numbers.

* mask density: the cells that the policy's mask keeps, of those that it could keep;
* applied density: the cells (query head, query, token) that attention computed, of those that
  full attention computes, the chunk itself included;
* bytes: what was read to choose and to attend, of what full attention reads.

The seed's statistic counts blocks of layer 0 that were read, of those that were there: a density of
bytes, without the bytes that the choice itself has read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.log import logger


@dataclass(frozen=True)
class ChunkDensity:
    """What one chunk in one layer did, chosen by the policy of that name.

    available, selected: blocks of history, and those read by at least one KV head. kept, keepable:
    cells of the policy's mask. applied, visible: cells that attention computed, and that full
    attention computes. estimate_bytes, load_bytes: read to choose and to attend; full_bytes: K and
    V of all history.
    """

    policy: str
    layer: int
    available: int
    selected: int
    kept: int
    keepable: int
    applied: int
    visible: int
    estimate_bytes: int
    load_bytes: int
    full_bytes: int


class DensityStats:
    """Sums of ChunkDensity over a prefill."""

    def __init__(self) -> None:
        self._policy = "no chunk yet"
        self.reset()

    def reset(self) -> None:
        """Count anew."""
        self._chunks = self._available = self._selected = 0
        self._sums: dict[str, int] = dict.fromkeys(
            ("kept", "keepable", "applied", "visible", "estimate_bytes", "load_bytes",
             "full_bytes"), 0)

    reset_stats = reset

    def record(self, chunk: ChunkDensity) -> None:
        """Add one chunk of one layer; that of layer 0 is written to the log at debug level."""
        self._policy = chunk.policy
        for name in self._sums:
            self._sums[name] += getattr(chunk, name)
        if chunk.layer == 0 and chunk.available:
            self._chunks += 1
            self._available += chunk.available
            self._selected += chunk.selected
            logger("prefill").debug(
                "[%s] chunk=%d, available=%d, selected=%d, chunk_density=%.1f%%", self._policy,
                self._chunks, chunk.available, chunk.selected,
                100 * chunk.selected / chunk.available)

    def get_density_stats(self) -> dict[str, Any]:
        """Return the seed's four keys, counted in layer 0, and the three densities of all layers.

        overall_density: blocks read / blocks there, over the chunks that had a history.
        mask_density, applied_density, bytes_density: as at the head of this file, 1.0 where there
        was nothing to leave out. estimate_bytes, load_bytes, full_bytes: what bytes_density is
        made of.
        """
        sums = self._sums
        return {
            "total_available_blocks": self._available,
            "total_selected_blocks": self._selected,
            "num_chunks": self._chunks,
            "overall_density": _share(self._selected, self._available),
            "mask_density": _share(sums["kept"], sums["keepable"]),
            "applied_density": _share(sums["applied"], sums["visible"]),
            "bytes_density": _share(sums["estimate_bytes"] + sums["load_bytes"],
                                    sums["full_bytes"]),
            "estimate_bytes": sums["estimate_bytes"],
            "load_bytes": sums["load_bytes"],
            "full_bytes": sums["full_bytes"],
        }

    def print_density_stats(self) -> None:
        """Print get_density_stats in a few lines."""
        stats = self.get_density_stats()
        print(f"[{self._policy}] {stats['num_chunks']} chunks with a history, layer 0: "
              f"{stats['total_selected_blocks']} of {stats['total_available_blocks']} blocks read "
              f"({stats['overall_density']:.1%})")
        print(f"  mask density     {stats['mask_density']:7.1%}  cells that the mask keeps")
        print(f"  applied density  {stats['applied_density']:7.1%}  cells that were computed")
        print(f"  bytes read       {stats['bytes_density']:7.1%}  of full attention's: "
              f"{stats['estimate_bytes'] / 1e6:.1f} MB to choose, "
              f"{stats['load_bytes'] / 1e6:.1f} MB to attend")


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0
