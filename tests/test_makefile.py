"""How `make` makes .venv: whole or not at all, again when it is half-made or when the requirements changed.

A shell script stands in for Python, so that nothing is installed; it writes down how it was called.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
STAND_IN = """#!/bin/sh
echo "$@" >> "{log}"
case "$*" in
    *version_info*) exit {too_old} ;;
    *ensurepip*) exit {no_venv} ;;
    *RECORD*) exit $(cat "{folder}/record_status") ;;
    --version) echo "Python 3.10.1" ;;
    "-m venv"*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-m pip"*) exit $(cat "{folder}/pip_status") ;;
esac
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make on this machine")


class Folder:
    """A folder with the Makefile, the two files it watches, and a Python that is none."""

    def __init__(self, path, too_old=0, no_venv=0):
        self.path, self.log, self.python = path, path / "log", path / "stand-in"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, path)
        script = STAND_IN.format(log=self.log, folder=path, too_old=too_old, no_venv=no_venv)
        self.python.write_text(script, encoding="utf-8")
        self.python.chmod(0o755)
        self.pip_status(0)
        self.record_status(0)

    def record_status(self, status):
        """What the question whether every recorded package is there ends with."""
        (self.path / "record_status").write_text(str(status), encoding="utf-8")

    def pip_status(self, status):
        (self.path / "pip_status").write_text(str(status), encoding="utf-8")

    def make(self, target="venv"):
        """Run make; return (finished process, what was done: "venv" and "pip" in order)."""
        self.log.unlink(missing_ok=True)
        environment = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}
        command = ["make", "-s", target, f"PYTHON={self.python}"]
        done = subprocess.run(command, cwd=self.path, capture_output=True, text=True, check=False, env=environment)
        calls = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return done, [call.split()[1] for call in calls if call.startswith("-m ")]


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path)


def test_made_once(folder):
    done, calls = folder.make()
    assert done.returncode == 0
    assert calls == ["venv", "pip"]
    assert folder.make()[1] == []


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_installed_again_when_requirements_change(folder, name):
    folder.make()
    with (folder.path / name).open("a", encoding="utf-8") as file:
        file.write("# changed\n")
    assert folder.make()[1] == ["pip"]
    assert folder.make()[1] == []


def test_half_made_is_made_again(folder):
    folder.make()
    (folder.path / ".venv" / "installed").unlink()
    (folder.path / ".venv" / "left over").touch()
    assert folder.make()[1] == ["venv", "pip"]
    assert not (folder.path / ".venv" / "left over").exists()


def test_broken_python_is_made_again(folder):
    folder.make()
    (folder.path / ".venv" / "bin" / "python").unlink()
    assert folder.make()[1] == ["venv", "pip"]


def test_lost_package_is_made_again(folder):
    folder.make()
    folder.record_status(1)
    assert folder.make()[1] == ["venv", "pip"]
    folder.record_status(0)
    assert folder.make()[1] == []


def test_lost_package_is_seen(tmp_path):
    """The question itself, asked by a real Python in an environment with a package that is there, then is not."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / ".venv"], check=True)
    (packages,) = (tmp_path / ".venv" / "lib").glob("python*/site-packages")
    for name in ("whole", "whole-1.0.dist-info"):
        (packages / name).mkdir()
    (packages / "whole" / "__init__.py").touch()
    about = packages / "whole-1.0.dist-info"
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: whole\nVersion: 1.0\n", encoding="utf-8")
    (about / "RECORD").write_text("whole/__init__.py,,\nwhole/data/never_asked.txt,,\n", encoding="utf-8")
    question = ["make", "-s", "-f", str(ROOT / "Makefile"), "--eval", "ask: ; @$(COMPLETE)", "ask"]
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "MAKEFLAGS")}
    for status in (True, False):
        done = subprocess.run(question, cwd=tmp_path, check=False, env=environment)
        assert (done.returncode == 0) == status
        shutil.rmtree(packages / "whole", ignore_errors=True)


def test_moved_folder_is_installed_again(folder):
    folder.make()
    stamp = folder.path / ".venv" / "installed"
    stamp.write_text(stamp.read_text(encoding="utf-8").replace(str(folder.path), "elsewhere"), encoding="utf-8")
    assert folder.make()[1] == ["pip"]


def test_failed_installation_leaves_no_stamp(folder):
    folder.pip_status(1)
    done, calls = folder.make()
    assert done.returncode != 0
    assert calls == ["venv", "pip"]
    assert not (folder.path / ".venv" / "installed").exists()
    assert "installation failed" in done.stderr
    folder.pip_status(0)
    assert folder.make()[1] == ["venv", "pip"]


def test_old_python_is_refused_in_one_line(tmp_path):
    done, calls = Folder(tmp_path, too_old=1).make()
    assert done.returncode != 0
    assert calls == []
    assert not (tmp_path / ".venv").exists()
    assert "PYTHON must be Python 3.11 or newer, got" in done.stderr
    assert "Python 3.10.1" in done.stderr.splitlines()[0]


def test_python_without_venv_is_told_what_to_install(tmp_path):
    done, calls = Folder(tmp_path, no_venv=1).make()
    assert done.returncode != 0
    assert calls == []
    assert "python3-venv" in done.stderr


def test_help_lists_every_command(folder):
    done, calls = folder.make("help")
    assert calls == []
    listed = [line.split()[1] for line in done.stdout.splitlines()]
    assert listed == ["help", "lab", "course", "test", "book", "notebooks", "lint", "clean"]


def test_ci_calls_make_test():
    assert "make test" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert ".ci/run" in (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
