"""The configuration files that are shipped, and the loader of settings.

May import `schemas`.
"""
