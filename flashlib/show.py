"""Show library code inside a notebook: its source, or what changed between two versions of it.

The source is read from the imported object, so a page can never show code other than the code it ran.
"""

import difflib
import inspect
import textwrap

MAX_LINES = 60


class Listing:
    """A piece of source that displays as highlighted code (a fenced block where Markdown is rendered).

    Args:
        text: the source, without a trailing newline.
        language: the fence's language, "python" or "diff".
    """

    def __init__(self, text, language="python"):
        self.text = text
        self.language = language

    def __repr__(self):
        return self.text

    def _repr_markdown_(self):
        return f"```{self.language}\n{self.text}\n```"


def source_of(obj, docstring=True):
    """Return the dedented source of a function, class, module or `@triton.jit` kernel.

    Args:
        obj: the object; a kernel is unwrapped to the function it was made from.
        docstring: False leaves the object's own docstring out.

    Returns:
        str, without a trailing newline.

    Raises:
        ValueError: obj has no source (a built-in, a value).
    """
    obj = getattr(obj, "fn", obj)
    try:
        text = textwrap.dedent(inspect.getsource(obj)).rstrip("\n")
    except (TypeError, OSError) as error:
        raise ValueError(f"obj must be something with Python source, got {type(obj).__name__}") from error
    if not docstring and obj.__doc__:
        text = _without_docstring(text, inspect.ismodule(obj))
    return text


def show(obj, docstring=False):
    """Display the source of a library object; at most 60 lines, so that a page stays a page.

    Args:
        obj: function, class or kernel.
        docstring: True shows the docstring too.

    Returns:
        Listing: displays itself as the last value of a cell.

    Raises:
        ValueError: obj has no source, or shows more than 60 lines.
    """
    text = source_of(obj, docstring)
    lines = text.count("\n") + 1
    if lines > MAX_LINES:
        raise ValueError(f"obj must show in at most {MAX_LINES} lines, got {lines}")
    return Listing(text)


def diff(before, after, context=2):
    """Display what changed from one library object to another, docstrings left out.

    Args:
        before, after: functions, classes or kernels.
        context: unchanged lines around each change.

    Returns:
        Listing: a unified diff without its header.
    """
    old = source_of(before, docstring=False).splitlines()
    new = source_of(after, docstring=False).splitlines()
    lines = difflib.unified_diff(old, new, n=context, lineterm="")
    body = [line for line in lines if not line.startswith(("---", "+++"))]
    return Listing("\n".join("…" if line.startswith("@@") else line for line in body), "diff")


def _without_docstring(text, is_module):
    import ast

    tree = ast.parse(text)
    node = tree if is_module else tree.body[0]
    first = node.body[0]
    if not (
        isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str)
    ):
        return text
    lines = text.splitlines()
    del lines[first.lineno - 1 : first.end_lineno]
    # A docstring is often followed by a blank line that only separated it from the code.
    if first.lineno - 1 < len(lines) and not lines[first.lineno - 1].strip():
        del lines[first.lineno - 1]
    return "\n".join(lines)
