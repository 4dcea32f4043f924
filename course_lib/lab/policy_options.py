"""How an experiment prefills by a policy: which one, with what, in chunks of how many tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from course_lib.prefill import PrefillPolicy, make_policy

STRIDE = 8


@dataclass(frozen=True)
class PolicyOptions:
    """threshold, aggregate: of xattn. ram_budget: bytes, with offload; as `Engine.prefill`."""

    name: str
    threshold: float = 0.9
    aggregate: str = "majority"
    chunk: int = 1024
    block_size: int = 128
    offload: bool = False
    ram_budget: int | None = None

    def make(self) -> PrefillPolicy:
        """A new policy; ValueError for an unknown name and for options that do not fit.

        xattn's rule for short queries is lowered to the chunk: only the rest of a prompt, shorter
        than a chunk, reads all for being short.
        """
        if self.name != "xattn":
            return make_policy(self.name, block_size=self.block_size)
        return make_policy(
            self.name, threshold=self.threshold, aggregate=self.aggregate, stride=STRIDE,
            block_size=self.block_size, short_query=min(STRIDE * 128, self.chunk),
        )

    def for_prefill(self) -> dict[str, Any]:
        """The options of `Engine.prefill`, with a new policy."""
        return {"policy": self.make(), "chunk": self.chunk, "offload": self.offload or None,
                "ram_budget": self.ram_budget}
