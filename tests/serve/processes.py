"""`python -m serve` as a process of its own."""

import contextlib
import dataclasses
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from serve.client import Client


@dataclasses.dataclass
class Process:
    """A running server; its files lie in `folder`."""

    popen: subprocess.Popen[str]
    address: str
    folder: Path

    def client(self) -> Client:
        return Client(self.address, answer_timeout_s=60.0)

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.popen.send_signal(number)

    def wait(self) -> int:
        return self.popen.wait(60.0)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


@contextlib.contextmanager
def served(folder: Path, *arguments: str, ready_timeout_s: float = 300.0) -> Iterator[Process]:
    """Starts a server on any free port; ends it by SIGTERM, whatever happened."""
    folder.mkdir(parents=True, exist_ok=True)
    address_file = folder / "address"
    with (folder / "log").open("w") as log:
        popen = subprocess.Popen(
            [sys.executable, "-m", "serve", *arguments, "--port", "0", "--address-file", str(address_file)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        )
    try:
        deadline_s = time.monotonic() + ready_timeout_s
        while not address_file.exists():
            assert popen.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline_s, "the server did not become ready"
            time.sleep(0.05)
        yield Process(popen, address_file.read_text().strip(), folder)
    finally:
        popen.terminate()
        try:
            popen.wait(60.0)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
        assert popen.stdout is not None
        popen.stdout.close()
