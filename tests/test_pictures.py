"""README's pictures show the numbers that are recorded now."""

import json
from pathlib import Path

import pytest
from PIL import Image

from book import pictures

ROOT = Path(__file__).resolve().parent.parent


def stored(path):
    with Image.open(path) as image:
        return json.loads(image.text["Description"])


def test_picture_is_up_to_date():
    assert stored(pictures.PICTURE) == pictures.payoff(), "run python book/pictures.py"


def test_picture_of_the_speeds_is_up_to_date():
    assert stored(pictures.SPEED) == pictures.speed(), "run python book/pictures.py"


@pytest.mark.parametrize("picture", [pictures.PICTURE, pictures.SPEED])
def test_readme_shows_it(picture):
    assert f"({picture.relative_to(ROOT).as_posix()})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_drawing_the_speeds_stores_them(tmp_path):
    rows = pictures.speed()
    rows[0]["tflops"] += 1
    pictures.draw_speed(rows, tmp_path / "a.png")
    assert stored(tmp_path / "a.png") == rows != pictures.speed()


def test_readme_says_what_the_picture_of_the_speeds_shows():
    """Above FlashAttention-2 everywhere, above FlexAttention forward, below FlashAttention-4."""
    speeds = {(r["impl"], r["pass"], r["causal"], r["seqlen_q"]): r["tflops"] for r in pictures.speed()}
    for (impl, *shape), ours in speeds.items():
        if impl == "flashlib_portable":
            assert ours > speeds["fa2", *shape]
            assert ours > speeds["flex", *shape] or shape[0] == "bwd"
            assert ours < speeds["fa4", *shape] or shape[2] == 512


def test_drawing_stores_its_numbers(tmp_path):
    drawn = pictures.payoff()
    drawn["fa2"][0][1] += 1
    pictures.draw(drawn, tmp_path / "a.png")
    assert stored(tmp_path / "a.png") == drawn != pictures.payoff()


@pytest.mark.parametrize("name", pictures.LABELS)
def test_picture_tells_what_readme_says(name):
    lengths = [row[0] for row in pictures.payoff()[name]]
    assert lengths == sorted(set(lengths))
    assert len(lengths) >= 4


def test_flash_is_faster_and_smaller_at_every_length():
    drawn = pictures.payoff()
    for naive, flash in zip(drawn["naive"], drawn["fa2"], strict=True):
        assert naive[0] == flash[0]
        assert naive[1] > flash[1]
        assert naive[2] > flash[2]
