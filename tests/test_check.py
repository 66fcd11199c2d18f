"""Every exercise: its solution is right, its stub is unsolved, each known mistake is named, nothing raises."""

import numpy as np
import pytest

from flashlib import check

EXERCISES = check.exercises()
IDS = [exercise.id for exercise in EXERCISES]
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
    assert "got 2" in check.diagnose("04.1", kind([4, 12])).message


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
    Hostile(),
    np.array(["a"], dtype=object),
]


@pytest.mark.parametrize("exercise", EXERCISES, ids=IDS)
def test_no_answer_makes_the_checker_raise(exercise):
    for given in ANYTHING:
        assert check.diagnose(exercise.id, given).message


@pytest.mark.parametrize("exercise_id", [None, "", "99.9", "x", 3, object()])
def test_unknown_exercise_gets_a_message(exercise_id, capsys):
    check.answer(exercise_id, None)
    assert "exercise_id must be one of" in capsys.readouterr().out
