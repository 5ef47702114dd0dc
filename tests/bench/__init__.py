"""What the agent costs, measured: `python -m tests.bench`."""
