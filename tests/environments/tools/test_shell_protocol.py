"""The words between the sandbox and its shell, without a shell."""

import re

from verbatim.environments.tools.isolation import SandboxLimits
from verbatim.environments.tools.sandbox import ShellOutput, ShellProtocol


def token_of(protocol: ShellProtocol) -> bytes:
    return re.search(rb"\\0(sandbox-\w{16}) 1 ", protocol.line("true", 1))[1]


def test_an_answer_is_what_comes_before_its_mark_however_it_is_cut_into_pieces():
    protocol = ShellProtocol()
    written = b"a\0b\n\0" + token_of(protocol) + b" 7 2\0rest"
    for byte in written[:-5]:
        protocol.received.append(byte)
        assert protocol.answer() is None
    protocol.received += written[-5:]
    assert protocol.answer() == ShellOutput(output=b"a\0b\n", to=7, status=2)
    assert protocol.received == b"rest"


def test_answers_come_one_by_one():
    protocol = ShellProtocol()
    token = token_of(protocol)
    protocol.received += b"\0" + token + b" ready 0\0x\0" + token + b" 1 0\0"
    assert [protocol.answer(), protocol.answer(), protocol.answer()] == [
        ShellOutput(output=b"", to="ready", status=0),
        ShellOutput(output=b"x", to=1, status=0),
        None,
    ]


def test_the_mark_of_another_shell_is_output():
    protocol = ShellProtocol()
    protocol.received += b"\0" + token_of(ShellProtocol()) + b" 1 0\0"
    assert protocol.answer() is None


def test_everything_is_killed_only_by_process_1_of_a_namespace():
    """`kill -1` as any other process would end the user's session."""
    inside = ShellProtocol().init_script(SandboxLimits(), has_namespaces=True).splitlines()
    (stop,) = [line for line in inside if "kill" in line]
    assert stop == "(( $$ == 1 )) || exit; trap 'while kill -KILL -1; do :; done' TERM"
    assert "kill" not in ShellProtocol().init_script(SandboxLimits(), has_namespaces=False)


def test_limits_are_set_before_the_first_shell_starts():
    limits = SandboxLimits(cpu_seconds=3, memory_mb=5, disk_mb=7, open_files=11, processes=13)
    script = ShellProtocol().init_script(limits, has_namespaces=True)
    assert "ulimit -t 3 -d 5120 -f 7168 -n 11 -u 13 || exit" in script
    assert script.index("ulimit") < script.index("bash --noprofile")


def test_a_forged_mark_with_a_number_of_any_length_is_output():
    protocol = ShellProtocol()
    token = token_of(protocol)
    protocol.received += b"\0" + token + b" 1 " + b"9" * 5000 + b"\0" + b"\0" + token + b" " + b"1" * 5000 + b" 0\0"
    assert protocol.answer() is None
    protocol.received += b"\0" + token + b" 1 0\0"
    assert protocol.answer().to == 1
