"""The contract: headers, records, events, tables, state format, settings, errors. No I/O, no clock.

May import nothing.
"""
