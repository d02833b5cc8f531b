"""Figures from real runs against a real broker. Not tests: they judge nothing."""
