"""`python -m serve --model M`: loads a model, compiles its steps, and serves it until told to stop.

Standard output gets one line, `ready ADDRESS`; progress and log go to standard error. The exit status is 0 if every request
that was running at the end finished.
"""

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from nanoflow_jax.checkpoints import CheckpointError
from nanoflow_jax.config import PRESETS
from nanoflow_jax.plan_files import read_plans
from nanoflow_jax.runtime.kv_tiers import DirectoryInUseError, add_tier_arguments, tier_options
from nanoflow_jax.runtime.llm import ExecutionMode, KernelChoice, RunnerConfig
from nanoflow_jax.runtime.plan_choice import default_mode
from nanoflow_jax.runtime.service import EngineService
from nanoflow_jax.runtime.sizing import serving_sizes, sizes_from
from nanoflow_jax.tokenizer import ChatTemplateError, TokenizerError
from serve.address import DEFAULT_HOST, DEFAULT_PORT, Address, TcpAddress, UnixAddress
from serve.backend import Backend
from serve.connection import ConnectionLimits
from serve.server import Ending, Server, ServerConfig, bind
from serve.startup import EngineOptions, default_cache_dir, start_engine

_log = logging.getLogger("serve")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m serve", description="Serves a model; docs/serving.md is the guide.")
    parser.add_argument(
        "--model",
        required=True,
        help="smollm2, a Hugging Face folder, a .gguf file, a converted folder, or a preset: " + ", ".join(sorted(PRESETS)),
    )
    _add_engine_arguments(parser.add_argument_group("engine"))
    _add_server_arguments(parser.add_argument_group("server"))
    return parser


def _add_engine_arguments(group: argparse._ArgumentGroup) -> None:
    runner = RunnerConfig()
    group.add_argument("--random-weights", action="store_true", help="weights made on the devices, for benchmarks")
    group.add_argument("--seed", type=int, default=0, help="of random weights (default %(default)s)")
    group.add_argument("--models-dir", type=Path, help="where smollm2 is kept (default: in the user's cache directory)")
    types = ("auto", "bfloat16", "float16", "float32")
    group.add_argument("--dtype", default="auto", choices=types, help="auto: float32 on a CPU, else bfloat16 (default)")
    group.add_argument("--tp", type=int, default=1, help="devices to divide the model over (default %(default)s)")
    on_gpu = serving_sizes(on_gpu=True)
    group.add_argument(
        "--b-dense",
        type=int,
        help=f"tokens of a full step (default: the plans' largest, {runner.b_dense}, on a GPU {on_gpu['b_dense']})",
    )
    group.add_argument(
        "--step-sizes",
        type=sizes_from,
        metavar="N,N,..",
        help="tokens of the steps to compile; fewer start sooner and pad more (default: some between 64 and a full step)",
    )
    group.add_argument(
        "--max-sequences",
        type=int,
        help=f"sequences that run at once (default {runner.max_sequences}, on a GPU {on_gpu['max_sequences']})",
    )
    group.add_argument(
        "--page-size", type=int, help=f"tokens per KV page (default {runner.page_size}, on a GPU {on_gpu['page_size']})"
    )
    group.add_argument("--num-pages", type=int, help="pages of the KV pool (default: from free device memory)")
    group.add_argument("--max-context", type=int, help="longest prompt and output together (default: the model's)")
    group.add_argument(
        "--memory-fraction",
        type=float,
        default=runner.memory_fraction,
        help="share of free device memory for the KV pool (default %(default)s)",
    )
    group.add_argument(
        "--mode",
        choices=("auto", *get_args(ExecutionMode)),
        help="how steps are executed; auto: by --plan, else by the best plans known for model and device; the others but "
        "sequential need --plan (default: sequential, auto with --plan)",
    )
    group.add_argument("--plan", type=Path, help="a plan or plan set of python -m search")
    group.add_argument(
        "--kernels",
        default=runner.kernels,
        choices=("auto", *get_args(KernelChoice)),
        help="auto: the best for the device (default)",
    )
    group.add_argument(
        "--no-prefix-cache", action="store_true", help="compute every prompt as a whole, whatever the pool still holds of it"
    )
    add_tier_arguments(group)
    group.add_argument(
        "--kv-close-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that writing host memory to the SSD may take in the end (default %(default)s)",
    )
    group.add_argument("--sync", action="store_true", help="read each step's tokens before the next is formed: a baseline")
    cache = group.add_mutually_exclusive_group()
    cache.add_argument(
        "--cache-dir", type=Path, default=default_cache_dir(), help="where compiled steps are kept (default %(default)s)"
    )
    cache.add_argument("--no-cache", action="store_true", help="compile everything anew")


def _add_server_arguments(group: argparse._ArgumentGroup) -> None:
    limits = ConnectionLimits()
    group.add_argument("--host", help=f"address to listen on (default {DEFAULT_HOST}); others than loopback need a token")
    group.add_argument("--port", type=int, help=f"0: any free port (default {DEFAULT_PORT})")
    group.add_argument("--unix", type=Path, metavar="PATH", help="listen on a Unix socket instead")
    group.add_argument("--address-file", type=Path, help="write the address here once clients can connect")
    secret = group.add_mutually_exclusive_group()
    secret.add_argument("--token", help="what clients must show; others on this machine can see arguments, a file is safer")
    secret.add_argument("--token-file", type=Path, help="read the token from a file")
    group.add_argument(
        "--queue", type=int, default=1024, help="requests that may wait; more are told `overloaded` (default %(default)s)"
    )
    group.add_argument("--max-connections", type=int, default=1024, help="(default %(default)s)")
    group.add_argument("--max-frame-bytes", type=int, default=limits.max_frame_bytes, help="(default %(default)s)")
    group.add_argument(
        "--max-unread-bytes",
        type=int,
        default=limits.max_unread_bytes,
        help="answers that a client may leave unread before it is disconnected (default %(default)s)",
    )
    group.add_argument(
        "--drain-timeout",
        type=float,
        default=60.0,
        metavar="S",
        help="seconds that running requests get after SIGTERM; a second SIGTERM stops at once (default %(default)s)",
    )


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """Raises ValueError: an option is out of range, or the plan is none; OSError: the plan cannot be read."""
    plans = read_plans(args.plan) if args.plan else None
    names = ("b_dense", "step_sizes", "max_sequences", "page_size", "num_pages", "max_context", "memory_fraction", "kernels")
    told = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return EngineOptions(
        model=args.model,
        random_weights=args.random_weights,
        seed=args.seed,
        models_dir=args.models_dir,
        dtype=args.dtype,
        tp_size=args.tp,
        mode=args.mode or default_mode(plans),
        plans=plans,
        told=told,
        sync=args.sync,
        prefix_cache=not args.no_prefix_cache,
        kv_tiers=tier_options(args),
        cache_dir=None if args.no_cache else args.cache_dir,
    )


def server_config(args: argparse.Namespace) -> ServerConfig:
    """Raises ValueError: an option is out of range; OSError: the token's file cannot be read."""
    if args.unix and (args.host is not None or args.port is not None):
        raise ValueError("--unix excludes --host and --port")
    if args.queue < 1:
        raise ValueError(f"--queue {args.queue} must be positive")
    host, port = args.host or DEFAULT_HOST, DEFAULT_PORT if args.port is None else args.port
    return ServerConfig(
        address=UnixAddress(args.unix) if args.unix else TcpAddress(host, port),
        limits=ConnectionLimits(
            token=args.token_file.read_text().strip() if args.token_file else args.token,
            max_frame_bytes=args.max_frame_bytes,
            max_unread_bytes=args.max_unread_bytes,
        ),
        max_connections=args.max_connections,
        drain_timeout_s=args.drain_timeout,
    )


async def serve(backend: Backend, config: ServerConfig, bound: socket.socket, address_file: Path | None) -> Ending:
    """Runs a server until signals, or the failure of its engine, end it."""
    server = Server(backend, config, bound)
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, server.shut_down)

    def on_ready(address: Address) -> None:
        if address_file is not None:
            _write_whole(address_file, f"{address}\n")
        print(f"ready {address}", flush=True)

    try:
        return await server.run(on_ready)
    finally:
        if address_file is not None:
            address_file.unlink(missing_ok=True)


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that no reader ever sees half written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.replace(path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit status."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    for name in ("serve", "nanoflow_jax"):
        logging.getLogger(name).setLevel(logging.INFO)
    try:
        options, config = engine_options(args), server_config(args)
        if args.address_file is not None:
            args.address_file.unlink(missing_ok=True)  # of a server that was killed
        with bind(config.address) as bound:
            engine, description = start_engine(options)
            service = EngineService(engine, max_waiting=args.queue)
            backend = Backend(service=service, tokenizer=engine.tokenizer, description=description)
            ending = asyncio.run(serve(backend, config, bound, args.address_file))
            if ending is not Ending.HUNG and not engine.close(args.kv_close_timeout):
                _log.warning("the SSD did not take all of the cache in %g s", args.kv_close_timeout)
    except (CheckpointError, TokenizerError, ChatTemplateError, DirectoryInUseError, ValueError, OSError, MemoryError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if ending is Ending.HUNG:
        # The runtime would wait for the device at exit; all that needs closing has been closed.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
    return 0 if ending is Ending.DRAINED else 1


if __name__ == "__main__":
    sys.exit(main())
