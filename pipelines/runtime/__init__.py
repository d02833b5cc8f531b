"""What the process runs on: the Spark session, JARs, Java, paths.

May import `schemas` and `conf`.
"""
