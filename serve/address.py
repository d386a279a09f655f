"""Where a server listens: "host:port", "[ipv6]:port" or "unix:/path". Imports no jax."""

import dataclasses
import ipaddress
import socket
from pathlib import Path

DEFAULT_HOST = "127.0.0.1"
DEFAULT_PORT = 7433


@dataclasses.dataclass(frozen=True)
class TcpAddress:
    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host:
            raise ValueError("the address has no host; 0.0.0.0 or :: stand for every interface")
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port={self.port} must be from 0 to 65535 (0: any free port)")

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclasses.dataclass(frozen=True)
class UnixAddress:
    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


Address = TcpAddress | UnixAddress


def parse_address(text: str) -> Address:
    """The address that `text` spells.

    Raises:
      ValueError: it spells none.
    """
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        if not path:
            raise ValueError(f"address {text!r} has no path after 'unix:'")
        return UnixAddress(Path(path))
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()):
        raise ValueError(f"address {text!r} is none of host:port, [ipv6]:port, unix:/path")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError(f"address {text!r}: write an IPv6 host in brackets, [{host}]:{port}")
    return TcpAddress(host, int(port))


def is_local(address: Address) -> bool:
    """Whether only this machine can reach the address. A name counts as what it resolves to.

    Raises:
      ValueError: the host does not resolve.
    """
    if isinstance(address, UnixAddress):
        return True
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ValueError(f"host {address.host!r} does not resolve: {error}") from None
    return all(ipaddress.ip_address(str(sockaddr[0]).partition("%")[0]).is_loopback for *_, sockaddr in found)
