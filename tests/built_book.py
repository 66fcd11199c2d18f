"""The built book, for the tests that look at it: built once in a test run, whatever the number of workers."""

import dataclasses
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "book"))

import generate  # noqa: E402  (book/ is on the path only now)

__all__ = ["ROOT", "Built", "build", "built", "docnames", "generate"]


@dataclasses.dataclass(frozen=True)
class Built:
    """A book: its folder, and the exit status and messages of Sphinx."""

    folder: Path
    status: int
    messages: str


def docnames():
    """Return the pages of the book, the front page first."""
    _, parts = generate.read_book(ROOT)
    return ["book/index"] + [name for _, files in parts for name in files]


def build(source, folder, *options):
    """Build the book of `source` into `folder`/html and return it as `Built`."""
    folder = Path(folder)
    command = [sys.executable, "-m", "sphinx", "-q", "-b", "html", *options, "-d", str(folder / "doctrees")]
    command += ["-c", str(ROOT / "book"), str(source), str(folder / "html")]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return Built(folder / "html", process.returncode, process.stderr)


def built(tmp_path_factory):
    """Return the book of the repository as it is; the first worker that asks builds it, the others wait."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent
    folder, result = base / "book", base / "book.json"
    with (base / "book.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            book = build(ROOT, folder, "-W", "-n", "--keep-going")
            result.write_text(json.dumps([book.status, book.messages]), encoding="utf-8")
    status, messages = json.loads(result.read_text(encoding="utf-8"))
    return Built(folder / "html", status, messages)
