"""What a run tells other systems: metrics for Prometheus, traces for OpenTelemetry. They read the log, nothing else."""
