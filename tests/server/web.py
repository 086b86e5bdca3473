"""Servers on free ports of this machine, in threads of their own, and clients for them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai

from hf_cb.engine import Engine
from hf_cb.server.models import ServedModel, load_model
from hf_cb.server.run import HttpServer
from hf_cb.server.settings import ServerSettings

MODEL = "tiny"
HELLO = [{"role": "user", "content": "Hello there"}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 24}
ENDLESS: dict[str, Any] = {"model": MODEL, "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
"""Goes on for longer than any test looks at it."""


@dataclass(frozen=True)
class Running:
    http: HttpServer
    models: Sequence[ServedModel]

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def engine(self) -> Engine:
        return self.models[0].engine

    @contextlib.contextmanager
    def client(self, **options: Any) -> Iterator[Any]:
        """OpenAI's own. Any: what tests look at in an answer may be None by its types."""
        with openai.OpenAI(**{**self.openai_options, **options}) as client:
            yield client

    @property
    def openai_options(self) -> dict[str, Any]:
        return {"base_url": f"{self.url}/v1", "api_key": "none", "max_retries": 0, "timeout": 20}

    def post(self, path: str, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", timeout=20, **options)

    def plain_text(self, prompt: str | list[dict[str, str]], max_new_tokens: int, **options: Any) -> str:
        """What the model's own generate answers."""
        model, tokenizer = self.models[0].model, self.models[0].tokenizer
        if isinstance(prompt, str):
            inputs = tokenizer(prompt, return_tensors="pt")
        else:
            inputs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        options = {"do_sample": False, **options}
        out = type(model).generate(model, **inputs, max_new_tokens=max_new_tokens, **options)
        return str(tokenizer.decode(out[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def tiny(folder: Path, name: str = MODEL, **options: Any) -> ServedModel:
    return load_model(str(folder), name, device="cpu", dtype="float32", **options)


@contextlib.contextmanager
def running(*models: ServedModel, metrics: Any = None, **settings: Any) -> Iterator[Running]:
    """Serve until the block is left; then drain, and close the models."""
    ready = threading.Event()
    http = HttpServer(models, ServerSettings(**{"port": 0, **settings}), metrics, lambda _: ready.set())
    thread = threading.Thread(target=http.serve_until_told)
    thread.start()
    try:
        assert ready.wait(10)
        yield Running(http, models)
    finally:
        http.handle_exit(0, None)
        thread.join(20)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.002)
