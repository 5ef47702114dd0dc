"""BPF programs, their loader and decoders. Imports nothing else of prefetchd."""
