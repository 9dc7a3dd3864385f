"""The evaluation kit: a verification that travels to a GPU machine without compiler, index or network, and back.

`build` makes the archive and `results` takes the answer in (both here, with the whole application); everything else
runs on the GPU machine, from sources that the archive carries, and needs torch, numpy and cuda-bindings only.
"""
