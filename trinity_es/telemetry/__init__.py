"""Export of metrics and traces from the log: monitors, Prometheus, OpenTelemetry."""
