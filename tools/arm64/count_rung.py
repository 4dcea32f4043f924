"""One rung of the dot product's ladder in Python, for counting: count_rung.py RUNG ROWS."""

import gc
import sys

import numpy as np

from course_lib.lab import dot_ladder

COLS, MAX_ROWS = 160, 4096


def main() -> None:
    rung, rows = sys.argv[1], int(sys.argv[2])
    x = (np.arange(COLS) * 37 % 255 - 127).astype(np.int8)
    w = (np.arange(MAX_ROWS * COLS) * 101 % 255 - 127).astype(np.int8).reshape(MAX_ROWS, COLS)
    x_scales, w_scales = np.ones(COLS // 32, np.float32), np.ones((MAX_ROWS, COLS // 32), "f2")
    if rung == "python":  # all rows become lists, so that this costs the same for any ROWS
        lists = [a.tolist() for a in (x, x_scales, w, w_scales)]
        lists[2:] = [rows_of[:rows] for rows_of in lists[2:]]
        gc.disable()
        dot_ladder.python_product(*lists)
    else:
        dot_ladder.numpy_product(x, x_scales, w[:rows], w_scales[:rows])


main()
