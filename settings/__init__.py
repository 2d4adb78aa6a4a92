"""What every process needs to start and to be watched: configuration, logs, probes."""
