"""What operators look at: Prometheus metrics, OpenTelemetry spans and JSON logs of engines, each behind its own extra."""
