"""The chat page as people use it: headless Chromium, one tab per user, the packaged model."""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import chatting
import pytest
from playwright.sync_api import Browser, Error, Page, expect, sync_playwright

from demo import packaged_model
from demo.chat_answers import Sampling
from demo.chat_page import SYSTEM

pytestmark = [
    pytest.mark.timeout(300),  # sixteen tabs, a server and a model on as few as two cores
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # gradio of pandas
]

FRUITS = ("apple", "banana", "cherry", "grape", "lemon", "mango", "orange", "peach")
FRUITS += ("pear", "plum", "melon", "kiwi", "fig", "date", "papaya", "apricot")
SAMPLING = Sampling(max_new_tokens=64, temperature=0)
PATIENCE = 60_000  # milliseconds


@pytest.fixture(scope="module")
def page() -> Iterator[chatting.Served]:
    model, tokenizer = packaged_model.load()
    with chatting.served(model, tokenizer, SAMPLING) as page:
        yield page


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    found = (shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome", "chrome"))
    path = os.environ.get("CHROMIUM") or next(filter(None, found), None)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox", "--disable-gpu"])
        except Error as error:
            pytest.skip(
                f"no Chromium to run (set CHROMIUM to one, or: playwright install chromium): {str(error).splitlines()[0]}"
            )
        yield browser
        browser.close()


@pytest.fixture
def tabs(browser, page):
    """Opens tabs, each of a user of its own; all are closed at the end."""
    contexts = []

    def open_tab(width: int = 1400, height: int = 900) -> Page:
        contexts.append(browser.new_context(viewport={"width": width, "height": height}))
        tab = contexts[-1].new_page()
        tab.goto(page.url, timeout=PATIENCE)
        expect(tab.locator("#message textarea")).to_be_visible(timeout=PATIENCE)
        return tab

    yield open_tab
    for context in contexts:
        context.close()
    chatting.wait_until(page.is_idle, "blocks are held")


def send(tab: Page, text: str) -> None:
    field = tab.locator("#message textarea")
    field.fill(text)
    field.press("Enter")


def answer(tab: Page) -> str:
    """What stands on the page as the bot's latest answer."""
    found = tab.locator("#chat .bot.message")
    return found.last.inner_text() if found.count() else ""


def stop(tab: Page):
    return tab.locator("button.stop-button")


def wait(tab: Page, condition, what: str) -> None:
    """Let the browsers go on until the condition holds."""
    end = time.monotonic() + PATIENCE / 1000
    while not condition():
        assert time.monotonic() < end, what
        tab.wait_for_timeout(20)


def letters(text: str) -> str:
    """What of a text is the same on a page as in Markdown."""
    return re.sub(r"[^a-z]", "", text.lower())


_WATCH = """() => {
    window.seen = [];
    new MutationObserver(() => {
        const answers = document.querySelectorAll('#chat .bot.message');
        if (answers.length) window.seen.push([Date.now(), answers[answers.length - 1].innerText]);
    }).observe(document.querySelector('#chat'), {childList: true, characterData: true, subtree: true});
}"""


@pytest.mark.parametrize("users", [2, pytest.param(16, marks=pytest.mark.soak)])
def test_answers_stream_side_by_side_and_go_to_who_asked(page, tabs, users):
    asked = [f"Write a short story about the {fruit}." for fruit in FRUITS[:users]]
    opened = [tabs(*((420, 900) if user % 2 else (1400, 900))) for user in range(users)]
    with page.engine.pause():  # so that all begin together, however long the clicks take
        for tab, text in zip(opened, asked, strict=True):
            tab.evaluate(_WATCH)
            send(tab, text)
        wait(opened[0], lambda: page.engine.stats().waiting == users, "not all have come")
    for tab in opened:
        expect(tab.locator("#message .submit-button")).to_be_visible(timeout=PATIENCE)
    _picture(opened[:2], f"{users}")
    assert max(len(step.rows) for step in page.engine.steps()) >= users
    times = []
    for tab, expected in zip(opened, map(letters, page.answers_to(asked, SYSTEM)), strict=True):
        assert letters(answer(tab)) == expected
        seen = [(when, letters(text)) for when, text in tab.evaluate("window.seen")]
        assert {text for _, text in seen if not expected.startswith(text)} <= {"loadingcontent"}
        parts = [when for when, text in seen if text and expected.startswith(text)]
        assert len({text for _, text in seen}) > 5, "the answer did not come piece by piece"
        times.append(parts)
    assert len({letters(answer(tab)) for tab in opened}) == users
    assert max(parts[0] for parts in times) < min(parts[-1] for parts in times)  # all streams move at once


def _picture(opened: list[Page], name: str) -> None:
    """For people to look at; CHAT_PICTURES says where."""
    for tab in opened if "CHAT_PICTURES" in os.environ else ():
        size = tab.viewport_size["width"]
        tab.screenshot(path=Path(os.environ["CHAT_PICTURES"], f"{name}-{size}.png"), full_page=True)


def test_the_stop_button_frees_the_blocks(page, tabs):
    tab = tabs()
    _set_longest(tab, 2000)
    send(tab, "Write a very long story about a lighthouse, with many chapters.")
    wait(tab, lambda: len(answer(tab)) > 40, "no answer")
    assert page.engine.stats().blocks_used > 0
    before = page.num_cancelled
    stop(tab).click()
    wait(tab, lambda: page.num_cancelled == before + 1 and page.is_idle(), "blocks are held")
    assert len(answer(tab)) > 40
    send(tab, "What is 2 + 2?")  # the tab goes on
    wait(tab, lambda: tab.locator("#chat .bot.message").count() == 2 and page.is_idle(), "no second answer")


def test_a_closed_tab_frees_the_blocks(page, tabs):
    tab, other = tabs(), tabs()
    _set_longest(tab, 2000)
    send(tab, "Write a very long story about a lighthouse, with many chapters.")
    wait(tab, lambda: len(answer(tab)) > 40, "no answer")
    before = page.num_cancelled
    tab.close()
    wait(other, lambda: page.num_cancelled == before + 1 and page.is_idle(), "blocks are held")


def test_a_tab_that_is_closed_while_it_waits_is_forgotten(page, tabs):
    tab, other = tabs(), tabs()
    before = page.num_cancelled
    with page.engine.pause():
        send(tab, "Write a story.")
        wait(tab, lambda: page.engine.stats().waiting == 1, "never came")
        tab.close()
        wait(other, lambda: page.num_cancelled == before + 1, "not cancelled")


def test_errors_are_shown_in_words(page, tabs):
    tab = tabs()
    send(tab, "much too long " * 4000)
    expect(tab.get_by_text("has become too long for the model")).to_be_visible(timeout=PATIENCE)
    send(tab, "What is 2 + 2?")  # the tab goes on, and what was too long is forgotten
    wait(tab, lambda: letters(answer(tab)) == letters(page.answers_to(["What is 2 + 2?"], SYSTEM)[0]), "no answer")


def test_the_panel_is_alive(page, tabs):
    tab = tabs()
    _set_longest(tab, 2000)
    expect(tab.locator("[data-figure=running]")).to_have_text("0", timeout=PATIENCE)
    send(tab, "Write a very long story about a lighthouse, with many chapters.")
    expect(tab.locator("[data-figure=running]")).to_have_text("1", timeout=PATIENCE)
    expect(tab.locator("[data-figure='tokens/s']")).not_to_have_text("0.0", timeout=PATIENCE)
    expect(tab.locator("#panel svg rect.cb-decode").last).to_be_attached(timeout=PATIENCE)
    stop(tab).click()
    expect(tab.locator("[data-figure=running]")).to_have_text("0", timeout=PATIENCE)


def _set_longest(tab: Page, tokens: int) -> None:
    tab.get_by_text("System prompt and sampling").click()
    field = tab.get_by_label("number input for Longest answer, in tokens")
    field.fill(str(tokens))
    field.press("Tab")
