"""All-to-all exchange of small fp32 partial results between the warps of a cluster, through distributed shared memory.

Each CTA owns a table with one row per warp of the cluster and an mbarrier. A warp stores its row into the table of
every CTA with `st.async`, which carries data and completion in one message; a reader waits on its own CTA's mbarrier
only, so an exchange costs one trip between SMs and no cluster barrier. An exchange is used once per launch: phase 0.

Order: `open_exchange` by one thread, then a cluster barrier, so that no message meets an uninitialised mbarrier. A CTA
may exit as soon as it has waited for all of its exchanges: by then everything sent to it has arrived, and what it sent
came from registers.
"""

import cutlass
from cutlass import cute

__all__ = ["cluster_barrier", "open_exchange", "wait_exchange"]


@cute.jit
def open_exchange(barrier: cute.Pointer, expected_bytes: cutlass.Constexpr) -> None:
    """One thread: an mbarrier that completes when this many bytes have arrived."""
    cute.arch.mbarrier_init(barrier, 1)
    cute.arch.mbarrier_arrive_and_expect_tx(barrier, expected_bytes)


@cute.jit
def cluster_barrier() -> None:
    """All threads: make opened exchanges visible to the cluster."""
    cute.arch.mbarrier_init_fence()
    cute.arch.cluster_arrive_relaxed(aligned=True)
    cute.arch.cluster_wait()


@cute.jit
def wait_exchange(barrier: cute.Pointer) -> None:
    """All readers: until the table of this CTA is complete. Acquires what CTAs of the cluster have sent."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; poll: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], 0; "
        "@!done bra poll; }",
        read_only_args=[barrier.toint()],
    )
