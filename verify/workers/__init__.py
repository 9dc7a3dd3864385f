"""What runs inside the sandbox: a trusted server that loads candidate objects and does what the evaluator asks.

Code of this package is imported from an export of the base commit, in a process that the evaluator started. It may
import `k3_backend` and `verify.engine` besides itself, never `harness` or `verify.evaluator`. It knows no expected
values and decides nothing.
"""
