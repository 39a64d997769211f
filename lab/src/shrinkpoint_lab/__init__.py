"""The laboratory: baselines, demo, benchmarks and forecasts. Not part of the wheel."""
