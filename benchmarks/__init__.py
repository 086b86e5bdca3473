"""Benchmarks: what continuous batching brings, against the ways of serving one model that people use today."""
