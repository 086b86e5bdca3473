"""A training loop that alternates generation and weight updates: `python -m integrations.policy_gradient`.

Policy gradient (REINFORCE with the other samples of a prompt as baseline; Kool et al., 2019): the model writes on, each token
that begins a word with an S is rewarded, and the weights are updated in place, while the engine is paused. The engine then
samples from the new weights, with nothing to be copied or loaded, and the figures show that it does: the log-probabilities that
it reports are those that the trainer computes with the updated model. The curve goes to a picture.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import nn
from tqdm import tqdm

import hf_cb
from demo.packaged_model import load

PROMPTS = ("The weather today is", "In the garden we found", "The old sailor told us", "At the market you can buy")


@dataclass(frozen=True)
class Sample:
    """One text: token ids; of each token of the output the engine's log-probability and the reward."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    rewards: tuple[float, ...]
    text: str

    @property
    def reward(self) -> float:
        """The mean over its tokens."""
        return sum(self.rewards) / len(self.rewards)


@dataclass(frozen=True)
class Step:
    """What one update showed."""

    reward: float  # mean over the samples, before the update
    rewards: tuple[float, ...]
    difference: float  # between the engine's log-probability of a token and the trainer's, for the same weights, on average
    moved: float  # by how much the update then changed one: the difference if the engine went on with the old weights
    example: str  # the best text


def begins_with_s(piece: str) -> float:
    """What a token is worth: whether its text begins a word with an S."""
    return float(piece.lower().startswith(" s"))


def train(
    model: Any, tokenizer: Any, prompts: Sequence[str], reward: Callable[[str], float], args: argparse.Namespace
) -> list[Step]:
    """`args.steps` updates of the model's weights, in place."""
    weights = trained_weights(model, args.layers)
    optimizer = torch.optim.AdamW(weights, lr=args.lr, weight_decay=0.0)
    steps: list[Step] = []
    with hf_cb.continuous_batching(model) as engine:
        bar = tqdm(range(args.steps), unit="update", disable=args.quiet)
        for number in bar:
            groups = sample(engine, tokenizer, prompts, reward, args, seed=args.seed + number * 10_000)
            samples = [one for group in groups for one in group]
            logprobs = score(model, samples)
            difference = _mean_difference(logprobs, torch.tensor([one.logprobs for one in samples]))
            loss = -(logprobs * advantages(groups, args.discount)).mean()
            loss.backward()
            nn.utils.clip_grad_norm_(weights, 1.0)
            with engine.pause():  # no step of the engine sees half of the update
                optimizer.step()
            optimizer.zero_grad()
            few = samples[:: args.samples]  # one of each prompt
            with torch.no_grad():
                moved = _mean_difference(score(model, few), logprobs[:: args.samples])
            rewards = tuple(one.reward for one in samples)
            best = max(samples, key=lambda one: one.reward)
            steps.append(Step(sum(rewards) / len(rewards), rewards, difference, moved, best.text))
            bar.set_postfix(reward=f"{steps[-1].reward:.2f}", difference=f"{difference:.0e}", moved=f"{moved:.2f}")
    return steps


def trained_weights(model: Any, layers: int) -> list[nn.Parameter]:
    """Those of the last layers; the others are frozen, which halves the time of an update."""
    blocks = max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)
    model.requires_grad_(False)
    blocks[-layers:].requires_grad_(True)
    return [weight for weight in model.parameters() if weight.requires_grad]


def sample(
    engine: hf_cb.Engine, tokenizer: Any, prompts: Sequence[str], reward: Callable[[str], float], args: Any, seed: int
) -> list[list[Sample]]:
    """`args.samples` texts for each prompt, all in flight at once."""
    options = {"max_new_tokens": args.new_tokens, "eos_token_id": None, "do_sample": True, "top_k": 0, "logprobs": 0}
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    handles = [
        [engine.submit(prompt, temperature=1.0, seed=seed + 100 * i + j, **options) for j in range(args.samples)]
        for i, prompt in enumerate(ids)
    ]
    groups: list[list[Sample]] = []
    for prompt, group in zip(ids, handles, strict=True):
        groups.append([])
        for result in (handle.result() for handle in group):
            logprobs = tuple(one.logprob for one in result.logprobs or ())
            rewards = tuple(reward(tokenizer.decode([token])) for token in result.tokens)
            groups[-1].append(Sample(tuple(prompt), result.tokens, logprobs, rewards, tokenizer.decode(result.tokens)))
    return groups


def advantages(groups: Sequence[Sequence[Sample]], discount: float) -> torch.Tensor:
    """[N, new tokens]: the discounted rewards from each token on, less their mean over the prompt's other samples at the same
    place; over all scaled to a deviation of one.
    """
    values = []
    for group in groups:
        returns = torch.tensor([one.rewards for one in group])
        for place in reversed(range(returns.shape[1] - 1)):
            returns[:, place] += discount * returns[:, place + 1]
        values.append(returns - (returns.sum(0) - returns) / (len(group) - 1))
    found = torch.cat(values)
    return found / (found.std() + 1e-6)


def score(model: Any, samples: Sequence[Sample]) -> torch.Tensor:
    """Log-probabilities [N, new tokens] of the outputs under the model's weights now, by a forward pass over padded rows."""
    longest = max(len(one.prompt) for one in samples)
    ids = torch.tensor([[0] * (longest - len(one.prompt)) + [*one.prompt, *one.tokens] for one in samples])
    mask = torch.tensor([[0] * (longest - len(one.prompt)) + [1] * (len(one.prompt) + len(one.tokens)) for one in samples])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    new = ids[:, longest:]
    logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, logits_to_keep=new.shape[1] + 1).logits
    return logits[:, :-1].float().log_softmax(-1).gather(2, new[..., None])[..., 0]


def _mean_difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().mean().item()


def draw(steps: Sequence[Step], title: str, file: Path) -> None:
    """The curve of rewards, and whose weights the engine had."""
    figure = Figure(figsize=(9, 6.5), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    x = range(1, len(steps) + 1)
    for number, step in zip(x, steps, strict=True):
        above.scatter([number] * len(step.rewards), step.rewards, s=10, color="#7fb2dd", alpha=0.45, linewidths=0)
    above.plot(x, [step.reward for step in steps], color="#1f77b4", linewidth=2.2, label="mean of the samples (dots: each)")
    above.set_ylabel("tokens that begin a word with S")
    above.set_ylim(-0.02, 1.02)
    above.set_title(title, fontsize="medium")
    below.semilogy(x, [step.moved for step in steps], color="#7f7f7f", label="an update moves a token's log-probability by")
    below.semilogy(
        x, [step.difference for step in steps], color="#d62728", label="the engine's differs from the updated model's by"
    )
    below.set_xlabel("update")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    below.set_ylabel("nats, mean over tokens")
    for axes in (above, below):
        axes.legend(frameon=False, fontsize="small", loc="upper left" if axes is above else "center right")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m integrations.policy_gradient", description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="an id or a folder; default: the packaged SmolLM2-135M-Instruct")
    parser.add_argument("--steps", type=int, default=20, help="updates")
    parser.add_argument("--samples", type=int, default=8, help="texts per prompt and update")
    parser.add_argument("--new-tokens", type=int, default=10)
    parser.add_argument("--layers", type=int, default=8, help="train the last so many")
    parser.add_argument("--lr", type=float, default=2e-4)
    parser.add_argument("--discount", type=float, default=0.5, help="of a reward that comes a token later")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", type=Path, default=Path("out/policy_gradient.png"))
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    model, tokenizer = load(args.model)
    steps = train(model, tokenizer, PROMPTS, begins_with_s, args)
    for number in (0, len(steps) - 1):
        print(f"update {number + 1}: reward {steps[number].reward:.2f}, best text:{steps[number].example!r}")
    means = [sum(values) / len(steps) for values in zip(*((step.moved, step.difference) for step in steps), strict=True)]
    print("a token's log-probability: an update moves it by {:.1e}, engine and trainer differ by {:.1e}".format(*means))
    name = args.model or "SmolLM2-135M-Instruct"
    draw(steps, f"{name}: policy gradient, {args.samples * len(PROMPTS)} texts an update, sampled by hf_cb", args.picture)
    print(f"picture: {args.picture}")


if __name__ == "__main__":
    main()
