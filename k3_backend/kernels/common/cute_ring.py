"""Shared memory by 32-bit address: mbarriers, bulk copies into ring slots, and messages within a cluster.

A ring has one `full` and one `empty` mbarrier per slot. The producer waits for `empty`, announces the bytes on `full`
(`expect`), and starts bulk copies that complete on it; consumers wait for `full`, read, and arrive on `empty`. The
parity to wait for flips each time the ring comes round; a producer begins with parity 1, which a fresh barrier passes.

Messages (`send_*`) carry data and completion in one trip: the receiver expects their bytes on an mbarrier of its own.

Addresses are those of the CTA's own shared window; `peer` maps one into another CTA of the cluster. Every function
here is one PTX instruction (waits: a loop around one) with the memory order that its text says.
"""

from cutlass import Float32, Int32, cute

__all__ = [
    "arrive", "arrive_peer", "bulk_copy", "bulk_copy_once", "bulk_send", "expect", "init_barrier", "load_f32x2",
    "load_peer_4xf32",
    "order_generic_before_bulk", "peer", "send_f32x2", "send_f32x4", "store_b32", "store_f32",
    "store_f32x2", "store_zero_16b", "wait", "wait_cluster",
]  # fmt: skip


@cute.jit
def init_barrier(barrier: Int32, arrivals: Int32) -> None:
    """One thread; `mbarrier_init_fence` and a CTA (or cluster) barrier follow before anyone uses it."""
    cute.arch.inline_ptx("mbarrier.init.shared::cta.b64 [{$r0}], {$r1};", read_only_args=[barrier, arrivals])


@cute.jit
def expect(barrier: Int32, count: Int32) -> None:
    """Arrive, and let the phase end only when this many bytes have come as well."""
    cute.arch.inline_ptx(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [{$r0}], {$r1};", read_only_args=[barrier, count]
    )


@cute.jit
def arrive(barrier: Int32) -> None:
    """Arrive; releases to the CTA."""
    cute.arch.inline_ptx("mbarrier.arrive.shared::cta.b64 _, [{$r0}];", read_only_args=[barrier])


@cute.jit
def arrive_peer(barrier: Int32) -> None:
    """Arrive at a barrier of the cluster, given by its mapped address; releases to the cluster."""
    cute.arch.inline_ptx("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [{$r0}];", read_only_args=[barrier])


@cute.jit
def wait(barrier: Int32, parity: Int32) -> None:
    """Until the phase of this parity has ended; acquires what arrivals of the CTA and bulk copies have written."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; poll: mbarrier.try_wait.parity.shared::cta.b64 done, [{$r0}], {$r1}; @!done bra poll; }",
        read_only_args=[barrier, parity],
    )


@cute.jit
def wait_cluster(barrier: Int32, parity: Int32) -> None:
    """As `wait`; acquires what CTAs of the cluster have sent or released."""
    cute.arch.inline_ptx(
        "{ .reg .pred done; poll: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1}; "
        "@!done bra poll; }",
        read_only_args=[barrier, parity],
    )


@cute.jit
def bulk_copy(target: Int32, source: cute.Pointer, count: Int32, barrier: Int32) -> None:
    """Copy bytes (a multiple of 16, both ends aligned to 16) from global to shared memory; completes on the barrier."""
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, count, barrier],
    )


@cute.jit
def bulk_copy_once(target: Int32, source: cute.Pointer, count: Int32, barrier: Int32) -> None:
    """As `bulk_copy`, of bytes that nobody reads again: their lines leave L2 first (evict_first, all of them)."""
    cute.arch.inline_ptx(
        "{ .reg .b64 policy; mov.b64 policy, 0x12F0000000000000; cp.async.bulk.shared::cluster.global"
        ".mbarrier::complete_tx::bytes.L2::cache_hint [{$r0}], [{$r1}], {$r2}, [{$r3}], policy; }",
        read_only_args=[target, source, count, barrier],
    )


@cute.jit
def bulk_send(target: Int32, source: Int32, count: Int32, barrier: Int32) -> None:
    """Copy bytes (a multiple of 16) of own shared memory to a mapped address; completes on a barrier of that CTA.

    `order_generic_before_bulk` by the threads that wrote the source, and a barrier among them, go before.
    """
    cute.arch.inline_ptx(
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[target, source, count, barrier],
    )


@cute.jit
def order_generic_before_bulk() -> None:
    """Ordinary accesses of this thread to shared memory before bulk copies after it."""
    cute.arch.inline_ptx("fence.proxy.async.shared::cta;")


@cute.jit
def load_f32x2(address: Int32) -> tuple:
    """Two consecutive Float32."""
    return cute.arch.inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];", write_only_types=[Float32] * 2, read_only_args=[address]
    )


@cute.jit
def load_peer_4xf32(address: Int32) -> tuple:
    """Four consecutive Float32 at a mapped address; a cluster barrier behind their stores goes before."""
    return cute.arch.inline_ptx(
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32] * 4,
        read_only_args=[address],
    )


@cute.jit
def store_f32(address: Int32, value: Float32) -> None:
    """A Float32."""
    cute.arch.inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_f32x2(address: Int32, first: Float32, second: Float32) -> None:
    """Two consecutive Float32."""
    cute.arch.inline_ptx("st.shared.v2.f32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


@cute.jit
def store_b32(address: Int32, value: Int32) -> None:
    """A register."""
    cute.arch.inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def store_zero_16b(address: Int32) -> None:
    """16 bytes of zeros."""
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {0, 0, 0, 0};", read_only_args=[address])


@cute.jit
def peer(address: Int32, rank: Int32) -> Int32:
    """The same place in the shared memory of another CTA of the cluster, as an address of the cluster's window."""
    return cute.arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};", write_only_types=[Int32], read_only_args=[address, rank]
    )


@cute.jit
def send_f32x2(address: Int32, values: tuple, barrier: Int32) -> None:
    """Store two Float32 at a mapped address and count 8 bytes on a barrier of the same CTA."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, *values, barrier],
    )


@cute.jit
def send_f32x4(address: Int32, values: tuple, barrier: Int32) -> None:
    """Store four Float32 at a mapped address and count 16 bytes on a barrier of the same CTA."""
    cute.arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *values, barrier],
    )
