"""The collector's text, read back by prometheus_client's own parsers."""

from __future__ import annotations

from collections.abc import Iterator

import inside
import pytest
import tables
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from transformers import PreTrainedModel

import hf_cb
from hf_cb.metrics import catalog
from hf_cb.metrics.collector import EngineCollector

pytestmark = pytest.mark.timeout(20)

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@pytest.fixture
def engine(llama: PreTrainedModel) -> Iterator[hf_cb.Engine]:
    with hf_cb.continuous_batching(llama) as engine:
        yield engine


def samples_of(text: str) -> Samples:
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


def scrape(collector: EngineCollector) -> Samples:
    body, kind = collector.exposition()
    assert kind.startswith("text/plain; version=")
    return samples_of(body.decode())


def test_every_metric_is_there_for_every_engine(engine: hf_cb.Engine) -> None:
    samples = scrape(EngineCollector({"a": engine, 'b "\\\n': engine}))
    for metric in catalog.METRICS:
        names = {"histogram": ("_bucket", "_count", "_sum")}.get(metric.kind, ("",))
        for model in ("a", 'b "\\\n'):
            found = [name for name, labels in samples if ("model", model) in labels and name.startswith(metric.full_name)]
            if metric.name != "native_calls":  # there are none, for no reason
                assert {metric.full_name + suffix for suffix in names} <= set(found)
    assert samples[("process_resident_memory_bytes", ())] > 0


def test_values_are_those_of_stats(engine: hf_cb.Engine) -> None:
    engine.generate_batch([[3, 4, 5], [6, 7]], max_new_tokens=4, eos_token_id=None)
    inside.intake(engine).count_native("a reason")
    samples, stats = scrape(EngineCollector({"m": engine})), engine.stats()

    def value(name: str, **labels: str) -> float:
        return samples[(f"hf_cb_{name}", tuple(sorted({"model": "m", **labels}.items())))]

    assert value("generation_tokens_total") == stats.output_tokens == 8
    assert value("prompt_tokens_total") == value("prefix_cache_queries_total") == 5
    assert value("request_success_total", finished_reason="length") == 2
    assert value("request_success_total", finished_reason="failed") == 0
    assert value("native_calls_total", reason="a reason") == 1
    assert value("batch_slots") == 256
    assert value("kv_cache_usage_ratio") == 0
    assert value("engine_step_seconds_total") == pytest.approx(stats.step_seconds)
    found = stats.distributions.time_to_first_token
    buckets = [value("time_to_first_token_seconds_bucket", le=str(float(bound))) for bound in found.bounds]
    assert buckets == [sum(found.counts[: i + 1]) for i in range(len(found.bounds))]
    assert value("time_to_first_token_seconds_bucket", le="+Inf") == value("time_to_first_token_seconds_count") == 2
    assert value("time_to_first_token_seconds_sum") == pytest.approx(found.total)


def test_kv_use_while_something_runs(engine: hf_cb.Engine) -> None:
    handle = engine.submit([3] * 20, max_new_tokens=400, eos_token_id=None)
    next(iter(handle))
    with engine.pause():
        samples = scrape(EngineCollector({"m": engine}))
        used = samples[("hf_cb_kv_cache_usage_ratio", (("model", "m"),))]
        assert 0 < used == engine.stats().blocks_used / engine.stats().num_blocks
        assert samples[("hf_cb_num_requests_running", (("model", "m"),))] == 1
        handle.cancel()


def test_a_model_that_runs_natively_has_its_counts(llama: PreTrainedModel) -> None:
    llama.register_forward_hook(lambda *_: None)
    with hf_cb.continuous_batching(llama) as engine:
        llama.generate(inputs=None, max_new_tokens=1)
        samples = scrape(EngineCollector({"m": engine}))
        assert samples[("hf_cb_kv_cache_usage_ratio", (("model", "m"),))] == 0
        assert [value for (name, _), value in samples.items() if name == "hf_cb_native_calls_total"] == [1]


def test_it_registers_where_a_program_keeps_its_metrics(engine: hf_cb.Engine) -> None:
    registry, engines = CollectorRegistry(), {"m": engine}
    registry.register(EngineCollector(engines))
    with pytest.raises(ValueError, match="Duplicated"):
        registry.register(EngineCollector(engines))
    assert registry.get_sample_value("hf_cb_engine_steps_total", {"model": "m"}) == 0
    engines["n"] = engine  # a model that came later
    assert registry.get_sample_value("hf_cb_engine_steps_total", {"model": "n"}) == 0
    assert b'hf_cb_engine_steps_total{model="n"}' in generate_latest(registry)
    list(parse_openmetrics(openmetrics.generate_latest(registry).decode()))  # the stricter form is well-formed, too


def test_the_readme_has_the_table() -> None:
    assert tables.between_marks(tables.README.read_text(), "metrics") == catalog.markdown(), "run: python tests/tables.py"
