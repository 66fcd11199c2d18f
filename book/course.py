"""Run the course: execute the notebooks, build the book from them, make the reader's own copy.

    python book/course.py course       execute every chapter into _build/, then build the book from what was executed
    python book/course.py book         build the book from the outputs stored in notebooks/
    python book/course.py lab          make workbook/ where it is missing and open JupyterLab there
    python book/course.py notebooks    execute notebooks/ in place, without a GPU, and renew README's chapter table

The Makefile has a target for each. A notebook runs in a fresh kernel, in an empty folder, and is written only when it
is complete: whatever stops a run, no file is half written.
"""

import argparse
import asyncio
import contextlib
import copy
import csv
import io
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import nbformat
import yaml
from jupyter_client.kernelspec import NoSuchKernel
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
CELL_TIMEOUT_S = 600
WORDS_PER_MINUTE = 180
SECONDS_PER_CODE_CELL = 20
STARS = {"●": "5 minutes", "●●": "15 minutes", "●●●": "45 minutes"}
READING = re.compile(r"about \d+ minutes? of reading")
TABLE = re.compile(r"(<!-- chapters: .*?-->\n)(.*?)(<!-- end of chapters -->)", re.DOTALL)


class ChapterError(Exception):
    """A chapter that did not run through: its name, the number of the code cell, and the error."""

    def __init__(self, name, cell, error):
        super().__init__(f"{name}, cell {cell}: {error}" if cell else f"{name}: {error}")
        self.name, self.cell, self.error = name, cell, error


# --- what the chapters are -----------------------------------------------------------------------------------------


def chapters(root):
    """Return the paths of the notebooks, in the order of book.yml.

    Raises:
        ValueError: book.yml is no YAML, names no notebook, or one that does not exist.
    """
    root = Path(root)
    try:
        contents = yaml.safe_load((root / "book.yml").read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"book.yml must be YAML, got {error}") from error
    found = [root / f"{name}.ipynb" for name in _files(contents) if name.startswith("notebooks/")]
    if not found:
        raise ValueError("book.yml must name notebooks, got none")
    missing = [path.name for path in found if not path.is_file()]
    if missing:
        raise ValueError(f"book.yml must name notebooks that exist, got {', '.join(missing)}")
    return found


def _files(node):
    if isinstance(node, dict):
        own = [node["file"]] if isinstance(node.get("file"), str) else []
        return own + [name for key, value in node.items() if key != "meta" for name in _files(value)]
    if isinstance(node, list):
        return [name for item in node for name in _files(item)]
    return []


def read(path):
    """Return a notebook.

    Raises:
        ValueError: the file is no notebook.
    """
    try:
        return nbformat.read(path, as_version=4)
    except (ValueError, KeyError, AttributeError, nbformat.ValidationError) as error:
        raise ValueError(f"{Path(path).name} must be a notebook, got {type(error).__name__}: {error}") from error


def tags(cell):
    return cell.metadata.get("tags", [])


def title(notebook):
    """Return the first level-1 heading, such as "03 Online softmax"."""
    for cell in notebook.cells:
        found = re.search(r"^# (.+)$", cell.source, re.MULTILINE) if cell.cell_type == "markdown" else None
        if found:
            return found[1].strip()
    return ""


def lead(notebook, label):
    """Return, as one line, what follows the bold `label` that opens a paragraph of the first cell; "" if none does."""
    for paragraph in re.split(r"\n\s*\n", notebook.cells[0].source if notebook.cells else ""):
        found = re.match(rf"\*\*{re.escape(label)}[.:]?\*\*[.:]?\s*(.*)", paragraph.strip(), re.DOTALL)
        if found:
            return " ".join(found[1].split())
    return ""


def exercise_headings(notebook):
    """Return [(id, stars, title)] of the headings such as `### 03.1 ● Merge two pieces`."""
    text = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return re.findall(r"^### (\d\d\.\d+) (●+) (.+)$", text, re.MULTILINE)


def words(markdown):
    """Return how many words a reader reads: no addresses of links, no HTML tags, no signs that stand alone."""
    return len(re.findall(r"\S*\w\S*", re.sub(r"\]\([^)]*\)|<[^>]+>", " ", markdown)))


def reading_minutes(notebook):
    """Return whole minutes: 180 words a minute and 20 seconds a code cell; hidden cells and exercises do not count."""
    read = cells = 0
    in_exercises = False
    for cell in notebook.cells:
        if {"remove-cell", "remove-input"} & set(tags(cell)):
            continue
        if cell.cell_type == "markdown":
            heading = re.match(r"## (.+)", cell.source)
            if heading:
                in_exercises = heading[1].strip() == "Exercises"
            if not in_exercises:
                read += words(cell.source)
        elif cell.cell_type == "code" and not in_exercises:
            cells += 1
    return max(1, math.ceil(read / WORDS_PER_MINUTE + cells * SECONDS_PER_CODE_CELL / 60))


# --- executing -----------------------------------------------------------------------------------------------------


class _Client(NotebookClient):
    """nbclient, without its own handling of Ctrl-C: that one shuts the kernel down and lets the run go on."""

    @contextlib.asynccontextmanager
    async def async_setup_kernel(self, **kwargs):
        self.km = self.create_kernel_manager()
        try:
            await self.async_start_new_kernel(**kwargs)
            await self.async_start_new_kernel_client()
            yield
        finally:
            await self._async_cleanup_kernel()


def _runs(cell):
    return cell.cell_type == "code" and bool(cell.source.strip())


async def _run(client, **kwargs):
    try:
        await client.async_execute(**kwargs)
    except DeadKernelError:
        # nbclient takes the cancellation that Ctrl-C causes for a dead kernel.
        if asyncio.current_task().cancelling():
            raise asyncio.CancelledError from None
        raise


def execute(notebook, name, *, gpu=True, tick=lambda: None, timeout_s=CELL_TIMEOUT_S):
    """Run the code cells of a notebook, top to bottom, in a fresh kernel, and store the outputs in it.

    Args:
        notebook: the notebook; changed in place.
        name: what messages call it.
        gpu: False hides every GPU from the kernel.
        tick: called when a code cell starts.
        timeout_s: the longest that one cell may take.

    Raises:
        ChapterError: a cell raised, took too long, or killed the kernel. The outputs up to there are in the notebook.
    """
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    at = 0

    def started(cell, cell_index):
        nonlocal at
        if _runs(cell):
            at += 1
            tick()

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        folder.mkdir()
        # The reader's own IPython profile and plotting backend stay out of it.
        env = {key: value for key, value in os.environ.items() if key != "MPLBACKEND"}
        env |= {"IPYTHONDIR": f"{scratch}/ipython"} | ({} if gpu else {"CUDA_VISIBLE_DEVICES": ""})
        client = _Client(
            notebook,
            timeout=timeout_s,
            kernel_name="python3",
            record_timing=False,
            on_cell_start=started,
        )
        try:
            # What a kernel says about its own end is no message to the reader.
            asyncio.run(_run(client, cwd=str(folder), env=env, stderr=subprocess.DEVNULL))
        except CellExecutionError as error:
            raise ChapterError(name, at, f"{error.ename}: {error.evalue}") from error
        except CellTimeoutError as error:
            raise ChapterError(name, at, f"it took longer than {timeout_s} s") from error
        except DeadKernelError as error:
            raise ChapterError(name, at, "the kernel died") from error
        except (RuntimeError, NoSuchKernel) as error:
            raise ChapterError(name, at, f"the kernel did not start: {error}") from error
        finally:
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    cell.outputs = join_streams(cell.outputs)


def join_streams(outputs):
    """Return outputs with the pieces of each stream joined, which a kernel cuts anywhere.

    nbclient's own coalesce_streams takes minutes for one long line: its search for carriage returns is quadratic.
    """
    joined, pieces = [], {}
    for output in outputs:
        if output.output_type != "stream":
            joined.append(output)
        elif output.name in pieces:
            pieces[output.name].append(output.text)
        else:
            pieces[output.name] = [output.text]
            joined.append(output)
    for output in joined:
        if output.output_type == "stream":
            output.text = "".join(pieces[output.name])
    # Which of two streams arrives first is chance.
    for i, (a, b) in enumerate(itertools.pairwise(joined)):
        if (a.get("name"), b.get("name")) == ("stderr", "stdout"):
            joined[i : i + 2] = [b, a]
    return joined


def normalise(notebook):
    """Keep only the metadata that belongs to the text: two executions store the same bytes."""
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    seen = set()
    for index, cell in enumerate(notebook.cells):
        kept = {key: value for key, value in cell.metadata.items() if key in ("tags", "mystnb") and value}
        cell.metadata = nbformat.from_dict(kept)
        if not cell.get("id") or cell["id"] in seen:
            cell["id"] = f"cell-{index}"
        seen.add(cell["id"])
        for output in cell.get("outputs", []):
            if output.output_type in ("execute_result", "display_data"):
                output.metadata = nbformat.from_dict({})
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def without_outputs(notebook):
    """Return a copy with no outputs and no execution counts."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return notebook


def write(path, text):
    """Write a text file in one step: afterwards it is the old one or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # A temporary file is private; a written one follows the umask like any other.
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_notebook(path, notebook):
    write(path, nbformat.writes(notebook) + "\n")


class Progress:
    """One line a chapter: a bar that moves on a terminal, a plain line when it is done elsewhere."""

    def __init__(self, name, cells, file=None):
        self.name, self.cells, self.done, self.start = name, cells, 0, time.monotonic()
        self.file = sys.stdout if file is None else file
        self.bar = self.stop = None
        if self.file.isatty():
            self.bar = tqdm(
                total=cells,
                desc=f"{name:<28}",
                file=self.file,
                bar_format="{desc} {bar} cell {n_fmt} of {total_fmt}  {elapsed}",
                ascii=" ▏▎▍▌▋▊▉█",
                # Some terminals do not know their size; tqdm would then show nothing.
                ncols=min(100, shutil.get_terminal_size().columns),
                nrows=20,
                leave=False,
            )
            self.stop = threading.Event()
            threading.Thread(target=self._keep_time, daemon=True).start()

    def _keep_time(self):
        # A long cell moves no bar; the clock shows that it is still running.
        while not self.stop.wait(0.5):
            self.bar.refresh()

    def tick(self):
        self.done += 1
        if self.bar is not None:
            self.bar.update()

    def close(self, result=None):
        if self.bar is not None:
            self.stop.set()
            self.bar.close()
        if result is not None:
            seconds = time.monotonic() - self.start
            count = f"cell {self.done} of {self.cells}"
            print(f"{self.name:<28} {count:<16} {seconds:6.1f} s  {result}", file=self.file, flush=True)


def execute_all(paths, *, gpu=True, progress=None):
    """Execute notebooks one after the other; a chapter that fails does not stop the next.

    Returns:
        (notebooks, failures, seconds): dict path -> executed notebook (up to the error, where there was one), list of
        ChapterError, dict path -> seconds.
    """
    notebooks, failures, seconds = {}, [], {}
    for path in paths:
        notebook = read(path)
        name = title(notebook) or path.stem
        bar = Progress(name, sum(map(_runs, notebook.cells)), progress)
        try:
            execute(notebook, name, gpu=gpu, tick=bar.tick)
        except ChapterError as error:
            failures.append(error)
            bar.close("failed")
        except BaseException:
            bar.close()
            raise
        else:
            bar.close("passed")
        notebooks[path], seconds[path] = notebook, time.monotonic() - bar.start
    return notebooks, failures, seconds


# --- the commands --------------------------------------------------------------------------------------------------


def course(root):
    """Execute all chapters into _build/notebooks, then build the book from what was executed; 0 if all passed."""
    start = time.monotonic()
    notebooks, failures, _ = execute_all(chapters(root))
    executed = root / "_build" / "notebooks"
    for path, notebook in notebooks.items():
        write_notebook(executed / path.name, normalise(notebook))
    status = build_book(root, executed)
    passed, took = len(notebooks) - len(failures), _clock(time.monotonic() - start)
    # In a log, too, the failures come last.
    print(f"\n{passed} of {len(notebooks)} chapters passed, {took}", flush=True)
    return report(failures) or status


def report(failures):
    """Print each failure with its chapter, cell and error; return the exit status."""
    for failure in failures:
        print(f"FAILED  {failure}", file=sys.stderr)
    return 1 if failures else 0


def build_book(root, executed=None):
    """Build the HTML book into _build/html from `executed` (notebooks/ itself if None); return Sphinx's exit status."""
    build = root / "_build"
    source = build / "source"
    for old in (source, build / "html"):
        shutil.rmtree(old, ignore_errors=True)
    (source / "notebooks").mkdir(parents=True)
    shutil.copy(root / "book.yml", source)
    shutil.copytree(root / "book", source / "book", ignore=shutil.ignore_patterns("__pycache__"))
    for path in chapters(root):
        shutil.copy((executed or path.parent) / path.name, source / "notebooks")
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-q", "-E", "-W", "-n", "--keep-going"]
    command += ["-c", str(root / "book"), "-d", str(build / "doctrees"), str(source), str(build / "html")]
    status = subprocess.run(command, check=False).returncode
    if status == 0:
        print(f"The book: {build / 'html' / 'index.html'}", flush=True)
    else:
        print(f"FAILED  the book: Sphinx ended with status {status}", file=sys.stderr)
    return status


def book(root):
    """Build the book from the outputs stored in notebooks/."""
    return build_book(root)


def make_workbook(root):
    """Copy the chapters that workbook/ lacks, without outputs; a file that is there is never touched.

    Returns:
        list of the paths made.
    """
    made = []
    for path in chapters(root):
        target = root / "workbook" / path.name
        if not target.exists():
            write_notebook(target, without_outputs(read(path)))
            made.append(target)
    return made


def lab(root):
    """Make workbook/ and open JupyterLab there."""
    made = make_workbook(root)
    print(f"workbook/ is yours: {len(made)} new chapter(s); what you wrote is left alone.", flush=True)
    command = [sys.executable, "-m", "jupyterlab", f"--ServerApp.root_dir={root / 'workbook'}"]
    # It calls nobody: no news, no search for updates.
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        # Jupyter refuses root unless told: a container often has no other user.
        command.append("--allow-root")
    os.chdir(root / "workbook")
    if os.name == "nt":
        return subprocess.run(command, check=False).returncode
    os.execv(sys.executable, command)


def notebooks(root):
    """Execute notebooks/ in place without a GPU; write them, their minutes and README's table only if all pass."""
    paths = chapters(root)
    _readme(root)
    executed, failures, seconds = execute_all(paths, gpu=False)
    if failures:
        print("Nothing was written.", file=sys.stderr)
        return report(failures)
    for path, notebook in executed.items():
        set_minutes(notebook)
        write_notebook(path, normalise(notebook))
    write_seconds(root, {path.stem: value for path, value in seconds.items()})
    update_readme(root)
    return 0


def set_minutes(notebook):
    """Write the reading minutes into the first cell."""
    minutes = reading_minutes(notebook)
    first = notebook.cells[0]
    first.source = READING.sub(f"about {minutes} minute{'s' if minutes > 1 else ''} of reading", first.source)


# --- README's chapter table ----------------------------------------------------------------------------------------


def read_seconds(root):
    """Return {chapter: row} of book/seconds.csv: how long each chapter ran, and on how many CPU cores."""
    path = root / "book" / "seconds.csv"
    if not path.is_file():
        return {}
    with path.open(newline="", encoding="utf-8") as file:
        return {row["chapter"]: row for row in csv.DictReader(file)}


def write_seconds(root, measured):
    """Record the seconds of each chapter; a figure stands while a new one is within a third (or 2 s) of it."""
    old, rows = read_seconds(root), []
    cores = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    for chapter, value in measured.items():
        row = {"chapter": chapter, "seconds": str(math.ceil(value)), "cpu_cores": cores}
        before = old.get(chapter)
        if before and before["cpu_cores"] == cores:
            was = int(before["seconds"])
            if abs(value - was) <= max(2, was / 3):
                row = before
        rows.append(row)
    text = io.StringIO()
    writer = csv.DictWriter(text, ["chapter", "seconds", "cpu_cores"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write(root / "book" / "seconds.csv", text.getvalue())


def chapter_table(root):
    """Return README's table of chapters, made from the notebooks and from the seconds their last execution took."""
    recorded = read_seconds(root)
    lines = [
        "| | chapter | after it you can | reading | runs in | exercises |",
        "|---|---|---|---|---|---|",
    ]
    total_minutes = total_seconds = 0
    for path in chapters(root):
        notebook = read(path)
        number, _, name = title(notebook).partition(" ")
        can = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", lead(notebook, "After this chapter you can")).rstrip(".")
        stars = " ".join(stars for _, stars, _ in exercise_headings(notebook)) or "none"
        seconds = recorded.get(path.stem, {}).get("seconds")
        runs = f"{seconds} s" if seconds else "not measured"
        can = can.replace("|", "\\|")
        minutes = reading_minutes(notebook)
        lines.append(f"| {number} | [{name}](notebooks/{path.name}) | {can} | {minutes} min | {runs} | {stars} |")
        total_minutes += minutes
        total_seconds += int(seconds or 0)
    cores = sorted({row["cpu_cores"] for row in recorded.values()}, key=int)
    where = f"measured on {' or '.join(cores)} CPU cores without a GPU" if cores else "not measured yet"
    levels = ", ".join(f"{stars} {time}" for stars, time in STARS.items())
    lines += [
        "",
        f"In all {total_minutes // 60} h {total_minutes % 60} min of reading and {total_seconds} s to run, {where}.",
    ]
    lines += [f"Exercises are not counted as reading: {levels}."]
    return "\n".join(lines) + "\n"


def _readme(root):
    text = (root / "README.md").read_text(encoding="utf-8")
    if len(TABLE.findall(text)) != 1:
        raise ValueError(f"README.md must hold one place for the chapter table, got {len(TABLE.findall(text))}")
    return text


def update_readme(root):
    """Put the chapter table between README's two markers."""
    text = TABLE.sub(lambda found: found[1] + chapter_table(root) + found[3], _readme(root))
    write(root / "README.md", text)


def _clock(seconds):
    return f"{int(seconds) // 60} min {int(seconds) % 60} s" if seconds >= 60 else f"{seconds:.0f} s"


COMMANDS = {"course": course, "book": book, "lab": lab, "notebooks": notebooks}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository (default: the one this file is in)")
    given = parser.parse_args(arguments)
    # A kernel "python3" that the user once installed elsewhere does not know flashlib.
    os.environ.setdefault("JUPYTER_PREFER_ENV_PATH", "1")
    try:
        return COMMANDS[given.command](given.root.resolve())
    except KeyboardInterrupt:
        print("\nInterrupted: no committed file was changed. Run it again when you like.", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"FAILED  {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
