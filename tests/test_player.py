"""The step player in a real browser: step k shows the numbers of trace step k, and without scripts a table does."""

import dataclasses
import html.parser
import os
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest

import flashlib
from flashlib import tiling
from flashlib.player import MAX_STEPS, Player, _number, _short, player

FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def make_trace(seqlen_q=6, seqlen_k=9, head_dim=3, head_dim_v=2, block_m=2, block_n=3, causal=True, seed=0):
    rng = np.random.default_rng(seed)
    q, k = rng.standard_normal((seqlen_q, head_dim)), rng.standard_normal((seqlen_k, head_dim))
    v = rng.standard_normal((seqlen_k, head_dim_v))
    return tiling.trace(q, k, v, block_m=block_m, block_n=block_n, causal=causal)


def page_of(*parts, theme="", phone=True):
    attribute = f' data-theme="{theme}"' if theme else ""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width">' if phone else ""
    return f"<!doctype html><html{attribute}><head>{head}</head><body>{''.join(parts)}</body></html>"


def sanitised(text):
    """What an untrusted notebook keeps: no script, no style, no handlers, no attributes but class."""
    text = re.sub(r"<(script|style)>.*?</\1>", "", text, flags=re.S)
    return re.sub(r'\s(tabindex|role|aria-label|scope)="[^"]*"', "", text)


class TableReader(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


# --- without a browser ---------------------------------------------------------------------------------------------


def test_table_has_every_step_with_its_numbers():
    trace = make_trace()
    reader = TableReader()
    reader.feed(player(trace, row=1).html())
    head, *rows = reader.rows
    assert head == ["step", "queries", "keys", "tile", "row", "m", "l", "acc", "bytes so far"]
    assert len(rows) == len(trace.steps)
    for index, (cells, step) in enumerate(zip(rows, trace.steps, strict=True)):
        assert cells[0] == str(index + 1)
        assert int(cells[4]) == step.rows[0] + 1
        assert cells[5:7] == [_number(step.m[1]), _number(step.l[1])]
        assert cells[7] == ", ".join(_number(x) for x in step.acc[1])
        assert cells[8] == f"{step.bytes_so_far:,}"
    assert {cells[3] for cells in rows} == {"full", "partly masked", "skipped"}


def test_same_trace_gives_same_text_without_addresses():
    first, second = player(make_trace()), player(make_trace())
    assert first.html() == second.html()
    bundle = first._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "text/html"}
    assert bundle["text/plain"] == repr(first) == repr(second)
    assert "0x" not in bundle["text/plain"]
    assert "9 steps" in bundle["text/plain"]
    assert not re.search(r'\bid="', bundle["text/html"].partition("<style>")[0])


def test_html_is_small_and_loads_nothing():
    text = player(make_trace(16, 16, 16, 16, 4, 4)).html()
    assert len(text.encode()) < 150_000
    assert not re.search(r"""(src|href)=|@import|fetch\(|XMLHttp|https?://(?!www\.w3\.org/2000/svg)""", text)


def test_text_from_the_trace_cannot_end_the_script():
    trace = make_trace()
    trace.steps[0] = dataclasses.replace(trace.steps[0], kind='</script><img src=x onerror="alert(1)">')
    text = player(trace).html()
    assert "<img" not in text
    assert text.count("</script>") == 1


def test_rows_without_a_key_and_nan_are_shown():
    trace = make_trace(seqlen_q=5, seqlen_k=2)
    assert "-inf" in player(trace).html()
    trace.steps[-1].acc[:] = np.nan
    assert "nan" in player(trace).html()


@pytest.mark.parametrize(
    ("x", "text"),
    [(0, "0"), (-0.0, "0"), (np.float32(1.5), "1.5000"), (-np.inf, "-inf"), (1e-5, "1.000e-05"), (2e9, "2.000e+09")],
)
def test_numbers_are_short_texts(x, text):
    assert _number(x) == text


def test_tiles_show_no_negative_zero():
    assert [_short(x) for x in (-0.001, -0.0, 0.125, -1234.5, np.nan)] == ["0.00", "0", "0.12", "-1e+03", "nan"]


def test_style_and_script_are_installed_with_the_package():
    folder = Path(flashlib.__file__).parent
    files = {path.name for path in folder.iterdir() if path.is_file() and path.suffix != ".py"}
    settings = tomllib.loads((folder.parent / "pyproject.toml").read_text(encoding="utf-8"))
    assert files == {"player.css", "player.js"} == set(settings["tool"]["setuptools"]["package-data"]["flashlib"])


@pytest.mark.parametrize("row", [-1, 6, 1.5, "0", True, np.float64(1)])
def test_row_must_be_a_row_of_q(row):
    with pytest.raises(ValueError, match=r"row must be an integer from 0 to 5, got"):
        player(make_trace(), row=row)


@pytest.mark.parametrize("row", [None, 0, 5, np.int64(3)])
def test_any_row_of_q_is_accepted(row):
    assert isinstance(player(make_trace(), row=row), Player)


def test_what_is_too_large_or_no_trace_is_refused():
    with pytest.raises(ValueError, match="trace must be what tiling\\.trace returns, got ndarray"):
        player(np.zeros((4, 4)))
    with pytest.raises(ValueError, match=f"trace must have 1 to {MAX_STEPS} steps, got 441"):
        player(make_trace(21, 21, block_m=1, block_n=1))
    with pytest.raises(ValueError, match="trace must hold at most"):
        player(make_trace(256, 256, block_m=64, block_n=64, causal=False))
    empty = make_trace()
    empty.steps = []
    with pytest.raises(ValueError, match="got 0"):
        player(empty)


# --- in a browser --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    chromium = shutil.which("chromium")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    if chromium is None or sync_playwright is None:
        what = "chromium" if chromium is None else "playwright"
        if os.environ.get("CI", "").lower() == "true":
            pytest.fail(f"{what} is missing, and CI must run the browser tests")
        pytest.skip(f"{what} is not installed")
    with sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        yield running
        running.close()


@pytest.fixture
def open_page(browser):
    contexts = []

    def open_it(content, width=800, **options):
        context = browser.new_context(viewport={"width": width, "height": 700}, **options)
        contexts.append(context)
        page = context.new_page()
        page.problems = []
        page.on("pageerror", lambda error: page.problems.append(str(error)))
        page.on("console", lambda message: page.problems.append(message.text))
        page.on("request", lambda request: page.problems.append(request.url))
        page.set_content(content)
        return page

    yield open_it
    problems = [problem for context in contexts for page in context.pages for problem in page.problems]
    for context in contexts:
        context.close()
    assert problems == []


def shown(page, index=0):
    """Return what one player shows, and the texts of its score tile."""
    return page.evaluate(
        """index => {
          const root = document.querySelectorAll(".flash-player")[index];
          const text = name => root.querySelector(`[data-fp="${name}"]`).textContent;
          const score = [...root.querySelectorAll('[data-fp="score"] rect.fp-cell title')].map(t => t.textContent);
          const seen = Object.fromEntries(["m", "l", "acc", "bytes", "count", "status", "note"].map(n => [n, text(n)]));
          const before = [...root.querySelectorAll(".fp-state tbody tr")].map(r => r.children[1].textContent);
          const labels = [...root.querySelectorAll('[data-fp="score"] text.fp-soft')].map(t => t.textContent);
          const inputs = [...root.querySelectorAll(".fp-three > div")].map(box => [
            box.firstChild.textContent, [...box.querySelectorAll("rect.fp-cell title")].map(t => t.textContent)]);
          const lit = root.querySelectorAll('[data-step][fill-opacity="1"]').length;
          const strips = [...root.querySelectorAll(".fp-strip")].map(
            e => ["fp-on", "fp-done"].filter(name => e.classList.contains(name)).join());
          const meter = parseFloat(root.querySelector(".fp-meter div").style.width);
          const row = root.querySelector("select").selectedOptions[0].textContent;
          return {...seen, score, before, labels, inputs, lit, strips, meter, row};
        }""",
        index,
    )


def assert_shows(seen, trace, k, offset):
    step = trace.steps[k]
    total = trace.steps[-1].bytes_so_far
    row = min(offset, step.rows[1] - step.rows[0] - 1)
    assert seen["count"] == f"step {k + 1} of {len(trace.steps)}"
    assert seen["row"] == str(step.rows[0] + row)
    assert seen["m"] == _number(step.m[row])
    assert seen["l"] == _number(step.l[row])
    assert seen["acc"] == ", ".join(_number(x) for x in step.acc[row])
    assert seen["bytes"].endswith(f"{step.bytes_so_far:,} of {total:,}")
    earlier = [other for other in trace.steps[:k] if other.i == step.i]
    if earlier:
        m, l, acc = (getattr(earlier[-1], name)[row] for name in ("m", "l", "acc"))
        assert seen["before"] == [_number(m), _number(l), ", ".join(_number(x) for x in acc)]
    else:
        assert seen["before"][:2] == ["-inf", "0"]
    if step.kind == "empty":
        assert seen["score"] == []
        assert "skipped" in seen["status"]
    else:
        scores = [float(text) for text in seen["score"]]
        np.testing.assert_allclose(scores, np.ravel(step.s), atol=0.00501)
        labels = [*range(*step.rows), *range(*step.keys)]
        assert sorted(seen["labels"]) == sorted(str(label) for label in labels)
    assert_notes(seen, trace, k, row)
    assert_pictures(seen, trace, k)


def assert_notes(seen, trace, k, row):
    step = trace.steps[k]
    earlier = [other.m[row] for other in trace.steps[:k] if other.i == step.i]
    if step.kind == "empty":
        assert "The state stays as it was" in seen["note"]
    elif np.isfinite(step.m[row]):
        alpha = np.exp((earlier or [-np.inf])[-1] - step.m[row])
        assert f"= {_number(alpha)} rescales" in seen["note"]
        assert (
            f"p = exp(s − m after) = {', '.join(_short(np.exp(x - step.m[row])) for x in step.s[row])}." in seen["note"]
        )
    if k + 1 == len(trace.steps) or trace.steps[k + 1].i != step.i:
        if np.isneginf(trace.lse[int(seen["row"])]):
            assert "out = 0, lse = -inf" in seen["note"]
        else:
            assert ", ".join(_number(x) for x in trace.out[int(seen["row"])]) in seen["note"]
            assert _number(trace.lse[int(seen["row"])]) in seen["note"]


def assert_pictures(seen, trace, k):
    step = trace.steps[k]
    loaded = step.kind != "empty"
    tiles_i, tiles_j = (1 + max(getattr(other, name) for other in trace.steps) for name in "ij")
    done = [i for i in range(tiles_i) if k >= max(n for n, other in enumerate(trace.steps) if other.i == i)]
    assert seen["lit"] == k + 1
    assert seen["strips"] == (
        ["fp-on" if loaded and j == step.j else "" for j in range(tiles_j)]
        + ["fp-on" if i == step.i else "" for i in range(tiles_i)]
        + ["fp-done" if i in done else "" for i in range(tiles_i)]
    )
    assert seen["meter"] == pytest.approx(100 * step.bytes_so_far / trace.steps[-1].bytes_so_far, abs=0.01)
    for (title, numbers), name in zip(seen["inputs"], "qkv", strict=True):
        span = step.rows if name == "q" else step.keys
        array = getattr(trace, name)[slice(*span)] if loaded or name == "q" else np.empty(0)
        assert numbers == [_short(x) for x in np.ravel(array)]
        assert title.startswith(f"{name.upper()} tile: ")


@pytest.mark.parametrize(
    ("sizes", "row"),
    [({}, 1), ({"seqlen_q": 5, "seqlen_k": 3}, 4), ({"seqlen_q": 7, "seqlen_k": 7, "block_m": 4, "causal": False}, 3)],
    ids=["causal", "rows without a key", "ragged"],
)
def test_step_k_shows_the_numbers_of_trace_step_k(open_page, sizes, row):
    trace = make_trace(**sizes)
    page = open_page(page_of(player(trace, row=row).html()))
    page.focus(".flash-player")
    for k in range(len(trace.steps)):
        assert_shows(shown(page), trace, k, row % trace.block_m)
        page.keyboard.press("ArrowRight")


def test_keys_buttons_and_slider_step(open_page):
    trace = make_trace()
    last = len(trace.steps) - 1
    page = open_page(page_of(player(trace).html()))
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.classList.contains('flash-player')")
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    for key, k in [("End", last), ("ArrowRight", last), ("ArrowLeft", last - 1), ("Home", 0), ("ArrowLeft", 0)]:
        page.keyboard.press(key)
        assert_shows(shown(page), trace, k, 0)
    page.get_by_label("Step forward").click()
    page.get_by_label("Step forward").click()
    page.get_by_label("Step back").click()
    assert_shows(shown(page), trace, 1, 0)
    page.get_by_label("Step", exact=True).fill("4")
    assert_shows(shown(page), trace, 4, 0)
    # The slider keeps the focus: its arrows must step once, not twice.
    page.get_by_label("Step", exact=True).press("ArrowRight")
    assert_shows(shown(page), trace, 5, 0)
    page.get_by_label("First step").click()
    page.locator('[data-step="7"]').click()
    assert_shows(shown(page), trace, 7, 0)
    page.get_by_label("State of row").select_option("1")
    assert_shows(shown(page), trace, 7, 1)
    page.locator('[data-row="0"]').click()
    assert_shows(shown(page), trace, 7, 0)
    assert page.get_by_role("status").get_attribute("aria-live") == "polite"


def test_every_control_has_a_name(open_page):
    page = open_page(page_of(player(make_trace()).html()))
    names = page.evaluate(
        """() => [...document.querySelectorAll("button, input, select, svg[role=img]")].map(
             e => e.getAttribute("aria-label") || e.textContent)"""
    )
    assert len(names) == 12
    assert all(name.strip() for name in names)


def test_the_wide_table_keeps_its_own_keys(open_page):
    trace = make_trace()
    page = open_page(page_of(player(trace).html()), width=390)
    page.locator(".fp-list").click()
    page.locator('.fp-static [role="region"]').focus()
    page.keyboard.press("ArrowRight")
    assert_shows(shown(page), trace, 0, 0)


def test_a_row_whose_scores_are_all_masked_says_so(open_page):
    # Queries 0 and 1 see no key, query 2 of the same tile does.
    trace = make_trace(seqlen_q=5, seqlen_k=3, block_m=3, block_n=2)
    page = open_page(page_of(player(trace).html()))
    seen = shown(page)
    assert "All scores of row 0 are masked: its state stays as it was." in seen["note"]
    assert "alpha" not in seen["note"]


def test_play_runs_to_the_end_and_space_stops_it(open_page):
    trace = make_trace()
    page = open_page("<!doctype html><html><body></body></html>")
    # A hand-driven clock: the test does not wait for the player.
    page.evaluate("() => { window.setInterval = f => (window.tick = f, 1); window.clearInterval = () => {}; }")
    page.evaluate(
        """text => { const range = document.createRange(); range.selectNode(document.body);
                     document.body.appendChild(range.createContextualFragment(text)); }""",
        player(trace).html(),
    )
    page.focus(".flash-player")
    page.keyboard.press("Space")
    assert page.get_by_label("Pause").count() == 1
    assert page.get_by_role("status").get_attribute("aria-live") == "off"
    page.evaluate("window.tick()")
    assert_shows(shown(page), trace, 1, 0)
    page.keyboard.press("Space")
    assert page.get_by_label("Play (space)").count() == 1
    page.keyboard.press("Space")
    page.evaluate("() => { for (let k = 0; k < 20; k++) window.tick(); }")
    assert_shows(shown(page), trace, len(trace.steps) - 1, 0)
    assert page.get_by_label("Play (space)").count() == 1
    page.keyboard.press("Home")
    page.locator(".fp-play").focus()
    page.keyboard.press("Space")
    page.evaluate("window.tick()")
    assert_shows(shown(page), trace, 1, 0)


def test_two_players_on_a_page_do_not_touch_each_other(open_page):
    one, two = make_trace(), make_trace(8, 4, seed=1)
    page = open_page(page_of(player(one).html(), player(two).html(), player(one).html()))
    page.locator(".flash-player").nth(1).press("ArrowRight")
    page.locator(".flash-player").nth(2).press("End")
    assert_shows(shown(page, 0), one, 0, 0)
    assert_shows(shown(page, 1), two, 1, 0)
    assert_shows(shown(page, 2), one, len(one.steps) - 1, 0)
    ids = page.evaluate("() => [...document.querySelectorAll('[id]')].map(e => e.id)")
    assert len(ids) == len(set(ids)) > 0


def luminance(colour):
    channels = [int(x) / 255 for x in re.findall(r"\d+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def contrast(a, b):
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize(
    ("theme", "scheme", "dark"),
    [("", "light", False), ("", "dark", True), ("dark", "light", True), ("light", "dark", False)],
)
def test_text_is_readable_in_light_and_dark(open_page, theme, scheme, dark):
    page = open_page(page_of(player(make_trace()).html(), theme=theme), color_scheme=scheme, reduced_motion="reduce")
    pairs = page.evaluate(
        """() => {
          const root = document.querySelector(".flash-player"), of = (e, p) => getComputedStyle(e)[p];
          const under = of(root, "backgroundColor");
          return [[of(root, "color"), under]].concat(
            [...root.querySelectorAll("p, th, td, label, span")].map(e => [of(e, "color"), under]),
            [...root.querySelectorAll("svg text")].map(e => [of(e, "fill"), under]),
            [...root.querySelectorAll("select, .fp-list")].map(e => [of(e, "color"), of(e, "backgroundColor")]));
        }"""
    )
    assert min(contrast(*pair) for pair in pairs) >= 4.5
    assert (luminance(pairs[0][1]) < 0.1) == dark
    # The strongest shade must still carry its number.
    shade, ink = page.evaluate(
        """() => [".fp-cell.fp-written", "svg text:not(.fp-soft)"].map(
             name => getComputedStyle(document.querySelector(name)).fill)"""
    )
    assert contrast(shade, ink) >= 4.5
    assert page.evaluate("getComputedStyle(document.querySelector('.fp-meter div')).transitionDuration") == "0s"


def test_jupyterlab_theme_wins_over_the_system(open_page):
    page = open_page(page_of(player(make_trace()).html()), color_scheme="dark")
    seen = []
    for light in ("true", "false"):
        page.evaluate("light => document.body.setAttribute('data-jp-theme-light', light)", light)
        seen.append(
            luminance(page.evaluate("getComputedStyle(document.querySelector('.flash-player')).backgroundColor"))
        )
    assert seen[0] > 0.9
    assert seen[1] < 0.1


@pytest.mark.parametrize("head_dim", [8, 40])
def test_a_phone_needs_no_sideways_scrolling(open_page, head_dim):
    trace = make_trace(12, 12, head_dim, head_dim, 4, 4)
    page = open_page(page_of(player(trace).html()), width=390)
    page.focus(".flash-player")
    for key in ("Home", "End"):
        page.keyboard.press(key)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390


@pytest.mark.parametrize("strip", [False, True], ids=["no scripts", "sanitised"])
def test_without_scripts_the_table_stands_alone(open_page, strip):
    trace = make_trace()
    text = player(trace).html()
    page = open_page(page_of(sanitised(text) if strip else text), java_script_enabled=False)
    assert page.get_by_text("Run this cell to see it move").is_visible()
    assert page.locator("tbody tr").count() == len(trace.steps)
    assert page.locator("tbody tr").last.is_visible()
    assert page.locator("button, input, select, svg").count() == 0


def test_with_scripts_the_table_is_folded_away(open_page):
    page = open_page(page_of(player(make_trace()).html()))
    table = page.locator(".fp-static table")
    assert not table.is_visible()
    assert not page.get_by_text("Run this cell").is_visible()
    page.get_by_text("All steps as a table").click()
    assert table.is_visible()
    page.get_by_text("All steps as a table").click()
    page.emulate_media(media="print")
    assert table.is_visible()
    assert not page.get_by_label("Step forward").is_visible()
