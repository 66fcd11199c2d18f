"""Every exercise: its solution is right, its stub is unsolved, each known mistake is named, nothing raises."""

import decimal
import fractions
import re

import numpy as np
import pytest
import torch

from flashlib import check

EXERCISES = check.exercises()
IDS = [exercise.id for exercise in EXERCISES]
# A kernel writes its result to memory: it has no form of its own.
RETURNING = [exercise for exercise in EXERCISES if exercise.call is None]
RETURNING_IDS = [exercise.id for exercise in RETURNING]
WRONG = [(exercise, wrong) for exercise in EXERCISES for wrong in exercise.wrong]


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_solution_is_right(exercise):
    verdict = check.diagnose(exercise.id, exercise.build(exercise.solution, "solution"))
    assert verdict.status == "right", verdict.message


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_stub_is_not_attempted(exercise):
    verdict = check.diagnose(exercise.id, exercise.build(exercise.stub, "stub"))
    assert verdict.status == "not attempted", verdict.message


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_other_right_answers_are_accepted(exercise):
    for index, source in enumerate(exercise.also_right):
        verdict = check.diagnose(exercise.id, exercise.build(source, f"also right {index}"))
        assert verdict.status == "right", verdict.message


@pytest.mark.parametrize("kind", [tuple, list, np.array])
def test_numbers_may_come_in_a_tuple_a_list_or_an_array(kind):
    assert check.diagnose("04.1", kind([4, 12, 4])).status == "right"
    assert "order of the three" in check.diagnose("04.1", kind([12, 4, 4])).message
    assert "must have 3 parts" in check.diagnose("04.1", kind([4, 12])).message


@pytest.mark.parametrize(("exercise", "wrong"), WRONG, ids=[f"{e.id}: {w.says[:40]}" for e, w in WRONG])
def test_known_mistake_is_named(exercise, wrong):
    verdict = check.diagnose(exercise.id, exercise.build(exercise.source_of(wrong), "wrong"))
    assert verdict.status == "known mistake", verdict.message
    assert wrong.says in verdict.message


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_exercise_is_well_formed(exercise):
    assert exercise.level in (1, 2, 3)
    assert len(exercise.wrong) >= 2
    if exercise.cases is not None:
        assert "raise NotImplementedError" in exercise.stub
        assert exercise.also_right, "a function has more than one right form: keep one to test that it is accepted"


# --- the same answer, written differently ------------------------------------------------------------------------


def each(result, change):
    """Apply `change` to every array or number of a result."""
    if isinstance(result, tuple):
        parts = [each(part, change) for part in result]
        return type(result)(*parts) if hasattr(result, "_fields") else tuple(parts)
    return change(np.asarray(result))


def changed(exercise, change):
    """Return the solution of an exercise with `change` applied to what it returns, or is."""
    right = exercise.build(exercise.solution, "solution")
    if exercise.cases is None:
        return each(right, change)
    return lambda *args: each(right(*args), change)


FORMS = {
    "torch": lambda x: torch.from_numpy(x.copy()).double(),
    "torch with a graph": lambda x: torch.from_numpy(x.copy()).double().requires_grad_() * 1,
    "list": lambda x: x.tolist(),
    "list of rows": lambda x: list(x) if x.ndim else x[()],
    "tuple of rows": lambda x: tuple(x) if x.ndim else x[()],
    "list of torch rows": lambda x: [torch.from_numpy(np.array(row)) for row in x] if x.ndim else float(x),
    "objects": lambda x: x.astype(object),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("exercise", RETURNING, ids=RETURNING_IDS)
def test_any_form_of_the_right_numbers_is_accepted(exercise, form):
    verdict = check.diagnose(exercise.id, changed(exercise, FORMS[form]))
    assert verdict.status == "right", verdict.message


# Exercises whose arguments are arrays; the others count with Python's numbers.
ON_ARRAYS = [e for e in RETURNING if e.cases and e.id not in ("01.3", "02.2", "02.3", "04.3", "05.3", "05.4", "12.1")]


@pytest.mark.parametrize("exercise", ON_ARRAYS, ids=[e.id for e in ON_ARRAYS])
def test_float32_arithmetic_is_accepted(exercise):
    right = exercise.build(exercise.solution, "solution")

    def single(x):
        if isinstance(x, tuple):
            return type(x)(*map(single, x)) if hasattr(x, "_fields") else tuple(map(single, x))
        return x.astype(np.float32) if isinstance(x, (np.ndarray, np.floating)) else x

    verdict = check.diagnose(exercise.id, lambda *args: single(right(*map(single, args))))
    assert verdict.status == "right", verdict.message


@pytest.mark.parametrize("exercise", RETURNING, ids=RETURNING_IDS)
def test_float32_excuses_no_known_mistake(exercise):
    for index, wrong in enumerate(exercise.wrong):
        given = exercise.build(exercise.source_of(wrong), f"wrong {index}")
        if exercise.cases is None:
            continue
        single = lambda *args, given=given: each(given(*args), lambda x: x.astype(np.float32))  # noqa: E731
        assert check.diagnose(exercise.id, single).status != "right", wrong.says


@pytest.mark.parametrize("number", [fractions.Fraction(1072, 5), decimal.Decimal("214.4"), torch.tensor(214.4)])
def test_any_kind_of_number_is_accepted(number):
    assert check.diagnose("05.2", number).status == "right"


def test_whole_numbers_of_any_size_are_numbers():
    assert "got 1e+30" in check.diagnose("02.3", lambda *args, **kwargs: 10**30).message


def test_parts_may_come_in_a_dict_or_one_array():
    merge = next(e for e in EXERCISES if e.id == "03.1")
    right = merge.build(merge.solution, "solution")
    assert check.diagnose("03.1", lambda *args: np.array(right(*args))).status == "right"
    states = next(e for e in EXERCISES if e.id == "03.2")
    right = states.build(states.solution, "solution")
    assert check.diagnose("03.2", lambda a, b: dict(reversed(right(a, b)._asdict().items()))).status == "right"
    assert "must have 3 parts (m, l, acc), got 2" in check.diagnose("03.2", lambda a, b: {"m": 1, "l": 2}).message


# --- wrong answers --------------------------------------------------------------------------------------------------

SPOILT = {
    "NaN": lambda x: np.full(x.shape, np.nan),
    "one NaN": lambda x: np.where(np.arange(x.size).reshape(x.shape) == 0, np.nan, x),
    "zeros": lambda x: np.zeros(x.shape),
    "sevens": lambda x: np.full(x.shape, 7.0),
    "infinity": lambda x: np.full(x.shape, np.inf),
    "a little off": lambda x: x + 3e-2 * (1 + np.abs(np.where(np.isfinite(x), x, 0))),
    "one more axis": lambda x: x[None],
    "hidden under a mask": lambda x: np.ma.array(x, mask=np.ones(x.shape, bool)),
    "complex": lambda x: x.astype(complex),
    "text": lambda x: str(x),
}


@pytest.mark.parametrize("spoil", SPOILT)
@pytest.mark.parametrize("exercise", RETURNING, ids=RETURNING_IDS)
def test_spoilt_answer_is_wrong_and_not_diagnosed(exercise, spoil):
    """A NaN or a constant says nothing about its cause, so no mistake may be named for it."""
    verdict = check.diagnose(exercise.id, changed(exercise, SPOILT[spoil]))
    assert verdict.status == "wrong", verdict.message


def edited(exercise_id, *edits):
    exercise = next(e for e in EXERCISES if e.id == exercise_id)
    source = exercise.solution
    for old, new in edits:
        assert source.count(old) >= 1
        source = source.replace(old, new)
    return check.diagnose(exercise_id, exercise.build(source, "edited"))


# Two mistakes at once, of which the first case shows one: (exercise, edits, what is said).
TWO_AT_ONCE = [
    ("03.2", [("State(m, l, acc)", "State(m, l, acc / np.where(l == 0, 1, l)[..., None])")], "divided by l already"),
    ("06.4", [("if causal:", "if False:"), ("(out * dout)", "(out * out)")], "out and out"),
]


@pytest.mark.parametrize(("exercise_id", "edits", "says"), TWO_AT_ONCE)
def test_mistake_beside_another_is_named(exercise_id, edits, says):
    verdict = edited(exercise_id, *edits)
    assert verdict.status == "known mistake"
    assert "In this case it is what comes out when" in verdict.message
    assert says in verdict.message


# The first wrong case agrees with a known mistake by chance; the other cases show that it is another one.
CHANCE = [
    ("03.1", [("np.exp(m_a - m) * l_a + np.exp(m_b - m) * l_b", "np.minimum(l_a, l_b)")]),
    ("04.3", [("seen_by_all // block_n", "i")]),
    ("01.3", [("seqlen_k - seqlen_q", "abs(seqlen_k - seqlen_q)")]),
    ("02.2", [("memory_s = moved", "memory_s = 1000 * moved"), ("1e9)", "1e9) if flops < 1e9 else compute_s")]),
]


@pytest.mark.parametrize(("exercise_id", "edits"), CHANCE)
def test_agreement_by_chance_is_no_diagnosis(exercise_id, edits):
    verdict = edited(exercise_id, *edits)
    assert verdict.status == "wrong", verdict.message


@pytest.mark.parametrize(
    ("exercise_id", "edits"),
    [
        ("01.1", [("e / e.sum(-1, keepdims=True)", "e / (e.sum(-1, keepdims=True) + 1e-6)")]),
        ("04.4", [("acc / l_safe[:, None]", "acc / (l_i + 1e-6)[:, None]")]),
    ],
)
def test_small_constant_in_the_denominator_is_seen(exercise_id, edits):
    message = edited(exercise_id, *edits).message
    should, got = re.search(r"should be (\S+), got (\S+)", message).groups()
    assert should != got


# --- unsolved, half solved ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exercise", [e for e in RETURNING if e.cases], ids=[e.id for e in RETURNING if e.cases])
def test_only_the_stub_is_not_attempted(exercise):
    """What was begun is never called 'not attempted yet', whatever raises NotImplementedError and when."""
    right = exercise.build(exercise.solution, "solution")
    calls = []

    def first_case_only(*args):
        calls.append(args)
        if len(calls) > 1:
            raise NotImplementedError
        return right(*args)

    def line_left_behind(*args):
        right(*args)
        raise NotImplementedError

    def operation_that_torch_lacks(*args):
        return torch.empty(2, device="meta").cpu()

    for given in (first_case_only, line_left_behind, operation_that_torch_lacks):
        verdict = check.diagnose(exercise.id, given)
        assert verdict.status == "wrong"
        assert "NotImplementedError" in verdict.message
    assert check.diagnose(exercise.id, lambda *args: None).status == "wrong"
    undocumented = re.sub(r'    """.*?"""\n', "", exercise.stub, flags=re.DOTALL)
    assert check.diagnose(exercise.id, exercise.build(undocumented, "stub")).status == "not attempted"


def test_arguments_changed_in_place_are_seen_inside_a_state():
    def merge_states(a, b):
        a.acc[...] = 0
        return a

    assert "argument 1 was changed in place" in check.diagnose("03.2", merge_states).message


def forever():
    return forever()


def raised(error):
    raise error


class Hostile:
    """An object that raises whenever it is touched."""

    def __getattribute__(self, name):
        raise RuntimeError("touched")

    def __call__(self, *args, **kwargs):
        return self


ANYTHING = [
    0,
    -1.5,
    "text",
    [],
    {},
    object(),
    int,
    lambda: None,
    lambda *args, **kwargs: None,
    lambda *args, **kwargs: np.nan,
    lambda *args, **kwargs: np.zeros((0, 3)),
    lambda *args, **kwargs: "text",
    lambda *args, **kwargs: object(),
    lambda *args, **kwargs: {"m": [1, [2, 3]]},
    lambda *args, **kwargs: args,
    lambda *args, **kwargs: args[0] / 0,
    lambda *args, **kwargs: exit(),
    lambda: (yield),
    lambda *args, **kwargs: (x for x in args),
    lambda *args, **kwargs: torch.ones(3, 3).to_sparse(),
    lambda *args, **kwargs: torch.ones(3, 3, device="meta"),
    lambda *args, **kwargs: torch.ones(3, 3, dtype=torch.bfloat16),
    lambda *args, **kwargs: [[1], [1, 2]],
    lambda *args, **kwargs: 10**400,
    lambda *args, **kwargs: (lambda x: x.append(x) or x)([]),
    lambda *args, **kwargs: raised(GeneratorExit()),
    lambda *args, **kwargs: raised(ValueError("\n\nlater")),
    lambda *args, **kwargs: forever(),
    Hostile(),
    np.array(["a"], dtype=object),
]


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_no_answer_makes_the_checker_raise(exercise):
    for given in ANYTHING:
        verdict = check.diagnose(exercise.id, given)
        assert verdict.status in ("wrong", "error")
        assert verdict.message


def test_interruption_is_not_swallowed():
    with pytest.raises(KeyboardInterrupt):
        check.diagnose("01.1", lambda s: raised(KeyboardInterrupt()))


@pytest.mark.parametrize("exercise_id", [None, "", "99.9", "x", 3, object()])
def test_unknown_exercise_gets_a_message(exercise_id, capsys):
    check.answer(exercise_id, None)
    assert "exercise_id must be one of" in capsys.readouterr().out
