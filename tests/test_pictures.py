"""README's picture shows the numbers that are recorded now."""

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


def test_readme_shows_it():
    assert f"({pictures.PICTURE.relative_to(ROOT).as_posix()})" in (ROOT / "README.md").read_text(encoding="utf-8")


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
