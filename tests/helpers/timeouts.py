"""How long a test waits for what comes by itself."""

PATIENCE = 600.0
"""Seconds after which something is taken to hang. It ends a hang and measures nothing: a process that imports torch in
three seconds takes a minute where ten others want the same core."""
