"""`hf-cb serve` as a program, with `bench` and `top` pointed at it, and SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import tiny_chat
from terminal import environment

from hf_cb.cli.http import Http
from hf_cb.cli.main import main

pytestmark = pytest.mark.timeout(120)  # a program that imports torch and loads a model


class Served:
    """A running `hf-cb serve`."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process = process
        self.url = url

    def stop(self) -> tuple[int, list[str]]:
        """Exit status after SIGTERM, and what it had still to say."""
        self.process.send_signal(signal.SIGTERM)
        said = self.process.communicate(timeout=60)[1]
        return self.process.returncode, said.splitlines()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    (tmp_path / "keys").write_text("secret\n")
    folder = tiny_chat.save(tmp_path / "tiny")
    options = ["--port", "0", "--api-key-file", str(tmp_path / "keys"), "--json-logs", "--max-batch-size", "4"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_cb.cli", "serve", f"small={folder}", *options],
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    with process:
        try:
            lines = []
            for line in process.stderr:
                lines.append(line)
                if ready := re.fullmatch(r"serving small on (http://127\.0\.0\.1:\d+)\n", line):
                    yield Served(process, ready[1])
                    break
            else:
                pytest.fail(f"it has ended: {lines}")
        finally:
            process.kill()


def test_bench_and_top_look_at_a_server_that_then_ends_well(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    key = ["--api-key", "secret"]
    assert (
        main(["bench", served.url, "--concurrency", "3", "--requests", "6", "--new-tokens", "8", "--prompt-tokens", "9", *key])
        == 0
    )
    assert f"small at {served.url}\n6 requests, 3 at a time" in capsys.readouterr().out
    assert main(["top", served.url, "--once", "--interval", "0.05", *key]) == 0
    picture = capsys.readouterr().out
    assert "0 of 4" in picture
    ended = sum(int(count) for count in re.findall(r"(?:stop|length) +(\d+)", picture))
    assert ended == 7  # with the one that warms up
    assert main(["top", served.url, "--once", "--api-key", "wrong"]) == 1
    event, *_ = Http(served.url, "secret").stream(
        "/v1/completions", {"model": "small", "prompt": "a", "stream": True, "max_tokens": 1}
    )
    assert event["object"] == "text_completion"
    status, said = served.stop()
    assert status == 0
    logs = [json.loads(line) for line in said if line.startswith("{")]
    assert len([line for line in logs if line["logger"] == "hf_cb.requests"]) == 8
    ids = {name: {line["request_id"] for line in logs if line["logger"] == name} for name in ("hf_cb.requests", "hf_cb.server")}
    assert ids["hf_cb.requests"] <= ids["hf_cb.server"]  # the same request has the same name in both
