"""Talks to a sandbox's shell: commands on one pipe, output on another, split by marks with a random token."""

from __future__ import annotations

import re
import secrets
import shlex
from dataclasses import dataclass
from typing import Literal

from verbatim.tools.isolation import SandboxLimits

# Process 1 of the namespace. It starts the shell that reads commands, and another one when that one ends or SIGTERM has
# killed everything but process 1; each time it reports the status of the previous shell. `kill -1` outside of it would
# reach every process of the user. If memory runs out, the kernel kills processes in here first; if a file grows
# too long, the command gets an error and nothing is killed.
_KEEPER = """
exec 3<&0 4>&1 </dev/null
{stop}
ulimit -c 0 && ulimit -t {cpu_seconds} -v {memory_kb} -f {disk_kb} -n {open_files} {processes} || exit
echo 1000 >/proc/$$/oom_score_adj || exit
trap '' XFSZ
exec >/dev/null 2>&1
status=0
while printf '\\0{token} ready %s\\0' $status >&4; do
  bash --noprofile --norc <&3 >&4 2>&4 3<&- &
  wait $!
  status=$?
  wait
done
"""
_STOP = "(( $$ == 1 )) || exit; trap 'while kill -KILL -1; do :; done' TERM"


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The shell's output up to one of its marks."""

    output: bytes
    """Bytes before the mark."""
    to: int | Literal["ready"]
    """The number of the finished command; "ready" = a shell, the first or a fresh one, is ready."""
    status: int
    """Exit status of the command, or of the previous shell."""


class ShellProtocol:
    """Marks and commands of one shell. They are safe against accidents; a command that forges marks harms only itself.

    Example: after `eval 'echo a' ...; printf ...` as command 1 the shell has written
    `a\\n\\0sandbox-d2b7c4f1a09e3356 1 0\\0`, which reads as `Answer(output=b"a\\n", to=1, status=0)`.
    """

    def __init__(self) -> None:
        self._token = f"sandbox-{secrets.token_hex(8)}"  # a digit after \\0 would be part of the escape
        self._mark = re.compile(rb"\0%s (\d{1,9}|ready) (\d{1,3})\0" % self._token.encode())
        self.received = bytearray()
        """Bytes written by the shell that belong to no answer yet."""

    def keeper(self, limits: SandboxLimits, *, has_namespaces: bool) -> str:
        """The script that sets the limits and keeps a shell running; the shell reads commands from its input."""
        return _KEEPER.format(
            token=self._token, stop=_STOP if has_namespaces else "", cpu_seconds=limits.cpu_seconds,
            memory_kb=limits.memory_mb << 10, disk_kb=limits.disk_mb << 10, open_files=limits.open_files,
            # Outside a user namespace the limit would count all processes of the user.
            processes=f"-u {limits.processes}" if has_namespaces else "",
        )  # fmt: skip

    def line(self, command: str, number: int) -> bytes:
        """The bytes to send for one command. It runs in `eval`, so a stray `break` or `return` has no effect, and
        its processes can reach neither later commands nor the descriptor of the marks."""
        quoted = shlex.quote(command.replace("\0", ""))
        done = f"builtin printf '\\0{self._token} {number} %s\\0' $? >&4"
        return f"eval {quoted} </dev/null 4>&-; {done}\n".encode(errors="replace")

    def answer(self) -> Answer | None:
        """The next complete answer in `received`; None = incomplete."""
        found = self._mark.search(self.received)
        if found is None:
            return None
        answer = Answer(
            output=bytes(self.received[: found.start()]),
            to="ready" if found[1] == b"ready" else int(found[1]),
            status=int(found[2]),
        )
        del self.received[: found.end()]
        return answer
