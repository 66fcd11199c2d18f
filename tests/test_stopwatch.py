"""The two queues of host and GPU, by hand."""

import pytest

from flashlib import stopwatch


def test_a_kernel_waits_for_its_launch_and_for_the_one_before():
    line = stopwatch.run(3, launch_us=10, kernel_us=[25, 1, 1])
    assert line.launches == [(0, 10), (10, 20), (20, 30)]
    # The first starts when it is launched, the second when the first is done, the third right after.
    assert line.kernels == [(10, 35), (35, 36), (36, 37)]
    assert line.first_event == 0


def test_a_busy_gpu_hides_the_launches():
    line = stopwatch.run(2, launch_us=10, kernel_us=4, busy_us=20)
    assert line.kernels == [(20, 24), (24, 28)]
    assert line.first_event == 20


@pytest.mark.parametrize("kernel_us", [1.0, 10.0, 500.0])
def test_only_the_last_stopwatch_reads_the_kernel(kernel_us):
    read = stopwatch.readings(20, launch_us=10.0, kernel_us=kernel_us)
    assert list(read.values()) == pytest.approx(
        [10, 10 + kernel_us, max(10 + kernel_us / 20, (10 + 20 * kernel_us) / 20), 10 + kernel_us, kernel_us]
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0, 1, []), "calls must be"), ((2, 1, [1]), "got 2 and 1"), ((1, -1, 1), "must not be negative")],
)
def test_what_makes_no_sense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        stopwatch.run(*arguments)
