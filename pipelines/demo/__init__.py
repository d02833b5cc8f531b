"""`halfway demo`: real traffic through the real client, and a verdict on its outcome.

May import `schemas`, `clients`, `kafka`, `storage` and `runtime`.
"""
