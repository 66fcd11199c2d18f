"""The parts of the book's pages that are read off the repository, so that no page can disagree with the code.

A page holds a line `<!-- generated: NAME ARGUMENTS -->`; `fill_in` puts Markdown in its place. Data written by hand lie
beside this file: notation.yml (symbols) and stumbles.yml (what learners stumble over).
"""

import dataclasses
import functools
import itertools
import json
import re
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
MARKER = re.compile(r"^<!-- generated: ([a-z_]+)((?: \S+)*) -->$", re.MULTILINE)
# Headings deeper than this get no anchor; conf.py gives the same number to the parser.
ANCHORED_LEVELS = 4


@dataclasses.dataclass(frozen=True)
class Cell:
    """A cell of a notebook and where a reader finds it.

    Args:
        kind: "markdown" or "code".
        text: its source.
        tags: its tags.
        section: the last heading at or above it, as plain text.
        anchor: that heading's anchor on the page.
    """

    kind: str
    text: str
    tags: tuple
    section: str
    anchor: str


@dataclasses.dataclass(frozen=True)
class Chapter:
    """A notebook of the book: its number ("03"), file name without suffix, title and cells."""

    number: str
    name: str
    title: str
    cells: tuple

    def link(self, text, anchor=None):
        """Return a Markdown link to the chapter from a page in book/."""
        return f"[{text}](../notebooks/{self.name}.ipynb{'#' + anchor if anchor else ''})"


def slug(heading):
    """Return the anchor of a heading as JupyterLab makes it, so that one link works there and in the book."""
    return heading.strip().replace(" ", "-")


def read_book(source):
    """Return (settings, parts) of SOURCE/book.yml; a part is (caption, list of document names)."""
    book = yaml.safe_load((Path(source) / "book.yml").read_text(encoding="utf-8"))
    parts = [(part["caption"], [entry["file"] for entry in part["entries"]]) for part in book["subtrees"]]
    return book["meta"], parts


def chapters(source):
    """Return the chapters of SOURCE in the book's order."""
    _, parts = read_book(source)
    names = [Path(name).name for _, files in parts for name in files if name.startswith("notebooks/")]
    return [read_chapter(Path(source) / "notebooks" / f"{name}.ipynb") for name in names]


def read_chapter(path):
    """Return the `Chapter` of a notebook file."""
    path = Path(path)
    # The time stamp makes an edited notebook a new one.
    return _read_chapter(path, path.stat().st_mtime_ns)


@functools.cache
def _read_chapter(path, _stamp):
    title, section, anchor = "", "", ""
    taken, cells = set(), []
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        text = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for heading in headings(text):
                section, anchor = heading, slug(heading)
                # The parser numbers the anchors of equal headings in the same way.
                anchor = next(a for a in _numbered(anchor) if a not in taken)
                taken.add(anchor)
                title = title or section
        tags = tuple(cell.get("metadata", {}).get("tags", ()))
        cells.append(Cell(cell["cell_type"], text, tags, section, anchor))
    number = path.name.partition("_")[0]
    return Chapter(number, path.stem, title, tuple(cells))


def headings(text):
    """Return the headings of a Markdown cell that get an anchor, as plain text without their formulas."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = re.findall(rf"^#{{1,{ANCHORED_LEVELS}}} +(.+?)[ #]*$", outside, re.MULTILINE)
    # Formulas, links, then marks of code and emphasis.
    for pattern, kept in ((r"\$[^$]*\$", ""), (r"\[([^]]*)\]\([^)]*\)", r"\1"), (r"[`*]", "")):
        found = [re.sub(pattern, kept, heading) for heading in found]
    return found


def _numbered(anchor):
    return itertools.chain([anchor], (f"{anchor}-{n}" for n in itertools.count(1)))


def opening(chapter):
    """Return the bold-led paragraphs of a chapter's first cell, such as {"Time": "about 20 minutes …"}."""
    found = re.findall(r"\*\*(.+?)\*\*[:.]?\s+(.*?)(?=\n\s*\n|\Z)", chapter.cells[0].text, re.DOTALL)
    return {lead.strip(" .:"): " ".join(rest.split()) for lead, rest in found}


def exercises(number):
    """Return the exercises of a chapter, from its checker."""
    from flashlib import check

    return check.exercises(number)


def fill_in(text, source):
    """Replace the generated lines of a page.

    Args:
        text: Markdown of a page in book/.
        source: folder with book.yml and notebooks/.

    Returns:
        (text, list of the files that it was read from).

    Raises:
        ValueError: a line names nothing that can be generated.
    """
    source = Path(source)

    def replace(match):
        name, arguments = match[1], match[2].split()
        if name not in GENERATORS:
            raise ValueError(f"generated must name one of {', '.join(GENERATORS)}, got {name}")
        return GENERATORS[name](source, *arguments)

    filled = MARKER.sub(replace, text)
    if filled == text:
        return text, []
    files = [source / "book.yml", *sorted(HERE.glob("*.yml")), *sorted((source / "notebooks").glob("*.ipynb"))]
    import flashlib.check

    files += sorted(Path(flashlib.check.__file__).parent.glob("*.py"))
    return filled, [str(file) for file in files]


# --- the chapters --------------------------------------------------------------------------------------------------


def chapter_table(source):
    """A table of the chapters: what the reader can do after each, and how long it takes."""
    rows = [
        (
            chapter.link(chapter.title),
            opening(chapter).get("After this chapter you can", ""),
            "<br>".join(filter(None, (_minutes(chapter), _stars(chapter)))),
        )
        for chapter in chapters(source)
    ]
    return _table(("chapter", "after it you can", "reading, exercises"), rows)


def short_path(source):
    """The chapters of the short path that the book has, as links."""
    settings, _ = read_book(source)
    there = {chapter.number: chapter for chapter in chapters(source)}
    links = [there[n].link(there[n].title) if n in there else f"{n} (to come)" for n in settings["short_path"]]
    return ", then ".join(links) + "."


def _minutes(chapter):
    found = re.search(r"(\d+) minutes", opening(chapter).get("Time", ""))
    return f"{found[1]} min" if found and int(found[1]) else ""


def _stars(chapter):
    return " ".join(exercise.stars for exercise in exercises(chapter.number)) or "–"


# --- notation ------------------------------------------------------------------------------------------------------


def read_notation():
    """Return the groups of notation.yml: each has a title and rows."""
    return yaml.safe_load((HERE / "notation.yml").read_text(encoding="utf-8"))


def notation(source):
    """One table for each group of symbols; symbols of chapters that do not exist yet are left out."""
    there = {chapter.number: chapter for chapter in chapters(source)}
    head = ("article", "papers", "code", "meaning", "shape", "unit", "first met")
    text = []
    for group in read_notation():
        rows = [
            (
                row.get("article", "–"),
                row.get("papers", "–"),
                _code(row),
                row["meaning"],
                row.get("shape", "–"),
                row.get("unit", "–"),
                there[row["first"]].link(row["first"]),
            )
            for row in group["rows"]
            if row["first"] in there
        ]
        if rows:
            text += [f"## {group['title']}", _table(head, rows)]
    return "\n\n".join(text)


def _code(row):
    names = ", ".join(f"`{name}`" for name in row.get("code", ()))
    return f"{names} in `{row['module']}`" if names else "–"


# --- stumbles and misconceptions -----------------------------------------------------------------------------------


def read_stumbles():
    """Return {number: {"text": …, "chapter": … or "answer": …}} of stumbles.yml."""
    return yaml.safe_load((HERE / "stumbles.yml").read_text(encoding="utf-8"))


def where_met(source):
    """Return {stumble number: list of (chapter, cell)} of the cells tagged `stumble-N`."""
    found = {}
    for chapter in chapters(source):
        for cell in chapter.cells:
            for tag in cell.tags:
                if tag.startswith("stumble-"):
                    found.setdefault(int(tag.removeprefix("stumble-")), []).append((chapter, cell))
    return found


def stumbles(source):
    """A table of what learners stumble over, and the cells that meet each."""
    met = where_met(source)
    rows = []
    for number, stumble in read_stumbles().items():
        links = [
            chapter.link(f"{chapter.number}, {_plain(cell.section)}", cell.anchor)
            for chapter, cell in met.get(number, ())
        ]
        later = f"chapter {stumble['chapter']}, to come" if "chapter" in stumble else stumble.get("answer", "–")
        rows.append((str(number), stumble["text"], "; ".join(dict.fromkeys(links)) or later))
    return _table(("no.", "what goes wrong", "where it is met"), rows)


def misconceptions(source):
    """Each exercise with the mistakes that its checker names, chapter by chapter."""
    text = []
    for chapter in chapters(source):
        found = exercises(chapter.number)
        if not found:
            continue
        text.append(f"## {chapter.title}")
        for exercise in found:
            heading = f"{exercise.id} {exercise.stars} {exercise.title}"
            text.append(f"**{_to_exercise(chapter, exercise, heading)}**: the checker knows what comes out when")
            text.append("\n".join(f"- {_plain(wrong.says)}{_stumble_mark(wrong)}" for wrong in exercise.wrong))
    return "\n\n".join(text)


def _to_exercise(chapter, exercise, text):
    cell = next((c for c in chapter.cells if c.kind == "markdown" and c.section.startswith(f"{exercise.id} ")), None)
    return chapter.link(_plain(text), cell.anchor if cell else None)


def _stumble_mark(wrong):
    return f" *(stumble {wrong.stumble})*" if wrong.stumble else ""


# --- teaching ------------------------------------------------------------------------------------------------------


def meeting(source, *numbers):
    """The chapters of a meeting: their questions to predict and their exercises."""
    text = []
    for chapter in chapters(source):
        if chapter.number not in numbers:
            continue
        minutes = _minutes(chapter)
        text.append(f"**{chapter.link(chapter.title)}**" + (f", {minutes} of reading" if minutes else ""))
        questions = [f"- {chapter.link('Predict', cell.anchor)}: {asked}" for cell, asked in predictions(chapter)]
        tasks = [
            f"- Exercise {_to_exercise(chapter, exercise, exercise.id)} {exercise.stars} {_plain(exercise.title)}"
            for exercise in exercises(chapter.number)
        ]
        text.append("\n".join(questions + tasks))
    return "\n\n".join(text)


def predictions(chapter):
    """Return (cell, question) for each cell that asks the reader to predict."""
    found = []
    for cell in chapter.cells:
        if cell.kind == "markdown":
            for question in re.findall(r"\*\*Predict:?\*\*:?\s*(.*?)(?=\n\s*\n|\Z)", cell.text, re.DOTALL):
                if "?" not in question:
                    # A sentence about predictions, not one of them.
                    continue
                # A link between chapters starts from notebooks/; these pages lie in book/.
                asked = re.sub(r"\]\((?=\d\d_\w+\.ipynb)", "](../notebooks/", " ".join(question.split()))
                found.append((cell, asked))
    return found


# --- Markdown ------------------------------------------------------------------------------------------------------


def _plain(text):
    """Escape what Markdown would take for markup, outside of `code`."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:
        return re.sub(r"([\\`*\[\]<>|$])", r"\\\1", text)
    pieces[::2] = [re.sub(r"([\\*\[\]<>|$])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


def _table(head, rows):
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


GENERATORS = {
    "chapter_table": chapter_table,
    "short_path": short_path,
    "notation": notation,
    "stumbles": stumbles,
    "misconceptions": misconceptions,
    "meeting": meeting,
}
