"""The command line as a whole: help, exit statuses, missing extras, and what `serve` makes of its options."""

from __future__ import annotations

import argparse
import builtins
import dataclasses
import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
import tiny_chat

import hf_cb
from hf_cb.cli import main as cli
from hf_cb.cli import serve
from hf_cb.cli.main import main
from hf_cb.config import CBConfig
from hf_cb.errors import InvalidArgumentError
from hf_cb.server.settings import ServerSettings

pytestmark = pytest.mark.timeout(20)

COMMANDS = ("run", "serve", "bench", "top", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_every_example_in_the_help_is_a_command_line(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    examples = re.findall(r"^  (?:.* \| )?hf-cb (.*?)(?:   .*)?$", capsys.readouterr().out, re.MULTILINE)
    assert examples
    for example in examples:
        words = [part.strip('"') for part in re.findall(r'"[^"]*"|\S+', example)]
        args = cli._parser().parse_args(words)  # exits, if it is none
        assert args.command in COMMANDS


@pytest.mark.parametrize(
    ("command", "package", "extra"),
    [
        (["run", "x"], "rich", "cli"),
        (["top"], "rich", "cli"),
        (["serve", "x"], "uvicorn", "server"),
        (["serve", "x", "--port", "0"], "prometheus_client", "server"),
    ],
)
def test_a_missing_extra_is_a_line_with_the_command_that_gets_it(
    command: list[str], package: str, extra: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    ours = {"hf_cb.server.run", "hf_cb.metrics.collector", "hf_cb.cli.panel"}
    for name in sys.modules.keys() & ours:  # imported anew, each takes its own place in its package: to be put back, too
        monkeypatch.setattr(name, sys.modules[name])
    for name in [name for name in sys.modules if name.partition(".")[0] == package or name in ours]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"hf-cb: {command[0]} needs {package}")
    assert line.endswith(f": in the checkout of hf_cb, pip install '.[{extra}]'")


@pytest.mark.parametrize(
    ("error", "status"), [(KeyboardInterrupt(), 130), (InvalidArgumentError("a: takes\n  b"), 1), (OSError("no room"), 1)]
)
def test_exit_statuses(
    error: BaseException, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("hf_cb.cli.top._look", fail)
    assert main(["top"]) == status
    said = capsys.readouterr().err
    assert said in ("", "hf-cb: a: takes b\n", "hf-cb: no room\n")
    assert bool(said) == (status == 1)
    monkeypatch.setattr("hf_cb.cli.top._look", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a bug keeps its traceback
        main(["top"])


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["bench", "x", "--concurrency", "0"], "argument --concurrency: takes an integer >= 1; got '0'"),
        (["top", "--interval", "nan"], "argument --interval: takes seconds > 0; got 'nan'"),
        (["run", "x", "--dtype", "float12"], "argument --dtype: invalid choice: 'float12'"),
        (["run"], "the following arguments are required: MODEL"),
    ],
)
def test_wrong_command_lines(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(command)
    assert left.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["run", "./nowhere"], "./nowhere: there is no such folder"),
        (["bench", "x", "--device", "nonsense"], "--device: "),
        (["serve", "x", "--host", "0.0.0.0"], "--host: 0.0.0.0 can be reached from outside"),
        (["serve", "x", "--api-key-file", "/nowhere"], "[Errno 2] No such file"),
        (["serve", "a/m", "b/m"], "MODEL: two have the name 'm'"),
        (["serve", "x", "--port", "70000"], "--port: takes 0 to 65535"),
        (["serve", "x", "--port", "0", "--policy", "none"], "--policy: takes fcfs, priority, fair"),
        (["serve", "x", "--port", "0", "--kv-cache-memory", "lots"], "--kv-cache-memory: takes bytes"),
        (["run", "x", "--temperature", "-1"], "--temperature: takes"),
        (["run", "."], ".: there is no config.json in this folder"),
        (["serve", "=x"], "MODEL: takes an id on the Hugging Face Hub, or a folder, or NAME=MODEL; got '=x'"),
        (["serve", "x="], "MODEL: takes an id on the Hugging Face Hub, or a folder, or NAME=MODEL; got 'x='"),
        (["top", "http://127.0.0.1:99999"], "URL: takes the address of a server"),
        (["top", "http://[::1"], "URL: takes the address of a server"),
        (["top", "--api-key", "a\nb"], "--api-key: takes printable ASCII"),
    ],
)
def test_what_a_user_can_mend_is_one_line(command: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-cb: " + message)


def test_a_port_that_is_taken_is_told_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no/model", "--port", str(port)]) == 1
    assert capsys.readouterr().err == f"hf-cb: --port: {port} on 127.0.0.1 is in use; --port takes another one\n"


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert (left.value.code, capsys.readouterr().out) == (0, f"hf-cb {hf_cb.__version__}\n")


def test_every_setting_of_a_server_has_an_option() -> None:
    fields = {field.name for field in dataclasses.fields(ServerSettings)}
    assert fields == {*serve.SERVER, "api_keys", "allow_without_keys"}
    assert serve.ENGINE.keys() <= {field.name for field in dataclasses.fields(CBConfig)}


def parsed(*words: str) -> argparse.Namespace:
    args: argparse.Namespace = cli._parser().parse_args(["serve", "m", *words])
    return args


def test_settings_come_from_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_CB_API_KEYS", raising=False)
    assert serve.settings_of(parsed()) == ServerSettings()
    (tmp_path / "keys").write_text("one\n\n two \n")
    monkeypatch.setenv("HF_CB_API_KEYS", "three, four,")
    words = ["--api-key", "zero", "--api-key-file", str(tmp_path / "keys"), "--max-n", "3", "--read-timeout", "2.5"]
    settings = serve.settings_of(parsed(*words))
    assert sorted(settings.api_keys) == ["four", "one", "three", "two", "zero"]
    assert settings == dataclasses.replace(ServerSettings(), api_keys=settings.api_keys, max_n=3, read_timeout=2.5)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"k\xe9y\n", "api_keys: takes strings of printable ASCII"), (b"\n", r"api_key_file: .* has no key in it")],
)
def test_key_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, message: str) -> None:
    monkeypatch.delenv("HF_CB_API_KEYS", raising=False)
    (tmp_path / "keys").write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message):
        serve.settings_of(parsed("--api-key-file", str(tmp_path / "keys")))


@pytest.mark.timeout(60)
def test_serve_hands_over_models_settings_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny_chat.save(tmp_path / "tiny")
    given: dict[str, Any] = {}

    def take(models: Any, settings: Any, *, metrics: Any, on_ready: Any) -> None:
        on_ready("http://here")
        text = metrics()[0].decode()
        given.update(names=[model.name for model in models], settings=settings, text=text)
        given["sizes"] = [model.engine.config.max_batch_size for model in models]
        models[0].engine.submit([1, 2], max_new_tokens=1).result()
        models[0].close()

    monkeypatch.setattr("hf_cb.server.run.serve", take)
    models = [str(folder), f"other={folder}"]
    assert main(["serve", *models, "--port", "0", "--max-batch-size", "5", "--device", "cpu", "--json-logs", "--trace"]) == 0
    assert given["names"] == ["tiny", "other"]
    assert (given["settings"].port, given["sizes"]) == (0, [5, 5])
    assert {f'hf_cb_batch_slots{{model="{name}"}} 5.0' for name in ("tiny", "other")} <= set(given["text"].splitlines())
    said = capsys.readouterr().err
    assert "serving tiny, other on http://here" in said
    assert '"message": "request ended: ' in said
