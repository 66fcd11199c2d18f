"""The runner, on tiny notebooks in a folder of their own: what passes, what fails, and what an interruption leaves."""

import io
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import nbformat.v4 as nb
import pytest

import conftest
from book import course

ROOT = Path(__file__).resolve().parent.parent
README = "# Course\n\n<!-- chapters: made -->\nold\n<!-- end of chapters -->\n\nMore.\n"


def notebook(number, *sources):
    lead = f"# {number} Sums\n\n**After this chapter you can** add | multiply ([see](x.md)).\n\n"
    lead += "**Time** about 0 minutes of reading."
    cells = [nb.new_markdown_cell(lead), *(nb.new_code_cell(source) for source in sources)]
    return course.normalise(nb.new_notebook(cells=cells))


@pytest.fixture
def root(tmp_path):
    """Return a course of two chapters, which book.yml lists in the other order than their names."""

    def make(first, second=("print(2)",)):
        (tmp_path / "book").mkdir()
        (tmp_path / "book" / "index.md").write_text("# Front\n", encoding="utf-8")
        entries = "".join(f"      - file: notebooks/{name}\n" for name in ("02_b", "01_a"))
        (tmp_path / "book.yml").write_text(
            f"root: book/index\nsubtrees:\n  - caption: One\n    entries:\n{entries}meta:\n  file: notebooks/no\n",
            encoding="utf-8",
        )
        (tmp_path / "README.md").write_text(README, encoding="utf-8")
        course.write_notebook(tmp_path / "notebooks" / "01_a.ipynb", notebook("01", *first))
        course.write_notebook(tmp_path / "notebooks" / "02_b.ipynb", notebook("02", *second))
        return tmp_path

    return make


def contents(folder):
    """Return {path: bytes} of every file below a folder, hidden ones included."""
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def committed(root):
    return {path: data for path, data in contents(root).items() if path.parts[0] != "_build"}


def test_chapters_come_in_the_order_of_the_book(root):
    assert [path.stem for path in course.chapters(root(["1"]))] == ["02_b", "01_a"]


def test_missing_chapter_is_named(root):
    folder = root(["1"])
    (folder / "notebooks" / "01_a.ipynb").unlink()
    with pytest.raises(ValueError, match=r"book\.yml must name notebooks that exist, got 01_a\.ipynb"):
        course.chapters(folder)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("book.yml", "a: [", "book.yml must be YAML"),
        ("book.yml", "root: book/index", "book.yml must name notebooks, got none"),
        ("notebooks/01_a.ipynb", "no notebook", "01_a.ipynb must be a notebook"),
        ("notebooks/01_a.ipynb", "{}", "01_a.ipynb must be a notebook"),
        ("README.md", "no markers", "README.md must hold one place for the chapter table, got 0"),
    ],
)
def test_bad_files_are_named_and_nothing_is_written(root, capsys, name, text, words):
    folder = root(["print(1)"])
    (folder / name).write_text(text, encoding="utf-8")
    before = contents(folder)
    assert course.main(["notebooks", "--root", str(folder)]) == 1
    assert f"FAILED  {words}" in capsys.readouterr().err
    assert contents(folder) == before


def test_course_writes_copies_only(root, monkeypatch, capsys):
    folder = root(["x = 41", "print(x + 1)"])
    before = committed(folder)
    built = []
    monkeypatch.setattr(course, "build_book", lambda *arguments: built.append(arguments) or 0)
    assert course.main(["course", "--root", str(folder)]) == 0
    assert committed(folder) == before
    executed = course.read(folder / "_build" / "notebooks" / "01_a.ipynb")
    assert executed.cells[2].outputs[0].text == "42\n"
    assert [cell.execution_count for cell in executed.cells[1:]] == [1, 2]
    assert built == [(folder, folder / "_build" / "notebooks")]
    assert "2 of 2 chapters passed" in capsys.readouterr().out


def test_failure_names_chapter_cell_and_error_and_the_rest_runs(root, monkeypatch, capsys):
    folder = root(["print(2)"], ["x = 1", "x / 0", "print(x)"])
    monkeypatch.setattr(course, "build_book", lambda *_: 0)
    assert course.main(["course", "--root", str(folder)]) == 1
    captured = capsys.readouterr()
    assert "FAILED  02 Sums, cell 2: ZeroDivisionError: division by zero" in captured.err
    lines = [line.split() for line in captured.out.splitlines() if "Sums" in line]
    assert [(line[0], line[3], line[5], line[-1]) for line in lines] == [
        ("02", "2", "3", "failed"),
        ("01", "1", "1", "passed"),
    ]


def test_book_that_fails_fails_the_course(root, monkeypatch):
    monkeypatch.setattr(course, "build_book", lambda *_: 2)
    assert course.main(["course", "--root", str(root(["1"]))]) == 2


def test_long_line_takes_no_longer_than_a_short_one():
    chapter = notebook("07", "print('x' * 1_000_000)")
    course.execute(chapter, "07 Sums", timeout_s=60)
    assert chapter.cells[1].outputs[0].text == "x" * 1_000_000 + "\n"


def test_pieces_of_a_stream_are_joined_and_stdout_comes_first():
    def stream(name, text):
        return nb.new_output("stream", name=name, text=text)

    shown = nb.new_output("display_data", {"text/plain": "1"})
    pieces = [stream("stderr", "e"), stream("stdout", "a"), shown, stream("stdout", "b"), stream("stderr", "f")]
    joined = course.join_streams(pieces)
    assert joined == [stream("stdout", "ab"), stream("stderr", "ef"), shown]


@pytest.mark.parametrize("source", ["input('name')", "def"])
def test_question_to_the_reader_and_bad_syntax_are_failures(source):
    with pytest.raises(course.ChapterError, match=r"^07 Sums, cell 1: (StdinNotImplementedError|SyntaxError)"):
        course.execute(notebook("07", source), "07 Sums")


def test_dead_kernel_is_a_failure():
    with pytest.raises(course.ChapterError, match=r"^07 Sums, cell 2: the kernel died$"):
        course.execute(notebook("07", "1", "import os; os._exit(1)", "2"), "07 Sums")


def test_endless_cell_is_a_failure():
    with pytest.raises(course.ChapterError, match=r"^07 Sums, cell 1: it took longer than 1 s$"):
        course.execute(notebook("07", "while True: pass"), "07 Sums", timeout_s=1)


def test_error_that_is_asked_for_is_none():
    chapter = notebook("07", "1 / 0", "print(2)")
    chapter.cells[1].metadata["tags"] = ["raises-exception"]
    course.execute(chapter, "07 Sums")
    assert chapter.cells[2].outputs[0].text == "2\n"


def test_kernel_is_clean(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "svg")
    source = "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'] == '', 'MPLBACKEND' in os.environ, os.listdir())"
    chapter = notebook("07", source)
    course.execute(chapter, "07 Sums", gpu=False)
    # ipykernel sets the backend again, to its own.
    assert chapter.cells[1].outputs[0].text.startswith("True")
    assert chapter.cells[1].outputs[0].text.endswith("[]\n")


def test_notebooks_in_place_twice_are_the_same(root, monkeypatch):
    folder = root(["print(1)"])
    execute_all = course.execute_all

    def in_three_seconds(paths, **options):
        notebooks, failures, _ = execute_all(paths, **options)
        return notebooks, failures, dict.fromkeys(paths, 3.0)

    # How long it took depends on what else the machine does.
    monkeypatch.setattr(course, "execute_all", in_three_seconds)
    assert course.main(["notebooks", "--root", str(folder)]) == 0
    first = contents(folder)
    executed = course.read(folder / "notebooks" / "01_a.ipynb")
    assert executed.cells[1].outputs[0].text == "1\n"
    assert "about 1 minute of reading" in executed.cells[0].source
    readme = first[Path("README.md")].decode()
    assert "| 01 | [Sums](notebooks/01_a.ipynb) | add \\| multiply (see) | 1 min | 3 s | none |" in readme
    assert "In all 0 h 2 min of reading and 6 s to run, measured on" in readme
    assert readme.startswith("# Course\n")
    assert readme.endswith("<!-- end of chapters -->\n\nMore.\n")
    assert course.main(["notebooks", "--root", str(folder)]) == 0
    assert contents(folder) == first


def test_notebooks_writes_nothing_when_one_fails(root, capsys):
    folder = root(["print(1)"], ["1 / 0"])
    before = contents(folder)
    assert course.main(["notebooks", "--root", str(folder)]) == 1
    assert contents(folder) == before
    assert "cell 1: ZeroDivisionError" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["course", "notebooks"])
def test_interruption_changes_nothing_and_ends_the_kernel(root, tmp_path_factory, command):
    sign = tmp_path_factory.mktemp("sign") / "pid"
    wait = f"import os, time\nopen({str(sign)!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    folder = root(["print(1)"], ["print(2)", wait])
    before = contents(folder)
    runner = subprocess.Popen(
        [sys.executable, ROOT / "book" / "course.py", command, "--root", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    until(lambda: sign.is_file() and sign.read_text(), 60)
    runner.send_signal(signal.SIGINT)
    _, errors = runner.communicate(timeout=30)
    assert runner.returncode == 130
    assert "Interrupted" in errors
    assert "Traceback" not in errors
    assert contents(folder) == before
    until(lambda: not alive(int(sign.read_text())), 10)


def until(condition, seconds):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_write_leaves_the_old_file_when_it_fails(tmp_path):
    path = tmp_path / "a.txt"
    course.write(path, "old")
    with pytest.raises(UnicodeEncodeError):
        course.write(path, "new \ud800")
    assert contents(tmp_path) == {Path("a.txt"): b"old"}


def test_workbook_is_made_once_and_never_overwritten(root):
    folder = root(["print(1)"])
    course.execute(chapter := course.read(folder / "notebooks" / "02_b.ipynb"), "02 Sums")
    course.write_notebook(folder / "notebooks" / "02_b.ipynb", chapter)
    mine = folder / "workbook" / "01_a.ipynb"
    mine.parent.mkdir()
    mine.write_text("mine", encoding="utf-8")
    assert [path.name for path in course.make_workbook(folder)] == ["02_b.ipynb"]
    assert mine.read_text(encoding="utf-8") == "mine"
    copied = course.read(folder / "workbook" / "02_b.ipynb")
    assert copied.cells[1].outputs == []
    assert copied.cells[1].execution_count is None
    assert copied.cells[1].source == "print(2)"
    assert course.make_workbook(folder) == []


def test_book_is_built_from_what_was_executed(root, monkeypatch):
    folder = root(["print(1)"])
    executed = folder / "_build" / "notebooks"
    for name in ("01_a", "02_b"):
        course.write(executed / f"{name}.ipynb", name)
    commands = []

    def run(command, **_):
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(course.subprocess, "run", run)
    (folder / "_build" / "source" / "notebooks").mkdir(parents=True)
    (folder / "_build" / "source" / "notebooks" / "old.ipynb").touch()
    assert course.build_book(folder, executed) == 0
    assert set(contents(folder / "_build" / "source")) == {
        Path("book.yml"),
        Path("book/index.md"),
        Path("notebooks/01_a.ipynb"),
        Path("notebooks/02_b.ipynb"),
    }
    assert (folder / "_build" / "source" / "notebooks" / "01_a.ipynb").read_text(encoding="utf-8") == "01_a"
    assert commands[0][-2:] == [str(folder / "_build" / "source"), str(folder / "_build" / "html")]
    assert {"-W", "-n"} <= set(commands[0])


def test_normalise_keeps_tags_and_alt_text_only():
    chapter = notebook("07", "1", "2")
    chapter.cells[1].metadata = nbformat.from_dict(
        {"tags": ["hide-output"], "mystnb": {"image": {"alt": "A"}}, "execution": {}, "collapsed": True}
    )
    chapter.cells[2]["id"] = chapter.cells[1]["id"]
    chapter.cells[1].outputs = [
        nb.new_output("display_data", {"text/plain": ""}, metadata={"needs_background": "light"})
    ]
    course.normalise(chapter)
    assert chapter.cells[1].metadata == {"tags": ["hide-output"], "mystnb": {"image": {"alt": "A"}}}
    assert chapter.cells[1].outputs[0].metadata == {}
    assert len({cell["id"] for cell in chapter.cells}) == 3


def test_reading_minutes_count_words_and_code_but_no_exercises():
    words = nb.new_markdown_cell("word " * 180)
    hidden = nb.new_code_cell("1", metadata={"tags": ["remove-cell"]})
    cells = [words, nb.new_code_cell("1"), nb.new_code_cell("2"), nb.new_code_cell("3"), hidden]
    exercises = [nb.new_markdown_cell("## Exercises\n\n" + "word " * 900), nb.new_code_cell("4")]
    after = nb.new_markdown_cell("## Five questions\n\n" + "word " * 177 + "[a](b)")
    assert course.reading_minutes(nb.new_notebook(cells=cells)) == 2
    assert course.reading_minutes(nb.new_notebook(cells=cells + exercises)) == 2
    assert course.reading_minutes(nb.new_notebook(cells=[*cells, *exercises, after])) == 3
    after.source += " word"
    assert course.reading_minutes(nb.new_notebook(cells=[*cells, *exercises, after])) == 4


def test_seconds_stand_while_they_are_about_right(tmp_path, monkeypatch):
    monkeypatch.setattr(course.os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    course.write_seconds(tmp_path, {"a": 8.2, "b": 30.0})
    course.write_seconds(tmp_path, {"a": 10.9, "b": 41.0})
    rows = course.read_seconds(tmp_path)
    assert rows["a"] == {"chapter": "a", "seconds": "9", "cpu_cores": "2"}
    assert rows["b"] == {"chapter": "b", "seconds": "41", "cpu_cores": "2"}


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_on_a_terminal_and_elsewhere():
    for file, moves in ((Terminal(), True), (io.StringIO(), False)):
        bar = course.Progress("07 Sums", 4, file)
        bar.tick()
        bar.tick()
        bar.close("passed")
        text = file.getvalue()
        assert ("\r" in text) == moves
        assert ("cell 2 of 4" in text.partition("passed")[0]) is True
        assert text.rstrip().endswith("passed")


def report(nodeid, when="call"):
    return type("Report", (), {"nodeid": nodeid, "when": when})()


CELLS = [report(f"a.ipynb::Cell {n}") for n in range(3)]


@pytest.mark.parametrize(
    ("expected", "stats", "words"),
    [
        (3, {"passed": CELLS}, None),
        (3, {"passed": CELLS[:2], "failed": CELLS[2:]}, None),
        (3, {"passed": CELLS[:2]}, "2 of 3"),
        (3, {"passed": [*CELLS[:2], CELLS[0]]}, "2 of 3"),
        (0, {}, "0 of 0"),
        (
            3,
            {"passed": CELLS, "xfailed": CELLS[:1]},
            "1 cells were skipped or expected to fail, such as a",
        ),
        (3, {"passed": CELLS, "xpassed": CELLS[:1]}, "expected to fail"),
        (3, {"passed": CELLS, "skipped": CELLS[:1]}, "skipped"),
        (1, {"passed": [report("test_a.py::test_b")]}, "0 of 1"),
        (3, {"passed": CELLS, "skipped": [report("test_a.py::test_b")]}, None),
    ],
)
def test_a_notebook_run_must_have_run_every_cell(expected, stats, words):
    found = conftest.complaint(expected, stats)
    assert (found is None) if words is None else (words in found)


def test_the_mutation_score_counts_found_and_survived():
    def reports(*values):
        return [type("Report", (), {"user_properties": [("mutant", value)] if value else []})() for value in values]

    stats = {"passed": reports(("a.b", True), None, ("c.d", True)), "failed": reports(("a.b", False))}
    assert conftest.score(stats) == "mutants found: 2 of 3 (a.b 1/2, c.d 1/1)"
    assert conftest.score({"passed": reports(None), "deselected": reports(None)}) == ""


@pytest.mark.parametrize(
    ("source", "status", "words"),
    [("print(1)", 0, "1 passed"), ("print(2)", 1, "1 failed"), (None, 1, "0 of 0 code cells ran")],
)
def test_nbval_run_compares_and_counts(tmp_path, source, status, words):
    chapter = notebook("07", *([] if source is None else ["print(1)"]))
    course.execute(chapter, "07 Sums")
    for cell in chapter.cells[1:]:
        cell.source = source
    course.write_notebook(tmp_path / "07_a.ipynb", chapter)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "--rootdir", tmp_path]
    command += ["-c", os.devnull, "--nbval", "--nbval-current-env", "--every-cell", tmp_path]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == status, ran.stdout + ran.stderr
    assert words in ran.stdout
