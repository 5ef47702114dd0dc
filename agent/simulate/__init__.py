"""A simulated node behind the same interfaces as the real one, and the scenarios that it shares with the lab."""
