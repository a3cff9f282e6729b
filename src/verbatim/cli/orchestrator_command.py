"""`verbatim orchestrator FILE --run-dir FOLDER`: a run whose trainer is started separately, also on another host."""

from __future__ import annotations

import argparse
import logging
import shlex
from pathlib import Path

from verbatim.cli import rl_command
from verbatim.cli.serve_command import key_of
from verbatim.core.errors import UsageError
from verbatim.inference.http.connection_settings import check_key
from verbatim.inference.http.server import LAST_PORT
from verbatim.logs.checkpoints import CONFIG
from verbatim.trainer.transport.mirror.server import Listen

logger = logging.getLogger(__name__)

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `verbatim rl` has, and where to listen for the trainer's host."""
    rl_command.add_shared_arguments(parser)
    rl_command.add_output_arguments(parser)
    parser.epilog = (
        "With --listen the trainer may run on a host that does not share the run folder: weights, batches "
        "and checkpoints travel. An SSH tunnel, or --tls-cert, keeps others from reading them on the way"
    )
    add = parser.add_argument
    add(
        "--listen",
        metavar="[HOST:]PORT",
        help="for a trainer on another host, `verbatim trainer FILE --connect URL`; HOST is 127.0.0.1 by default",
    )
    add("--api-key-env", metavar="VARIABLE", help="with --listen: the variable with the key that both hosts have")
    add("--tls-cert", type=Path, metavar="FILE", help="with --listen: a certificate (PEM), for https")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM), where it is not in the same file")


def run(args: argparse.Namespace) -> int:
    """Train. As `verbatim rl`.

    Raises:
        NothingTrained: the run came to its end and learned from no token.
        UsageError: an option that cannot be used.
    """
    listen = _listen(args)

    def again(folder: Path) -> str:
        where, own = [str(folder / CONFIG), "--resume", str(folder)], []
        if listen is not None:
            options = {
                "--listen": args.listen,
                "--api-key-env": args.api_key_env,
                "--tls-cert": args.tls_cert,
                "--tls-key": args.tls_key,
            }
            own = [str(part) for pair in options.items() if pair[1] is not None for part in pair]
        orchestrator = shlex.join(["verbatim", "orchestrator", *where, *own])
        if listen is not None:
            return f"{orchestrator}  and on its host the trainer as before"
        return f"{shlex.join(['verbatim', 'trainer', *where])} & {orchestrator}"

    return rl_command.train(args, again, trainer_elsewhere=True, listen=listen)


def _listen(args: argparse.Namespace) -> Listen | None:
    key = key_of(args)
    if args.listen is None:
        for name in ("api_key_env", "tls_cert", "tls_key"):
            if getattr(args, name) is not None:
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --listen [HOST:]PORT, for a trainer on another host"
                )
        return None
    host, _, port = args.listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > LAST_PORT:
        raise UsageError(f"--listen {args.listen}: expected [HOST:]PORT, such as 8400 or 0.0.0.0:8400")
    if key is None:
        raise UsageError(
            "--listen: whoever reaches this port could send weights; give it a key: --api-key-env "
            "VARIABLE (a good one: openssl rand -hex 32)"
        )
    check_key(key)
    if args.tls_key is not None and args.tls_cert is None:
        raise UsageError(f"--tls-key {args.tls_key} is the key of a certificate; give that too: --tls-cert FILE")
    if args.tls_cert is None and host not in _LOOPBACK:
        logger.warning(
            "--listen %s: the key, weights and batches travel unencrypted; give --tls-cert FILE, or listen "
            "on 127.0.0.1 behind an SSH tunnel",
            args.listen,
        )
    return Listen(host=host, port=int(port), key=key, certificate=args.tls_cert, private_key=args.tls_key)
