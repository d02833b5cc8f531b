"""`halfway demo`: real traffic through the real client, and the verdict on what came of it.

May import `clients`, `kafka`, `storage` and `runtime`.
"""
