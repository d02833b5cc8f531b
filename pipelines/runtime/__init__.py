"""What the process runs on: Spark's session and its JVM, JARs, Java, paths, signals, the garbage collector.

May import `schemas` and `conf`.
"""
