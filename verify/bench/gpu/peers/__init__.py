"""Peers, one module per family: what a kernel of ours is compared with in the same process.

Packages of others are run where the machine has them, or where `--peers DIR` brings them; nothing of theirs is copied.
"""
