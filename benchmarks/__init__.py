"""Benchmarks: they measure the real job against a real broker, and judge nothing.

May import `halfway` except `halfway.pipelines.cli`, and of the tests `tests.support` alone.
"""
