"""What the process runs on: the Spark session, JARs, Java, paths, the garbage collector.

May import `schemas` and `conf`.
"""
