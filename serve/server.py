"""The server: listens, hands each client to a `Connection`, and ends in order.

`Server.run` returns when the server has ended: by `shut_down` (the first SIGTERM: new work is refused, running work finishes),
by `stop_now` (the second), or because the engine failed.
"""

import asyncio
import dataclasses
import enum
import logging
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path

from serve import protocol
from serve.address import Address, TcpAddress, UnixAddress, is_local
from serve.backend import Backend
from serve.connection import Connection, ConnectionLimits, EventBridge
from serve.protocol import ErrorCode

_log = logging.getLogger(__name__)

_STOP_TIMEOUT_S = 5.0  # for the step that is under way when the engine is stopped


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Where to listen and when to give up.

    Attributes:
      max_connections: clients at once; one more is refused.
      drain_timeout_s: for running requests to finish once a shutdown began.
    """

    address: Address
    limits: ConnectionLimits = dataclasses.field(default_factory=ConnectionLimits)
    max_connections: int = 1024
    drain_timeout_s: float = 60.0

    def __post_init__(self) -> None:
        if self.max_connections < 1:
            raise ValueError(f"ServerConfig: max_connections={self.max_connections} must be positive")
        if not self.drain_timeout_s >= 0:
            raise ValueError(f"ServerConfig: drain_timeout_s={self.drain_timeout_s} must not be negative")
        if self.limits.token is None and not is_local(self.address):
            raise ValueError(f"{self.address} can be reached from other machines; give clients a token or listen on 127.0.0.1")


class Ending(enum.Enum):
    """How a server ended."""

    DRAINED = "drained"  # every running request finished
    CUT_SHORT = "cut short"  # the time limit passed, or it was told to stop at once
    FAILED = "failed"  # the engine did
    HUNG = "hung"  # a step of the device does not end; the engine's thread still waits for it


class Server:
    """Serves one backend on one socket."""

    def __init__(self, backend: Backend, config: ServerConfig, bound: socket.socket) -> None:
        """`bound` is what `bind(config.address)` returned; the server closes it."""
        self._backend = backend
        self._config = config
        self._socket = bound
        self._connections: dict[Connection, asyncio.Task[None]] = {}
        self._accepted = 0
        self._shut_down = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._failed = asyncio.Event()
        self._bridge = EventBridge(asyncio.get_running_loop(), self._check_engine)

    def shut_down(self) -> None:
        """Starts the orderly end; called again, ends at once."""
        if self._shut_down.is_set():
            self._stop_now.set()
        self._shut_down.set()

    async def run(self, on_ready: Callable[[Address], None]) -> Ending:
        """Serves until told to end. `on_ready` gets the address with the real port once clients can connect."""
        listener = await self._listen()
        address = bound_address(self._config.address, self._socket)
        try:
            on_ready(address)
            await _first(self._shut_down, self._failed)
        finally:
            # A client that comes from here on finds nobody, and a successor can take the address.
            listener.close()
            if isinstance(address, UnixAddress):
                address.path.unlink(missing_ok=True)
        ending = await self._end_requests()
        await self._end_connections(ending)
        return ending

    async def _listen(self) -> asyncio.Server:
        if self._socket.family == socket.AF_UNIX:
            return await asyncio.start_unix_server(self._accept, sock=self._socket)
        return await asyncio.start_server(self._accept, sock=self._socket)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _notice_dead_peer(writer.get_extra_info("socket"))
        self._accepted += 1
        connection = Connection(
            f"client {self._accepted}", self._backend, self._bridge, reader, writer.transport, self._config.limits
        )
        if len(self._connections) >= self._config.max_connections:
            message = f"{self._config.max_connections} clients are connected"
            await connection.refuse(protocol.Error(code=ErrorCode.TOO_MANY_CONNECTIONS, message=message))
            return
        task = asyncio.current_task()
        assert task is not None
        self._connections[connection] = task
        try:
            await connection.run()
        finally:
            del self._connections[connection]

    def _check_engine(self) -> None:
        health = self._backend.service.health()
        if health.state == "failed" and not self._failed.is_set():
            _log.error("the engine failed: %s", health.error)
            self._failed.set()

    async def _end_requests(self) -> Ending:
        """Waits for running requests as long as it may; the rest are told why they end."""
        drained = not self._failed.is_set() and await self._drain()
        if not drained and not self._failed.is_set():
            limit = f"not finished after {self._config.drain_timeout_s:g} s"
            reason = "the server was told to stop at once" if self._stop_now.is_set() else limit
            _log.warning("stopping with %d requests running: %s", self._backend.counters.generations_open, reason)
            for connection in self._connections:
                connection.refuse_open(ErrorCode.SHUTTING_DOWN, reason)
        # A failed engine tells every request itself.
        stopped = await asyncio.to_thread(self._backend.service.stop, _STOP_TIMEOUT_S)
        if self._failed.is_set():
            return Ending.FAILED
        if not stopped:
            return Ending.HUNG
        return Ending.DRAINED if drained else Ending.CUT_SHORT

    async def _drain(self) -> bool:
        """Whether all running requests finished within the time there is."""
        left_s = self._config.drain_timeout_s
        _log.info(
            "shutting down: refusing new requests, up to %g s for %d running", left_s, self._backend.counters.generations_open
        )
        deadline_s = time.monotonic() + left_s
        # In short waits, because a thread's wait cannot be cut short by a second signal.
        while not await asyncio.to_thread(self._backend.service.drain, max(0.0, min(left_s, 0.2))):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or self._stop_now.is_set() or self._failed.is_set():
                return False
        return True

    async def _end_connections(self, ending: Ending) -> None:
        """Lets clients read their last answers, for as long as a goodbye may take."""
        await asyncio.sleep(0)  # the last events are in the bridge, and the loop's next round delivers them
        for connection in list(self._connections):
            connection.close()
        if self._connections and not self._stop_now.is_set():
            await asyncio.wait(self._connections.values(), timeout=self._config.limits.goodbye_timeout_s)
        for connection in list(self._connections):
            connection.abort()
        if self._connections:  # what holds one of them now is a tokenizer's thread
            await asyncio.wait(self._connections.values(), timeout=_STOP_TIMEOUT_S)
        _log.info("ended: %s", ending.value)


async def _first(*events: asyncio.Event) -> None:
    """Returns when one of the events is set."""
    waits = [asyncio.create_task(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def bind(address: Address) -> socket.socket:
    """A socket that holds the address and does not listen yet: what loads for minutes can first make sure of its place.

    Raises:
      OSError: the address is not ours to take, or somebody else has it.
    """
    if isinstance(address, UnixAddress):
        _remove_dead_socket(address.path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(str(address.path))
            address.path.chmod(stat.S_IRUSR | stat.S_IWUSR)
        except BaseException:
            sock.close()
            raise
        return sock
    failure: OSError | None = None
    for family, kind, proto, _, sockaddr in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(sockaddr)
        except OSError as error:  # a host may have an address of a family that this machine does not speak
            failure = OSError(error.errno, f"cannot listen on {address}: {error.strerror}")
            sock.close()
        else:
            return sock
    raise failure or OSError(f"cannot listen on {address}: the host has no address")


def bound_address(address: Address, bound: socket.socket) -> Address:
    """The address that clients use: with the port that the system picked where 0 was asked for."""
    return address if isinstance(address, UnixAddress) else TcpAddress(address.host, bound.getsockname()[1])


def _remove_dead_socket(path: Path) -> None:
    """Removes what a server that was killed left behind.

    Raises:
      OSError: the path is no socket, or somebody listens on it.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(f"{path} exists and is no socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
    raise OSError(f"a server is listening on {path}")


def _notice_dead_peer(sock: socket.socket) -> None:
    """Has the kernel find out within about a minute that a peer is gone without a goodbye (power, cable)."""
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 60_000)):
        if hasattr(socket, option):  # not on every system
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
