"""The Grafana dashboard: every query is PromQL over metrics that an engine has, and answers with a figure under load."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import inside
import pytest
from promql import Scrapes
from transformers import PreTrainedModel

import hf_cb
from hf_cb.metrics import catalog
from hf_cb.metrics.collector import EngineCollector

pytestmark = pytest.mark.timeout(20)

DASHBOARD: dict[str, Any] = json.loads((Path(__file__).parents[2] / "integrations/grafana/hf_cb.json").read_text())
TARGETS = [(panel["title"], target) for panel in DASHBOARD["panels"] for target in panel["targets"]]
RARE = ("refused", "Native calls/s by reason", "Preemptions/s")  # zero, or nothing, where nothing of the kind has happened


@pytest.fixture(scope="module")
def scrapes() -> Scrapes:
    import models

    model: PreTrainedModel = models.tiny("llama")
    prompts = [[3 + i, *range(5, 30)] for i in range(6)]
    with hf_cb.continuous_batching(model) as engine:
        collector = EngineCollector({"m": engine})
        before = collector.exposition()[0].decode()
        engine.generate_batch(prompts, max_new_tokens=4, eos_token_id=None)
        inside.intake(engine).count_native("a reason")
        handle = engine.submit(prompts[0], max_new_tokens=400, eos_token_id=None)
        next(iter(handle))
        with engine.pause():
            after = collector.exposition()[0].decode()
            handle.cancel()
    return Scrapes.of(before, after, 5.0)


def filled_in(expression: str) -> str:
    """With what Grafana puts in the place of its variables."""
    return expression.replace("$__rate_interval", "1m").replace("$model", ".*")


@pytest.mark.parametrize(("title", "target"), TARGETS, ids=[f"{title} {target['refId']}" for title, target in TARGETS])
def test_every_query_has_an_answer(scrapes: Scrapes, title: str, target: dict[str, Any]) -> None:
    assert "$" not in filled_in(target["expr"])
    if title == "Native calls/s by reason":  # a series that was not there before has no rate
        scrapes.before.setdefault("hf_cb_native_calls_total", {})
    answer = scrapes.answer(filled_in(target["expr"]))
    assert answer
    assert not any(math.isnan(value) for value in answer.values()), answer
    labels = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
    assert all({name for name, _ in found} >= set(labels) for found in answer)  # each line is named
    if target["legendFormat"] not in RARE and title not in (*RARE, "Waiting") and "waiting" not in target["legendFormat"]:
        assert max(answer.values()) > 0


def test_every_metric_is_looked_at_somewhere() -> None:
    asked = " ".join(target["expr"] for _, target in TARGETS)
    unused = [metric.name for metric in catalog.METRICS if metric.full_name not in asked]
    assert unused == ["kv_cache_blocks", "engine_steps"]


def test_panels_do_not_overlap_and_their_names_are_their_own() -> None:
    panels = DASHBOARD["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(target["datasource"]["uid"] == "${datasource}" for _, target in TARGETS)
    names = {variable["name"]: variable for variable in DASHBOARD["templating"]["list"]}
    assert names["model"]["query"]["query"] == "label_values(hf_cb_num_requests_running, model)"
    assert names.keys() == {"datasource", "model"}
