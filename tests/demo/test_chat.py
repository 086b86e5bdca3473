"""The chat page as programs use it: gradio's own client, over HTTP."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import chatting
import pytest
import tiny_chat
import torch
from crowd import held
from gradio_client import Client

import hf_cb
from demo import packaged_model
from demo.chat_answers import ChatError, Sampling, in_words
from demo.chat_page import NO_ANSWER, conversation_of, seed_of

pytestmark = [
    pytest.mark.timeout(120),  # importing gradio and beginning a server take their time on a busy machine
    # gradio's server and client leave sockets and event loops to the collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # gradio of pandas
]

USERS = 16
SAMPLING = Sampling(max_new_tokens=160, temperature=0)
LONG = Sampling(max_new_tokens=1500, temperature=0)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return packaged_model.load(tiny_chat.save(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def page(loaded) -> Iterator[chatting.Served]:
    with chatting.served(*loaded, SAMPLING, num_blocks=4000) as page:
        yield page


@pytest.fixture(scope="module")
def clients(page) -> Iterator[list[Client]]:
    with ThreadPoolExecutor(USERS) as threads:
        clients = list(threads.map(lambda _: Client(page.url, verbose=False), range(USERS)))
        yield clients
        list(threads.map(Client.close, clients))


@pytest.fixture
def client(page) -> Iterator[Client]:
    """A user who has said nothing yet: gradio keeps what was said for each client."""
    client = Client(page.url, verbose=False)
    yield client
    client.close()


def ask(client: Client, message: str, sampling: Sampling = SAMPLING, seed: str = "", system: str = ""):
    values = (sampling.max_new_tokens, sampling.temperature, sampling.top_p, sampling.repetition_penalty, seed)
    return client.submit(message, system, *values, api_name="/chat")


def message(user: int) -> str:
    return f"User {user} wants to hear about the number {user * user}."


def plain(loaded, text: str, system: str = "", seed: int | None = None, **options) -> str:
    """What plain generate() answers to this message alone."""
    model, tokenizer = loaded
    chat = conversation_of(system, [], text)
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    if seed is not None:
        torch.manual_seed(seed)
    output = type(model).generate(model, **inputs, **options)
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def test_many_users_at_once_get_their_own_answers_and_none_waits_for_another(page, loaded, clients):
    times: list[list[float]] = [[]] * USERS

    def read(user: int, job) -> str:
        times[user] = [time.perf_counter() for _ in job]
        return job.result()

    with ThreadPoolExecutor(USERS) as threads:
        with held(page.engine, USERS):
            jobs = [ask(client, message(user)) for user, client in enumerate(clients)]
            texts = [threads.submit(read, user, job) for user, job in enumerate(jobs)]
        answers = [text.result(timeout=60) for text in texts]
    options = {"max_new_tokens": SAMPLING.max_new_tokens, "do_sample": False}
    assert answers == [plain(loaded, message(user), **options) for user in range(USERS)]
    assert len(set(answers)) == USERS
    assert max(len(step.rows) for step in page.engine.steps()) >= USERS
    assert max(moments[0] for moments in times) < min(moments[-1] for moments in times)  # all streams move at once
    chatting.wait_until(page.is_idle, "blocks are held")


def test_the_controls_count(page, loaded, client):
    sampling = Sampling(max_new_tokens=12, temperature=0.7, top_p=0.8, repetition_penalty=1.3)
    answer = ask(client, "Hello", sampling, seed="11", system="Be brief.").result(timeout=60)
    options = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 0, "repetition_penalty": 1.3}
    assert answer == plain(loaded, "Hello", "Be brief.", 11, max_new_tokens=12, **options)


def test_stop_frees_the_blocks(page, client):
    job = ask(client, "Go on for ever.", LONG)
    chatting.wait_until(lambda: len(job.outputs()) > 2, "no answer")
    before = page.num_cancelled
    job.cancel()
    chatting.wait_until(lambda: page.num_cancelled == before + 1, "not cancelled")
    chatting.wait_until(page.is_idle, "blocks are held")
    assert len(job.outputs()[-1]) > 0


def test_stop_ends_one_that_still_waits(page, client):
    with page.engine.pause():
        job = ask(client, "Go on for ever.", LONG)
        chatting.wait_until(lambda: page.engine.stats().waiting == 1, "never submitted")
        before = page.num_cancelled
        job.cancel()
        chatting.wait_until(lambda: page.num_cancelled == before + 1, "not cancelled")
    chatting.wait_until(page.is_idle, "blocks are held")


@pytest.mark.parametrize(
    ("text", "seed", "words"),
    [("much too long " * 1500, "", "has become too long"), ("Hello", "seven", "seed takes a whole number")],
)
def test_errors_come_in_words(page, client, text, seed, words):
    refusal = ask(client, text, seed=seed).result(timeout=60)
    assert words in refusal["content"]
    assert refusal["metadata"]["title"] == NO_ANSWER
    chatting.wait_until(page.is_idle, "blocks are held")


def test_a_full_queue_is_told_in_words(loaded):
    model, tokenizer = loaded
    with chatting.served(copy.deepcopy(model), tokenizer, SAMPLING, num_blocks=200, max_queue_size=0, max_batch_size=1) as page:
        client = Client(page.url, verbose=False)
        job = ask(client, "Hello", LONG)
        chatting.wait_until(lambda: page.engine.stats().running == 1, "never ran")
        assert "Too many people are waiting" in str(ask(client, "Hello").result(timeout=60))
        job.cancel()
        chatting.wait_until(page.is_idle, "blocks are held")
        client.close()


def test_every_error_has_words():
    for name in hf_cb.__all__:
        error = getattr(hf_cb, name)
        if error is hf_cb.PipelineItemsError:  # of pipelines, which the chat has nothing to do with
            continue
        if isinstance(error, type) and issubclass(error, hf_cb.HFCBError):
            assert in_words(error("because")).endswith(("because", "because)"))


def test_conversations_have_the_form_of_chat_templates():
    history = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "text", "text": "b"}], "metadata": None},
    ]
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert conversation_of("  ", history, "c") == turns
    no_answer = {"role": "assistant", "content": "too long", "metadata": {"title": NO_ANSWER}}
    half = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    assert conversation_of("", [*history, half[0], no_answer], "c") == turns
    assert conversation_of("", [*history, *half, no_answer], "c") == turns
    assert conversation_of("s", history, "c") == [{"role": "system", "content": "s"}, *turns]


def test_a_seed_is_a_whole_number_or_none():
    assert seed_of(" ") is None
    assert seed_of("7") == 7
    with pytest.raises(ChatError, match="whole number"):
        seed_of("7.5")
