"""The page: a chat on the left, the engine's live panel on the right; one above the other in a narrow window."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import gradio as gr

from demo.chat_answers import Answers, ChatError, Message, Sampling
from demo.chat_panel import CSS as PANEL_CSS
from demo.chat_panel import Panel

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
NO_ANSWER = "No answer"
_EXAMPLES = ("What is gravity?", "Write a short story about a lighthouse.", "Give me three ideas for dinner.")
_REFRESH = 1.0  # seconds between two looks at the panel

CSS = (
    """
footer { display: none !important; }
.cb-page { align-items: stretch; flex-wrap: wrap; }
#message { border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg); }
#message .input-container { align-items: center; }
#chat .example { border: 1px solid var(--border-color-primary); border-radius: var(--radius-lg); }
#message textarea { min-height: 44px; padding-top: 11px; }
.cb-head h1 { margin: 0; }
@media (min-width: 900px) { .cb-side { position: sticky; top: 16px; align-self: flex-start; } }
"""
    + PANEL_CSS
)


def theme() -> gr.themes.Base:
    """Fonts of the user's system: nothing is fetched from elsewhere."""
    return gr.themes.Soft(font=["system-ui", "sans-serif"], font_mono=["ui-monospace", "monospace"])


def build(answers: Answers, panel: Panel, model_name: str, defaults: Sampling = Sampling()) -> gr.Blocks:  # noqa: B008 - frozen
    """The page, not yet launched: that takes `CSS` and `theme()`. `defaults`: what the controls begin with."""
    with gr.Blocks(title=f"{model_name} · hf_cb", analytics_enabled=False, fill_width=True, fill_height=True) as page:
        gr.Markdown(
            f"# {model_name}\nEverybody on this page shares one model: all answers are computed in one batch.",
            elem_classes="cb-head",
        )
        with gr.Row(elem_classes="cb-page"):
            with gr.Column(scale=3, min_width=340):
                _chat(answers, defaults)
            with gr.Column(scale=2, min_width=340, elem_classes="cb-side"):
                live = gr.HTML(panel.html(), elem_id="panel")
        # Without the queue: one plain request a second, that holds no connection.
        ticks = gr.Timer(_REFRESH)
        ticks.tick(panel.html, outputs=live, queue=False, show_progress="hidden", api_visibility="private")

        def leave(request: gr.Request) -> None:
            answers.leave(str(request.session_hash))

        page.unload(leave)
    return page.queue(default_concurrency_limit=None)  # how many run at once is the engine's business


def _chat(answers: Answers, defaults: Sampling) -> gr.ChatInterface:
    async def respond(
        message: str,
        history: Sequence[dict[str, Any]],
        system: str,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        repetition_penalty: float,
        seed: str,
        request: gr.Request,
    ) -> AsyncIterator[Any]:
        conversation = conversation_of(system, history, message)
        answer = ""
        try:
            sampling = Sampling(int(max_new_tokens), temperature, top_p, repetition_penalty, seed_of(seed))
            async for answer in answers.stream(str(request.session_hash), conversation, sampling):
                yield answer
        except ChatError as error:  # in the chat, as gradio's own errors cover it and are gone with a click
            refusal = gr.ChatMessage(role="assistant", content=str(error), metadata={"title": NO_ANSWER})
            yield [answer, refusal] if answer else refusal

    return gr.ChatInterface(
        respond,
        chatbot=gr.Chatbot(
            height="64vh",
            show_label=False,
            placeholder="Ask something, also from several tabs at once.",
            buttons=["copy"],
            elem_id="chat",
        ),
        textbox=gr.Textbox(
            placeholder="Your message",
            elem_id="message",
            show_label=False,
            container=False,
            submit_btn=True,
            stop_btn=True,
            autofocus=True,
        ),
        additional_inputs=_controls(defaults),
        additional_inputs_accordion=gr.Accordion("System prompt and sampling", open=False, render=False),
        examples=[[example] for example in _EXAMPLES],
        concurrency_limit=None,
        api_name="chat",
        analytics_enabled=False,
    )


def _controls(default: Sampling) -> list[Any]:
    return [
        gr.Textbox(SYSTEM, label="System prompt", lines=2, render=False),
        gr.Slider(1, 2048, default.max_new_tokens, step=1, label="Longest answer, in tokens", render=False),
        gr.Slider(
            0, 2, default.temperature, step=0.05, label="Temperature", info="0: always the most probable token", render=False
        ),
        gr.Slider(0.05, 1, default.top_p, step=0.05, label="Top-p", render=False),
        gr.Slider(1, 2, default.repetition_penalty, step=0.05, label="Repetition penalty", render=False),
        gr.Textbox(
            "" if default.seed is None else str(default.seed),
            label="Seed",
            placeholder="a whole number; empty: another one each time",
            render=False,
        ),
    ]


def seed_of(text: str) -> int | None:
    """What stands in the field. Raises ChatError."""
    try:
        return int(text) if text.strip() else None
    except ValueError as error:
        raise ChatError(f"The seed takes a whole number; got {text!r}.") from error


def conversation_of(system: str, history: Sequence[dict[str, Any]], message: str) -> list[Message]:
    """The turns so far and the new message, in the form that chat templates take; without those that got no answer."""
    turns: list[Message] = []
    for turn in history:
        if (turn.get("metadata") or {}).get("title") == NO_ANSWER:
            while turns and turns.pop()["role"] != "user":  # what there was of an answer goes with its question
                pass
        else:
            turns.append({"role": turn["role"], "content": _text(turn["content"])})
    begin = [{"role": "system", "content": system}] if system.strip() else []
    return [*begin, *turns, {"role": "user", "content": message}]


def _text(content: Any) -> str:
    """gradio gives a turn's content as text, or as a list of parts."""
    if isinstance(content, str):
        return content
    return "".join(part["text"] for part in content if part.get("type") == "text")
