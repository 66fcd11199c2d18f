"""The versions: pyproject.toml, constraints.txt and environment.yml name the same packages, and the same pins."""

import ast
import re
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ["course", "test", "book"]
# What somebody who opens environment.yml looks for.
VISIBLE = {"jupyterlab", "numpy", "torch", "triton", "matplotlib", "nbval"}


def by_name(lines):
    """Return {canonical name: Requirement}; a name that comes twice is an error."""
    found = {}
    for line in lines:
        requirement = Requirement(line)
        name = canonicalize_name(requirement.name)
        assert name not in found, f"{name} is listed twice"
        found[name] = requirement
    return found


def pyproject():
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def direct():
    project = pyproject()
    extras = [line for extra in EXTRAS for line in project["optional-dependencies"][extra]]
    return by_name(project["dependencies"] + extras)


def constraints():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return by_name(line for line in lines if line and not line.startswith("#"))


def conda():
    """Return environment.yml's conda packages and its pip lines."""
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]
    pip = next(item["pip"] for item in dependencies if isinstance(item, dict))
    return [item for item in dependencies if isinstance(item, str)], pip


def disagreements(wanted, pinned, environment):
    """Return what is wrong between the direct dependencies, constraints.txt and environment.yml's pip lines, in words.

    Args:
        wanted, pinned, environment: dict name -> Requirement.
    """
    found = []
    for where, names in (("constraints.txt", pinned), ("environment.yml", environment)):
        found += [f"{name} is missing in {where}" for name in sorted(set(wanted) - set(names))]
        found += [f"{name} in {where} is no direct dependency" for name in sorted(set(names) - set(wanted))]
    for name in sorted(set(pinned) & set(environment)):
        if str(pinned[name]) != str(environment[name]):
            found.append(f"{pinned[name]} in constraints.txt is {environment[name]} in environment.yml")
    for name, requirement in sorted(pinned.items()):
        exact = re.fullmatch(r"==([\w.]+)", str(requirement.specifier))
        if not exact:
            found.append(f"{name} is not pinned: {requirement}")
        elif name in wanted and not wanted[name].specifier.contains(exact[1]):
            found.append(f"{requirement} does not satisfy {wanted[name]}")
        if name in wanted and str(requirement.marker) != str(wanted[name].marker):
            found.append(f"{name} has different markers: {requirement.marker}, {wanted[name].marker}")
    return found


def test_the_three_files_agree():
    _, pip = conda()
    environment = by_name(line for line in pip if not line.startswith("-"))
    assert disagreements(direct(), constraints(), environment) == []


def test_environment_installs_the_package_with_its_extras():
    packages, pip = conda()
    assert pip[-1] == f"-e .[{','.join(EXTRAS)}]"
    assert [line for line in pip if line.startswith("-")] == pip[-1:]
    # Whatever conda itself installed would be a second place for a version, or a second torch.
    assert [re.split("[<>=]", package)[0] for package in packages] == ["python", "pip"]
    assert set(by_name(pip[:-1])) >= VISIBLE


def test_library_dependencies_are_loose():
    for line in pyproject()["dependencies"]:
        assert all(part.operator == ">=" for part in Requirement(line).specifier), line


def test_makefile_installs_the_pins_in_one_go():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    installs = re.findall(r"pip install.*", text)
    assert len(installs) == 1
    assert "-c constraints.txt -e" in installs[0]
    assert f"EXTRAS := {','.join(EXTRAS)}\n" in text


def test_distribution_has_a_name_of_its_own():
    assert pyproject()["name"] == "flashattention-step-by-step"


# A module whose distribution has another name; cycler is a part of matplotlib's interface.
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "bs4": "beautifulsoup4",
    "markdown_it": "markdown-it-py",
    "cycler": "matplotlib",
}
# What `flashlib.hf` registers itself with, for those who have it; its tests skip without.
OPTIONAL = {"transformers"}
OWN = {"flashlib", "book", "conftest"} | {
    path.stem for name in ("book", "tests") for path in (ROOT / name).glob("*.py")
}


def imported(folder):
    """Return the distributions that the Python files of a folder import."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                found.add(node.module.partition(".")[0])
    found -= set(sys.stdlib_module_names) | OWN | OPTIONAL
    return {canonicalize_name(DISTRIBUTIONS.get(name, name)) for name in found}


@pytest.mark.parametrize("folder", ["flashlib", "book", "tests"])
def test_what_is_imported_is_a_direct_dependency(folder):
    found = imported(ROOT / folder)
    assert found
    assert found <= set(direct())


GOOD = ["a==1.0", "b==2.0; sys_platform == 'linux'"]
LOOSE = ["a>=1.0", "b>=1.5; sys_platform == 'linux'"]


def test_agreement_is_found():
    assert disagreements(by_name(LOOSE), by_name(GOOD), by_name(GOOD)) == []


@pytest.mark.parametrize(
    ("wanted", "pinned", "environment"),
    [
        (LOOSE, GOOD[:1], GOOD),
        (LOOSE, GOOD, GOOD[:1]),
        (LOOSE[:1], GOOD, GOOD),
        (LOOSE, GOOD, ["a==1.1", GOOD[1]]),
        (LOOSE, ["a>=1.0", GOOD[1]], ["a>=1.0", GOOD[1]]),
        (["a>=1.1", LOOSE[1]], GOOD, GOOD),
        (["a", "b>=1.5"], GOOD, GOOD),
    ],
)
def test_disagreement_is_found(wanted, pinned, environment):
    assert disagreements(by_name(wanted), by_name(pinned), by_name(environment))
