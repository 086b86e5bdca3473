"""Building the kernel: once for all processes and threads, and what happens where it can't be built."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from steps import make_spec

from hf_cb.attention.backend import choose_attention_backend
from hf_cb.attention.native import NativeCPUBackend
from hf_cb.kernels import extension

pytestmark = pytest.mark.timeout(240)  # most of it a C++ compiler on a busy machine
ROOT = Path(extension.__file__).parents[2]
CALLS = len([*(ROOT / "hf_cb/kernels/csrc").glob("*.cpp")]) + 1  # of the compiler: one for each source, and to link


@pytest.fixture
def built() -> Path:
    """The real library, from the user's cache."""
    return extension.load()


@pytest.fixture
def cache(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, in a process that seems to have loaded nothing."""
    monkeypatch.setattr(extension, "_loaded", [])
    monkeypatch.setattr(extension, "_failed", [])
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "kernels"


@pytest.fixture
def compiler(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A quick compiler, which gives what was built before, and notes each call in the file returned."""
    script, calls = tmp_path / "quick-c++", tmp_path / "calls"
    script.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nsleep 0.3\nfor last; do :; done\ncp {built} "$last"\n')
    script.chmod(0o755)
    monkeypatch.setenv("CXX", str(script))
    return calls


def start(code: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, *(("-c", code) if code else ("-m", "hf_cb.kernels"))]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_command_builds_and_tells_where(cache: Path, compiler: Path) -> None:
    first = start()
    out, err = first.communicate()
    assert first.returncode == 0, err
    (library,) = cache.glob("*.so")
    assert out.strip() == str(library)
    assert err == f"hf_cb: compiling its kernels, once, into {cache} (about 20 s)\n"
    assert start().communicate() == (out, "")


def test_two_processes_build_once(cache: Path, compiler: Path) -> None:
    results = [process.communicate() for process in [start(), start()]]
    assert results[0][0] == results[1][0] != ""
    assert len(compiler.read_text().splitlines()) == CALLS
    assert sorted(path.suffix for path in cache.iterdir()) == [".lock", ".so"]


def test_threads_build_once(cache: Path, compiler: Path) -> None:
    process = start(
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from hf_cb.kernels.extension import load\n"
        "pool = ThreadPoolExecutor(4)\n"
        "print(*{future.result() for future in [pool.submit(load) for _ in range(4)]})"
    )
    out, err = process.communicate()
    assert out.split() == [str(path) for path in cache.glob("*.so")], err
    assert len(compiler.read_text().splitlines()) == CALLS


def test_a_build_that_is_killed_leaves_no_lock_and_no_half_library(cache: Path, compiler: Path) -> None:
    process = start()
    while not compiler.exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list(cache.glob("*.so"))
    out, _ = start().communicate()
    assert Path(out.strip()).exists()


def test_importing_builds_nothing(cache: Path) -> None:
    process = start("import hf_cb, hf_cb.attention.native")
    assert process.communicate() == ("", "")
    assert not cache.exists()


def test_an_unwritable_cache_is_replaced_for_the_process(
    cache: Path, compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_CB_CACHE", str(tmp_path / "file"))
    process = start("from hf_cb.kernels.extension import load\nprint(load().exists(), load())")
    out, err = process.communicate()
    exists, path = out.split()
    assert exists == "True", err
    assert not Path(path).exists()  # gone with the process


def test_what_it_is_made_from_names_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [extension._key(["-O3"]), extension._key(["-O3"]), extension._key(["-O2"])]
    monkeypatch.setattr(extension, "_processor", lambda: ["another"])
    keys.append(extension._key(["-O3"]))
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("compiler", "reason"),
    [
        ("no-such-compiler", "there is no C++ compiler 'no-such-compiler' to build its kernel with: install a C"),
        ("false", "the C++ compiler 'false' failed on its kernel (it gave no message); install a C"),
        ("sh -c 'echo line; echo fatal error: no header >&2; exit 1'", "(fatal error: no header); install a C"),
    ],
)
def test_without_a_kernel_the_torch_path_is_chosen_with_one_warning(
    cache: Path, monkeypatch: pytest.MonkeyPatch, compiler: str, reason: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    with pytest.warns(RuntimeWarning, match="^hf_cb runs without its kernels, several times slower: .*apt install g") as caught:
        chosen, told = choose_attention_backend([make_spec(), make_spec(window=3)])
    assert chosen.name == "torch_grouped"
    assert reason in told
    assert reason in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert NativeCPUBackend().why_not(make_spec()) is not None
        assert choose_attention_backend([make_spec()])[1] == told
    assert not [name for name in os.listdir(cache) if not name.endswith(".lock")]
