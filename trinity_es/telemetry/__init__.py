"""The log, told to other tools: monitors, Prometheus, OpenTelemetry."""
