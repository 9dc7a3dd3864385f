"""Re-measure the choices inside the standard path: each form that it uses against the alternatives it was chosen from.

The baseline arm must be the fastest honest eager torch, so its choices are data that anyone can check again. Arms are
interleaved in one process; the number shown is the smallest CPU time per call of the calling thread over all rounds,
which other processes disturb least. This tool judges nothing and is not part of any gate.

Usage: python tools/standard_forms.py [--rounds 15]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch.nn import functional

from k3_backend.geometry import geometry
from k3_backend.ops.kda_decode import standard as kda
from k3_backend.ops.mla_decode import standard as mla
from k3_backend.ops.moe_experts import standard as moe

Forms = dict[str, Callable[[], object]]
NANO = geometry("k3-nano")
BF16 = torch.bfloat16


def main() -> None:
    """Print one line per case: the form in use is starred."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_grad_enabled(False)
    for cases in (_linear, _kda_state, _attention, _experts):
        for title, used, forms in cases():
            times = _cpu_us(forms, rounds)
            row = "  ".join(f"{'*' if name == used else ''}{name} {us:.0f}" for name, us in times.items())
            print(f"{title:44s} {row}")


def _cpu_us(forms: Forms, rounds: int) -> dict[str, float]:
    """Smallest CPU time per call, in microseconds, arms interleaved."""
    best = dict.fromkeys(forms, float("inf"))
    for form in forms.values():
        form()
    for _ in range(rounds):
        for name, form in forms.items():
            calls, start = 0, time.thread_time_ns()
            while (elapsed := time.thread_time_ns() - start) < 2_000_000 or not calls:
                form()
                calls += 1
            best[name] = min(best[name], elapsed / calls / 1e3)
    return best


def _linear() -> Iterator[tuple[str, str, Forms]]:
    for n, k in ((NANO.kda_proj_rows, NANO.hidden), (NANO.hidden, NANO.kda_width), (NANO.latent, NANO.hidden)):
        for m in (1, 8, 64):
            x, w = torch.randn(m, k).to(BF16), torch.randn(n, k).to(BF16)
            forms: Forms = {
                "linear": lambda x=x, w=w: functional.linear(x, w),
                "bmm": lambda x=x, w=w: torch.bmm(x.unsqueeze(0), w.T.unsqueeze(0)),
            }
            if m == 1:
                forms["mv"] = lambda x=x, w=w: torch.mv(w, x[0])
            yield f"linear M={m} N={n} K={k}, us", "mv" if m == 1 else "linear", forms


def _kda_state() -> Iterator[tuple[str, str, Forms]]:
    heads, width = NANO.heads, NANO.kda_head_dim
    for requests in (2, 8, 64):
        pool = torch.randn(requests + 1, heads, width, width)
        slots = torch.randperm(requests) + 1
        q, k, v = (torch.randn(requests, heads, width) * 0.1 for _ in range(3))
        decay, beta = torch.full_like(q, 0.999), torch.rand(requests, heads, 1)

        def one_pass(pool=pool, slots=slots, q=q, k=k, v=v, decay=decay, beta=beta) -> None:  # type: ignore[no-untyped-def]
            S = kda._gather(pool, slots)
            kda._delta_step(S, q, k, v, decay, beta)
            pool.index_copy_(0, slots, S)

        def as_written(pool=pool, slots=slots, q=q, k=k, v=v, decay=decay, beta=beta) -> None:  # type: ignore[no-untyped-def]
            S = kda._gather(pool, slots).mul_(decay.unsqueeze(2))
            u = beta * (v - torch.matmul(S, k.unsqueeze(-1)).squeeze(-1))
            S.addcmul_(u.unsqueeze(3), k.unsqueeze(2))
            torch.matmul(S, q.unsqueeze(-1))
            pool.index_copy_(0, slots, S)

        def request_by_request(pool=pool, slots=slots, q=q, k=k, v=v, decay=decay, beta=beta) -> None:  # type: ignore[no-untyped-def]
            for b, slot in enumerate(slots.tolist()):
                part = (x[b : b + 1] for x in (q, k, v, decay, beta))
                kda._delta_step(pool.narrow(0, slot, 1), *part)

        forms: Forms = {"one_pass": one_pass, "as_written": as_written, "request_by_request": request_by_request}
        yield f"kda state B={requests}, us", "one_pass", forms


def _attention() -> Iterator[tuple[str, str, Forms]]:
    row, kv_lora, heads = NANO.mla_row, NANO.kv_lora, NANO.heads
    for requests, length, tokens in ((1, 256, 1), (8, 256, 1), (1, 2048, 1), (8, 2048, 1), (8, 256, 8)):
        cache = torch.randn(requests * length // 64 + 1, 64, row).to(BF16)
        index = torch.randperm(requests * length).view(requests, length)
        query = torch.randn(requests * tokens, heads, row).to(BF16)
        visible = torch.full((requests, tokens), length)
        scale = (NANO.nope + NANO.pe) ** -0.5

        def fused(query=query, cache=cache, index=index, visible=visible, scale=scale) -> None:  # type: ignore[no-untyped-def]
            mla.attend(query, cache, index, visible, scale, kv_lora)

        def products(dtype: torch.dtype, query=query, cache=cache, index=index, visible=visible, scale=scale) -> None:  # type: ignore[no-untyped-def]
            rows = cache.view(-1, row).index_select(0, index.flatten()).view(*index.shape, row).to(dtype)
            q = query.view(index.shape[0], -1, row).to(dtype)
            score = torch.bmm(q, rows.transpose(1, 2)).float().mul_(scale)
            hidden = torch.arange(index.shape[1]) >= visible.repeat_interleave(heads, 1).unsqueeze(2)
            score.masked_fill_(hidden, -torch.inf)
            lse = torch.logsumexp(score, -1, keepdim=True)
            torch.bmm((score - lse).exp_().to(dtype), rows[..., :kv_lora])

        forms: Forms = {
            "fused": fused,
            "products_bf16": lambda products=products: products(BF16),
            "products_fp32": lambda products=products: products(torch.float32),
        }
        yield f"attention B={requests} L={length} T={tokens}, us", "fused", forms


def _experts() -> Iterator[tuple[str, str, Forms]]:
    g = NANO
    w13 = torch.randn(g.experts, 2 * g.expert_width, g.latent).to(BF16)
    w2 = torch.randn(g.experts, g.latent, g.expert_width).to(BF16)
    attrs = {"beta": g.situ_beta, "linear_beta": g.situ_linear_beta}
    for rows in (1, 2, 4, 8, 64):
        ids = torch.rand(rows, g.experts).argsort(-1)[:, : g.top_k].int()
        experts = moe._Experts(w13, w2, ids)
        z, weights = torch.randn(rows, g.latent).to(BF16), torch.rand(rows, g.top_k)
        kinds = {"gathered": moe._gathered, "all_experts": moe._all_experts, "grouped": moe._grouped}
        forms: Forms = {
            name: lambda form=form, z=z, experts=experts, weights=weights: form(z, experts, weights, attrs)
            for name, form in kinds.items()
        }
        used = "gathered" if rows <= moe.GATHER_ROWS else "all_experts"
        yield f"experts M={rows}, us", used, forms


if __name__ == "__main__":
    main()
