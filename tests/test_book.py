"""The book: its pages are those of book.yml, they build without a warning, and what is generated is true."""

import ast
import json
import math
import re
import runpy
import shutil
import types
import urllib.parse

import pytest
import yaml
from bs4 import BeautifulSoup
from built_book import ROOT, build, built, docnames, generate

from flashlib import check

PAGES = docnames()
CHAPTERS = generate.chapters(ROOT)
NUMBERS = [chapter.number for chapter in CHAPTERS]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The built book and what Sphinx said."""
    return built(tmp_path_factory)


@pytest.fixture(scope="module")
def book(made):
    """The folder of the built book."""
    return made.folder


@pytest.fixture(scope="module")
def pages(book):
    """{path in the book: parsed page} of every HTML file."""
    return {
        path.relative_to(book).as_posix(): BeautifulSoup(path.read_text(encoding="utf-8"), "html.parser")
        for path in sorted(book.rglob("*.html"))
        if "_static" not in path.parts
    }


def article(pages, name):
    return pages[f"{name}.html"].find("article", class_="bd-article")


def words(text):
    return " ".join(text.split())


# --- table of contents ---------------------------------------------------------------------------------------------


def test_book_yml_and_notebooks_agree():
    listed = sorted(name.removeprefix("notebooks/") for name in PAGES if name.startswith("notebooks/"))
    assert listed == sorted(path.stem for path in (ROOT / "notebooks").glob("*.ipynb"))


def test_book_yml_and_pages_agree():
    listed = sorted(name.removeprefix("book/") for name in PAGES if name.startswith("book/"))
    assert listed == sorted(path.stem for path in (ROOT / "book").glob("*.md"))


def test_chapters_are_in_order_and_numbered_by_their_files():
    assert sorted(NUMBERS) == NUMBERS
    for chapter in CHAPTERS:
        assert chapter.title.startswith(f"{chapter.number} "), chapter.title


# --- the build -----------------------------------------------------------------------------------------------------


def test_book_builds_without_a_warning(made):
    assert made.status == 0, made.messages[-4000:]
    assert made.messages.strip() == ""


@pytest.mark.parametrize("name", PAGES)
def test_page_exists_and_carries_its_title(pages, name):
    source = next(path for path in (ROOT / f"{name}.md", ROOT / f"{name}.ipynb") if path.is_file())
    if source.suffix == ".ipynb":
        title = generate.read_chapter(source).title
    else:
        title = re.search(r"^# (.+)$", source.read_text(encoding="utf-8"), re.MULTILINE)[1]
    headings = article(pages, name).find_all("h1")
    assert [words(h.get_text().replace("#", "")) for h in headings] == [title]
    assert pages[f"{name}.html"].title.get_text().startswith(title)


def test_index_leads_to_the_front_page(book, pages):
    settings, _ = generate.read_book(ROOT)
    assert pages["index.html"].title.get_text() == settings["title"]
    target = re.search(r"url=(\S+)", pages["index.html"].find("meta", {"http-equiv": "refresh"})["content"])[1]
    assert (book / target).is_file()


def test_parts_are_captions_of_the_sidebar(pages):
    _, parts = generate.read_book(ROOT)
    captions = [words(c.get_text()) for c in pages["book/index.html"].select(".bd-sidebar-primary p.caption")]
    assert captions == [caption for caption, _ in parts]


def test_answers_to_predictions_are_folded(pages):
    for chapter in CHAPTERS:
        hidden = [cell for cell in chapter.cells if cell.kind == "code" and "hide-output" in cell.tags]
        assert len(article(pages, f"notebooks/{chapter.name}").select("details.hide")) >= len(hidden)


def test_shown_source_is_highlighted(book, pages):
    listings = 0
    for chapter in CHAPTERS:
        for block in article(pages, f"notebooks/{chapter.name}").select(".cell_output .highlight-python pre"):
            assert block.find("span", class_="k"), block.get_text()[:80]
            listings += 1
    sources = [cell.text for chapter in CHAPTERS for cell in chapter.cells if cell.kind == "code"]
    shown = sum(re.search(r"^show\(", text, re.MULTILINE) is not None for text in sources)
    assert listings >= shown


# --- references ----------------------------------------------------------------------------------------------------

LOADING = [
    ("script", "src"),
    ("link", "href"),
    ("img", "src"),
    ("img", "srcset"),
    ("iframe", "src"),
    ("source", "src"),
    ("video", "src"),
    ("audio", "src"),
    ("object", "data"),
    ("embed", "src"),
    ("use", "href"),
    ("image", "href"),
]
FOREIGN = re.compile(r"^\s*(https?:)?//", re.IGNORECASE)
# A namespace is a name, not an address that anything is loaded from.
NAMESPACES = ("http://www.w3.org/",)


def test_no_page_loads_from_another_host(pages):
    found = [
        f"{path}: <{tag} {attribute}={element[attribute]}>"
        for path, page in pages.items()
        for tag, attribute in LOADING
        for element in page.find_all(tag)
        if element.has_attr(attribute) and FOREIGN.match(element[attribute])
    ]
    for path, page in pages.items():
        code = [script.get_text() for script in page.find_all("script") if not script.has_attr("src")]
        code += [style.get_text() for style in page.find_all("style")]
        code += [element["style"] for element in page.find_all(style=True)]
        hosts = re.findall(r"https?://[^\s\"'`)]+", "\n".join(code))
        found += [f"{path}: {host}" for host in hosts if not host.startswith(NAMESPACES)]
    assert not found


def test_no_style_sheet_loads_from_another_host(book):
    found = []
    for path in book.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        loads = re.findall(r"url\(\s*[\"']?([^\"')]+)", text) + re.findall(r"@import\s+[\"']([^\"']+)", text)
        found += [f"{path.name}: {load[:80]}" for load in loads if FOREIGN.match(load)]
    assert not found


def test_mathematics_comes_from_one_local_file(book, pages):
    assert (book / "_static" / "tex-svg-full.js").is_file()
    assert not (book / "_static" / "mathjax").exists()
    for path, page in pages.items():
        scripts = [script["src"] for script in page.find_all("script", src=True)]
        assert all(not FOREIGN.match(src) for src in scripts)
        if page.find(class_="math"):
            assert any("tex-svg-full.js" in src for src in scripts), path


def test_links_and_anchors_resolve(book, pages):
    ids = {path: {element["id"] for element in page.find_all(id=True)} for path, page in pages.items()}
    broken = []
    for path, page in pages.items():
        for link in page.find_all("a", href=True):
            address = urllib.parse.urlsplit(link["href"])
            if address.scheme or address.netloc or link["href"] in ("#", ""):
                continue
            target = (book / path).parent / urllib.parse.unquote(address.path) if address.path else book / path
            name = target.resolve().relative_to(book.resolve()).as_posix()
            anchor = urllib.parse.unquote(address.fragment)
            if not target.exists() or (anchor and name in ids and anchor not in ids[name] | {"_top"}):
                broken.append(f"{path}: {link['href']}")
    assert not broken


@pytest.mark.parametrize("name", PAGES)
def test_images_say_what_they_show(pages, name):
    for image in article(pages, name).find_all("img"):
        alt = image.get("alt", "")
        assert len(alt.split()) >= 3, f"{image['src']}: alt text {alt!r}"


def test_ids_are_unique(pages):
    for path, page in pages.items():
        ids = [element["id"] for element in page.find_all(id=True)]
        # The theme repeats its own search form and MathML of none of ours.
        twice = {i for i in ids if ids.count(i) > 1 and not i.startswith(("pst-", "search", "__"))}
        assert not twice, f"{path}: {twice}"


# --- settings ------------------------------------------------------------------------------------------------------


def buttons(page):
    return [
        a["href"]
        for a in page.select(".bd-header-article a[href], .article-header-buttons a[href]")
        if FOREIGN.match(a["href"])
    ]


def test_no_repository_buttons_unless_it_is_set(pages):
    settings, _ = generate.read_book(ROOT)
    for name in PAGES:
        assert bool(buttons(pages[f"{name}.html"])) == bool(settings["repository"]), name


def test_repository_buttons_when_it_is_set(tmp_path):
    # An assembled source with one chapter: links to the others lead nowhere, so this build may warn.
    repository = "https://github.com/somebody/somewhere"
    settings = yaml.safe_load((ROOT / "book.yml").read_text(encoding="utf-8"))
    settings["meta"] |= {"repository": repository, "branch": "trunk", "title": "Another title"}
    chapter = settings["subtrees"][0]["entries"][:1]
    settings["subtrees"] = [settings["subtrees"][0] | {"entries": chapter}, settings["subtrees"][-1]]
    source = tmp_path / "source"
    (source / "notebooks").mkdir(parents=True)
    shutil.copytree(ROOT / "book", source / "book", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / f"{chapter[0]['file']}.ipynb", source / "notebooks")
    (source / "book.yml").write_text(yaml.safe_dump(settings), encoding="utf-8")
    other = build(source, tmp_path)
    assert other.status == 0, other.messages[-4000:]
    page = BeautifulSoup((other.folder / f"{chapter[0]['file']}.html").read_text(encoding="utf-8"), "html.parser")
    found = buttons(page)
    assert repository in found
    assert f"https://colab.research.google.com/github/somebody/somewhere/blob/trunk/{chapter[0]['file']}.ipynb" in found
    assert page.title.get_text().endswith("Another title")


@pytest.mark.parametrize(
    ("repository", "options"),
    [
        ("", set()),
        ("https://example.org/somebody/somewhere", {"repository_url"}),
        ("https://github.com/somebody/somewhere", {"repository_url", "launch_buttons"}),
    ],
)
def test_buttons_follow_the_repository(tmp_path, repository, options):
    meta = {"title": "T", "author": "A", "repository": repository, "branch": "main", "colab": "https://x.example"}
    (tmp_path / "book.yml").write_text(yaml.safe_dump({"meta": meta}), encoding="utf-8")
    config = types.SimpleNamespace()
    runpy.run_path(str(ROOT / "book" / "conf.py"))["apply_settings"](types.SimpleNamespace(srcdir=tmp_path), config)
    assert set(config.html_theme_options) & {"repository_url", "launch_buttons"} == options
    assert config.html_title == "T"


# --- notation ------------------------------------------------------------------------------------------------------

ROWS = [row for group in generate.read_notation() for row in group["rows"]]
SHOWN = [row for row in ROWS if row["first"] in NUMBERS]


def label(row):
    return row.get("article", "–") if row.get("article", "–") != "–" else ",".join(row.get("code", ["?"]))


def names_in(module):
    """Return every name that a module of flashlib binds, takes as an argument, or reads."""
    tree = ast.parse((ROOT / "flashlib" / f"{module}.py").read_text(encoding="utf-8"))
    names = set()
    for node in ast.walk(tree):
        for field in ("id", "name", "arg", "attr"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    return names


def stands_in(name, text):
    return re.search(rf"(?<![A-Za-z0-9_]){re.escape(name)}(?![A-Za-z0-9_])", text) is not None


@pytest.mark.parametrize("row", [row for row in SHOWN if "code" in row], ids=label)
def test_notation_names_exist_in_code(row):
    missing = set(row["code"]) - names_in(row["module"])
    assert not missing, f"{row['module']}.py has no {missing}"


@pytest.mark.parametrize("row", SHOWN, ids=label)
def test_notation_first_chapter_has_the_symbol(row):
    chapter = next(chapter for chapter in CHAPTERS if chapter.number == row["first"])
    text = "\n".join(cell.text for cell in chapter.cells)
    forms = row.get("find", [])
    assert any(form in text for form in forms) or any(stands_in(name, text) for name in row.get("code", [])), forms


def test_notation_page_has_every_symbol(pages):
    text = words(article(pages, "book/notation").get_text())
    for row in SHOWN:
        for name in row.get("code", []):
            assert name in text
    assert len(article(pages, "book/notation").select("table tbody tr")) >= len(SHOWN)


# --- stumbles and misconceptions -----------------------------------------------------------------------------------

STUMBLES = generate.read_stumbles()


def test_stumbles_are_all_there():
    assert list(STUMBLES) == list(range(1, 16))
    for number, stumble in STUMBLES.items():
        assert ("chapter" in stumble) != ("answer" in stumble), number


@pytest.mark.parametrize("number", STUMBLES)
def test_stumble_is_met_where_it_is_said_to_be(pages, number):
    stumble = STUMBLES[number]
    met = generate.where_met(ROOT).get(number, [])
    if stumble.get("chapter") in NUMBERS:
        assert stumble["chapter"] in {chapter.number for chapter, _ in met}, f"no cell is tagged stumble-{number}"
    row = article(pages, "book/misconceptions").select("table tbody tr")[number - 1]
    assert words(row.find("td").get_text()) == str(number)
    assert len(row.find_all("a")) >= bool(met)


def test_contributing_names_the_same_chapters():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## What learners stumble over")[2]
    table = re.findall(r"^\| (\d+) \|.*\| ([^|]+) \|$", text, re.MULTILINE)
    said = {int(number): where if where.isdigit() else None for number, where in table}
    assert said == {number: stumble.get("chapter") for number, stumble in STUMBLES.items()}


def test_every_stumble_tag_has_a_text():
    assert set(generate.where_met(ROOT)) <= set(STUMBLES)


def test_misconceptions_page_has_every_known_mistake(pages):
    text = words(article(pages, "book/misconceptions").get_text()).replace("’", "'").replace("`", "")
    for exercise in check.exercises():
        if exercise.id.partition(".")[0] not in NUMBERS:
            continue
        assert f"{exercise.id} {exercise.stars} {words(exercise.title)}".replace("`", "") in text
        for wrong in exercise.wrong:
            assert words(wrong.says).replace("`", "") in text, f"{exercise.id}: {wrong.says}"


# --- front page, one page, teaching --------------------------------------------------------------------------------


def test_front_page_lists_every_chapter(pages):
    rows = article(pages, "book/index").select("table tbody tr")
    assert [words(row.find("a").get_text()) for row in rows] == [chapter.title for chapter in CHAPTERS]
    for row in rows:
        assert len(row.find_all("td")[1].get_text().split()) >= 3, row.get_text()


def test_teaching_covers_each_chapter_and_exercise_once(pages):
    text = (ROOT / "book" / "teaching.md").read_text(encoding="utf-8")
    taught = [number for line in re.findall(r"<!-- generated: meeting (.*) -->", text) for number in line.split()]
    assert taught == [number for number in NUMBERS if number <= "06"]
    page = article(pages, "book/teaching")
    items = [words(item.get_text()) for item in page.find_all("li")]
    listed = [item.split()[1] for item in items if item.startswith("Exercise ")]
    assert listed == [e.id for number in taught for e in check.exercises(number)]
    asked = [item for item in items if item.startswith("Predict:")]
    assert len(asked) == sum(len(generate.predictions(c)) for c in CHAPTERS if c.number in taught)


def test_numbers_of_the_one_page_are_right():
    text = (ROOT / "book" / "one_page.md").read_text(encoding="utf-8")
    first = [sum(math.exp(s - 2) * v for s, v in zip((1, 2), w, strict=True)) for w in ((1, 1), (10, 20))]
    second = [sum(math.exp(s - 4) * v for s, v in zip((3, 4), w, strict=True)) for w in ((1, 1), (30, 40))]
    merged = [math.exp(2 - 4) * a + b for a, b in zip(first, second, strict=True)]
    for name, largest, (l, acc) in (("first piece", 2, first), ("second piece", 4, second), ("merged", 4, merged)):
        assert f"| {name} | {largest} | {l:.4f} | {acc:.3f} |" in text
    assert f"{merged[1]:.3f} / {merged[0]:.4f} = {merged[1] / merged[0]:.2f}" in text
    assert f"{16384 * 16384 * 2 / 2**20:.0f} MiB" in text


# --- the generators ------------------------------------------------------------------------------------------------


def test_unknown_generated_line_is_an_error():
    with pytest.raises(ValueError, match="generated must name one of"):
        generate.fill_in("<!-- generated: nothing -->", ROOT)


def test_a_page_without_generated_lines_stays_as_it_is():
    assert generate.fill_in("# Title\n", ROOT) == ("# Title\n", [])


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("a * b", r"a \* b"),
        ("x < y | z", r"x \< y \| z"),
        ("`a * b` * c", r"`a * b` \* c"),
        ("one ` alone", r"one \` alone"),
        ("costs $3", r"costs \$3"),
    ],
)
def test_text_is_escaped_outside_of_code(text, escaped):
    assert generate._plain(text) == escaped


def test_headings_are_found_as_the_parser_finds_them():
    text = "# 03 `merge` of $m$ and *more*\n\n```\n# no heading\n```\n\n## See [04](04_tiling.ipynb)\n\n##### too deep"
    assert generate.headings(text) == ["03 merge of  and more", "See 04"]


def test_equal_headings_get_anchors_of_their_own(tmp_path):
    cells = [{"cell_type": "markdown", "source": [text], "metadata": {}} for text in ("# 03 X", "## Why", "## Why")]
    (tmp_path / "03_x.ipynb").write_text(json.dumps({"cells": cells}), encoding="utf-8")
    chapter = generate.read_chapter(tmp_path / "03_x.ipynb")
    assert [cell.anchor for cell in chapter.cells] == ["03-X", "Why", "Why-1"]


def test_opening_reads_the_bold_led_paragraphs():
    text = "# 03 X\n\n**After this chapter you can** merge\nstates.\n\n**Time** about 25 minutes of reading."
    chapter = generate.Chapter("03", "03_x", "03 X", (generate.Cell("markdown", text, (), "", ""),))
    assert generate.opening(chapter) == {
        "After this chapter you can": "merge states.",
        "Time": "about 25 minutes of reading.",
    }
