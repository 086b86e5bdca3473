"""`hf-cb top`: what it reckons from recorded metrics, and how it looks, narrow and wide."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Iterator

import fake_server
import pytest
import recorded
from rich.console import Console
from terminal import CTRL_C, Terminal

from hf_cb.cli.main import main
from hf_cb.cli.panel import picture, sparkline
from hf_cb.cli.scrape import Between, History, Scrape, quantile
from hf_cb.errors import InvalidArgumentError

pytestmark = pytest.mark.timeout(20)

EARLIER, LATER = recorded.text(0), recorded.text(1)
MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture
def history() -> History:
    history = History(60)
    history.add(Scrape.parse(EARLIER, 100.0))
    history.add(Scrape.parse(LATER, 112.0))
    return history


def drawn(history: History, width: int, note: str = "") -> list[str]:
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    console.print(picture(history, "http://here:8000", width, note))
    return console.file.getvalue().splitlines()


def row(lines: list[str], name: str) -> str:
    """The first line of the first model that has the figure `name`, from there on."""
    return next(line[line.index(name) :] for line in lines if name in line)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
def test_every_figure_is_there_at_any_width(history: History, width: int) -> None:
    lines = drawn(history, width, "what went wrong")
    assert max(map(len, lines)) <= width
    assert [line for line in lines if "…" in line and "native" not in line] == []
    for figure in ("16 of 16", "21.2% of 400", "8 waiting", "2 of 256", "output", "first token", "length", "what went wrong"):
        assert any(figure in line for line in lines), figure
    assert sum(MODEL in line for line in lines) == 1


def test_figures(history: History) -> None:
    lines, between = drawn(history, 120), history.window()
    before, after = (
        float(text.split(f'hf_cb_generation_tokens_total{{model="{MODEL}"}} ')[1].split()[0]) for text in (EARLIER, LATER)
    )
    assert between.rate(MODEL, "generation_tokens_total") == (after - before) / 12
    assert row(lines, "output").split()[1] == f"{(after - before) / 12:.1f}"
    assert row(lines, "length").split()[1:3] == [
        "6",
        f"{between.rate(MODEL, 'request_success_total', finished_reason='length'):.1f}/s",
    ]
    assert row(lines, "native:").rstrip(" │") == "native: 2 x argument position_ids"
    for name, metric in (("first token", "time_to_first_token_seconds"), ("next token", "inter_token_latency_seconds")):
        p50 = between.quantile(MODEL, metric, 0.5)
        assert p50 is not None
        shown = f"{p50:.2f} s" if p50 >= 1 else f"{1e3 * p50:.0f} ms"
        assert shown in row(lines, name)


def test_narrow_pictures_stand_below_each_other(history: History) -> None:
    def columns(width: int) -> int:
        first = drawn(history, width)
        return sum(name in next(line for line in first if "tokens/s" in line) for name in ("tokens/s", "latency", "ended"))

    assert [columns(width) for width in (60, 80, 120)] == [1, 2, 3]
    assert len(drawn(history, 60)) > len(drawn(history, 80)) > len(drawn(history, 120))


def test_before_anything_was_measured(history: History) -> None:
    first = History(60)
    first.add(history.latest)
    lines = drawn(first, 120)
    assert row(lines, "first token").split()[2:4] == ["-", "-"]
    assert row(lines, "output").split()[1] == "0.0"


def test_quantiles_as_prometheus_reckons_them() -> None:
    cumulative = {1.0: 2.0, 2.0: 6.0, 4.0: 6.0, math.inf: 8.0}
    expected = {0.0: 0.0, 0.125: 0.5, 0.25: 1.0, 0.5: 1.5, 0.75: 2.0, 0.9: 4.0, 1.0: 4.0}
    assert {q: quantile(cumulative, q) for q in expected} == expected
    assert quantile({1.0: 0.0, math.inf: 0.0}, 0.5) is None
    assert quantile({}, 0.5) is None


def test_a_server_that_was_restarted_counts_from_zero(history: History) -> None:
    backwards = Between(history.latest, history.window().before)
    assert backwards.rise(MODEL, "generation_tokens_total") == history.window().before.value(MODEL, "generation_tokens_total")


def test_a_history_goes_no_further_back_than_its_window() -> None:
    history = History(10)
    for at in range(0, 100, 4):
        history.add(Scrape.parse(EARLIER, float(at)))
    assert history.window().after.at - history.window().before.at == 12  # the oldest that spans it
    assert len(history.rates(MODEL, "generation_tokens_total")) == 3


@pytest.mark.parametrize(
    ("values", "line"),
    [((), "    "), ((0, 0), "    "), ((1, 2, 4, 8), "▁▂▄█"), ((5, 0.001, 0), " █▁ "), ((9, 9, 1, 1, 1, 1), "████")],
)
def test_sparklines(values: tuple[float, ...], line: str) -> None:
    assert sparkline(values, 4) == line


@pytest.mark.parametrize("text", ["", "up 1\n", 'hf_cb_x{model="m" 1\n'])
def test_what_is_not_our_metrics(text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^URL: /metrics "):
        Scrape.parse(text, 0.0)


@pytest.fixture
def url() -> Iterator[str]:
    """Answers with the two recordings in turn, for who has the key."""
    texts = itertools.cycle((EARLIER, LATER))

    def answer(path: str, headers: dict[str, str], body: bytes) -> fake_server.Answer:
        if headers.get("authorization") != "Bearer secret":
            return 401, '{"error": {"message": "a valid API key is needed"}}'
        return (200, next(texts)) if path == "/metrics" else (404, "")

    with fake_server.serving(answer) as url:
        yield url


def test_once(url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["top", url, "--api-key", "secret", "--once", "--interval", "0.01"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert row(lines, "slots").split("█")[-1].startswith(" 16 of 16")
    p50 = Between(Scrape(-math.inf, {}), Scrape.parse(LATER, 0.0)).quantile(MODEL, "time_to_first_token_seconds", 0.5)
    assert row(lines, "first token").startswith(f"first token    {p50:.2f} s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["{url}", "--api-key", "wrong"],
            "{url}/metrics: 401 a valid API key is needed; --api-key or $HF_CB_API_KEY gives a key",
        ),
        (["{url}/elsewhere", "--api-key", "secret"], "{url}/elsewhere/metrics: 404 Not Found"),
        (["http://127.0.0.1:9"], "http://127.0.0.1:9: can't be reached"),
        (["127.0.0.1:9"], "URL: takes the address of a server, such as http://127.0.0.1:8000; got '127.0.0.1:9'"),
    ],
)
def test_errors_are_one_line_that_says_what_to_do(
    url: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["top", *(argument.format(url=url) for argument in arguments)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("hf-cb: " + message.format(url=url))


@pytest.mark.timeout(120)  # a program that imports torch
def test_live_until_ctrl_c(url: str) -> None:
    with Terminal("-m", "hf_cb.cli", "top", url, "--api-key", "secret", "--interval", "0.05") as terminal:
        for _ in range(3):  # pictures
            terminal.wait_for("hf-cb top")
        terminal.press(CTRL_C)
        assert terminal.wait_for_end() == 0
        assert "Traceback" not in terminal.shown
        assert terminal.shown.endswith("\x1b[?25h\x1b[?1049l")  # the cursor is back, and the screen from before
