"""Attention residual (AttnRes) site: prefix update, block write, softmax mix over saved rows, output norm.

Per token: `prefix` p and saved rows `blocks[m, 0..NB-1]`. In this order:
1. `add_delta` = 1: p = bf16(p + delta);  0: p unchanged (delta null).
2. `write_block` >= 0: blocks[m, write_block] = p.
3. mix over blocks[m, 0..sources-1] and p by softmax of score(v) = sum(v*r*a) * rsqrt(mean(v^2)+eps), fp32, raw rows;
   sources = 0 gives p itself.
4. `round_mix` = 1 (final site only): the mix is rounded to bf16 before its norm.
5. out = bf16(mix * rsqrt(mean(mix^2)+eps) * out_norm).
"""

from k3_backend.ops.interface import AttrSpec, OpSpec, TensorSpec

SPEC = OpSpec(
    name="attn_res",
    summary="prefix update, optional block write, depth-wise softmax mix, RMSNorm of the mix",
    sizes=lambda g: {"D": g.hidden, "NB": g.attn_res_blocks},
    tensors=(
        TensorSpec("prefix", ("M", "D"), "bf16", "state"),
        TensorSpec("delta", ("M", "D"), "bf16", "activation", optional=True),
        TensorSpec("blocks", ("M", "NB", "D"), "bf16", "state"),
        TensorSpec("res_norm", ("D",), "bf16", "constant"),
        TensorSpec("res_proj", ("D",), "bf16", "constant"),
        TensorSpec("out_norm", ("D",), "bf16", "constant"),
        TensorSpec("out", ("M", "D"), "bf16", "output"),
    ),
    attrs=(
        AttrSpec("add_delta", "int", "1: add delta to the prefix first; 0: delta is null"),
        AttrSpec("write_block", "int", "index of the saved row to write, or -1"),
        AttrSpec("sources", "int", "saved rows that enter the mix beside the prefix"),
        AttrSpec("round_mix", "int", "1 at the model's final site"),
        AttrSpec("eps", "float", "RMSNorm epsilon"),
    ),
)
