"""The figure style: colours that stay apart for colour-blind eyes and in greyscale, a second cue for every line."""

import itertools

import matplotlib
import pytest

from flashlib import style

LINES = style._COLOURS


@pytest.fixture(autouse=True)
def own_settings():
    with matplotlib.rc_context():
        yield


def srgb(colour):
    return [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]


def linear(colour):
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in srgb(colour)]


def luminance(colour):
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def without_green_cones(colour):
    """Return linear RGB as a person without green cones sees it (Machado et al. 2009, deuteranomaly of severity 1)."""
    matrix = [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]]
    return [sum(a * b for a, b in zip(row, linear(colour), strict=True)) for row in matrix]


def test_colours_of_opposites_are_told_apart_without_green_cones():
    for a, b in ((style.NAIVE, style.FLASH), (style.HBM, style.SRAM), (style.TILE_PARTIAL, style.TILE_FULL)):
        distance = sum((x - y) ** 2 for x, y in zip(without_green_cones(a), without_green_cones(b), strict=True)) ** 0.5
        assert distance > 0.15, (a, b)


def test_colours_of_tiles_are_told_apart_in_grey():
    shades = sorted(map(luminance, (style.TILE_EMPTY, style.TILE_PARTIAL, style.TILE_FULL)))
    assert all((b + 0.05) / (a + 0.05) > 1.5 for a, b in itertools.pairwise(shades))


def test_every_line_differs_in_colour_and_in_dash_or_marker():
    style.use()
    lines = [tuple(map(str, entry.values())) for entry in matplotlib.rcParams["axes.prop_cycle"]]
    assert len({line[0] for line in lines}) == len(lines) == len(LINES)
    assert len({line[1:] for line in lines}) == len(lines)


def test_figures_are_white_so_that_the_dark_theme_can_invert_them():
    style.use()
    assert matplotlib.rcParams["figure.facecolor"] == matplotlib.rcParams["axes.facecolor"] == "white"


def test_text_can_be_read_on_white():
    style.use()
    for name in ("axes.labelcolor", "xtick.color", "ytick.color"):
        assert 1.05 / (luminance(matplotlib.rcParams[name]) + 0.05) > 7
