"""`hf-cb top`: a live view of a server, from its /metrics."""

from __future__ import annotations

import argparse
import math
import time

from hf_cb.cli.arguments import Commands, add_api_key, add_command, seconds
from hf_cb.cli.http import DEFAULT_URL, Http
from hf_cb.cli.scrape import History, Scrape
from hf_cb.errors import InvalidArgumentError

_EXAMPLES = """\
  hf-cb top                                              the server on this machine
  hf-cb top http://10.0.0.5:8000 --api-key KEY
  hf-cb top --once                                       one picture, for a script or a report
"""
_TIMEOUT = 10.0  # seconds: a server that takes longer for its metrics is as good as away


def add_to(commands: Commands) -> None:
    """Make it one of the commands."""
    about = (
        "Watch a server live: batch slots, queue, KV cache, tokens per second, latencies of the last --window seconds,\n"
        "and how requests ended since its start. Ctrl-C leaves."
    )
    parser = add_command(commands, "top", "watch a server live", about, _EXAMPLES)
    parser.add_argument("url", metavar="URL", nargs="?", default=DEFAULT_URL, help=f"default: {DEFAULT_URL}")
    add_api_key(parser)
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="SECONDS", help="between two looks (default: 1)")
    parser.add_argument("--window", type=seconds, default=60.0, metavar="SECONDS", help="that latencies are of (default: 60)")
    parser.add_argument("--once", action="store_true", help="one picture, with latencies since the server's start")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Look until somebody leaves."""
    from rich.console import Console
    from rich.live import Live

    from hf_cb.cli.panel import picture

    console, http = Console(), Http(args.url, args.api_key, _TIMEOUT)
    history = History(args.window)
    if args.once:
        history.add(Scrape(-math.inf, {}))  # before the server's start: the latencies are those of all requests since
    history.add(_look(http))  # raises if there is nothing to look at; later on, that is only noted
    if args.once:
        time.sleep(args.interval)
        history.add(_look(http))
        console.print(picture(history, args.url, console.width))
        return 0
    try:
        with Live(console=console, screen=True, auto_refresh=False) as live:
            note = ""
            while True:
                live.update(picture(history, args.url, console.width, note), refresh=True)
                time.sleep(args.interval)
                try:
                    history.add(_look(http))
                    note = ""
                except (ConnectionError, InvalidArgumentError) as error:
                    note = f"{error}; trying again"
    except KeyboardInterrupt:
        return 0


def _look(http: Http) -> Scrape:
    return Scrape.parse(http.get("/metrics"), time.monotonic())
