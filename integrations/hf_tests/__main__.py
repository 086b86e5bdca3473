"""transformers' (and PEFT's) own generation tests, plain and with every model installed: `make hf-tests`.

Takes a checkout of transformers, of the version that is installed: tests/generation, the generation mixin of some model
classes, the text-generation pipeline's tests. Each file runs twice at the same time, plain and installed, and gives a line of
the table; then what differs is listed. The status is 1 if anything differs that expected.py, beside this file, doesn't explain.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from integrations.hf_tests.expected import reason
from integrations.hf_tests.outcomes import Run, differing, found

PROJECT = Path(__file__).parents[2]
MODELS = (
    *("llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma", "gemma2", "phi", "phi3", "gpt2", "gpt_neox"),
    *("gptj", "opt", "bloom", "falcon", "stablelm", "starcoder2", "olmo2", "cohere", "granite", "smollm3", "t5", "mamba"),
)
GENERATION = (
    "generation/test_utils.py",
    "generation/test_streamers.py",
    "generation/test_stopping_criteria.py",
    "pipelines/test_pipelines_text_generation.py",
)
MARKS = "not torch_compile_test and not torch_export_test and not all_flash_attn_test"  # minutes each; or for GPUs
# Nothing is written. No plugin is needed that the checkout's settings ask for, as PEFT's do for coverage. No warning fails a
# test, as PEFT's settings want of those that a newer transformers gives.
ALONE = ("-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=")
CALLS = ("served", "native", "trimmed")
ROW = "{:<50}{:>6}{:>7}{:>11}{:>8}{:>8}{:>9}  {}"


@dataclass(frozen=True, slots=True)
class Suite:
    """Test files of one checkout, and what pytest is told besides."""

    root: Path
    files: tuple[str, ...]
    options: tuple[str, ...]


@dataclass(slots=True)
class Totals:
    """What the last lines are about."""

    calls: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    expected: list[tuple[str, str, str]] = field(default_factory=list)  # test, what differs, why it may
    wrong: list[tuple[str, str]] = field(default_factory=list)

    def take(self, plain: Run, installed: Run) -> str:
        """Add a file's two runs, and say how they differ."""
        self.calls.update(installed.calls)
        self.reasons.update(installed.reasons)
        wrong = expected = 0
        for test, said in found(plain, installed):
            if (why := reason(test, said)) is not None:
                expected += 1
                self.expected.append((test, said, why))
            else:
                wrong += 1
                self.wrong.append((test, said))
        parts = [f"{wrong} differ" if wrong else "", f"{expected} differ, as expected" if expected else ""]
        return ", ".join(filter(None, parts)) or ("nothing" if installed.calls["served"] else "nothing, but nothing was served")


def suites(args: argparse.Namespace) -> Iterator[Suite]:
    keyword = ("-k", args.keyword) if args.keyword else ()
    if args.transformers is not None:
        models = [f"models/{model}/test_modeling_{model}.py" for model in args.models]
        files = args.files or [*models, *GENERATION]
        yield Suite(_root(args.transformers), tuple(files), ("-m", MARKS, *keyword, *args.pytest))
    if args.peft is not None:
        keyword = keyword or ("-k", "generate")
        yield Suite(_root(args.peft), ("test_decoder_models.py",), (*keyword, *args.pytest))


def run(suite: Suite, tests: Sequence[str], installed: bool) -> Run:
    """One process of pytest, in the checkout, in which nothing is written."""
    with tempfile.TemporaryDirectory() as folder:
        record = Path(folder) / "record"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "--rootdir=.", "--timeout=300", *ALONE]
        command += ["-p", "integrations.hf_tests.plugin", "--hf-cb-record", str(record), *suite.options, *tests]
        environment = {
            "OMP_NUM_THREADS": "1",
            **os.environ,
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, [str(PROJECT), os.environ.get("PYTHONPATH")])),
        }
        command += ["--hf-cb-install"] if installed else []
        done = subprocess.run(command, cwd=suite.root, env=environment, capture_output=True, text=True, check=False)
        outcome = Run.read(record, done.returncode)
    if outcome.trouble is not None:
        lines = (done.stdout + done.stderr).strip().splitlines()
        outcome.trouble += ": " + " / ".join([line for line in lines if line.startswith("E  ")][:3] or lines[-5:])
    return outcome


def run_both(suite: Suite, file: str) -> tuple[Run, Run]:
    """Plain and installed, at the same time. Tests that differ run once more: some of transformers' own fail now and then."""
    with ThreadPoolExecutor(2) as pool:
        plain, installed = pool.map(lambda installed: run(suite, [f"tests/{file}"], installed), (False, True))
        if tests := differing(plain, installed):
            again = list(pool.map(lambda installed: run(suite, tests, installed), (False, True)))
            for first, second in zip((plain, installed), again, strict=True):
                first.outcomes |= second.outcomes
    return plain, installed


def show(totals: Totals) -> None:
    calls = totals.calls
    print(
        f"\n{calls['served']} calls were served, each repeated plainly and compared; {calls['native']} ran natively, of which"
    )
    print(f"{calls['trimmed']} were made again without the options that the engine doesn't serve, and compared. Reasons:")
    for why, count in totals.reasons.most_common():
        print(f"{count:>6}  {why}")
    for test, said, why in totals.expected:
        print(f"\nexpected: {test}\n  {_short(said)}\n  {why}")
    for test, said in totals.wrong:
        print(f"\nDIFFERS: {test}\n  {_short(said)}")
    print(f"\n{len(totals.wrong)} differences, and {len(totals.expected)} more that are expected")


def _short(said: str) -> str:
    lines = [line for line in said.splitlines() if line.strip()]
    return "\n  ".join(line[:200] for line in lines[:3])


def _root(folder: Path) -> Path:
    """The checkout's root, for it or its tests."""
    root = folder.resolve()
    root = root.parent if root.name == "tests" and not (root / "tests").is_dir() else root
    if not (root / "tests").is_dir():
        sys.exit(f"{folder}: takes a checkout that has the folder tests; there is none")
    return root


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m integrations.hf_tests", description=__doc__.splitlines()[0])
    parser.add_argument("--transformers", type=Path, metavar="FOLDER", help="a checkout of transformers, or its tests")
    parser.add_argument("--peft", type=Path, metavar="FOLDER", help="a checkout of PEFT, or its tests")
    parser.add_argument("--models", nargs="*", default=MODELS, help=f"folders of tests/models; default: {' '.join(MODELS)}")
    parser.add_argument("--files", nargs="*", help="files under tests/ instead of the models' and the usual ones")
    parser.add_argument("-k", dest="keyword", metavar="EXPRESSION", help="pytest's -k")
    parser.add_argument("--pytest", nargs=argparse.REMAINDER, default=[], help="the rest is for pytest")
    args = parser.parse_args(argv)
    if args.transformers is None and args.peft is None:
        parser.error("takes --transformers FOLDER or --peft FOLDER (make hf-tests HF_TESTS=FOLDER PEFT_TESTS=FOLDER)")
    totals = Totals()
    print(ROW.format("file", "tests", "plain", "installed", *CALLS, "what differs"), flush=True)
    for suite in suites(args):
        for file in suite.files:
            plain, installed = run_both(suite, file)
            differs = totals.take(plain, installed)
            counts = len(plain.outcomes), plain.passed, installed.passed
            calls = (installed.calls[kind] for kind in CALLS)
            print(ROW.format(file.removeprefix("models/"), *counts, *calls, differs), flush=True)
    show(totals)
    return 1 if totals.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
