"""Meanings that share a picture differ for every reader: on a grey print, and in the colours that
readers without one kind of cone see.

The simulation is that of Machado, Oliveira and Fernandes, "A Physiologically-based Model for
Simulation of Color Vision Deficiency", IEEE Transactions on Visualization and Computer Graphics
15(6), 2009, doi:10.1109/TVCG.2009.113: its published matrices of severity 1.0, on linear RGB.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from course_lib.show import style
from course_lib.show.style import Meaning

VISION = {
    "usual": np.eye(3),
    "grey": np.full((3, 1), 1.0) * [0.2126, 0.7152, 0.0722],
    "protanopia": np.array([[0.152286, 1.052583, -0.204868],
                            [0.114503, 0.786281, 0.099216],
                            [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array([[0.367322, 0.860646, -0.227968],
                              [0.280085, 0.672501, 0.047413],
                              [-0.011820, 0.042940, 0.968881]]),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779],
                            [-0.078411, 0.930809, 0.147602],
                            [0.004733, 0.691367, 0.303900]]),
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])

# What stands in one picture. Of tiles with letters the letter tells; bars, cells too small for a
# letter and legends have fill and hatch alone.
LETTERED = {
    "blocks of decode": (style.REASON, tuple(style.REASON)),
    "blocks of a vote": (style.PREFILL, ("vote", "threshold", "sink", "safety_first",
                                         "safety_last", "extra", "not_selected")),
}
TOGETHER = {
    "probe scores": (style.REASON, ("not_selected", "probe", "evicted_by_recency")),
    "importance": (style.REASON, ("not_selected", "importance")),
    "decode compared": (style.SIDE, ("exact", "sparse")),
    "rows compared": (style.SIDE, ("float", "q8")),
    "errors in a bound": (style.SIDE, ("error", "bound")),
    "errors by sign": (style.SIDE, ("negative", "positive", "both")),
    "labels of numbers": (style.SIDE, ("quoted", "this machine", "derived", "recorded")),
    "scores read": (style.STREAM, tuple(style.STREAM)),
    "bytes of a cache": (style.BYTES, tuple(style.BYTES)),
    "tokens": (style.TOKEN, tuple(style.TOKEN)),
    "parts to merge": (style.MERGE, tuple(style.MERGE)),
    "slots of a ring": (style.RING, tuple(style.RING)),
    "a mask by threshold": (style.PREFILL, ("sink", "diagonal", "threshold", "extra",
                                            "not_selected")),
    "a mask by budget": (style.PREFILL, ("sink", "diagonal", "budget", "not_selected")),
    "a whole mask": (style.PREFILL, ("all", "not_selected")),
    "points under a roof": (style.ROOF, tuple(style.ROOF)),
    "bytes of a weight block": (style.BYTE, tuple(style.BYTE)),
}
APART = 15  # of 100 steps from black to white: CIELAB's L*, or its distance where colours count
CONTRAST = 3.0  # WCAG 2.1, 1.4.11: parts of a picture that one must see


def linear(color: str) -> np.ndarray:
    rgb = np.array(to_rgb(color))
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def seen(color: str, vision: str) -> np.ndarray:
    """Linear RGB of a colour as such a reader sees it."""
    return np.clip(VISION[vision] @ linear(color), 0, 1)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB (D65) of linear RGB."""
    t = XYZ @ rgb / XYZ.sum(axis=1)
    f = np.where(t > (6 / 29) ** 3, np.cbrt(t), t / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: np.ndarray, other: np.ndarray) -> float:
    low, high = sorted(float(VISION["grey"][0] @ rgb) for rgb in (one, other))
    return (high + 0.05) / (low + 0.05)


def alike(one: Meaning, other: Meaning, vision: str) -> bool:
    """Whether fill and hatch leave such a reader in doubt."""
    distance = np.linalg.norm(lab(seen(one.color, vision)) - lab(seen(other.color, vision)))
    return one.hatch == other.hatch and distance < APART


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("group", TOGETHER)
def test_fills_and_hatches_that_stand_together_differ(group, vision):
    meanings, names = TOGETHER[group]
    pairs = [(a, b) for a, b in combinations(names, 2) if alike(meanings[a], meanings[b], vision)]
    assert pairs == []


@pytest.mark.parametrize("vision", VISION)
@pytest.mark.parametrize("group", LETTERED)
def test_letters_that_stand_together_differ_and_can_be_read(group, vision):
    meanings, names = LETTERED[group]
    assert len({meanings[name].letter for name in names}) == len(names)
    for name in names:
        ink, fill = (seen(color, vision) for color in (meanings[name].ink, meanings[name].color))
        assert contrast(ink, fill) >= CONTRAST, name


@pytest.mark.parametrize("vision", VISION)
def test_hatches_can_be_seen(vision):
    for group, (meanings, names) in TOGETHER.items():
        for name in names:
            meaning = meanings[name]
            edge = meaning.ink if group == "probe scores" and meaning.hatch else style.INK
            if meaning.hatch:
                assert contrast(seen(edge, vision), seen(meaning.color, vision)) >= CONTRAST, name


def test_every_meaning_has_been_placed():
    placed = {id(meanings[name]) for groups in (TOGETHER, LETTERED)
              for meanings, names in groups.values() for name in names}
    for family, meanings in vars(style).items():
        if isinstance(meanings, Mapping) and not family.startswith("_"):
            left = [name for name, m in meanings.items() if id(m) not in placed]
            assert left == [], f"say in TOGETHER with what {family} stands: {left}"


def test_the_simulation_keeps_grey_and_confuses_what_it_must():
    """Rows sum to 1, so that grey stays grey; red and a green of its lightness become alike."""
    for vision, matrix in VISION.items():
        np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-5, err_msg=vision)
    red, green = Meaning("", "#c05000", "", "", ""), Meaning("", "#708000", "", "", "")
    assert alike(red, green, "deuteranopia") and not alike(red, green, "usual")
    blue, teal = Meaning("", "#3a6ad0", "", "", ""), Meaning("", "#00808a", "", "", "")
    assert alike(blue, teal, "tritanopia") and not alike(blue, teal, "usual")
