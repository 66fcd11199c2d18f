"""Check a reader's answer, and when it is wrong, say which mistake gives exactly that result.

Each exercise brings its solution and the wrong answers that readers are known to give. An answer is run on the
exercise's cases beside all of them: the diagnosis is the wrong answer whose results are the reader's results, so it is
never a guess.

    check.answer("03.1", merge)      check the reader's function (or value)
    check.task("03.1")               print the specification and the stub
    check.solution("03.1")           print the solution; nothing is defined by it
"""

import contextlib
import copy
import dataclasses
import decimal
import functools
import importlib
import io
import linecache
import numbers
import pkgutil
import warnings
import zlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class Wrong:
    """A wrong answer that readers give, and its diagnosis.

    Args:
        says: completes the sentence "This is what comes out when …"; no full stop.
        edit: (old, new), the one change that turns the solution into this wrong answer; `old` occurs once.
        source: the whole wrong answer, where one edit cannot say it.
        stumble: its number in CONTRIBUTING.md's list of stumbles, if it is one.
    """

    says: str
    edit: tuple = None
    source: str = None
    stumble: int = None


class Case:
    """One input of an exercise: a label for messages and the arguments, copied afresh for each call."""

    def __init__(self, label, *args, **kwargs):
        self.label = label
        self._args = args
        self._kwargs = kwargs

    def arguments(self):
        return copy.deepcopy(self._args), copy.deepcopy(self._kwargs)


@dataclasses.dataclass(frozen=True)
class Exercise:
    """What the reader is asked, with its solution and the known wrong answers.

    Args:
        id: chapter and number, "03.1".
        title: a few words.
        level: 1, 2 or 3: five, fifteen or forty-five minutes.
        task: the specification, plain Markdown.
        name: the function, or value, that stub and solution bind.
        stub: source that the notebook shows; a function's ends in `raise NotImplementedError`, a value's is `x = None`.
        solution: source of a right answer.
        cases: a function without arguments that returns the list of `Case`; None for a value.
        wrong: the `Wrong` answers.
        also_right: sources of other right answers, kept to test that they are accepted.
        rtol, atol: how near a right answer's numbers are to the solution's; float32 results get 1e-3 and 1e-5.
        setup: imports that stub and answers may rely on, as source.
        call: how an answer runs on a case's arguments, `call(answer, *args, **kwargs)`, where the answer is no plain
            function (a kernel needs memory and a grid); it raises NotImplementedError for the stub.
    """

    id: str
    title: str
    level: int
    task: str
    name: str
    stub: str
    solution: str
    cases: object = None
    wrong: tuple = ()
    also_right: tuple = ()
    rtol: float = 1e-8
    atol: float = 1e-11
    setup: str = "import numpy as np"
    call: object = None

    @property
    def stars(self):
        return "●" * self.level

    def build(self, source, label):
        """Return what `source` binds to the exercise's name; its lines stay readable by `inspect` and in tracebacks."""
        filename = f"<exercise {self.id}, {label}>"
        linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
        namespace = {"__name__": f"exercise_{self.id.replace('.', '_')}"}
        exec(compile(self.setup, f"<exercise {self.id}, setup>", "exec"), namespace)
        exec(compile(source, filename, "exec"), namespace)
        return namespace[self.name]

    def source_of(self, wrong):
        """Return the whole source of a wrong answer."""
        if wrong.source is not None:
            return wrong.source
        old, new = wrong.edit
        if self.solution.count(old) != 1:
            raise ValueError(
                f"edit must match the solution of {self.id} once, got {self.solution.count(old)} matches of {old!r}"
            )
        return self.solution.replace(old, new)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the checker found: `status` is "not attempted", "right", "known mistake", "wrong" or "error"."""

    status: str
    message: str


def answer(exercise_id, given):
    """Check an answer and print the verdict; never raises, whatever it is given.

    Args:
        exercise_id: such as "03.1".
        given: the reader's function, or the value asked for.
    """
    print(diagnose(exercise_id, given).message)


def task(exercise_id):
    """Print the specification of an exercise, then its stub."""
    exercise = _find(exercise_id)
    print(_unknown(exercise_id) if exercise is None else f"{_heading(exercise)}\n\n{exercise.task}\n\n{exercise.stub}")


def solution(exercise_id):
    """Print the solution of an exercise; it defines nothing."""
    exercise = _find(exercise_id)
    print(_unknown(exercise_id) if exercise is None else exercise.solution.rstrip("\n"))


def exercises(chapter=None):
    """Return the exercises, of one chapter ("03") or of all, in order.

    Returns:
        list of Exercise.
    """
    found = []
    for module in sorted(m.name for m in pkgutil.iter_modules(__path__) if m.name.startswith("ex_")):
        if chapter is None or module == f"ex_{chapter}":
            found.extend(importlib.import_module(f"{__name__}.{module}").EXERCISES)
    return found


def diagnose(exercise_id, given):
    """Return the `Verdict` on an answer; never raises, whatever it is given."""
    exercise = _find(exercise_id)
    if exercise is None:
        return Verdict("error", _unknown(exercise_id))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            verdict = _value_verdict(exercise, given) if exercise.cases is None else _function_verdict(exercise, given)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # An answer may be any object at all, one that raises when it is looked at included.
        verdict = Verdict("error", f"your answer could not be looked at: {_brief(error)}")
    return Verdict(verdict.status, f"{_heading(exercise)}: {verdict.message}")


def _find(exercise_id):
    chapter = exercise_id.partition(".")[0] if isinstance(exercise_id, str) else ""
    if not chapter.isdigit():
        return None
    return next((e for e in exercises(chapter) if e.id == exercise_id), None)


def _unknown(exercise_id):
    known = ", ".join(e.id for e in exercises())
    # The id may be any object, one without a printable form included.
    shown = exercise_id if isinstance(exercise_id, str) else type(exercise_id).__name__
    return f"exercise_id must be one of {known}, got {shown}"


def _heading(exercise):
    return f"{exercise.id} {exercise.stars} {exercise.title}"


def _brief(error):
    try:
        # Triton's compiler shows the place in the kernel first and says last what is wrong there.
        text = str(getattr(error, "error_message", None) or error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text.strip()}".splitlines()[0][:200].rstrip(": ")


# --- a value -------------------------------------------------------------------------------------------------------


def _value_verdict(exercise, given):
    if given is None or given is Ellipsis:
        return Verdict("not attempted", "not attempted yet")
    right = exercise.build(exercise.solution, "solution")
    complaint = _difference(given, right, exercise)
    if complaint is None:
        return Verdict("right", "right")
    for index, wrong in enumerate(exercise.wrong):
        if _difference(given, exercise.build(exercise.source_of(wrong), f"wrong {index}"), exercise) is None:
            return Verdict("known mistake", f"not yet. This is what comes out when {wrong.says}.")
    # The right number stays unsaid: the reader should still be able to find it.
    try:
        unlike = [(got.shape, want.shape) for _, got, want in _matched(given, right) if got.shape != want.shape]
    except Exception as error:
        return Verdict("wrong", f"not yet. The answer {_why_unreadable(error)}.")
    if unlike:
        return Verdict("wrong", f"not yet. The answer must have shape {unlike[0][1]}, got {unlike[0][0]}.")
    return Verdict("wrong", "not yet, and not a mistake this checker knows.")


# --- a function ----------------------------------------------------------------------------------------------------


def _function_verdict(exercise, given):
    if given is None or given is Ellipsis:
        return Verdict("not attempted", "not attempted yet")
    if not callable(given):
        return Verdict("error", f"the answer must be a function, got {type(given).__name__}")
    cases = exercise.cases()
    results = [_run(given, case, exercise) for case in cases]
    if all(map(_unwritten, results)) and (exercise.call or _is_stub(given, exercise)):
        return Verdict("not attempted", "not attempted yet")
    expected = [_known(exercise, exercise.solution, index) for index in range(len(cases))]
    complaints = [_compare(a, b, exercise) for a, b in zip(results, expected, strict=True)]
    bad = {index for index, complaint in enumerate(complaints) if complaint}
    if not bad:
        return Verdict("right", f"right, in all {len(cases)} cases")
    first = min(bad)
    where = f"case “{cases[first].label}”: {complaints[first]}"
    partly = []
    for wrong in exercise.wrong:
        source = exercise.source_of(wrong)
        # The first case decides most often; the others are run only where it agrees.
        if not _same(results[first], _known(exercise, source, first), exercise):
            continue
        mistaken = [_known(exercise, source, index) for index in range(len(cases))]
        same = {index for index in range(len(cases)) if _same(results[index], mistaken[index], exercise)}
        if len(same) == len(cases):
            return Verdict("known mistake", f"not yet. This is what comes out when {wrong.says}.\n  {where}")
        shows = {i for i in range(len(cases)) if _compare(mistaken[i], expected[i], exercise)}
        telling = {i for i in shows if _tells(mistaken[i])}
        # A second mistake may hide this one in some cases. But where an answer is right that should show it, it is
        # not there; and one case alone may agree by chance.
        sure = first in telling and telling <= bad and (len(telling & same) > 1 or len(shows) == 1)
        partly.append((wrong, sure))
    if len(partly) == 1 and partly[0][1]:
        says = partly[0][0].says
        return Verdict("known mistake", f"not yet. In this case it is what comes out when {says}.\n  {where}")
    return Verdict("wrong", f"not yet, and not a mistake this checker knows.\n  {where}")


@functools.cache
def _known(exercise, source, index):
    """Return what a known answer, right or wrong, gives for a case; kernels are slow enough to remember it."""
    return _run(_built(exercise, source), exercise.cases()[index], exercise)


@functools.cache
def _built(exercise, source):
    return exercise.build(source, f"answer {zlib.crc32(source.encode()):08x}")


def _is_stub(given, exercise):
    """Tell whether a function does nothing but what the stub does; its docstring and its names may be the reader's."""
    stub = exercise.build(exercise.stub, "stub")
    return getattr(getattr(given, "__code__", None), "co_code", None) == stub.__code__.co_code


def _unwritten(result):
    return isinstance(result, _Raised) and isinstance(result.error, NotImplementedError)


def _tells(result):
    """Tell whether a result is more than a constant, a NaN or an error, which many mistakes share."""
    try:
        numbers = np.concatenate([array.astype(np.float64).ravel() for array in _arrays(result)])
    except Exception:
        return False
    finite = numbers[np.isfinite(numbers)]
    return len(finite) > 0 and (len(numbers) == 1 or len(set(finite)) > 1)


class _Raised:
    def __init__(self, error):
        self.error = error


class _Touched:
    def __init__(self, position):
        self.position = position


def _run(function, case, exercise):
    args, kwargs = case.arguments()
    before, _ = case.arguments()
    try:
        result = exercise.call(function, *args, **kwargs) if exercise.call else function(*args, **kwargs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return _Raised(error)
    for position, (a, b) in enumerate(zip(args, before, strict=True)):
        if _changed(a, b):
            return _Touched(position)
    return result


def _changed(a, b):
    if isinstance(a, np.ndarray):
        return not np.array_equal(a, b, equal_nan=a.dtype.kind == "f")
    return isinstance(a, (tuple, list)) and (len(a) != len(b) or any(map(_changed, a, b)))


def _compare(result, expected, exercise):
    """Return what is wrong with a result, or None."""
    if isinstance(expected, _Raised):
        if isinstance(result, _Raised) and isinstance(result.error, type(expected.error)):
            return None
        return f"{type(expected.error).__name__} was expected here"
    if _unwritten(result) and not str(result.error):
        return "it still raises NotImplementedError: that line of the stub goes out when the function is written"
    if isinstance(result, _Raised):
        return f"it raised {_brief(result.error)}"
    if isinstance(result, _Touched):
        return f"argument {result.position + 1} was changed in place; work on a copy"
    if result is None:
        return "it returned None; is the return missing?"
    return _difference(result, expected, exercise)


def _same(a, b, exercise):
    if isinstance(a, _Raised) or isinstance(b, _Raised):
        # The kind of error alone says little: two ValueErrors may have nothing in common.
        return isinstance(a, _Raised) and isinstance(b, _Raised) and _brief(a.error) == _brief(b.error)
    if isinstance(a, _Touched) or isinstance(b, _Touched):
        return isinstance(a, _Touched) and isinstance(b, _Touched) and a.position == b.position
    if a is None or b is None:
        return a is b
    return _difference(a, b, exercise) is None


# --- comparing results ---------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """A result that is not of the form asked for; the message completes "the result …"."""


def _difference(result, expected, exercise):
    """Return the first place where two results differ, in words, or None. A NaN equals a NaN."""
    try:
        matched = _matched(result, expected)
    except Exception as error:
        return f"the result {_why_unreadable(error)}"
    for path, got, want in matched:
        name = path or "result"
        if got.shape != want.shape:
            return f"{name} must have shape {want.shape}, got {got.shape}"
        rtol, atol = exercise.rtol, exercise.atol
        if want.dtype.kind == "f" and got.dtype == np.float32:
            rtol, atol = max(rtol, 1e-3), max(atol, 1e-5)
        got, want = got.astype(np.float64), want.astype(np.float64)
        near = np.isclose(got, want, rtol=rtol, atol=atol, equal_nan=True)
        if not near.all():
            index = tuple(int(i) for i in np.argwhere(~near)[0])
            place = f" at {list(index)}" if index else ""
            should, is_ = _apart(want[index], got[index])
            return f"{name}{place} should be {should}, got {is_}"
    return None


def _why_unreadable(error):
    return str(error) if isinstance(error, _Unreadable) else f"cannot be read as numbers ({_brief(error)})"


def _apart(x, y):
    """Return two numbers as texts, with as many digits as it takes to tell them apart."""
    texts = [(f"{x:.{digits}g}", f"{y:.{digits}g}") for digits in (6, 9, 12, 17)]
    return next((pair for pair in texts if pair[0] != pair[1]), texts[-1])


def _matched(result, expected, path=""):
    """Return [(path, array of the result, array of what is expected)], the result read in the form that is expected.

    Where parts are expected, a tuple, a list, a named tuple, a dict or a dataclass with these parts will do, and for
    parts of one shape an array of them. Where an array is expected, so do tensors, numbers, and lists of any of these.
    """
    parts = _parts(expected)
    if parts is None:
        return [(path, _array(result), _array(expected))]
    given = _parts(result)
    if given is None and not isinstance(result, list):
        shapes = {_array(value).shape for value in parts.values()}
        array = _array(result)
        if len(shapes) == 1 and array.shape == (len(parts), *shapes.pop()):
            given = dict(enumerate(array))
    elif given is None:
        given = dict(enumerate(result))
    if given is None or len(given) != len(parts):
        got = "one array" if given is None else f"{len(given)} ({', '.join(map(str, given))})"
        raise _Unreadable(f"must have {len(parts)} parts ({', '.join(parts)}), got {got}")
    values = [given[name] for name in parts] if set(given) == set(parts) else list(given.values())
    return [
        found
        for name, value in zip(parts, values, strict=True)
        for found in _matched(value, parts[name], f"{path}.{name}".lstrip(".") if name[0] != "[" else path + name)
    ]


def _parts(value):
    """Return {name: part} of a tuple, named tuple, dict or dataclass; None for anything else."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return dict(value)
    if isinstance(value, tuple):
        return dict(zip(getattr(value, "_fields", None) or [f"[{i}]" for i in range(len(value))], value, strict=True))
    return None


def _arrays(value):
    """Return all the arrays of a result, whatever its form."""
    parts = _parts(value)
    return [_array(value)] if parts is None else [array for part in parts.values() for array in _arrays(part)]


def _array(value):
    """Return a number, array, tensor, or a list or tuple of such, as an array of real numbers."""
    if isinstance(value, (str, bytes)):
        raise _Unreadable(f"must be numbers, got {type(value).__name__}")
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.to_dense() if value.is_sparse else value
        # NumPy has no bfloat16.
        value = (value.float() if value.dtype.itemsize < 4 and value.dtype.is_floating_point else value).numpy()
    if isinstance(value, (list, tuple)):
        rows = [_array(row) for row in value]
        if len({row.shape for row in rows}) > 1:
            raise _Unreadable(
                f"must be one array, got a {type(value).__name__} of {len(rows)} that have several shapes"
            )
        return np.stack(rows) if rows else np.zeros(0)
    if isinstance(value, np.ma.MaskedArray):
        # What lies under a mask is no result.
        value = value.astype(np.float64).filled(np.nan)
    array = np.asarray(value)
    if array.dtype.kind == "O" and all(isinstance(x, (numbers.Real, decimal.Decimal)) for x in array.flat):
        array = np.array([float(x) for x in array.flat]).reshape(array.shape)
    if array.dtype.kind not in "biuf":
        what = f"an array of {array.dtype}" if isinstance(value, np.ndarray) else type(value).__name__
        raise _Unreadable(f"must be numbers, got {what}")
    return array
