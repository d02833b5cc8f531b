"""`halfway demo`: real traffic through the real client, and a verdict on its outcome.

May import `clients`, `kafka`, `storage` and `runtime`.
"""
