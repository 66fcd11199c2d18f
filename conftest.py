"""How notebooks are compared with their stored outputs (nbval), and the proof that every one of their cells ran."""

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
    if not config.option.every_cell or hasattr(config, "workerinput"):
        return
    paths = [Path(config.invocation_params.dir, argument) for argument in config.args]
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    config.every_cell_complaint = complaint(code_cells(paths), reporter.stats)
    if config.every_cell_complaint and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def score(stats):
    """Return the mutation score of a run as text, in all and by function; "" if no mutant was tried."""
    tried = [
        value
        for outcome in ("passed", "failed")
        for report in stats.get(outcome, [])
        for name, value in report.user_properties
        if name == "mutant"
    ]
    by_function = {where: [found for at, found in tried if at == where] for where, _ in tried}
    parts = [f"{where} {sum(founds)}/{len(founds)}" for where, founds in sorted(by_function.items())]
    found = sum(found for _, found in tried)
    return f"mutants found: {found} of {len(tried)} ({', '.join(parts)})" if tried else ""


def pytest_terminal_summary(terminalreporter, config):
    if score(terminalreporter.stats):
        terminalreporter.write_line(score(terminalreporter.stats))
    if getattr(config, "every_cell_complaint", None):
        terminalreporter.write_line(f"FAILED  every cell must run: {config.every_cell_complaint}", red=True)
