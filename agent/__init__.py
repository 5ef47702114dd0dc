"""Command line, control core and loop of the prefetchd node agent."""
