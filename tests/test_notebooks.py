"""The rules that every notebook keeps (CONTRIBUTING.md, "Notebooks"), and for each rule a notebook that breaks it."""

import ast
import dataclasses
import re
from pathlib import Path

import nbformat.v4 as nb
import pytest
import yaml

from book import course
from flashlib import check

ROOT = Path(__file__).resolve().parent.parent
TAGS = {"hide-input", "hide-output", "remove-cell", "remove-input", "raises-exception", "nbval-ignore-output"}
LEAD = ("After this chapter you can", "You need", "Time", "Where it sits")
CLOSING = ["What to remember", "Exercises", "Five questions", "Where to read on"]
# The numbered stumbles of CONTRIBUTING.md that a chapter must meet in a cell tagged with the number.
STUMBLES = {"00": {8, 9}, "01": {13}, "03": {11, 14}, "05": {6}, "09": {4, 5, 15}, "10": {3, 7}, "11": {12}}
# A chapter is called like its module, but for these.
MODULES = {"start_here": "device", "speed": "bench", "masks_and_scores": "mods", "heads_and_batches": "varlen"}


@dataclasses.dataclass
class Chapter:
    """A notebook with what it is held against: its file's stem, its exercises, the folder its links start from."""

    stem: str
    notebook: object
    exercises: list
    folder: Path

    @property
    def number(self):
        return self.stem[:2]

    def cells(self, kind):
        return [(index, cell) for index, cell in enumerate(self.notebook.cells) if cell.cell_type == kind]


def chapters():
    """Return every notebook there is, listed in book.yml or not."""
    return [
        Chapter(path.stem, course.read(path), check.exercises(path.stem[:2]), path.parent)
        for path in sorted((ROOT / "notebooks").glob("*.ipynb"))
    ]


CHAPTERS = chapters()
RULES = {}


def rule(function):
    RULES[function.__name__] = function
    return function


# --- helpers -------------------------------------------------------------------------------------------------------


def prose(text):
    """Return Markdown without its code, fenced or inline."""
    text = re.sub(r"^(```|~~~).*?^\1[^\n]*$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text, flags=re.DOTALL)


def headings(notebook):
    """Return [(cell index, level, text)]."""
    return [
        (index, len(found[1]), found[2].strip())
        for index, cell in enumerate(notebook.cells)
        if cell.cell_type == "markdown"
        for found in re.finditer(r"^(#{1,6}) (.+)$", prose(cell.source), re.MULTILINE)
    ]


def printed(cell):
    """Return everything a code cell shows as text."""
    parts = []
    for output in cell.outputs:
        parts += [output.text] if output.output_type == "stream" else []
        parts += [str(value) for key, value in output.get("data", {}).items() if key.startswith("text/")]
        parts += output.get("traceback", [])
    return "\n".join(parts)


def outputs(cell, kind):
    return [output for output in cell.outputs if output.output_type == kind]


def expected_cell(exercise):
    """Return the source of an exercise's code cell: the stub, then one call of the checker."""
    gap = "\n\n" if exercise.cases is None else "\n\n\n"
    return f'{exercise.stub.rstrip()}{gap}check.answer("{exercise.id}", {exercise.name})'


# --- the rules -----------------------------------------------------------------------------------------------------


@rule
def one_title(chapter):
    """One level-1 heading, in the first cell, that opens with the chapter's number."""
    found = [(index, text) for index, level, text in headings(chapter.notebook) if level == 1]
    if len(found) != 1:
        yield f"there are {len(found)} level-1 headings"
    elif found[0][0] != 0 or not re.match(rf"{chapter.number} \S", found[0][1]):
        yield f"cell {found[0][0]} has the title {found[0][1]!r}; cell 0 must, as '{chapter.number} …'"


@rule
def heading_levels_do_not_jump(chapter):
    before = 0
    for index, level, text in headings(chapter.notebook):
        if level > before + 1:
            yield f"cell {index}: {text!r} goes from level {before} to {level}"
        before = level


@rule
def first_cell_leads(chapter):
    """What you can do afterwards, what you need, the time, the place: four short paragraphs."""
    for label in LEAD:
        if not course.lead(chapter.notebook, label):
            yield f"cell 0 has no paragraph that opens with **{label}**"


@rule
def time_is_up_to_date(chapter):
    """`make notebooks` writes the reading minutes; the line also names the levels of the exercises."""
    time = course.lead(chapter.notebook, "Time")
    minutes = course.reading_minutes(chapter.notebook)
    if not re.search(rf"\babout {minutes} minutes? of reading", time):
        yield f"the Time line must say 'about {minutes} minutes of reading': run make notebooks"
    for _, stars, _ in course.exercise_headings(chapter.notebook):
        if not re.search(rf"(?<!●){stars}(?!●)", time):
            yield f"the Time line must name the level {stars}"


@rule
def closing_sections_in_order(chapter):
    found = [text for _, level, text in headings(chapter.notebook) if level == 2]
    # 00 comes before there is anything to exercise.
    closing = [name for name in CLOSING if chapter.number != "00" or name in (*found, CLOSING[0], CLOSING[-1])]
    if found[-len(closing) :] != closing:
        yield f"the last sections must be {closing}, got {found[-len(closing) :]}"


@rule
def five_questions_with_answers(chapter):
    """Five numbered questions; the next cell hides the answers, with blank lines so that Markdown works inside."""
    for index, _, text in headings(chapter.notebook):
        if text != "Five questions":
            continue
        numbers = re.findall(r"^(\d)\. ", chapter.notebook.cells[index].source, re.MULTILINE)
        if numbers != list("12345"):
            yield f"cell {index} must ask questions 1 to 5, got {numbers}"
        after = chapter.notebook.cells[index + 1].source if index + 1 < len(chapter.notebook.cells) else ""
        if not re.match(r"<details>\s*<summary>Answers</summary>\n\n.+\n\n</details>\s*$", after, re.DOTALL):
            yield f"cell {index + 1} must hold the answers in <details>, with blank lines around them"


@rule
def every_cell_was_run_in_order(chapter):
    """nbval never compares a cell without an execution count."""
    counts = [cell.execution_count for _, cell in chapter.cells("code")]
    if counts != list(range(1, len(counts) + 1)):
        yield f"execution counts must be 1 to {len(counts)}, got {counts}"


@rule
def errors_only_where_expected(chapter):
    for index, cell in chapter.cells("code"):
        raised = bool(outputs(cell, "error"))
        if raised != ("raises-exception" in course.tags(cell)):
            yield f"cell {index} {'raised' if raised else 'did not raise'}, and its tags say otherwise"


@rule
def nothing_on_stderr(chapter):
    for index, cell in chapter.cells("code"):
        if any(output.name == "stderr" for output in outputs(cell, "stream")):
            yield f"cell {index} wrote to stderr"


@rule
def tags_from_the_closed_list(chapter):
    for index, cell in enumerate(chapter.notebook.cells):
        for tag in course.tags(cell):
            if tag not in TAGS and not re.fullmatch(r"stumble-([1-9]|1[0-5])", tag):
                yield f"cell {index} has the tag {tag!r}"


@rule
def no_silencing_semicolon(chapter):
    """`expr;` does not silence a cell under nbval; write `_ = expr`."""
    for index, cell in chapter.cells("code"):
        if cell.source.rstrip().endswith(";"):
            yield f"cell {index} ends in a semicolon"


@rule
def cells_are_short(chapter):
    for index, cell in chapter.cells("markdown"):
        words = course.words(cell.source)
        if words > 120:
            yield f"cell {index} has {words} words; 120 are the most"
    for index, cell in chapter.cells("code"):
        lines = len(cell.source.strip().splitlines())
        if not 1 <= lines <= 25:
            yield f"cell {index} has {lines} lines of code; 1 to 25 are allowed"


@rule
def pictures_have_alt_text(chapter):
    for index, cell in chapter.cells("code"):
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            alt = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", "")
            if len(alt.split()) < 5:
                yield f"cell {index} shows a picture; its metadata must say what is on it (mystnb, image, alt)"


@rule
def metadata_is_minimal(chapter):
    """One kernel name for everybody, no editor's leftovers, and an id on each cell (format 4.5)."""
    metadata = chapter.notebook.metadata
    if metadata.get("kernelspec") != {"display_name": "Python 3", "language": "python", "name": "python3"}:
        yield f"kernelspec must be the plain python3, got {metadata.get('kernelspec')}"
    if set(metadata) != {"kernelspec", "language_info"} or set(metadata["language_info"]) != {"name"}:
        yield "metadata must hold kernelspec and the name of the language only"
    if (chapter.notebook.nbformat, chapter.notebook.nbformat_minor) != (4, 5):
        yield "the format must be 4.5"
    ids = [cell.get("id") for cell in chapter.notebook.cells]
    if None in ids or len(set(ids)) < len(ids):
        yield "every cell must have an id of its own"
    for index, cell in enumerate(chapter.notebook.cells):
        if set(cell.metadata) - {"tags", "mystnb"}:
            yield f"cell {index} has metadata {sorted(set(cell.metadata) - {'tags', 'mystnb'})}"


@rule
def dollars_are_paired(chapter):
    for index, cell in chapter.cells("markdown"):
        if len(re.findall(r"(?<!\\)\$", prose(cell.source))) % 2:
            yield f"cell {index} has an odd number of $"


# What formulas may use: commands that MathJax (JupyterLab, the book) and KaTeX (VS Code) know; KaTeX 0.19.1 set each of
# these. A new one goes here once https://katex.org/docs/supported.html lists it.
TEX = set(
    re.findall(
        r"\\(?:[A-Za-z]+|.)",
        r"\! \# \% \, \; \\ \_ \{ \| \} \alpha \approx \bar \begin \beta \Big \big \Bigl \bigl \Bigr \bigr"
        r"\cap \cdot \cdots \circ \cup \Delta \delta \dfrac \dots \ell \end \epsilon \equiv \exp \forall \frac"
        r"\gamma \ge \geq \gets \gg \hat \in \infty \int \lambda \lceil \ldots \le \left \leftarrow \leq"
        r"\lfloor \lim \ll \ln \log \mapsto \mathbb \mathbf \mathcal \mathrm \max \mid \min \mu \nabla \ne"
        r"\neq \notin \odot \Omega \operatorname \oplus \otimes \overbrace \overline \partial \phantom \pm"
        r"\prod \propto \qquad \quad \rceil \rfloor \right \rightarrow \Sigma \sigma \sim \sqrt \subset \sum"
        r"\tanh \tau \text \tfrac \Theta \theta \tilde \times \to \top \underbrace \underline \varepsilon"
        r"\vdots",
    )
)
ENVIRONMENTS = {"aligned", "array", "bmatrix", "cases", "gathered", "matrix", "pmatrix"}


@rule
def formulas_work_in_both_renderers(chapter):
    for index, cell in chapter.cells("markdown"):
        for found in re.finditer(r"(?<!\\)(\$\$?)(.+?)(?<!\\)\1", prose(cell.source), re.DOTALL):
            unknown = set(re.findall(r"\\(?:[A-Za-z]+|.)", found[2])) - TEX
            unknown |= set(re.findall(r"\\begin\{([^}]*)\}", found[2])) - ENVIRONMENTS
            if unknown:
                yield f"cell {index} has a formula with {', '.join(sorted(unknown))}"


@rule
def plain_markdown(chapter):
    """What only one renderer understands, or what loads something from another host."""
    for index, cell in chapter.cells("markdown"):
        for bad in (r"\\newcommand", r"\\def\\", r"^:::", r"^```\{", r"!\[[^]]*\]\(https?:", r"<(img|script|iframe)\b"):
            if re.search(bad, cell.source, re.MULTILINE):
                yield f"cell {index} matches {bad}"
    for index, cell in chapter.cells("code"):
        if re.search(r"^\s*[!%]", cell.source, re.MULTILINE):
            yield f"cell {index} has a shell or magic command"


@rule
def no_paths_of_one_machine(chapter):
    for index, cell in enumerate(chapter.notebook.cells):
        text = cell.source + ("\n" + printed(cell) if cell.cell_type == "code" else "")
        found = re.search(r"(?<![\w.])/(home|root|Users|tmp|work|opt|usr)/\S*|[A-Z]:\\Users|ipykernel_\d+", text)
        if found:
            yield f"cell {index} holds {found[0]!r}"


@rule
def links_resolve(chapter):
    for index, cell in chapter.cells("markdown"):
        for target in re.findall(r"\]\(([^)\s]+)[^)]*\)", prose(cell.source)):
            if re.match(r"https?://|mailto:", target):
                continue
            file, _, anchor = target.partition("#")
            path = chapter.folder / file
            if target.startswith("/") or not path.exists():
                yield f"cell {index} links to {target}, which does not exist"
            elif anchor:
                there = course.read(path) if file else chapter.notebook
                # JupyterLab's names, which the book uses too.
                if anchor not in {text.replace(" ", "-") for _, _, text in headings(there)}:
                    yield f"cell {index} links to {target}, a heading that does not exist"


@rule
def predict_then_run(chapter):
    """At least three questions, each with its answer in the next code cell, hidden until the reader has decided."""
    cells, found = chapter.notebook.cells, 0
    for index, cell in chapter.cells("markdown"):
        # In the middle of a line the words are spoken about, not used.
        question = re.split(r"^\*\*Predict:\*\*", cell.source, maxsplit=1, flags=re.MULTILINE)[1:]
        if not question:
            continue
        found += 1
        if "?" not in question[0]:
            yield f"cell {index} predicts without a question"
        after = cells[index + 1] if index + 1 < len(cells) else None
        if after is None or after.cell_type != "code" or "hide-output" not in course.tags(after):
            yield f"cell {index} must be followed by a code cell tagged hide-output"
    if found < 3:
        yield f"there are {found} predictions; three are the least"


@rule
def exercises_agree_with_the_checker(chapter):
    """Two to four exercises from 01 on; heading, level and stub are the checker's; unsolved they still run."""
    given = course.exercise_headings(chapter.notebook)
    wanted = [(exercise.id, exercise.stars, exercise.title) for exercise in chapter.exercises]
    if given != wanted:
        yield f"the headings must be {wanted}, got {given}"
    if chapter.number != "00" and not 2 <= len(wanted) <= 4:
        yield f"there are {len(wanted)} exercises; two to four are asked for"
    calls = {
        found[1]: cell
        for _, cell in chapter.cells("code")
        for found in re.finditer(r'check\.answer\("(\d\d\.\d+)"', cell.source)
    }
    for exercise in chapter.exercises:
        cell = calls.pop(exercise.id, None)
        if cell is None or cell.source != expected_cell(exercise):
            yield f"{exercise.id}: its cell must be the stub and one call of the checker"
        elif "not attempted yet" not in printed(cell):
            yield f"{exercise.id}: the stored output must say 'not attempted yet'"
    if calls:
        yield f"check.answer is called for {sorted(calls)}, which are not exercises of this chapter"


@rule
def stumbles_are_met(chapter):
    tagged = {
        int(tag.removeprefix("stumble-"))
        for cell in chapter.notebook.cells
        for tag in course.tags(cell)
        if tag.startswith("stumble-")
    }
    missing = STUMBLES.get(chapter.number, set()) - tagged
    if missing:
        yield f"no cell is tagged for the stumbles {sorted(missing)}"


@rule
def figures_follow_the_style(chapter):
    """`style.use()` once, before the first picture; figures are drawn on an axes object and end in plt.show()."""
    uses = [index for index, cell in chapter.cells("code") if "style.use()" in cell.source]
    for index, cell in chapter.cells("code"):
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            if not uses or uses[0] > index:
                yield f"cell {index} draws before style.use()"
            if "plt.show()" not in cell.source:
                yield f"cell {index} must end its figure with plt.show()"
    if len(uses) > 1:
        yield f"style.use() is called in cells {uses}; once is enough"


@rule
def code_is_python(chapter):
    for index, cell in chapter.cells("code"):
        try:
            ast.parse(cell.source)
        except SyntaxError as error:
            yield f"cell {index} is no Python: {error.msg}"


# --- every notebook keeps every rule -------------------------------------------------------------------------------


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.stem for chapter in CHAPTERS])
@pytest.mark.parametrize("name", RULES)
def test_notebook_keeps_rule(chapter, name):
    complaints = list(RULES[name](chapter))
    assert not complaints, "\n".join(complaints)


def test_there_are_chapters():
    assert CHAPTERS
    numbers = [chapter.number for chapter in CHAPTERS]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("chapter", CHAPTERS, ids=[chapter.stem for chapter in CHAPTERS])
def test_one_name_in_its_places(chapter):
    subject = chapter.stem[3:]
    module = MODULES.get(subject, subject)
    assert (ROOT / "flashlib" / f"{module}.py").is_file()
    assert (ROOT / "tests" / f"test_{module}.py").is_file()


def test_exercises_have_their_chapters():
    assert {exercise.id[:2] for exercise in check.exercises()} <= {chapter.number for chapter in CHAPTERS}


def test_readme_table_is_up_to_date():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert course.TABLE.search(readme)[2] == course.chapter_table(ROOT), "run make notebooks"


def test_stumbles_are_listed_as_they_are_met():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| .+ \| (all|\d\d)\b.*\|$", text, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 16))
    listed = {}
    for number, chapter in rows:
        if chapter != "all":
            listed.setdefault(chapter, set()).add(int(number))
    assert listed == STUMBLES
    book = yaml.safe_load((ROOT / "book" / "stumbles.yml").read_text(encoding="utf-8"))
    assert {str(number): stumble.get("chapter", "all") for number, stumble in book.items()} == dict(rows)


# --- each rule can fail --------------------------------------------------------------------------------------------


EXERCISE = check.Exercise(
    id="07.1", title="Double", level=1, task="", name="two", stub="two = None", solution="two = 2"
)
FUNCTION = dataclasses.replace(
    EXERCISE, id="07.2", level=2, name="f", stub="def f(x):\n    raise NotImplementedError\n", cases=lambda: []
)


def code(source, *tags, output=None, picture=False):
    cell = nb.new_code_cell(source)
    if tags:
        cell.metadata["tags"] = list(tags)
    if output:
        cell.outputs = [nb.new_output("stream", name="stdout", text=output)]
    if picture:
        cell.outputs = [nb.new_output("display_data", {"image/png": "", "text/plain": "<Figure>"})]
        cell.metadata["mystnb"] = {"image": {"alt": "A line that rises from left to right."}}
    return cell


def good():
    """Return a chapter that keeps every rule."""
    text = nb.new_markdown_cell
    predict = [
        cell
        for n in range(3)
        for cell in (
            text(f"## Step {n}\n\n**Predict:** is it $n = {n}$?"),
            code(f"print({n})", "hide-output", output="0\n"),
        )
    ]
    answers = "<details><summary>Answers</summary>\n\n1. Yes.\n\n</details>"
    lead = "# 07 Sums\n\n**After this chapter you can** add.\n\n**You need** [this](07_sums.ipynb).\n\n"
    lead += "**Time** about 0 minutes of reading, exercises ● and ●●.\n\n**Where it sits** in the middle."
    cells = [
        text(lead),
        code("import numpy as np\n\nstyle.use()"),
        *predict,
        code("fig, ax = plt.subplots()\nplt.show()", picture=True),
        text("## What to remember\n\nIt costs `$1`."),
        text("## Exercises\n\n### 07.1 ● Double\n\nDouble one."),
        code(expected_cell(EXERCISE), output="07.1 ● Double: not attempted yet\n"),
        text("### 07.2 ●● Double\n\nDouble x."),
        code(expected_cell(FUNCTION), output="07.2 ●● Double: not attempted yet\n"),
        text("## Five questions\n\n" + "\n".join(f"{n}. Why?" for n in range(1, 6))),
        text(answers),
        text("## Where to read on\n\nNowhere."),
    ]
    notebook = course.normalise(nb.new_notebook(cells=cells))
    for count, cell in enumerate((cell for cell in cells if cell.cell_type == "code"), 1):
        cell.execution_count = count
    course.set_minutes(notebook)
    return Chapter("07_sums", notebook, [EXERCISE, FUNCTION], ROOT / "tests")


@pytest.fixture
def chapter(tmp_path):
    course.write_notebook(tmp_path / "07_sums.ipynb", good().notebook)
    return dataclasses.replace(good(), folder=tmp_path)


def swap(index, old, new):
    def change(chapter):
        assert old in chapter.notebook.cells[index].source
        chapter.notebook.cells[index].source = chapter.notebook.cells[index].source.replace(old, new)

    return change


def tag(index, *tags):
    return lambda chapter: chapter.notebook.cells[index].metadata.update(tags=list(tags))


def drop(index):
    return lambda chapter: chapter.notebook.cells.pop(index)


def attribute(index, **values):
    return lambda chapter: chapter.notebook.cells[index].update(values)


def output(index, *arguments, **values):
    return lambda chapter: chapter.notebook.cells[index].outputs.append(nb.new_output(*arguments, **values))


BROKEN = [
    ("one_title", swap(2, "## Step", "# Step")),
    ("one_title", swap(0, "# 07 Sums", "# 08 Sums")),
    ("one_title", swap(0, "# 07 Sums", "Sums")),
    ("heading_levels_do_not_jump", swap(2, "## Step", "### Step")),
    ("first_cell_leads", swap(0, "**You need**", "You need")),
    ("time_is_up_to_date", swap(0, " minutes of", "0 minutes of")),
    ("time_is_up_to_date", swap(0, " and ●●", "")),
    ("closing_sections_in_order", swap(9, "## What to remember", "## Remember")),
    ("closing_sections_in_order", lambda c: c.notebook.cells.append(nb.new_markdown_cell("## More"))),
    ("five_questions_with_answers", swap(14, "\n5. Why?", "")),
    ("five_questions_with_answers", swap(15, "\n\n1.", "\n1.")),
    ("five_questions_with_answers", drop(15)),
    ("every_cell_was_run_in_order", attribute(3, execution_count=None)),
    ("every_cell_was_run_in_order", attribute(3, execution_count=9)),
    ("errors_only_where_expected", output(3, "error", ename="E", evalue="", traceback=[])),
    ("errors_only_where_expected", tag(3, "hide-output", "raises-exception")),
    ("nothing_on_stderr", output(3, "stream", name="stderr", text="careful")),
    ("tags_from_the_closed_list", tag(3, "hide-output", "skip-execution")),
    ("tags_from_the_closed_list", tag(2, "stumble-16")),
    ("no_silencing_semicolon", swap(3, "print(0)", "print(0);")),
    ("cells_are_short", swap(2, "Predict", "word " * 121)),
    ("cells_are_short", swap(3, "print(0)", "print(0)\n" * 26)),
    ("cells_are_short", swap(3, "print(0)", "")),
    ("pictures_have_alt_text", attribute(8, metadata=course.nbformat.from_dict({}))),
    ("metadata_is_minimal", lambda c: c.notebook.metadata.update(authors=[])),
    ("metadata_is_minimal", lambda c: c.notebook.metadata.kernelspec.update(name="other")),
    ("metadata_is_minimal", lambda c: c.notebook.cells[3].metadata.update(collapsed=True)),
    ("metadata_is_minimal", lambda c: [cell.update(id="same") for cell in c.notebook.cells[:2]]),
    ("metadata_is_minimal", lambda c: c.notebook.update(nbformat_minor=4)),
    ("dollars_are_paired", swap(2, "$n", "n")),
    ("formulas_work_in_both_renderers", swap(2, "$n", "$\\require{physics}n")),
    ("formulas_work_in_both_renderers", swap(2, "$n", "$\\begin{align}n\\end{align}")),
    ("plain_markdown", swap(2, "**Predict", "\\newcommand{\\x}{n}\n\n**Predict")),
    ("plain_markdown", swap(2, "**Predict", "::: note\n**Predict")),
    ("plain_markdown", swap(2, "**Predict", "```{note}\n```\n**Predict")),
    ("plain_markdown", swap(2, "**Predict", "![a](https://example.org/a.png) **Predict")),
    ("plain_markdown", swap(2, "**Predict", '<img src="a.png"> **Predict')),
    ("plain_markdown", swap(3, "print", "!pip install x\nprint")),
    ("no_paths_of_one_machine", swap(3, "0", "'" + "/ho" + "me/me/file'")),
    ("no_paths_of_one_machine", output(3, "stream", name="stdout", text="/tm" + "p/ipykernel" + "_123/1.py")),
    ("links_resolve", swap(0, "07_sums.ipynb", "07_other.ipynb")),
    ("links_resolve", swap(0, "(07_sums.ipynb)", "(/07_sums.ipynb)")),
    ("links_resolve", swap(0, "(07_sums.ipynb)", "(07_sums.ipynb#Step-9)")),
    ("links_resolve", swap(0, "(07_sums.ipynb)", "(#step-1)")),
    ("predict_then_run", swap(2, "**Predict:**", "Predict:")),
    ("predict_then_run", swap(2, "?", ".")),
    ("predict_then_run", tag(3, "hide-input")),
    ("predict_then_run", drop(3)),
    ("exercises_agree_with_the_checker", swap(11, "two = None", "two = 2")),
    ("exercises_agree_with_the_checker", swap(13, "\n\n\n", "\n\n")),
    ("exercises_agree_with_the_checker", swap(12, "●●", "●")),
    ("exercises_agree_with_the_checker", swap(10, "Double\n", "Triple\n")),
    ("exercises_agree_with_the_checker", attribute(11, outputs=[])),
    ("exercises_agree_with_the_checker", lambda c: c.exercises.pop()),
    ("exercises_agree_with_the_checker", swap(3, "print(0)", 'check.answer("09.1", 0)')),
    ("stumbles_are_met", lambda c: setattr(c, "stem", "05_sums")),
    ("stumbles_are_met", lambda c: setattr(c, "stem", "10_sums")),
    ("figures_follow_the_style", swap(1, "style.use()", "pass")),
    ("figures_follow_the_style", swap(8, "plt.show()", "pass")),
    ("figures_follow_the_style", swap(3, "print(0)", "style.use()")),
    ("code_is_python", swap(3, "print(0)", "print(0")),
]


@pytest.mark.parametrize("name", RULES)
def test_good_chapter_keeps_rule(chapter, name):
    assert list(RULES[name](chapter)) == []


@pytest.mark.parametrize(("name", "change"), BROKEN, ids=[f"{name}-{n}" for n, (name, _) in enumerate(BROKEN)])
def test_broken_chapter_is_found(chapter, name, change):
    change(chapter)
    assert list(RULES[name](chapter))


def test_every_rule_has_a_broken_chapter():
    assert {name for name, _ in BROKEN} == set(RULES)


def test_stumble_tags_satisfy_their_rule(chapter):
    chapter.stem = "05_sums"
    tag(2, "stumble-6")(chapter)
    assert list(stumbles_are_met(chapter)) == []


@pytest.mark.parametrize("target", ["07_sums.ipynb#Step-1", "#Step-1", "https://example.org/a#b"])
def test_link_to_a_heading_is_followed(chapter, target):
    swap(0, "(07_sums.ipynb)", f"({target})")(chapter)
    assert list(links_resolve(chapter)) == []


def test_code_is_not_prose():
    assert prose("a `$` b ``x ` $`` c\n```\n# no heading $\n```\nd").split() == ["a", "b", "c", "d"]
