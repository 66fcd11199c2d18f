"""How notebooks are compared with their stored outputs (nbval), the proof that every one of their cells ran, and the
record of the kernels' worst errors (--errors).
"""

import csv
import os
from pathlib import Path

import pytest

# What a machine may change without the lesson changing: messages on stderr and pictures. Each has its own test.
NOT_COMPARED = ("stderr", "image/svg+xml", "text/html", "text/latex")


def pytest_addoption(parser):
    parser.addoption(
        "--every-cell",
        action="store_true",
        help="with --nbval: fail unless every code cell of the given notebooks ran and none was expected to fail",
    )
    parser.addoption(
        "--errors",
        metavar="CSV",
        help="write, per dtype and tensor, the worst error of the kernels over the error that is allowed",
    )
    parser.addoption("--errors-commit", metavar="HASH", help="the commit to record there; by default what git says")


def pytest_configure(config):
    if config.option.errors and not hasattr(config, "workerinput"):
        # attention_cases.check appends its cases here, in this process and in the workers that inherit the variable.
        os.environ["FLASHLIB_ERRORS"] = str(Path(config.option.errors).absolute()) + ".cases"


def worst_errors(lines):
    """Return rows (dtype, tensor, worst ratio, cases) from lines of "torch.float16,out,0.25"."""
    found = {}
    for line in lines:
        dtype, name, ratio = line.strip().split(",")
        found.setdefault((dtype.removeprefix("torch."), name), []).append(float(ratio))
    return [(*key, f"{max(ratios):.3f}", len(ratios)) for key, ratios in found.items()]


def pytest_collectstart(collector):
    if getattr(collector, "path", None) is not None and collector.path.suffix == ".ipynb":
        collector.skip_compare = (*collector.skip_compare, *NOT_COMPARED)


def code_cells(paths):
    """Return how many code cells the notebooks hold that `paths` (files or folders) lead to."""
    # Only here: a machine that tests kernels alone need not have Jupyter.
    import nbformat

    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.ipynb")))]
    files = [file for file in files if ".ipynb_checkpoints" not in file.parts]
    return sum(cell.cell_type == "code" for file in files for cell in nbformat.read(file, as_version=4).cells)


def complaint(expected, stats):
    """Return why a notebook run proves nothing although no cell failed, or None.

    Args:
        expected: how many code cells there are.
        stats: pytest's reports by outcome.
    """
    ran = {
        report.nodeid
        for outcome in ("passed", "failed")
        for report in stats.get(outcome, [])
        if "::Cell" in report.nodeid and report.when == "call"
    }
    excused = {
        report.nodeid
        for outcome in ("xfailed", "xpassed", "skipped")
        for report in stats.get(outcome, [])
        if "::Cell" in report.nodeid
    }
    if excused:
        return f"{len(excused)} cells were skipped or expected to fail, such as {min(excused)}"
    if not expected or len(ran) < expected:
        return f"{len(ran)} of {expected} code cells ran"
    return None


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    config = session.config
    if config.option.errors and not hasattr(config, "workerinput"):
        from flashlib.bench import machine

        where = machine() | ({"commit": config.option.errors_commit} if config.option.errors_commit else {})
        cases = Path(os.environ["FLASHLIB_ERRORS"])
        with open(config.option.errors, "w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["dtype", "tensor", "worst_ratio", "cases", *where])
            rows = worst_errors(cases.read_text().splitlines() if cases.exists() else [])
            writer.writerows([*row, *where.values()] for row in rows)
        cases.unlink(missing_ok=True)
    if not config.option.every_cell or hasattr(config, "workerinput"):
        return
    paths = [Path(config.invocation_params.dir, argument) for argument in config.args]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    config.every_cell_complaint = complaint(code_cells(paths), reporter.stats)
    if config.every_cell_complaint and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if getattr(config, "every_cell_complaint", None):
        terminalreporter.write_line(f"FAILED  every cell must run: {config.every_cell_complaint}", red=True)
