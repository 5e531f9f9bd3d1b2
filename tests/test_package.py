"""What importing the package does."""

import subprocess
import sys
import tomllib
from pathlib import Path

import engine
from engine.plugin_guard.calls import SEE_CHANGELOG

WITHOUT_NUMPY = 'import sys; sys.modules["numpy"] = None; import engine, torch'


def test_an_install_without_numpy_starts_without_a_warning():
    command = [sys.executable, "-c", WITHOUT_NUMPY]
    done = subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": ":".join(sys.path)})
    assert (done.returncode, done.stderr) == (0, "")


def test_the_version_is_that_of_the_project():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert engine.__version__ == project["version"]


def test_a_wheel_has_the_changelog_that_messages_name():
    root = Path(__file__).parents[1]
    wheel = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    (name,) = wheel["force-include"]
    assert name in SEE_CHANGELOG and (root / name).is_file() and wheel["force-include"][name] == f"engine/{name}"
