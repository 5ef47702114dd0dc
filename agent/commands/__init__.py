"""One module per prefetchd command."""
