"""External peers: engines that run in a process and an environment of their own, with the model loaded once for all rounds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_environments
from benchmarks.outcome import Outcome, Row
from benchmarks.workload import Workload

_DRIVERS = Path(__file__).parent / "drivers"
_KV_GIB = 2  # room for all requests of the workload at once, in every precision
_LOG_LINES = 20
_STOP_SECONDS = 20


@dataclass(frozen=True, slots=True)
class Driver:
    """`script` under the interpreter of `environment`; `settings` go to it beside those that all have.

    `preload`: a library in the environment that its process starts with, where it is there.
    """

    environment: str
    script: Path
    settings: Mapping[str, Any]
    preload: str = ""


_OPENMP = "lib/libiomp5.so"  # vLLM's manual: preload it "for best performance"; its wheel brings it

DRIVERS: Mapping[str, Driver] = {
    "vllm": Driver("vllm", _DRIVERS / "run_vllm.py", {"compile": True}, _OPENMP),
    "vllm_eager": Driver("vllm", _DRIVERS / "run_vllm.py", {"compile": False}, _OPENMP),
    "vllm_gpu": Driver("vllm_gpu", _DRIVERS / "run_vllm.py", {"compile": True, "gpu_memory": 0.4}),  # others need some, too
    "openvino": Driver("openvino", _DRIVERS / "run_openvino.py", {}),
}


class ExternalPeer:
    """A driver's process while the body of `with` runs. `pid` is its process, for what it takes of the machine."""

    def __init__(self, name: str, model: str | os.PathLike[str], dtype: str, threads: int, max_tokens: int) -> None:
        self.name, driver = name, DRIVERS[name]
        settings = {
            "model": str(model),
            "dtype": dtype,
            "threads": threads,
            "max_tokens": max_tokens,
            "kv_gib": _KV_GIB,
            "exports": str(peer_environments.folder("openvino-models")),
            **driver.settings,
        }
        python = peer_environments.python(driver.environment)
        self._command = [str(python), str(driver.script), json.dumps(settings)]
        self._environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._environment.pop("PYTHONPATH", None)  # it is this environment's
        if driver.preload and (library := peer_environments.folder(driver.environment) / driver.preload).is_file():
            self._environment["LD_PRELOAD"] = str(library)

    def __enter__(self) -> ExternalPeer:
        self._log = tempfile.TemporaryFile("w+", errors="replace")
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
            start_new_session=True,  # so that what the engine starts can be ended with it
        )
        self.pid = self._process.pid
        try:
            self._notes = self._read()["ready"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(BrokenPipeError):  # what was not sent to one that has died
            self._process.stdin.close()  # the driver's loop ends
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            self._process.wait()
        self._process.stdout.close()
        self._log.close()

    def run(self, workload: Workload, progress: Callable[[int], object], concurrency: int) -> Outcome:
        """As the peers of `peers.PEERS`; the wall time is the driver's own, from the first sending to the last token."""
        requests = [asdict(item) for item in workload.items]
        with suppress(BrokenPipeError):  # reading tells why
            self._process.stdin.write(json.dumps({"requests": requests, "concurrency": concurrency}) + "\n")
            self._process.stdin.flush()
        while "rows" not in (message := self._read()):
            progress(message["progress"])
        items = {item.index: item for item in workload.items}
        rows = tuple(
            Row(items[row["index"]], row["sent_at"], tuple(row["tokens"]), tuple(row["times"])) for row in message["rows"]
        )
        return Outcome(rows, message["wall_seconds"], message["steps"], notes=self._notes)

    def _read(self) -> dict[str, Any]:
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            tail = "".join(self._log.readlines()[-_LOG_LINES:])
            raise RuntimeError(f"{self.name} ended with {self._process.returncode}; the end of its log:\n{tail}")
        return json.loads(line)
