"""Our CUDA kernels beside peers on one GPU: what `fasttrack bench --target h200 --peers` shows.

Cells, inputs, peers and timing; everything runs in the worker of a kit (`verify.workers.peer_methods`). Nothing here
decides about a candidate: rows and figures are `verify.protocol.peers`, from the raw lines.
"""
