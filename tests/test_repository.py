"""What must not be in a tracked file: paths of one machine, package indexes, temporary names."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# Written in pieces, so that this file does not hold what it looks for.
FORBIDDEN = [
    r"(?<![\w.~-])/(?:root|work|home|Users)/\w",
    r"[A-Z]:\\+Users\\",
    r"ipy" + r"kernel_\d",
    r"--(?:extra-)?index" + r"-url",
    r"pypi\.org/simple",
    r"files\.python" + r"hosted\.org",
    r"download\.py" + r"torch\.org",
    r"https?://(?:10\.|192\.168\.)[\d.]+",
]
BINARY = {".png", ".ico", ".woff2", ".gz"}
LARGEST_BYTES = 1_000_000


def tracked():
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout: there is no list of tracked files")
    names = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def offences(text):
    return [found[0] for pattern in FORBIDDEN for found in re.finditer(pattern, text)]


def test_tracked_files_hold_nothing_of_one_machine():
    found = {
        str(path.relative_to(ROOT)): offences(path.read_text(encoding="utf-8"))
        for path in tracked()
        if path.suffix not in BINARY
    }
    assert {name: what for name, what in found.items() if what} == {}


def test_tracked_files_are_small():
    assert [path.name for path in tracked() if path.stat().st_size > LARGEST_BYTES] == []


def test_what_a_run_makes_is_ignored():
    made = ["_build/x", ".venv/x", "workbook/x", "flashlib/__pycache__/x"]
    if not (ROOT / ".git").exists():
        pytest.skip("this is no git checkout: nothing is ignored")
    ignored = subprocess.run(["git", "check-ignore", *made], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ignored.stdout.split() == made


@pytest.mark.parametrize(
    "text",
    [
        "/ro" + "ot/x",
        "see /wo" + "rk/file",
        "C:" + "\\Users\\me",
        "ipy" + "kernel_12",
        "--index" + "-url x",
        "http://10." + "0.0.1:8080/a",
    ],
)
def test_an_offence_is_found(text):
    assert offences(text)


@pytest.mark.parametrize("text", ["network/file", "https://example.org/home/x", "~/course/x", "ipykernel==7.4.0"])
def test_an_innocent_text_is_not(text):
    assert offences(text) == []
