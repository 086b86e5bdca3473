"""The compiled kernel: built at first use into the user's cache, then loaded once a process.

torch.utils.cpp_extension's loader is not used: it needs ninja and Python's headers, of which a library of torch operators needs
neither, and a build that is killed leaves its lock behind. Here the file's name tells all that it was made from, it appears
under that name whole or not at all, and the lock that saves others the same work is the system's, gone with its process.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from hf_cb import forks

_SOURCES = Path(__file__).parent / "csrc"
_TIMEOUT = 300.0  # seconds; a build takes twenty
_INSTALL = "install a C++20 compiler (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or set CXX to one"

_lock = threading.Lock()
forks.renewed_in_child(globals(), _lock=threading.Lock)
_loaded: list[Path] = []
_failed: list[BuildError] = []


class BuildError(Exception):
    """The kernel can't be compiled or loaded here. The message says why, and what to install."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self._told = False

    def is_news(self) -> bool:
        """Whether nobody has been told of it yet; True the first time."""
        told, self._told = self._told, True
        return not told


def load() -> Path:
    """Build the kernel if need be, load it, and return its file. Raises BuildError, the same one again after a failure."""
    if _loaded:  # without the lock, which is not to be had while another thread compiles
        return _loaded[0]
    with _lock:
        if _loaded:
            return _loaded[0]
        if _failed:
            raise _failed[0]
        try:
            path = _build()
            try:
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
            except OSError:  # a damaged file: once more from the source
                path.unlink()
                path = _build()
                torch.ops.load_library(str(path))  # type: ignore[no-untyped-call]
        except (BuildError, OSError, ValueError) as error:
            failure = error if isinstance(error, BuildError) else BuildError(f"the compiled kernel can't be used: {error}")
            _failed.append(failure)
            raise failure from error
        _loaded.append(path)
        return path


def is_loaded() -> bool:
    """Whether the kernels can be called, without building them."""
    return bool(_loaded)


def has_matrix_unit() -> bool:
    """Whether the processor has AMX, and the system lets programs use it."""
    return bool(getattr(torch.cpu, "_is_amx_tile_supported", bool)())


def _build() -> Path:
    """The library's file, which another process may have built."""
    compiler, compile_flags, link_flags = _toolchain()
    name = f"kernels-{_key([*compiler, *compile_flags, *link_flags])}.so"
    folder = _user_folder()
    if folder is not None and (folder / name).exists():
        return folder / name
    if folder is None or not _can_write(folder):
        folder = _temporary_folder()
    with _only_process(folder / f"{name}.lock"):
        if not (folder / name).exists():
            _compile([*compiler, *compile_flags], [*compiler, *link_flags], folder / name)
    return folder / name


def _compile(compile_command: list[str], link_command: list[str], path: Path) -> None:
    if shutil.which(compile_command[0]) is None:
        raise BuildError(f"there is no C++ compiler {compile_command[0]!r} to build its kernel with: {_INSTALL}")
    print(f"hf_cb: compiling its kernels, once, into {path.parent} (about 20 s)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as build, ThreadPoolExecutor() as pool:
        sources = sorted(_SOURCES.glob("*.cpp"))
        compiled, linked = [f"{build}/{source.stem}.o" for source in sources], f"{build}/kernels.so"
        list(pool.map(_run, ([*compile_command, "-c", str(s), "-o", o] for s, o in zip(sources, compiled, strict=True))))
        _run([*link_command, *compiled, "-Wl,--no-as-needed", "-ltorch_cpu", "-lc10", "-o", linked])
        with open(linked, "rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave the name with half of the file
        os.replace(linked, path)


def _run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"the C++ compiler failed on its kernel ({error}); {_INSTALL}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or ["it gave no message"]
        first = next((line for line in lines if "error" in line), lines[-1])
        raise BuildError(f"the C++ compiler {command[0]!r} failed on its kernel ({first.strip()}); {_INSTALL}")


def _toolchain() -> tuple[list[str], list[str], list[str]]:
    """The compiler, and its flags to compile and to link."""
    compiler = shlex.split(os.environ.get("CXX", "")) or [next(filter(shutil.which, ("g++", "c++", "clang++")), "g++")]
    root = Path(torch.__file__).parent
    includes = [f"-isystem{root / 'include'}", f"-isystem{root / 'include/torch/csrc/api/include'}"]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    compile_flags = shlex.split("-std=c++20 -O3 -march=native -ffp-contract=off -fopenmp -fPIC -fvisibility=hidden -w")
    # Linked without OpenMP, so that its symbols are those of the runtime that torch has loaded: two runtimes in a process would
    # have two pools of threads.
    return compiler, [*compile_flags, abi, *includes], ["-shared", f"-L{root / 'lib'}"]


def _key(flags: list[str]) -> str:
    """Changes with the source, torch, the compiler, its flags, and the processor that -march=native stands for."""
    digest = hashlib.sha256("\0".join([torch.__version__, *flags, platform.machine(), *_processor()]).encode())
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _processor() -> list[str]:
    """What the system says about the first processor's model and instruction sets."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return [platform.processor()]
    names = ("vendor_id", "cpu family", "model\t", "flags", "Features", "CPU part", "CPU implementer")
    return [next((line for line in lines if line.startswith(name)), "") for name in names]


def _user_folder() -> Path | None:
    """HF_CB_CACHE, or hf_cb in the user's cache; None for a user without a home."""
    if chosen := os.environ.get("HF_CB_CACHE"):
        return Path(chosen) / "kernels"
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hf_cb" / "kernels"
    except RuntimeError:
        return None


def _can_write(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@functools.cache
def _temporary_folder() -> Path:
    """A folder that lasts as long as this process."""
    folder = tempfile.mkdtemp(prefix="hf_cb-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@contextlib.contextmanager
def _only_process(path: Path) -> Iterator[None]:
    """Hold the lock file. The system frees it when its holder ends, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: two builds at once do the same work twice, and no harm
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
