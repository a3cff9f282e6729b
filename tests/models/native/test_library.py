"""C files of ours: compiled once, found again, and missing without harm."""

from __future__ import annotations

import json
import logging
import os
import shutil
import stat
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from verbatim.cli import doctor_machine
from verbatim.models import native
from verbatim.models.native import ownership
from waiting import wait_until as until

pytestmark = pytest.mark.realtime
SUM = """
int omp_get_thread_num(void);
int add(int a, int b) { return a + b; }
int threads(int count) {
    int highest = 0;
    #pragma omp parallel for reduction(max: highest)
    for (int i = 0; i < count; i++) { int mine = omp_get_thread_num(); if (mine > highest) highest = mine; }
    return highest + 1;
}
"""

needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="this machine has no C compiler"
)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(native.SWITCH, raising=False)
    for found in (native.library_folder, native.build):  # the same text is the same library for the whole process
        found.cache_clear()
    yield
    for found in (native.library_folder, native.build):
        found.cache_clear()


def write(folder: Path, text: str) -> native.CSource:
    source = folder / "sum.c"
    source.write_text(text)
    return native.CSource.read(source)


def libraries(folder: Path, cache: str = "cache") -> list[Path]:
    return list((folder / cache / "verbatim" / "native").glob("*"))


@needs_compiler
def test_a_function_is_called_and_the_library_is_made_once(tmp_path):
    source = write(tmp_path, SUM)
    found = native.library(source)
    assert found is not None
    assert found.add(40, 2) == 42
    (kept,) = libraries(tmp_path)
    before = kept.stat().st_mtime_ns
    native.build.cache_clear()
    again = native.library(source)
    assert again is not None
    assert again.add(1, 2) == 3
    assert [path.stat().st_mtime_ns for path in libraries(tmp_path)] == [before]


@needs_compiler
def test_another_text_is_another_library(tmp_path):
    assert native.library(write(tmp_path, SUM)).add(1, 1) == 2
    native.build.cache_clear()
    assert native.library(write(tmp_path, SUM.replace("a + b", "a - b"))).add(1, 1) == 0
    assert len(libraries(tmp_path)) == 2


@needs_compiler
def test_a_file_that_changes_after_it_was_read_is_compiled_as_it_was(tmp_path):
    """As by an upgrade while a process runs: modules that are imported already fill in the structures of the old text.
    The library of the old text in the cache has its functions too."""
    old = write(tmp_path, SUM)
    new = write(tmp_path, SUM.replace("a + b", "a - b"))
    assert native.library(old).add(5, 3) == 8
    assert native.library(new).add(5, 3) == 2
    native.build.cache_clear()
    assert native.library(write(tmp_path, SUM)).add(5, 3) == 8
    assert len(libraries(tmp_path)) == 2


@needs_compiler
def test_a_library_is_whole_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    done, fsync, replace = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: (done.append("fsync"), fsync(file)))
    monkeypatch.setattr(os, "replace", lambda *paths: (done.append("replace"), replace(*paths)))
    assert native.library(write(tmp_path, SUM)).add(1, 2) == 3
    assert done == ["fsync", "replace"]


@needs_compiler
@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: whole[: len(whole) // 2],
        lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]),
        lambda whole: b"",
    ],
    ids=["half of it", "one bit", "empty"],
)
def test_a_damaged_library_is_made_anew(tmp_path, caplog, monkeypatch, damage):
    made = made_elsewhere(tmp_path, monkeypatch, SUM)
    kept, whole = native.library_folder() / made.name, made.read_bytes()
    kept.write_bytes(damage(whole))
    kept.chmod(0o700)
    with caplog.at_level(logging.WARNING):
        assert native.library(write(tmp_path, SUM)).add(40, 2) == 42
    assert f"{kept} is damaged; compiling it again" in caplog.text
    assert [path.read_bytes() for path in libraries(tmp_path)] == [whole]
    caplog.clear()
    native.build.cache_clear()
    assert native.library(write(tmp_path, SUM)).add(40, 2) == 42
    assert not caplog.text


def made_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """The library of a text in another cache: another file than the one that a test has loaded."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
        before = set(libraries(tmp_path, "elsewhere"))
        for remembered in (native.library_folder, native.build):
            remembered.cache_clear()
        native.library(write(tmp_path, text))
        (made,) = set(libraries(tmp_path, "elsewhere")) - before
    for remembered in (native.library_folder, native.build):
        remembered.cache_clear()
    return made


def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """A whole library under the name of another source: its digest is right, and it does something else."""
    right, evil = (made_elsewhere(tmp_path, monkeypatch, source) for source in (text, text.replace("a + b", "666")))
    name, digest = right.stem.rpartition("-")[0], evil.stem.rpartition("-")[2]
    return evil.rename(native.library_folder() / f"{name}-{digest}.so")


@needs_compiler
def test_a_library_that_was_made_from_something_else_is_not_loaded(tmp_path, monkeypatch, caplog):
    target = planted(tmp_path, monkeypatch, SUM)
    with caplog.at_level(logging.WARNING):
        assert native.library(write(tmp_path, SUM)).add(40, 2) == 42
    assert f"{target} is built from another source; compiling it again" in caplog.text
    assert not target.exists()


@needs_compiler
@pytest.mark.parametrize("how", ["group", "all", "link"])
def test_a_library_that_others_can_write_is_not_loaded(tmp_path, caplog, monkeypatch, how):
    source = write(tmp_path, SUM)
    assert native.library(source).add(40, 2) == 42
    native.build.cache_clear()
    (kept,) = libraries(tmp_path)
    monkeypatch.setattr(ownership, "_is_own_group", lambda gid: False)
    if how == "link":
        kept.rename(tmp_path / "elsewhere.so")
        kept.symlink_to(tmp_path / "elsewhere.so")
    else:
        kept.chmod(0o720 if how == "group" else 0o702)
    with caplog.at_level(logging.WARNING):
        assert native.library(source).add(40, 2) == 42
    assert f"{kept} is not yours alone; compiling it again" in caplog.text
    assert stat.S_IMODE(kept.lstat().st_mode) == 0o700 and not kept.is_symlink()


@needs_compiler
@pytest.mark.parametrize("step", ["cache/verbatim/native", "cache/verbatim", "cache"])
def test_a_folder_that_others_can_write_is_not_used(tmp_path, monkeypatch, caplog, step):
    target = planted(tmp_path, monkeypatch, SUM)
    (tmp_path / step).chmod(0o777)
    native.library_folder.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert native.library(write(tmp_path, SUM)).add(40, 2) == 42
    assert f"others may write to {tmp_path / step} (mode 0777)" in caplog.text
    assert libraries(tmp_path) == [target], "nothing was loaded from there, or written there"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_folder_or_a_file_of_another_user_is_not_used(tmp_path):
    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    assert "belongs to the user nobody" in ownership.why_not_own(tmp_path / "theirs")
    (tmp_path / "theirs" / "mine").mkdir()
    assert "theirs belongs to the user nobody" in ownership.why_not_own(tmp_path / "theirs" / "mine")
    (tmp_path / "file").write_bytes(b"x")
    assert ownership.read_own(tmp_path / "file") == b"x"
    os.chown(tmp_path / "file", 65534, 65534)
    assert ownership.read_own(tmp_path / "file") is None


def test_a_folder_of_ones_own_below_a_shared_one_is_fine(tmp_path):
    """As below /tmp, where each may rename only what is his own."""
    (tmp_path / "shared" / "mine").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o1777)
    assert ownership.why_not_own(tmp_path / "shared" / "mine") is None
    (tmp_path / "shared").chmod(0o777)
    assert "others may write" in ownership.why_not_own(tmp_path / "shared" / "mine")


@needs_compiler
def test_another_compiler_of_the_same_version_makes_another_library(tmp_path, monkeypatch):
    real = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    for name in ("one", "two"):
        compiler = tmp_path / name / "cc"
        compiler.parent.mkdir()
        compiler.write_text(f'#!/bin/sh\nexec {real} "$@"\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        native.build.cache_clear()
        assert native.library(write(tmp_path, SUM)).add(1, 1) == 2
    assert len(libraries(tmp_path)) == 2


def test_a_compiler_that_does_not_end_is_tried_once_and_told_as_that(tmp_path, monkeypatch, caplog):
    tried, popen = [], subprocess.Popen
    script = tmp_path / "cc"
    script.write_text("#!/bin/sh\nif [ $1 = --version ]; then exit; fi\nsleep 1234567 & wait\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setattr(native, "_PATIENCE", 0.5)
    monkeypatch.setattr(native, "_HUNG", set())
    monkeypatch.setattr(subprocess, "Popen", lambda command, **how: tried.append(command) or popen(command, **how))
    with caplog.at_level(logging.WARNING):
        for text in (SUM, SUM.replace("a + b", "a - b")):
            found = native.build(write(tmp_path, text))
            assert found.functions is None and found.reason == f"{script} took more than 0.5 s"
    assert len([command for command in tried if "--version" not in command]) <= 1, "no other options are tried"
    assert "could not be compiled" not in caplog.text
    until(lambda: not any("1234567" in (process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])))


def test_a_compiler_that_does_not_say_its_version_is_told_too(tmp_path, monkeypatch, capsys):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\nsleep 1000000\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setattr(native, "_PATIENCE", 0.1)
    monkeypatch.setattr(native, "_HUNG", set())
    assert native.build(write(tmp_path, SUM)).reason == f"{compiler} took more than 0.1 s"
    doctor_machine.report(model="", as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert (found["compiler"], found["version"]) == (str(compiler), None)


@needs_compiler
def test_a_library_that_another_process_removes_meanwhile_is_made_with_the_same_options(tmp_path, caplog, monkeypatch):
    name = made_elsewhere(tmp_path, monkeypatch, SUM).stem.rpartition("-")[0]
    expected = native.build(write(tmp_path, SUM)).options
    native.build.cache_clear()
    (kept,) = libraries(tmp_path)
    kept.unlink()
    (native.library_folder() / f"{name}-{'0' * 24}.so").write_text("listed, and then not there")
    monkeypatch.setattr(native, "read_own", lambda path: path.unlink() or path.read_bytes())
    with caplog.at_level(logging.WARNING):
        found = native.build(write(tmp_path, SUM))
    assert found.functions.add(40, 2) == 42
    assert found.options == expected != "" and not caplog.text


@needs_compiler
def test_headers_of_the_package_are_found_and_are_part_of_what_was_read(tmp_path):
    text = '#include "vectors.h"\nint add(int a, int b) {\n#ifdef INLINE\n return a + b;\n#endif\n return a - b;\n}\n'
    source = write(tmp_path, text)
    assert native.library(source).add(1, 2) == 3
    other = native.CSource(source.name, (source.files[0], ("vectors.h", b"/* nothing */\n")))
    assert native.library(other).add(1, 2) == -1


@needs_compiler
@pytest.mark.skipif(os.uname().sysname != "Linux", reason="OpenMP of torch is found on Linux")
def test_threads_are_those_of_torch(tmp_path):
    found = native.library(write(tmp_path, SUM))
    before = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert found.threads(64) == count
    finally:
        torch.set_num_threads(before)


def test_without_a_compiler_there_is_no_library(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert native.library(write(tmp_path, SUM)) is None
    assert native.build(write(tmp_path, SUM)).reason == "no C compiler was found (cc, gcc, clang, or what CC names)"


def test_the_switch_turns_everything_off(tmp_path, monkeypatch):
    monkeypatch.setenv(native.SWITCH, "0")
    found = native.build(write(tmp_path, SUM))
    assert found.functions is None and found.is_off and found.reason == "VERBATIM_NATIVE = 0"


@needs_compiler
def test_a_file_that_does_not_compile_is_told(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        assert native.library(write(tmp_path, "int add(int a { return a; }")) is None
    assert "sum.c could not be compiled" in caplog.text
    assert "error" in caplog.text


@needs_compiler
def test_a_library_without_threads_is_told(tmp_path, monkeypatch, caplog):
    """As with a compiler whose OpenMP has other names than the one that torch has loaded."""
    monkeypatch.setattr(native, "_VARIANTS", (("-DOTHER",), ()))
    text = "#ifdef OTHER\nint verbatim_missing(void);\nint add(int a, int b) { return verbatim_missing(); }\n#else\n"
    source = write(tmp_path, f"{text}int add(int a, int b) {{ return a + b; }}\n#endif\n")
    with caplog.at_level(logging.WARNING):
        assert native.library(source).add(1, 2) == 3
    assert "the options (none), which is slower" in caplog.text
    assert "verbatim_missing" in caplog.text


@needs_compiler
def test_a_cache_that_cannot_be_written_is_passed_over(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    native.library_folder.cache_clear()
    assert native.library(write(tmp_path, SUM)).add(2, 2) == 4


@needs_compiler
def test_the_variable_for_the_compiler_may_have_arguments(tmp_path, monkeypatch):
    """As CC="ccache gcc": the first word is the program, and the others are its arguments."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    monkeypatch.setenv("CC", f"env MARK=1 {compiler} -DEXTRA=5")
    assert native.library(write(tmp_path, SUM.replace("a + b", "a + b + EXTRA"))).add(1, 1) == 7


@needs_compiler
@pytest.mark.parametrize("name", ["", "no-such-compiler -O1", "'gcc"])
def test_a_variable_that_names_no_compiler_is_passed_over(tmp_path, monkeypatch, name):
    monkeypatch.setenv("CC", name)
    assert native.library(write(tmp_path, SUM)).add(1, 1) == 2
