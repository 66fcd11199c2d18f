"""Listings show the source of what was imported, without its docstring, and stay short."""

import textwrap

import pytest

from flashlib import show as module
from flashlib.show import diff, show, source_of


def plain(x):
    """Return twice x."""

    return 2 * x


def plain_plus(x):
    """Return twice x and one: another docstring is no change."""
    y = 2 * x
    return y + 1


def bare(x):
    return "'''no docstring'''"


def multiline(x):
    """Return x.

    Args:
        x: anything.
    """
    # Nothing to do.
    return x


class Kernel:
    """What `@triton.jit` makes: an object that holds the function as `fn`."""

    def __init__(self, fn):
        self.fn = fn


class Point:
    """A point."""

    x = 1


def long_function():
    """Be long.

    The docstring does not count.
    """
    # fmt: off
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    a = 0
    return a
    # fmt: on


def test_docstring_is_left_out():
    assert show(plain).text == "def plain(x):\n    return 2 * x"
    assert show(multiline).text == "def multiline(x):\n    # Nothing to do.\n    return x"
    assert show(Point).text == "class Point:\n    x = 1"
    assert show(bare).text == "def bare(x):\n    return \"'''no docstring'''\""


def test_docstring_is_shown_when_asked_for():
    assert '"""Return twice x."""' in show(plain, docstring=True).text


def test_kernel_is_unwrapped():
    assert show(Kernel(plain)).text == show(plain).text


def test_method_is_dedented():
    assert source_of(Kernel.__init__) == "def __init__(self, fn):\n    self.fn = fn"


def test_module_has_its_source():
    assert source_of(module).startswith('"""Show library code')
    assert source_of(module, docstring=False).startswith("import difflib\n")


def test_listing_is_code_in_both_forms():
    listing = show(plain)
    assert repr(listing) == listing.text
    assert listing._repr_markdown_() == f"```python\n{listing.text}\n```"


def test_limit_counts_shown_lines(monkeypatch):
    monkeypatch.setattr(module, "MAX_LINES", 14)
    assert show(long_function).text.count("\n") == 13
    monkeypatch.setattr(module, "MAX_LINES", 13)
    with pytest.raises(ValueError, match="obj must show in at most 13 lines, got 14"):
        show(long_function)


@pytest.mark.parametrize("obj", [3, "text", len, None, print])
def test_what_has_no_source_is_refused(obj):
    with pytest.raises(ValueError, match="obj must be something with Python source, got"):
        show(obj)


def test_diff_shows_changes_without_docstrings():
    assert diff(plain, plain_plus).text == textwrap.dedent(
        """\
        …
        -def plain(x):
        -    return 2 * x
        +def plain_plus(x):
        +    y = 2 * x
        +    return y + 1"""
    )
    assert diff(plain, plain_plus)._repr_markdown_().startswith("```diff\n…\n-def")


def test_diff_of_the_same_is_empty():
    assert diff(plain, plain).text == ""
