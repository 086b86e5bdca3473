"""Positions: how far a model counts, whatever its rows' company."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_cb.hf.twins.twin import rope_follows_length


def max_positions(model: nn.Module) -> int | None:
    """Positions that every row may use whatever its neighbours' length."""
    text_config: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    limit = getattr(text_config, "max_position_embeddings", None)
    if any(rope_follows_length(module) for module in model.modules()):
        # Beyond the original length the frequencies of the whole batch would change with its longest row.
        parameters = getattr(text_config, "rope_parameters", None) or {}
        nested = [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
        limits = [p.get("original_max_position_embeddings") for p in nested]
        known = [value for value in (*limits, getattr(text_config, "original_max_position_embeddings", None), limit) if value]
        limit = min(known, default=None)
    span = query_scale_span(model)
    limits_known = [int(value) for value in (limit, span) if value]
    return min(limits_known, default=None)


def query_scale_span(model: nn.Module) -> int | None:
    """Llama 4 scales the queries of layers without rotary embedding by position, in steps of `floor_scale`, and counts
    positions from the start of what it is given rather than by position_ids. Below the first step the scale is one for all."""
    spans = [
        int(state["floor_scale"]) - 1
        for state in map(vars, model.modules())
        if state.get("attn_temperature_tuning") and "floor_scale" in state and not state.get("use_rope")
    ]
    return min(spans, default=None)


def goes_beyond(model: nn.Module) -> bool:
    """Whether the model goes on beyond `max_positions` by itself, in another way than with rows in company."""
    return query_scale_span(model) is not None or any(map(rope_follows_length, model.modules()))
