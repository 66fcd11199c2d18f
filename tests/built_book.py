"""The built book, for the tests that look at it: built once in a process, in a folder that goes away with it."""

import functools
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book"))

import generate  # noqa: E402  (book/ is on the path only now)

__all__ = ["ROOT", "build", "built", "docnames", "generate"]

# Kept until the process ends, then removed.
_SCRATCH = tempfile.TemporaryDirectory(prefix="book-")


def docnames():
    """Return the pages of the book, the front page first."""
    _, parts = generate.read_book(ROOT)
    return ["book/index"] + [name for _, files in parts for name in files]


def build(source, out, *options):
    """Build the book of `source` into `out` and return the finished process."""
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", *options, "-d", str(Path(out).parent / "doctrees")]
    command += ["-c", str(ROOT / "book"), str(source), str(out)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@functools.cache
def built():
    """Return (folder of the built book, finished process), built from the repository as it is."""
    out = Path(_SCRATCH.name) / "html"
    return out, build(ROOT, out, "-W", "-n", "--keep-going")
