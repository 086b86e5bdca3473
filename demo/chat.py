"""A chat page for any number of people at once, on one model, with a live look at the engine.

python -m demo.chat    # then open http://127.0.0.1:7860, in several tabs
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch

import hf_cb
from demo import packaged_model
from demo.chat_answers import Answers
from demo.chat_page import CSS, build, theme
from demo.chat_panel import RECORDED_STEPS, Panel


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse(argv)
    model, tokenizer = packaged_model.load(args.model, getattr(torch, args.dtype))
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    name = os.path.basename(args.model.rstrip("/")) if args.model else packaged_model.NAME
    with hf_cb.continuous_batching(model, record_steps=RECORDED_STEPS, max_queue_size=args.max_queue_size) as engine:
        if engine.unsupported_reason:
            raise SystemExit(f"{name}: the engine cannot serve this model: {engine.unsupported_reason}")
        answers = Answers(engine, tokenizer)
        try:
            build(answers, Panel(engine), name).launch(
                server_name=args.host, server_port=args.port, css=CSS, theme=theme(), footer_links=[]
            )
        finally:
            answers.close()


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.chat", description=__doc__)
    parser.add_argument("--model", help="id or folder of a chat model (default: the packaged one)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="(%(default)s)")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen at; 0.0.0.0 for the network (%(default)s)")
    parser.add_argument("--port", type=int, default=7860, help="(%(default)s)")
    parser.add_argument("--max-queue-size", type=int, default=1000, help="the most messages that wait (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
