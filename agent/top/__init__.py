"""The live view of `prefetchd top`: what it remembers, what keys do, how it is drawn."""
