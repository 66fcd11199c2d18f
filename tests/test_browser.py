"""What a reader sees in Chromium: the built book at two widths and in both themes, on paper, and JupyterLab."""

import dataclasses
import functools
import http.server
import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request

import numpy as np
import pytest
from built_book import ROOT, built, docnames, generate

PAGES = docnames()
CHAPTERS = generate.chapters(ROOT)
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}
QUICK_CHAPTER = "03_online_softmax"


def need(condition, what):
    """Skip where something is missing, but fail where everything has to be there."""
    if not condition:
        reason = f"{what} is not installed"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)


@pytest.mark.parametrize(("ci", "outcome"), [("true", pytest.fail.Exception), ("", pytest.skip.Exception)])
def test_a_missing_browser_fails_where_everything_has_to_be_there(monkeypatch, ci, outcome):
    monkeypatch.setenv("CI", ci)
    with pytest.raises(outcome, match="chromium is not installed"):
        need(None, "chromium")


@pytest.fixture(scope="module")
def browser():
    """One headless Chromium for all tests of this file."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        need(False, "playwright")
    need(shutil.which("chromium"), "chromium")
    flags = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync"]
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        yield chromium
        chromium.close()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The address of the built book on a local server."""
    book = built(tmp_path_factory)
    assert book.status == 0, book.messages[-4000:]
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(_Silent, directory=str(book.folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Watch:
    """Collects what a browser context asks of other hosts and complains about; requests off the host get no answer.

    Args:
        context: the browser context.
        port: the port of the only server that it may talk to.
    """

    def __init__(self, context, port):
        self.foreign, self.errors, self.missing = [], [], []
        self._port = port
        context.route("**/*", self._route)
        context.on("console", lambda message: self._console(message))
        context.on("weberror", lambda error: self.errors.append(str(error.error)))
        context.on("response", lambda reply: self.missing.append(reply.url) if reply.status >= 400 else None)

    def _route(self, route):
        address = urllib.parse.urlsplit(route.request.url)
        if address.scheme in ("data", "blob") or (address.hostname, address.port) == ("127.0.0.1", self._port):
            route.continue_()
        else:
            self.foreign.append(route.request.url)
            route.abort()

    def _console(self, message):
        if message.type == "error":
            self.errors.append(message.text)

    def take(self):
        """Return (foreign, errors, missing) since the last call."""
        taken = self.foreign[:], self.errors[:], self.missing[:]
        self.foreign.clear()
        self.errors.clear()
        self.missing.clear()
        return taken


# Mathematics is typeset when MathJax says so; folded parts are opened, so that all of a page is looked at.
READY = """async () => {
  if (window.MathJax?.startup) await MathJax.startup.promise;
  for (const fold of document.querySelectorAll("article details")) fold.open = true;
  await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
}"""

LOOK = """() => {
  const article = document.querySelector("article.bd-article");
  const prose = article.cloneNode(true);
  for (const part of prose.querySelectorAll("pre, code, script, style, mjx-container")) part.remove();
  const images = [...article.querySelectorAll("img")].map(image => {
    const box = image.getBoundingClientRect();
    return { src: image.src.split("/").pop(), natural: image.naturalWidth, width: box.width, height: box.height };
  });
  return {
    formulas: article.querySelectorAll("span.math, div.math").length,
    typeset: article.querySelectorAll("mjx-container > svg").length,
    errors: [...article.querySelectorAll("[data-mjx-error], mjx-merror")].map(e => e.dataset.mjxError ?? e.textContent),
    prose: prose.textContent,
    images,
    scrolled: [...article.querySelectorAll("div.highlight pre")]
      .filter(pre => pre.scrollWidth > pre.clientWidth + 1).map(pre => pre.textContent.slice(0, 60)),
  };
}"""

# How far the page is wider than the window, and what sticks out that no scrolling box contains.
OVERFLOW = """() => {
  const wide = document.documentElement.scrollWidth - window.innerWidth;
  const scrolls = e => e && e !== document.body &&
    (["auto", "scroll", "hidden", "clip"].includes(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
  const out = [];
  for (const e of document.querySelectorAll("article.bd-article *")) {
    const box = e.getBoundingClientRect();
    if (e.closest("mjx-assistive-mml") || scrolls(e.parentElement)) continue;
    if (box.width > 1 && box.right > window.innerWidth + 1)
      out.push(`${e.tagName.toLowerCase()}.${e.className}: ${Math.round(box.right)}`);
  }
  return { wide, out: out.slice(0, 5) };
}"""


@dataclasses.dataclass
class Visit:
    """One page as seen once: what it asked for, what is on it, and its overflow at each width."""

    foreign: list
    errors: list
    missing: list
    look: dict
    overflow: dict


@pytest.fixture(scope="module")
def visits(browser, site):
    """{page: Visit}, each page loaded once."""
    port = urllib.parse.urlsplit(site).port
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    watch, page, found = Watch(context, port), context.new_page(), {}
    for name in PAGES:
        page.set_viewport_size(DESKTOP)
        page.goto(f"{site}/{name}.html", wait_until="load")
        page.evaluate(READY)
        look, overflow = page.evaluate(LOOK), {}
        for size in (DESKTOP, PHONE):
            page.set_viewport_size(size)
            overflow[size["width"]] = page.evaluate(OVERFLOW)
        found[name] = Visit(*watch.take(), look, overflow)
    context.close()
    return found


@pytest.mark.parametrize("name", PAGES)
def test_page_asks_no_other_host_and_reports_no_error(visits, name):
    visit = visits[name]
    assert not visit.foreign
    assert not visit.missing
    assert not visit.errors


@pytest.mark.parametrize("name", PAGES)
def test_mathematics_is_typeset(visits, name):
    look = visits[name].look
    assert not look["errors"]
    assert look["typeset"] >= look["formulas"]
    raw = re.findall(r"\\[a-zA-Z(\[]+|\$[^$\n]*\$|\w_\{\w*\}|\^\{", look["prose"])
    assert not raw


def test_chapters_and_notation_have_mathematics(visits):
    for name in ("book/notation", "book/one_page", f"notebooks/{QUICK_CHAPTER}"):
        assert visits[name].look["formulas"] > 5, name


@pytest.mark.parametrize("name", PAGES)
def test_figures_are_visible(visits, name):
    for image in visits[name].look["images"]:
        assert image["natural"] > 0, image
        assert image["width"] > 100, image
        assert image["height"] > 50, image


@pytest.mark.parametrize("width", [DESKTOP["width"], PHONE["width"]])
@pytest.mark.parametrize("name", PAGES)
def test_nothing_is_wider_than_the_window(visits, name, width):
    overflow = visits[name].overflow[width]
    assert overflow["wide"] <= 0, overflow
    assert not overflow["out"]


@pytest.mark.parametrize("name", [name for name in PAGES if name.startswith("notebooks/")])
def test_code_needs_no_scrolling_on_a_desktop(visits, name):
    """120 columns, the longest line that the linter allows, fit beside both sidebars."""
    assert not visits[name].look["scrolled"]


# --- the dark theme ------------------------------------------------------------------------------------------------


def pixels(png):
    """Return an image as an array of shape (height, width, 3)."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def test_figures_are_inverted_in_the_dark(browser, site, visits):
    name = next(name for name in PAGES if name.startswith("notebooks/") and visits[name].look["images"])
    context = browser.new_context(viewport=DESKTOP, color_scheme="dark")
    page = context.new_page()
    page.goto(f"{site}/{name}.html", wait_until="load")
    page.evaluate(READY)
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    behind = np.array([int(n) for n in re.findall(r"\d+", background)[:3]])
    figure = page.locator("article .cell_output img").first
    seen = pixels(figure.screenshot())
    context.close()
    corners = np.stack([seen[2, 2], seen[2, -3], seen[-3, 2], seen[-3, -3]])
    assert abs(corners - behind).max() <= 12, (corners, behind)
    # Text and axes are light on it.
    assert np.percentile(seen.mean(axis=2), 99.9) > 170
    assert behind.mean() < 60


def test_theme_can_be_switched_by_the_reader(browser, site):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    page = context.new_page()
    page.goto(f"{site}/book/index.html", wait_until="load")
    for mode in ("dark", "light"):
        page.locator("button.theme-switch-button").first.click()
        page.locator(f".theme-change-button[data-mode={mode}]").first.click()
        assert page.evaluate("document.documentElement.dataset.theme") == mode
    context.close()


# --- the step player -----------------------------------------------------------------------------------------------

COLOURS = """player => {
  const numbers = colour => colour.match(/[\\d.]+/g).slice(0, 3).map(Number);
  const text = player.querySelector("[data-fp=status]");
  return [numbers(getComputedStyle(text).color), numbers(getComputedStyle(player).backgroundColor)];
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_step_player_works_in_the_book(browser, site, scheme):
    context = browser.new_context(viewport=DESKTOP, color_scheme=scheme)
    watch, page = Watch(context, urllib.parse.urlsplit(site).port), context.new_page()
    page.goto(f"{site}/notebooks/04_tiling.html", wait_until="load")
    page.evaluate(READY)
    player = page.locator(".flash-player.fp-moving").first
    before = player.locator("[data-fp=status]").text_content()
    player.locator("button.fp-next").click()
    after = player.locator("[data-fp=status]").text_content()
    player.press("End")
    last = player.locator("input[type=range]").input_value()
    text, background = player.evaluate(COLOURS)
    box = player.bounding_box()
    context.close()
    assert before != after
    assert int(last) >= 3
    assert contrast(text, background) >= 4.5, (text, background)
    assert (np.mean(background) < 100) == (scheme == "dark")
    assert box["width"] > 300
    assert watch.take() == ([], [], [])


def contrast(one, other):
    """Return the contrast ratio of two sRGB colours, as the accessibility guidelines define it."""
    light = []
    for colour in (one, other):
        channels = np.array(colour) / 255
        linear = np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
        light.append(linear @ [0.2126, 0.7152, 0.0722] + 0.05)
    return max(light) / min(light)


# --- paper ---------------------------------------------------------------------------------------------------------


def test_whole_idea_prints_on_one_page(browser, site):
    context = browser.new_context(viewport=DESKTOP, color_scheme="light")
    page = context.new_page()
    page.goto(f"{site}/book/one_page.html", wait_until="load")
    page.evaluate(READY)
    pdf = page.pdf(prefer_css_page_size=True, print_background=True)
    context.close()
    assert len(re.findall(rb"/Type\s*/Page(?![a-z])", pdf)) == 1
    width, height = (float(n) for n in re.search(rb"/MediaBox\s*\[\s*0 0 ([\d.]+) ([\d.]+)", pdf).groups())
    # A4 in points.
    assert abs(width - 595.3) < 1
    assert abs(height - 841.9) < 1


# --- JupyterLab ----------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(tmp_path):
    """A JupyterLab with settings of its own on a folder with one notebook; yields its address."""
    pytest.importorskip("jupyterlab")
    folder, settings = tmp_path / "workbook", tmp_path / "settings"
    folder.mkdir()
    notebook = json.loads((ROOT / "notebooks" / f"{QUICK_CHAPTER}.ipynb").read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"], cell["execution_count"] = [], None
    (folder / f"{QUICK_CHAPTER}.ipynb").write_text(json.dumps(notebook), encoding="utf-8")
    wanted = {
        "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
        # Every cell is in the page, on the screen or not.
        "notebook-extension/tracker": {"windowingMode": "none"},
    }
    for name, values in wanted.items():
        path = settings / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(values), encoding="utf-8")
    private = {f"JUPYTER_{kind}_DIR": str(tmp_path / kind.lower()) for kind in ("CONFIG", "DATA", "RUNTIME")}
    private |= {
        "JUPYTERLAB_SETTINGS_DIR": str(settings),
        "JUPYTERLAB_WORKSPACES_DIR": str(tmp_path / "workspaces"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PREFER_ENV_PATH": "1",
    }
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0"]
    command += ["--allow-root", "--IdentityProvider.token=", "--ServerApp.password=", f"--ServerApp.root_dir={folder}"]
    command += ["--LabApp.news_url=None", "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate"]
    log = tmp_path / "lab.log"
    with log.open("w") as stream:
        server = subprocess.Popen(command, env={**os.environ, **private}, stdout=stream, stderr=stream)
    try:
        yield _address(tmp_path / "runtime", server, log)
    finally:
        server.terminate()
        try:
            server.wait(timeout=15)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _address(runtime, server, log):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                address = json.loads(path.read_text(encoding="utf-8"))["url"].replace("localhost", "127.0.0.1")
                urllib.request.urlopen(address + "api", timeout=5).close()
            except (ValueError, OSError):
                continue
            return address
        time.sleep(0.1)
    pytest.fail(f"JupyterLab did not start:\n{log.read_text()[-2000:]}")


def test_jupyterlab_runs_a_chapter_from_end_to_end(browser, lab):
    chapter = next(c for c in CHAPTERS if c.name == QUICK_CHAPTER)
    code = sum(cell.kind == "code" for cell in chapter.cells)
    context = browser.new_context(viewport={"width": 1400, "height": 1000})
    watch = Watch(context, urllib.parse.urlsplit(lab).port)
    page = context.new_page()
    page.goto(f"{lab}lab/tree/{QUICK_CHAPTER}.ipynb")
    prompts = page.locator(".jp-Notebook .jp-CodeCell .jp-InputPrompt")
    # The notebook's own indicator says "idle" before there is a kernel; the status bar does not.
    page.locator("#jp-main-statusbar").get_by_text(re.compile(r"\| Idle$")).wait_for(timeout=60_000)
    page.wait_for_function("n => document.querySelectorAll('.jp-Notebook .jp-CodeCell').length === n", arg=code)
    page.get_by_role("menuitem", name="Run", exact=True).click()
    page.get_by_role("menuitem", name=re.compile("^Run All Cells")).click()
    finished = """count => {
      const prompts = [...document.querySelectorAll(".jp-Notebook .jp-CodeCell .jp-InputPrompt")];
      return prompts.length === count && prompts.every(p => /^\\[\\d+\\]:?$/.test(p.textContent.trim()));
    }"""
    page.wait_for_function(finished, arg=code, timeout=60_000)
    numbers = [int(re.search(r"\d+", text)[0]) for text in prompts.all_text_contents()]
    failed = page.locator(".jp-OutputArea-output[data-mime-type='application/vnd.jupyter.error']").all_text_contents()
    typeset = page.locator(".jp-MarkdownOutput mjx-container").count()
    figures = page.locator(".jp-OutputArea-output img").count()
    context.close()
    assert numbers == list(range(1, code + 1))
    assert not failed
    assert not watch.foreign
    assert typeset > 5
    assert figures >= 1
