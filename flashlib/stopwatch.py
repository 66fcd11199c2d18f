"""A host that launches kernels, a GPU that runs them, and what five stopwatches read off the same two clocks.

A launch returns at once and the GPU works through a queue, so a time depends on where the stopwatch stands. Nothing is
measured here: the durations are given, and the readings follow from them.

Source: NVIDIA, "CUDA C++ Best Practices Guide", section "Timing".
"""

from typing import NamedTuple


class Timeline(NamedTuple):
    """What happened, in µs since the host began.

    launches: (start, end) on the host, of each launch. kernels: (start, end) on the GPU, of each kernel; the work that
    kept it busy before is not among them. first_event: when the GPU reached the event recorded before the first launch.
    """

    launches: list
    kernels: list
    first_event: float


def run(calls, launch_us, kernel_us, busy_us=0.0):
    """Let the host launch kernels one after the other and the GPU run them in order.

    Args:
        calls: number of launches.
        launch_us: host time of a launch; a number.
        kernel_us: GPU time of a kernel; a number, or a list with one a call.
        busy_us: time that the GPU still works on something else when the host begins.

    Returns:
        Timeline.

    Raises:
        ValueError: calls is below 1, a time is negative, or the list has another length.
    """
    times = list(kernel_us) if isinstance(kernel_us, (list, tuple)) else [kernel_us] * calls
    if calls < 1 or len(times) != calls:
        raise ValueError(f"calls must be at least 1 and the number of kernel times, got {calls} and {len(times)}")
    if min(launch_us, busy_us, *times) < 0:
        raise ValueError(f"times must not be negative, got {launch_us}, {busy_us}, {times}")
    launches, kernels, free = [], [], busy_us
    for call, time in enumerate(times):
        launches.append((call * launch_us, (call + 1) * launch_us))
        start = max(free, launches[-1][1])
        free = start + time
        kernels.append((start, free))
    return Timeline(launches, kernels, busy_us)


def readings(calls, launch_us, kernel_us):
    """Return what each stopwatch says a kernel takes: dict, its description -> µs a call."""
    idle = run(calls, launch_us, kernel_us)
    busy = run(calls, launch_us, kernel_us, busy_us=calls * launch_us)
    one = run(1, launch_us, kernel_us)
    return {
        "host clock, no synchronisation": idle.launches[-1][1] / calls,
        "host clock, synchronised after each call": one.kernels[-1][1],
        "host clock, synchronised after all calls": idle.kernels[-1][1] / calls,
        "events around each call, GPU idle before": one.kernels[-1][1] - one.first_event,
        "events around all calls, GPU busy before": (busy.kernels[-1][1] - busy.first_event) / calls,
    }
