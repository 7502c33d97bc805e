"""The native library: built once, by compilers that run together, and shared by content."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._inductor import cpp_builder
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from tests.threads import run_together
from worker.backends import native_attention as native
from worker.backends.native_attention import library_folder, library_path

# Writes its output, and a line to `built` beside it. BEFORE comes in between.
COMPILER = """\
#!/bin/sh
here=$(dirname "$0")
case "$*" in *-o*) ;; *) echo g++ 1.0; exit;; esac
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo half > "$out"
BEFORE
echo $(basename "$out") >> "$here/built"
echo whole > "$out"
"""


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a compiler whose library goes to the folder `cache` beside it."""
    script = tmp_path / "compiler"
    write_compiler(script, "")
    version = tmp_path / "version"
    version.write_text("g++ 1.0")
    monkeypatch.setattr(cpp_builder, "get_compiler_version_info", lambda _: version.read_text())
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "affinity", lambda thread: {0, 1})
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: str(script))
    return script


def write_compiler(script: Path, before: str) -> None:
    script.write_text(COMPILER.replace("BEFORE", before))
    script.chmod(0o755)


def test_the_library_is_linked_from_parts_and_built_once(compiler: Path) -> None:
    run_together(*[partial(library_path, True)] * 2)
    path = library_path(build=False)
    assert sorted((compiler.parent / "built").read_text().split()) == [
        "library.so", "part0.o", "part1.o",
    ]  # fmt: skip
    assert list(path.parent.iterdir()) == [path]
    assert path.read_text() == "whole\n"


def test_a_failed_build_ends_all_compilers_and_leaves_nothing(compiler: Path) -> None:
    pids = compiler.parent / "pids"
    write_compiler(
        compiler,
        f"""case "$out" in
        *part1.o) mkfifo "{pids}.wait"; echo $$ > "{pids}"; read line < "{pids}.wait";;
        *) while ! [ -s "{pids}" ]; do sleep 0.01; done; echo "x.cpp:1: error: no" >&2; exit 7;;
        esac""",
    )
    with pytest.raises(RuntimeError, match=r"returned 7: x.cpp:1: error: no"):
        library_path(build=True)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pids.read_text()), 0)
    assert list(library_folder().iterdir()) == []


def test_the_library_depends_on_contents_not_on_folders(
    compiler: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path, copied = library_path(build=False), tmp_path / "elsewhere"
    shutil.copytree(native.SOURCE_FOLDER, copied)
    monkeypatch.setattr(native, "SOURCE_FOLDER", copied)
    assert library_path(build=False) == path
    paths = {path}
    (copied / "linear.h").write_text("// changed")
    paths.add(library_path(build=False))
    (compiler.parent / "version").write_text("g++ 1.1")
    paths.add(library_path(build=False))
    monkeypatch.setattr(torch, "__version__", "0.1")
    paths.add(library_path(build=False))
    monkeypatch.setattr(native, "cpu_features", lambda: "flags: avx")
    paths.add(library_path(build=False))
    assert len(paths) == 5


def test_every_source_is_compiled() -> None:
    assert sorted(native.SOURCES) == sorted(f.stem for f in native.SOURCE_FOLDER.glob("*.cpp"))


def test_without_a_setting_the_library_is_in_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for _ in range(2):  # torch has set the variable in the second turn
        assert library_folder() == tmp_path / ".cache" / "onequeue"
    assert library_folder().stat().st_mode & 0o777 == 0o700


def test_where_the_users_cache_is_not_writable_torchs_folder_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", "/proc/none")
    assert library_folder() == Path(default_cache_dir())
