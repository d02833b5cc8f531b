"""What people look at, computed from state and tables: pending transactions, the audit of outcomes, the story of one id.

May import `schemas` and the rest of `transforms`.
"""
