"""The C library: what it is built from, which compiler and folder it uses, and when it is rebuilt."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hgrn_vision.kernels import cpu_build
from hgrn_vision.kernels.cpu_build import BuildError


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "hgrn_vision"


def test_it_is_built_once_for_the_same_code_flags_compiler_and_cpu(folder, tmp_path, monkeypatch):
    source, header, builds = tmp_path / "a.c", tmp_path / "a.h", []
    source.write_text("int a;")
    header.write_text("")

    def build(work, sources, flags, compiler, runtime):
        builds.append(list(sources))
        (work / "kernels.so").write_bytes(b"library %d" % len(builds))
        return work / "kernels.so"

    monkeypatch.setattr(cpu_build, "_build", build)
    monkeypatch.setattr(cpu_build, "compiler", lambda: (["cc"], "1.0"))
    monkeypatch.setattr(cpu_build, "_openmp_runtime", lambda: None)
    monkeypatch.setattr(cpu_build, "_cpu", lambda: "a cpu")
    monkeypatch.setattr(cpu_build.ctypes, "CDLL", lambda path: Path(path).read_bytes())

    def found(flags=("-O2",)):
        return cpu_build.find_or_build([source], [header], flags)

    assert found() == found() == b"library 1" and builds == [[source]]
    changes = [
        lambda: header.write_text("int b;"),
        lambda: source.write_text("int c;"),
        lambda: monkeypatch.setattr(cpu_build, "compiler", lambda: (["cc"], "2.0")),
        lambda: monkeypatch.setattr(cpu_build, "compiler", lambda: (["gcc"], "2.0")),
        lambda: monkeypatch.setattr(cpu_build, "_cpu", lambda: "another cpu"),
        lambda: monkeypatch.setattr(cpu_build, "_openmp_runtime", lambda: "libgomp.so"),
    ]
    for count, change in enumerate(changes, start=2):
        change()
        assert found() == found() == b"library %d" % count
    assert found(("-O3",)) == b"library 8" and len(builds) == 8
    # a file that does not match its name is removed, and the others are kept
    for path in folder.iterdir():
        path.write_bytes(b"broken")
    assert found() == b"library 9" and len(list(folder.iterdir())) == 8


def test_a_folder_that_others_may_write_to_is_closed(folder):
    folder.mkdir(mode=0o777)
    folder.chmod(0o777)
    assert cpu_build.cache_folder() == folder and folder.stat().st_mode & 0o777 == 0o700


def test_a_cache_folder_that_is_not_absolute_does_not_count(tmp_path, monkeypatch):
    """As the standard for XDG_CACHE_HOME says; the folder would depend on where a program is started."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cpu_build.cache_folder() == tmp_path / ".cache" / "hgrn_vision"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cpu_build.cache_folder() == tmp_path / ".cache" / "hgrn_vision"


def test_a_user_without_a_home_has_no_cache_folder(monkeypatch):
    def nobody():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nobody)
    assert cpu_build.cache_folder() is None


def test_a_library_that_cannot_be_kept_is_used_where_it_is(tmp_path, monkeypatch):
    library = tmp_path / "kernels.so"
    library.write_bytes(b"library")
    assert cpu_build._keep(library, None, "key") == library
    assert cpu_build._keep(library, tmp_path / "nowhere", "key") == library
    (tmp_path / "cache").mkdir()
    kept = cpu_build._keep(library, tmp_path / "cache", "key")
    assert kept.read_bytes() == b"library" and list((tmp_path / "cache").iterdir()) == [kept]


@pytest.mark.parametrize(
    "asked, there, command",
    [
        ("ccache 'my cc' -m64", ["cc"], ["ccache", "my cc", "-m64"]),
        ("", ["clang", "gcc"], ["gcc"]),
        ("", ["clang"], ["clang"]),
        ("", ["cc", "gcc"], ["cc"]),
    ],
)
def test_the_compiler_is_the_one_asked_for_or_a_usual_one(asked, there, command, monkeypatch):
    monkeypatch.setenv("CC", asked)
    monkeypatch.setattr(cpu_build.shutil, "which", lambda name: name if name in there else None)
    monkeypatch.setattr(cpu_build, "_run", lambda words: f"version of {words}")
    assert cpu_build.compiler() == (command, f"version of {[*command, '--version']}")


def build(monkeypatch, tmp_path, works, runtime="libgomp.so"):
    """The compile commands of a build in which only those succeed for which `works` is true."""
    tried = []

    def run(command):
        tried.append(command)
        if not works(command):
            raise BuildError(f"number {len(tried)} failed")
        return ""

    monkeypatch.setattr(cpu_build, "_run", run)
    sources = [Path("a.c"), Path("b.c")]
    try:
        assert cpu_build._build(tmp_path, sources, ["-O2"], ["cc"], runtime) == tmp_path / "kernels.so"
    except BuildError as error:
        return tried, str(error)
    return tried, None


def test_it_is_built_for_this_cpu_with_openmp_or_with_less(monkeypatch, tmp_path):
    tried, _ = build(monkeypatch, tmp_path, lambda command: True)
    start, objects = ["cc", "-O2", "-march=native", "-fopenmp", "-c"], [str(tmp_path / "a.o"), str(tmp_path / "b.o")]
    assert tried == [
        [*start, "a.c", "-o", objects[0]],
        [*start, "b.c", "-o", objects[1]],
        [
            "cc",
            "-shared",
            "-o",
            str(tmp_path / "kernels.so"),
            *objects,
            "-lm",
            "libgomp.so",
            "-Wl,--no-undefined",
            "-lc",
        ],
    ]
    # without a runtime that can be linked, files are compiled without OpenMP too
    tried, _ = build(monkeypatch, tmp_path, lambda command: "libgomp.so" not in command)
    assert len(tried) == 6 and not any("-fopenmp" in command or "libgomp.so" in command for command in tried[3:])
    assert all("-march=native" in command for command in tried[3:5])
    tried, _ = build(monkeypatch, tmp_path, lambda command: "-march=native" not in command)
    assert [command[2] for command in tried] == ["-march=native", "-march=native", "-c", "-c", "-o"]
    # without a runtime there is nothing to try it with
    assert len(build(monkeypatch, tmp_path, lambda command: True, runtime=None)[0]) == 3
    # the message of the first attempt says most
    tried, reason = build(monkeypatch, tmp_path, lambda command: False)
    assert len(tried) == 3 and reason == "number 1 failed"


def test_a_compilers_error_is_one_line(monkeypatch):
    said = "In file included from a.c:1:\na.h:3: Error: no such thing\nmore\n"
    done = SimpleNamespace(returncode=4, stderr=said, stdout="")
    monkeypatch.setattr(subprocess, "run", lambda *args, **options: done)
    with pytest.raises(BuildError, match="^C compiler cc failed with status 4: a.h:3: Error: no such thing$"):
        cpu_build._run(["cc"])
    done.stderr = "killed\n"
    with pytest.raises(BuildError, match="status 4: killed$"):
        cpu_build._run(["cc"])
    done.stderr = ""
    with pytest.raises(BuildError, match="status 4: no message$"):
        cpu_build._run(["cc"])


def test_a_compiler_that_hangs_or_writes_no_text_is_an_error_too(monkeypatch):
    program = r"import sys; sys.stderr.buffer.write(b'a.c: error: \xe9\n'); sys.exit(3)"
    with pytest.raises(BuildError, match="failed with status 3: a.c: error: \N{REPLACEMENT CHARACTER}$"):
        cpu_build._run([sys.executable, "-c", program])
    limits = []

    def hang(command, timeout, **options):
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(subprocess, "run", hang)
    with pytest.raises(BuildError, match="^C compiler cc: Command .* timed out after 300 seconds$"):
        cpu_build._run(["cc"])
    assert limits == [300]


def test_torchs_own_openmp_goes_before_others(monkeypatch):
    own = f"{Path(torch.__file__).parent}/lib/libgomp-a34b.so.1"
    maps = "7f-8f r-xp 0 08:01 12   {}\n"

    def mapped(*paths):
        text = "".join(maps.format(path) for path in paths)
        monkeypatch.setattr(Path, "read_text", lambda self: text)
        return cpu_build._openmp_runtime()

    assert mapped("/lib/libgomp.so.1", own, "/lib/libm.so.6") == own
    assert mapped("/opt/libiomp5.so") == "/opt/libiomp5.so" and mapped("/x/libomp.so.5") == "/x/libomp.so.5"
    assert mapped("/lib/libgomp_notes.txt", "/lib/libcomp.so", "[heap]") is None


@pytest.mark.skipif(not os.path.exists("/proc/cpuinfo"), reason="needs /proc")
def test_the_cpu_is_what_native_code_depends_on(monkeypatch):
    first = "processor: 0\nmodel name: A\nflags: avx avx2\ncpu MHz: 1000\n"
    monkeypatch.setattr(Path, "read_text", lambda self: first)
    same = cpu_build._cpu()
    monkeypatch.setattr(Path, "read_text", lambda self: first.replace("1000", "2000") + first)
    assert cpu_build._cpu() == same
    monkeypatch.setattr(Path, "read_text", lambda self: first.replace("avx2", "avx512f"))
    assert cpu_build._cpu() != same
