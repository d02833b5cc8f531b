"""The configuration files of the distribution, and the loader of the settings.

May import `schemas`.
"""
