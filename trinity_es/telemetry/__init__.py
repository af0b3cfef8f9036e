"""Exports of the log to other tools: monitors, Prometheus, OpenTelemetry."""
