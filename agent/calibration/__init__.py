"""Measuring what a device can do: where to measure, how, and what to write into the configuration."""
