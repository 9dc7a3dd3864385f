"""A small kernel tree for tests of the CUDA builder: one op, scaled copy of its activations."""
