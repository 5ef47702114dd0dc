"""Bandwidth policies behind one interface."""
