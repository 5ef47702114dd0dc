"""Tests with real BPF on this machine's own kernel."""
