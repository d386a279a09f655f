"""Prints the path of an installed CPython 3.12 or newer (looking on PATH and beside pyenv's), or nothing."""

import pathlib
import shutil
import subprocess


def candidates():
    for minor in (12, 13, 14):
        found = shutil.which(f"python3.{minor}")
        if found:
            yield found
        yield from sorted(map(str, (pathlib.Path.home() / ".pyenv/versions").glob(f"3.{minor}.*/bin/python")))


def works(path: str) -> bool:
    """A pyenv shim exists for versions that are not selected, so a path proves nothing; a run does."""
    run = subprocess.run([path, "-c", "import sys, venv; sys.exit(sys.version_info < (3, 12))"], capture_output=True)
    return run.returncode == 0


print(next(filter(works, candidates()), ""))
