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
import functools
import importlib
import io
import linecache
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
        rtol, atol: how near a right answer's numbers are to the solution's.
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
    rtol: float = 1e-6
    atol: float = 1e-9
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
    except Exception as error:
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
        text = str(error)
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}".splitlines()[0][:200].rstrip(": ")


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
    shape = _shape_complaint(given, right)
    return Verdict("wrong", f"not yet. {shape}" if shape else "not yet, and not a mistake this checker knows.")


def _shape_complaint(given, right):
    try:
        given, right = _flatten(_as_tuple(given, right)), _flatten(right)
    except Exception as error:
        return f"The answer must be numbers: {_brief(error)}"
    if [path for path, _ in given] != [path for path, _ in right]:
        return f"The answer must have {len(right)} part(s), got {len(given)}."
    for (_, a), (_, b) in zip(given, right, strict=True):
        if a.shape != b.shape:
            return f"The answer must have shape {b.shape}, got {a.shape}."
    return None


# --- a function ----------------------------------------------------------------------------------------------------


def _function_verdict(exercise, given):
    if given is None or given is Ellipsis:
        return Verdict("not attempted", "not attempted yet")
    if not callable(given):
        return Verdict("error", f"the answer must be a function, got {type(given).__name__}")
    cases = exercise.cases()
    results = []
    for case in cases:
        result = _run(given, case, exercise)
        if isinstance(result, _Raised) and isinstance(result.error, NotImplementedError):
            return Verdict("not attempted", "not attempted yet")
        results.append(result)
    expected = [_known(exercise, exercise.solution, index) for index in range(len(cases))]
    complaints = [_compare(a, b, exercise) for a, b in zip(results, expected, strict=True)]
    bad = [index for index, complaint in enumerate(complaints) if complaint]
    if not bad:
        return Verdict("right", f"right, in all {len(cases)} cases")
    first = bad[0]
    where = f"case “{cases[first].label}”: {complaints[first]}"
    whole, on_first = [], []
    for wrong in exercise.wrong:
        source = exercise.source_of(wrong)
        if _same(results[first], _known(exercise, source, first), exercise):
            on_first.append(wrong)
            if all(_same(result, _known(exercise, source, index), exercise) for index, result in enumerate(results)):
                whole.append(wrong)
    if whole:
        return Verdict("known mistake", f"not yet. This is what comes out when {whole[0].says}.\n  {where}")
    if len(on_first) == 1:
        says = on_first[0].says
        return Verdict("known mistake", f"not yet. In this case it is what comes out when {says}.\n  {where}")
    return Verdict("wrong", f"not yet, and not a mistake this checker knows.\n  {where}")


@functools.cache
def _known(exercise, source, index):
    """Return what a known answer, right or wrong, gives for a case; kernels are slow enough to remember it."""
    return _run(_built(exercise, source), exercise.cases()[index], exercise)


@functools.cache
def _built(exercise, source):
    return exercise.build(source, f"answer {zlib.crc32(source.encode()):08x}")


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
    except (Exception, SystemExit) as error:
        return _Raised(error)
    for position, (a, b) in enumerate(zip(args, before, strict=True)):
        if isinstance(a, np.ndarray) and not np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            return _Touched(position)
    return result


def _compare(result, expected, exercise):
    """Return what is wrong with a result, or None."""
    if isinstance(expected, _Raised):
        if isinstance(result, _Raised) and isinstance(result.error, type(expected.error)):
            return None
        return f"{type(expected.error).__name__} was expected here"
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


def _difference(result, expected, exercise):
    """Return the first place where two results differ, in words, or None. A NaN equals a NaN."""
    if hasattr(expected, "_fields") and type(result) is tuple and len(result) == len(expected):
        # A plain tuple in the right order is as good as the named one.
        result = type(expected)(*result)
    try:
        got = _flatten(_as_tuple(result, expected))
    except Exception as error:
        return f"the result cannot be read as numbers ({_brief(error)})"
    want = _flatten(expected)
    if [path for path, _ in got] != [path for path, _ in want]:
        return f"the result must have {len(want)} part(s) {_names(want)}, got {len(got)} {_names(got)}"
    for (path, a), (_, b) in zip(got, want, strict=True):
        name = f"{path} " if path else "result "
        if a.shape != b.shape:
            return f"{name}must have shape {b.shape}, got {a.shape}"
        near = np.isclose(a, b, rtol=exercise.rtol, atol=exercise.atol, equal_nan=True)
        if not near.all():
            index = tuple(int(i) for i in np.argwhere(~near)[0])
            place = f"at {list(index)} " if index else ""
            return f"{name}{place}should be {_number(b[index])}, got {_number(a[index])}"
    return None


def _as_tuple(result, expected):
    """Return a list or an array as a tuple where a tuple of numbers is expected: the same numbers in the same order."""
    wanted = type(expected) is tuple and all(isinstance(x, (int, float, np.number)) for x in expected)
    as_good = isinstance(result, list) or (isinstance(result, np.ndarray) and result.ndim == 1)
    return tuple(result) if wanted and as_good else result


def _number(x):
    return f"{x:.6g}"


def _names(parts):
    return "(" + ", ".join(path or "one array" for path, _ in parts) + ")"


def _is_row(value):
    return isinstance(value, list) and all(isinstance(x, (int, float, np.number, np.bool_)) for x in value)


def _flatten(value, path=""):
    """Return [(path, float64 array)] of a number, array, tensor, or nested tuple, list, dict or dataclass of them."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, dict):
        return [part for key in value for part in _flatten(value[key], f"{path}.{key}".lstrip("."))]
    if _is_row(value) or (isinstance(value, list) and all(map(_is_row, value)) and len({len(x) for x in value}) == 1):
        # A list of numbers, or of rows of one length, is as good as an array.
        value = np.array(value)
    if isinstance(value, (tuple, list)):
        return [part for index, item in enumerate(value) for part in _flatten(item, f"{path}[{index}]")]
    if isinstance(value, str):
        raise TypeError("got str")
    if hasattr(value, "detach"):
        value = value.detach().cpu().double().numpy()
    array = np.asarray(value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"got {type(value).__name__}")
    return [(path, array.astype(np.float64))]
