import numpy as np
from numpy.typing import NDArray

OPERATIONS: tuple[str, ...]

def quantize_rows(
    x: NDArray[np.float32],
    rule_code: int,
    out_q: NDArray[np.int8],
    out_scale: NDArray[np.float32],
) -> None: ...
