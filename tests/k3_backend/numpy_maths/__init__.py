"""A second implementation of the ops' maths, in fp64 numpy, that shares no code with `k3_backend`."""
