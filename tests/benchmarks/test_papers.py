"""The pictures' commands on a tiny model: what they count, and that each draws its file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import models
import pytest
import small

from benchmarks import paper_pictures, papers, peers, swap, trace, walkthrough
from benchmarks.subject import Subject
from hf_cb.core.output import RowMemory, ScheduledRow, SchedulerOutput

ROOT = Path(__file__).parents[2]
PAGES = ("how-a-token-is-made.md", "papers.md")
pytestmark = pytest.mark.timeout(60)


@pytest.fixture(scope="module")
def measured() -> Subject:
    model = models.tiny("llama", max_position_embeddings=2048)
    peers.ignore_end_of_sequence(model)
    return Subject(model, "nowhere", [i % 100 for i in range(3000)])


def step(*rows: tuple[int, int], preempted: tuple[int, ...] = (), sampled: tuple[int, ...] = (), seconds: float = 1.0):
    return SimpleNamespace(rows=rows, preempted=preempted, sampled=sampled, seconds=seconds)


def single(request_id: int, start: int, *table: int) -> ScheduledRow:
    return ScheduledRow(request_id, start, (5,), RowMemory(table), 1)


@pytest.mark.parametrize("part", papers.PARTS)
def test_each_part_is_measured_and_drawn(part, measured, monkeypatch, tmp_path):
    monkeypatch.setattr(papers.subject, "load", lambda *_: measured)
    monkeypatch.setattr(papers, "REQUESTS", 8)
    monkeypatch.setattr(papers, "CAPS", (32, 384))
    papers.main([part, "--scale", "0.05", "--out", str(tmp_path)])
    small.assert_redrawn(tmp_path / f"{part}.png", lambda: papers.main(["--draw", str(tmp_path / f"{part}.json")]))


def test_an_unknown_part_is_named(capsys):
    with pytest.raises(SystemExit):
        papers.main(["memry"])
    assert "no memry; there are memory, sharing" in capsys.readouterr().err


def test_reservations_are_counted_from_admission_to_the_last_token():
    # Request 0 has 4 tokens in the end, of which the last is never stored; request 1 has 2, loses its memory and comes again.
    steps = [step((0, 2), (1, 1)), step((0, 1), preempted=(1,)), step((1, 1))]
    shares = papers.reserved_shares(steps, {0: 4, 1: 3}, lambda length: 8)
    held, used, later = 8 * 4, (2 + 1) + 3 + 1, (2 + 2) + 1 + 2
    assert shares == {"used": used / held, "later": later / held, "wasted": 1 - (used + later) / held}


def test_shared_blocks_count_once():
    prompt = SchedulerOutput((ScheduledRow(1, 0, (5, 6), RowMemory((0,)), 1),), 2)
    both = SchedulerOutput((single(1, 20, 0, 1), single(2, 20, 0, 2)), 2)
    assert papers.blocks_saved([prompt, both]) == 1 - 3 / 4
    assert trace.shared_blocks((0, 1, 4), (0, 1, 3, 4)) == 2


def test_blocks_are_shared_by_beams_and_samples_of_the_engine(measured):
    points = papers.sharing(measured, SimpleNamespace(seed=0, scale=0.3))
    assert [(point["kind"], point["width"]) for point in points] == [(k, w) for k in ("samples", "beams") for w in (2, 4, 6)]
    assert all(0 < point["saved"] < 1 - 1 / point["width"] for point in points)


def test_the_text_has_a_line_for_each_point():
    points = [{"name": "a", "used": 0.25, "gaps": [(1, 2)]}, {"name": "b", "on": {"tokens": 3}}]
    assert paper_pictures.text({"points": points}) == "a:  used 0.25\nb:  on tokens 3"


def test_a_resumed_sequence_takes_its_own_steps():
    steps = [step((1, 4), (2, 4)), step((1, 1), preempted=(2,)), step((1, 1)), step((2, 3))]
    steps.append(step((2, 2), sampled=(2,), seconds=0.5))
    assert swap.resume_seconds(steps) == 1.5
    with pytest.raises(RuntimeError, match="no sequence was preempted"):
        swap.resume_seconds(steps[2:])
    with pytest.raises(RuntimeError, match="never came back"):
        swap.resume_seconds(steps[:4])


@pytest.mark.parametrize("admitted", [2, 3])
@pytest.mark.parametrize("length", [16, 512, 1024, 2048])
def test_the_pool_admits_what_it_has_no_room_for_later(length, admitted):
    blocks = swap.pool_blocks(length, admitted)
    room = blocks - admitted * length // swap.BLOCK
    assert blocks // 100 <= room < admitted * swap.NEW // swap.BLOCK


def test_swapping_is_measured_and_drawn(measured, monkeypatch, tmp_path):
    monkeypatch.setattr(swap, "load", lambda *_: (measured.model, None))
    swap.main(["--lengths", "16,48", "--requests", "4", "--repeats", "1", "--out", str(tmp_path)])
    points = json.loads((tmp_path / "swap.json").read_text())["points"]
    assert [point["prompt_tokens"] for point in points] == [16, 48]
    assert all(point["preemptions"] > 0 and point["recompute_s"] > 0 and point["swap_in_s"] > 0 for point in points)
    assert (tmp_path / "swap.png").read_bytes().startswith(b"\x89PNG")


def test_the_walk_through_the_engine_is_drawn(measured, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(walkthrough, "load", lambda *_: (measured.model, None))
    walkthrough.main(["--out", str(tmp_path)])
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["blocks.png", "chunks.png", "slots.png", "step.png"]
    with pytest.raises(SystemExit):
        walkthrough.main(["--only", "blox"])
    assert "no blox" in capsys.readouterr().err


def test_a_trace_has_every_phase_of_a_step_and_the_tables(measured):
    run = walkthrough.Run(measured.model, 0)
    prompt = run.prompt(40)
    with trace.traced() as seen, run.engine() as engine:
        handle = engine.submit(prompt, max_new_tokens=5, do_sample=False)
        handle.result()
    assert [len(row.token_ids) for row in seen.rows_of(handle.request_id)] == [40, 1, 1, 1, 1]
    assert all([phase for phase, _, _ in spans] == list(trace.PHASES) for spans in seen.steps)
    milliseconds = seen.decode_milliseconds()
    assert list(milliseconds) == [trace.WEIGHTS, *trace.PHASES, trace.BETWEEN]
    assert all(value >= 0 for value in milliseconds.values())


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_names_is_there(page):
    text = (ROOT / "docs" / page).read_text()
    pictures = re.findall(r"!\[[^]]+\]\((pictures/\w+\.png)\)", text)
    assert len(pictures) == text.count("![")  # each has a description
    files = re.findall(r"`((?:\w+/)*\w+(?:\.py|/))`", text)
    commands = re.findall(r"python -m benchmarks\.(\w+)", text)
    assert pictures
    assert commands
    missing = [
        *(name for name in pictures if not (ROOT / "docs" / name).is_file()),
        *(name for name in files if not (ROOT / "hf_cb" / name).exists()),
        *(name for name in commands if not (ROOT / "benchmarks" / f"{name}.py").is_file()),
    ]
    assert not missing
    assert all((ROOT / "docs" / name).stat().st_size < 150_000 for name in pictures)
