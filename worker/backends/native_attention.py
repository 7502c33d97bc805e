"""Native operations for CPUs, from the C++ in cpu/native: their build, and paged attention by them.

The library is built once for a source, compiler, torch and CPU, whatever environment that torch is
in. It is kept in TORCHINDUCTOR_CACHE_DIR or the user's cache folder, which processes may share.
Loading it registers CPU kernels: of onequeue::paged_attention, which layers call (paged.py), of the
linear operations (linear_layers.py, amx_linear.py), and of onequeue::sample_filtered (sampler.py).
Without a compiler the torch backend is used.
"""

import argparse
import ctypes
import fcntl
import logging
import os
import platform
import shlex
import signal
import subprocess
import tempfile
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from batching.sequence import Batch
from worker import compilers
from worker.cgroups import lines_of
from worker.cores import affinity
from worker.error_classification import first_line
from worker.load_context import advance, report
from worker.model.attention.kv_cache import BLOCK, KVCache
from worker.model.attention.paged import AttentionBackend

log = logging.getLogger("onequeue.native_attention")

SOURCE_FOLDER = Path(__file__).parent / "cpu" / "native"
# From the slowest to compile to the fastest: the parts of the build get them in turn.
SOURCES = (
    "packed_linear", "attention", "experts_linear", "bf16_weight_linear", "int4_linear",
    "short_conv", "amx_linear", "state_space", "gated_delta_rule", "int8_linear", "lora",
    "sampling",
)  # fmt: skip
MAX_PARTS = 4  # a compiler takes 0.7 GB, and reads torch's headers as long as several sources
FLAGS = ("-fno-fast-math", "-ffp-contract=fast", "-Wno-psabi", "-g0")
LOG_INTERVAL_S = 20
NICE = 10  # of the compilers: the models have priority
NATIVE_DTYPES = (torch.float32, torch.bfloat16)


@cache
def load_native_ops() -> ctypes.CDLL:
    """Load the library; build it first if it is not there.

    Raise what the compiler or the loader raises.
    """
    return ctypes.CDLL(str(library_path(build=True)))


@cache
def has_compiler() -> bool:
    """Return whether this machine has the compiler of native operations. A build is found by
    the compiler's version, so without one none is used."""
    from torch._inductor import cpp_builder  # seconds to import

    try:
        cpp_builder.get_cpp_compiler()
    except RuntimeError:
        return False
    return True


def try_load_native_ops(build: bool) -> bool:
    """Load the library if it is built already, or if `build`; return whether it is loaded."""
    try:
        if not build and not library_path(build=False).exists():
            return False
        load_native_ops()
    except Exception as error:  # no compiler, or a library that does not load
        log.warning("no native operations: %.300s", first_line(error))
        return False
    return True


def build_command(program: str, argv: Sequence[str]) -> None:
    """Run `onequeue build`: print the library's path, or the reason and exit with 1."""
    argparse.ArgumentParser(program, description="Build the native operations.").parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        print(library_path(build=True))
    except Exception as error:  # no compiler
        raise SystemExit(f"{program}: {first_line(error)}") from None


# ── the library's file ──


def library_path(build: bool) -> Path:
    """Return the path of the library for this source, compiler, torch and CPU. With `build`, build
    the library if it is not there; it appears complete, and an interrupted build leaves nothing."""
    from torch._inductor import cpp_builder  # seconds to import

    version = cpp_builder.get_compiler_version_info(cpp_builder.get_cpp_compiler())
    source = "".join(file.read_text() for file in sorted(SOURCE_FOLDER.iterdir()))
    # other flags are those of torch's version; other machines may share the folder
    key = "\n".join((source, *FLAGS, version, torch.__version__, cpu_features()))
    path = library_folder() / f"onequeue-{sha256(key.encode()).hexdigest()}.so"
    if build and not path.exists():
        with _locked(path.parent):
            if not path.exists():  # another process may have built it
                _build(path)
    return path


def library_folder() -> Path:
    """Return TORCHINDUCTOR_CACHE_DIR if the operator has set it, else a cache folder of the user:
    torch's default is one of temporary files. It is used where the user's is not writable."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir, default_cache_dir

    folder = Path(cache_dir())
    if folder == Path(default_cache_dir()):
        with suppress(OSError, RuntimeError):  # RuntimeError: the user has no home
            users = Path.home() / ".cache" / "onequeue"
            users.mkdir(mode=0o700, parents=True, exist_ok=True)
            if os.access(users, os.W_OK | os.X_OK):
                return users
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time build in this folder. The lock ends with the process."""
    file = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
    finally:
        os.close(file)


def cpu_features() -> str:
    """Return the instruction set extensions of this CPU."""
    lines = lines_of("/proc/cpuinfo")
    named = (line for line in lines if line.lower().startswith(("flags", "features")))
    return next(named, platform.processor())


# ── its build ──


def _build(path: Path) -> None:
    """Compile as many parts at a time as there are cores, and link them."""
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions

    count = min(len(affinity(0)) or os.cpu_count() or 1, MAX_PARTS)
    with (
        compilers.build(),
        tempfile.TemporaryDirectory(prefix="onequeue-", dir=path.parent) as folder,
    ):

        def builder(name: str, files: list[str], compiles: bool) -> CppBuilder:
            options = CppTorchDeviceOptions(
                device_type="cpu", extra_flags=FLAGS, compile_only=compiles
            )
            return CppBuilder(name, files, options, folder)

        parts = []
        for number in range(count):
            file = Path(folder, f"part{number}.cpp")
            names = [SOURCE_FOLDER / f"{name}.cpp" for name in SOURCES[number::count]]
            file.write_text("".join(f'#include "{name}"\n' for name in names))
            parts.append(builder(file.stem, [str(file)], compiles=True))
        objects = [part.get_target_file_path() for part in parts]
        library = builder("library", objects, compiles=False)
        log.info("building native operations, once")
        report("native operations")
        started = time.monotonic()
        _run([part.get_command_line() for part in parts], folder, started)
        _run([library.get_command_line()], folder, started)
        os.replace(library.get_target_file_path(), path)
    log.info("native operations built seconds=%.0f", time.monotonic() - started)


def _run(commands: Sequence[str], folder: str, started: float) -> None:
    """Run commands at the same time. Raise RuntimeError if one fails; none goes on then."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            with open(Path(folder, f"{number}.log"), "wb") as output:
                process = subprocess.Popen(
                    ["nice", f"-n{NICE}", "env", f"TMPDIR={folder}", *shlex.split(command)],
                    stderr=output, cwd=folder, start_new_session=True,
                )  # fmt: skip
            running.append(process)
        for number, process in enumerate(running):
            while process.poll() is None:
                advance()
                try:
                    process.wait(LOG_INTERVAL_S)
                except subprocess.TimeoutExpired:
                    seconds = time.monotonic() - started
                    log.info("building native operations, %.0f s so far, once", seconds)
            if process.returncode:
                lines = Path(folder, f"{number}.log").read_text(errors="replace").splitlines()
                reason = next((line for line in lines if "error" in line), "")
                raise RuntimeError(f"the compiler returned {process.returncode}: {reason}")
    finally:
        for process in running:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class NativeMetadata(AttentionBackend):
    """Paged attention by the native operation, which holds the step's layout while it runs."""

    def __init__(self, cache: KVCache, batch: Batch) -> None:
        self.cache = cache
        self.positions = torch.tensor(batch.positions)
        spans: list[int] = []
        tables = array("i")
        for offset, (blocks, start, width) in zip(batch.offsets, batch.spans, strict=True):
            spans += (offset, width, start, len(tables))  # as begin_step in C++ reads them
            tables.extend(blocks[: (start + width - 1) // BLOCK + 1])
        self._spans = torch.tensor(spans).view(-1, 4)
        self._tables = torch.frombuffer(tables, dtype=torch.int32)

    def begin(self) -> None:
        cache = self.cache
        torch.ops.onequeue.begin_step(
            cache.keys, cache.values, cache.limits, self._spans, self._tables
        )

    def begin_layers(self, number: int) -> None:
        torch.ops.onequeue.begin_layers(number)

    def end(self) -> None:
        torch.ops.onequeue.end_step()

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None,
        layer: int, scale: float, window: int, softcap: float,
    ) -> Tensor:  # fmt: skip
        out: Tensor = torch.ops.onequeue.paged_attention(
            query, key, value, sinks, layer, scale, window, softcap
        )
        return out
