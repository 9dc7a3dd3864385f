"""The trusted side of every measurement: makes inputs, keeps expected values, compares bytes, owns the clock.

The evaluator never loads candidate code. It talks to workers (`verify.workers`), which do.
"""
