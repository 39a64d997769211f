"""The timeout of tests that wait for threads and processes."""

PATIENCE = 600.0
"""Seconds after which a thread or process counts as hanging. It measures nothing: a process that imports torch in three
seconds takes a minute if ten others use the same core."""
