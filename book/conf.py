"""Sphinx configuration: `python -m sphinx -b html -W -n -c book SOURCE OUT`.

SOURCE is the repository, or any folder that holds book.yml, the pages of book/ and the chapters of notebooks/.

What a reader of the book may want to change lies in book.yml; this file says how it is built. Nothing is executed and
nothing is fetched: outputs are the stored ones, and mathematics is typeset by one local file.
"""

import importlib.metadata
import sys
from pathlib import Path

import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if (HERE.parent / "flashlib").is_dir():
    # An assembled source has no library of its own; it uses the installed one.
    sys.path.insert(0, str(HERE.parent))

import generate  # noqa: E402  (this folder is on the path only now)


def mathjax_file():
    """Return the one script that typesets mathematics offline, from the distribution sphinx-mathjax-offline.

    The package is not loaded as an extension: that would copy 24 MB into every book.
    """
    distribution = importlib.metadata.distribution("sphinx-mathjax-offline")
    return next(
        str(Path(distribution.locate_file(file))) for file in distribution.files if file.name == "tex-svg-full.js"
    )


extensions = ["myst_nb", "sphinx_external_toc", "sphinx_copybutton"]
external_toc_path = "book.yml"
external_toc_exclude_missing = False
include_patterns = ["book/*.md", "notebooks/*.ipynb"]
# Nothing there matches; naming them saves walking through an environment of a hundred thousand files.
exclude_patterns = [".*", "_build", "workbook", "notebooks/.ipynb_checkpoints"]
source_suffix = {".md": "myst-nb", ".ipynb": "myst-nb"}
language = "en"
# Quotes, dots and dashes stay as they were typed: many of them stand in names and options.
smartquotes = False
templates_path = []

nb_execution_mode = "off"
nb_merge_streams = True
nb_code_prompt_show = "Show the {type}"
nb_code_prompt_hide = "Hide the {type}"

myst_enable_extensions = ["dollarmath", "amsmath", "colon_fence", "attrs_block", "attrs_inline"]
myst_heading_anchors = generate.ANCHORED_LEVELS
myst_heading_slug_func = "generate.slug"
myst_dmath_double_inline = True

html_theme = "sphinx_book_theme"
html_static_path = ["_static", mathjax_file()]
html_extra_path = ["_root"]
html_css_files = ["book.css"]
html_js_files = ["book.js"]
html_logo = "_static/logo.svg"
html_favicon = "_static/favicon.svg"
html_copy_source = True
html_sourcelink_suffix = ""
html_last_updated_fmt = None
html_show_sphinx = False
# Without a stated mode the theme's script complains on the console of the first page that a reader opens.
html_context = {"default_mode": "auto"}
mathjax_path = "tex-svg-full.js"
mathjax3_config = {
    "options": {"enableMenu": False},
    "svg": {"fontCache": "local"},
    "chtml": {},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_selector = "div.cell_input div.highlight pre, .bd-article > section div.highlight-bash pre"


def apply_settings(app, config):
    """Take title, author and repository from the `meta:` of the book.yml that is being built."""
    meta = yaml.safe_load((Path(app.srcdir) / "book.yml").read_text(encoding="utf-8"))["meta"]
    config.project = config.html_title = meta["title"]
    config.author = meta["author"]
    # The theme would name the author twice, once as the holder of the copyright.
    config.copyright = ""
    config.html_show_copyright = False
    options = {
        "navbar_persistent": [],
        "path_to_docs": "",
        "show_toc_level": 2,
        "home_page_in_toc": False,
        "use_download_button": True,
        "use_fullscreen_button": False,
        "logo": {"text": meta["title"], "alt_text": ""},
        "pygments_light_style": "a11y-high-contrast-light",
        "pygments_dark_style": "a11y-high-contrast-dark",
    }
    if meta["repository"]:
        options |= {
            "repository_url": meta["repository"],
            "repository_branch": meta["branch"],
            "use_repository_button": True,
            "use_issues_button": True,
        }
    if meta["repository"].startswith("https://github.com/"):
        # The service opens notebooks from there only.
        options["launch_buttons"] = {"colab_url": meta["colab"]}
    config.html_theme_options = options


def fill_in(app, docname, content):
    """Replace the `<!-- generated: … -->` lines of a page by what the repository says."""
    if not docname.startswith("book/"):
        return
    text, sources = generate.fill_in(content[0], Path(app.srcdir))
    content[0] = text
    for source in sources:
        app.env.note_dependency(source)


def setup(app):
    # Before the theme and the table of contents read the configuration.
    app.connect("config-inited", apply_settings, priority=100)
    app.connect("source-read", fill_in)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
