"""Recorded measurements: every timing on a page is read from a CSV that names its machine and versions.

The files are `benchmarks/results/<gpu>/<subject>.csv`, written by the scripts beside them.
"""

import csv
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
_TEXT = {"pass", "dtype", "impl", "gpu", "driver", "torch", "triton", "commit", "date", "unit", "source"}


def read_results(subject, gpu="h200"):
    """Read one recorded benchmark.

    Args:
        subject: the file's name without `.csv`, such as "cost".
        gpu: the machine's folder under `benchmarks/results`.

    Returns:
        list of dict, one a row: numbers as int or float, an empty field as None, names as str.

    Raises:
        ValueError: there is no such file; the message lists those there are.
    """
    path = RESULTS / gpu / f"{subject}.csv"
    if not path.is_file():
        known = sorted(p.relative_to(RESULTS).with_suffix("").as_posix() for p in RESULTS.glob("*/*.csv"))
        raise ValueError(f"subject must name a recorded result (there are {known}), got {gpu}/{subject}")
    with path.open(newline="") as file:
        return [{key: _value(key, text) for key, text in row.items()} for row in csv.DictReader(file)]


def _value(key, text):
    if text == "":
        return None
    if key in _TEXT:
        return text
    try:
        return int(text)
    except ValueError:
        return float(text)
