"""Kernels that the device-code audit must refuse, each beside an honest twin. Compiled by build.py, run by nobody.

All have one signature: `flag` (workspace), `x` (activation), `w` (constant), `out` (output), `n` (scalar).
"""

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

ptx = cute.arch.inline_ptx
wait = cute.arch.griddepcontrol_wait


def at(pointer, n):
    return cute.make_tensor(pointer, cute.make_layout(n))


def thread():
    return cute.arch.thread_idx()[0]


@cute.kernel
def load_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    value = at(x, n)[t]
    wait()
    at(out, n)[t] = value * at(w, n)[t]


@cute.kernel
def weights_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    weight = at(w, n)[t]
    wait()
    at(out, n)[t] = at(x, n)[t] * weight


@cute.kernel
def hidden_load_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """The address is chosen at run time between a weight and an activation, and travels through shared memory."""
    t = thread()
    box = cute.arch.alloc_smem(Int64, 1)
    if t == 0:
        address = w.toint()
        if n > 7:
            address = x.toint()
        cute.make_tensor(box, cute.make_layout(1))[0] = address
    cute.arch.sync_threads()
    address = cute.make_tensor(box, cute.make_layout(1))[0] + Int64(t) * 4
    value = ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])
    wait()
    at(out, n)[t] = value


@cute.kernel
def hidden_weight_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    box = cute.arch.alloc_smem(Int64, 1)
    if t == 0:
        address = w.toint()
        if n > 7:
            address = w.toint() + 64
        cute.make_tensor(box, cute.make_layout(1))[0] = address
    cute.arch.sync_threads()
    address = cute.make_tensor(box, cute.make_layout(1))[0] + Int64(t) * 4
    value = ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])
    wait()
    at(out, n)[t] = value + at(x, n)[t]


@cute.kernel
def bulk_copy_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    tile, bar = _tile(t)
    if t == 0:
        _bulk(tile, x, bar)
    wait()
    cute.arch.mbarrier_wait(bar, 0)
    at(out, n)[t] = at(tile, 1024)[t]


@cute.kernel
def bulk_weights_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    tile, bar = _tile(t)
    if t == 0:
        _bulk(tile, w, bar)
    wait()
    cute.arch.mbarrier_wait(bar, 0)
    at(out, n)[t] = at(tile, 1024)[t] * at(x, n)[t]


@cute.jit
def _tile(t: Int32):
    tile = cute.arch.alloc_smem(Float32, 1024, alignment=128)
    bar = cute.arch.alloc_smem(Int64, 1)
    if t == 0:
        cute.arch.mbarrier_init(bar, 1)
        cute.arch.mbarrier_init_fence()
    cute.arch.sync_threads()
    return tile, bar


@cute.jit
def _bulk(tile: cute.Pointer, source: cute.Pointer, bar: cute.Pointer):
    cute.arch.mbarrier_arrive_and_expect_tx(bar, 4096)
    ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], 4096, [{$r2}];",
        read_only_args=[tile.toint(), source.toint(), bar.toint()],
    )


@cute.kernel
def store_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    at(out, n)[t] = at(w, n)[t]
    wait()
    at(out, n)[t + 128] = at(x, n)[t]


@cute.kernel
def store_below_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    weight = at(w, n)[t]
    wait()
    at(out, n)[t] = weight
    at(out, n)[t + 128] = at(x, n)[t]


@cute.kernel
def prefetch_l1_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    ptx("prefetch.global.L1 [{$r0}];", read_only_args=[(x + t).toint()])
    wait()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def prefetch_l2_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    ptx("prefetch.global.L2 [{$r0}];", read_only_args=[(x + t).toint()])
    ptx("prefetch.global.L1 [{$r0}];", read_only_args=[(w + t).toint()])
    wait()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def no_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def wait_on_one_path(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    if n > 64:
        wait()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def wait_in_one_warp(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """One warp waits, and the barrier of the whole CTA behind it orders the others: honest."""
    t = thread()
    if t < 32:
        wait()
    cute.arch.sync_threads()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def role_without_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """The copying warp waits; the others pass its mbarrier and read an activation themselves."""
    t = thread()
    tile, bar = _tile(t)
    if t < 32:
        wait()
        if t == 0:
            _bulk(tile, w, bar)
    else:
        cute.arch.mbarrier_wait(bar, 0)
        at(out, n)[t] = at(tile, 1024)[t] * at(x, n)[t]


@cute.kernel
def role_with_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    tile, bar = _tile(t)
    if t < 32:
        if t == 0:
            _bulk(tile, w, bar)
    else:
        wait()
        cute.arch.mbarrier_wait(bar, 0)
        at(out, n)[t] = at(tile, 1024)[t] * at(x, n)[t]


@cute.kernel
def fixed_address(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    address = Int64(0x7F0012340000) + Int64(t) * 4
    at(out, n)[t] = ptx("ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address])


@cute.jit
def _relaxed(flag: cute.Pointer):
    return ptx("ld.relaxed.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag.toint()])


@cute.kernel
def poll_then_load(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = _relaxed(flag)
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def poll_fence_load(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = _relaxed(flag)
    cute.arch.fence_acq_rel_sys()
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def poll_acquire_load(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = ptx(
            "ld.acquire.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag.toint()]
        )
        ptx("nanosleep.u32 20;")
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def poll_moved_load(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """One thread polls. The load stands after the loop in the PTX; ptxas moves it above the loop."""
    t = thread()
    if t == 0:
        seen = Int32(0)
        while seen != n:
            seen = _relaxed(flag)
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def poll_fenced_load(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    early = at(x, n)[t + 128]
    if t == 0:
        seen = Int32(0)
        while seen != n:
            seen = _relaxed(flag)
        cute.arch.fence_acq_rel_sys()
    cute.arch.sync_threads()
    at(out, n)[t] = at(x, n)[t] + early


@cute.kernel
def mailbox_before_poll(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """Reads the mailbox that peers write, then polls for it."""
    t = thread()
    letter = at(flag, n)[t + 128]
    seen = Int32(0)
    while seen == 0:
        seen = ptx(
            "ld.acquire.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag.toint()]
        )
    at(out, n)[t] = Float32(letter)


@cute.kernel
def mailbox_after_poll(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = ptx(
            "ld.acquire.sys.global.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[flag.toint()]
        )
    at(out, n)[t] = Float32(at(flag, n)[t + 128])


@cute.kernel
def mailbox_above_wait(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """A dependent launch polls its peers' mailbox before it waits for its predecessor: honest."""
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = _relaxed(flag)
    cute.arch.fence_acq_rel_sys()
    letter = at(flag, n)[t + 128]
    wait()
    at(out, n)[t] = Float32(letter) + at(x, n)[t]


@cute.kernel
def activation_behind_mailbox(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """The peers' flag says nothing about what the predecessor on this GPU writes."""
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = _relaxed(flag)
    cute.arch.fence_acq_rel_sys()
    letter = at(x, n)[t]
    wait()
    at(out, n)[t] = letter


@cute.kernel
def load_inside_poll(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    seen = Int32(0)
    value = Float32(0.0)
    while seen == 0:
        seen = _relaxed(flag)
        value = at(x, n)[t]
    at(out, n)[t] = value


@cute.kernel
def poll_data_in_flag(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """The flag and the data are one word: right without a fence, but only with a written argument."""
    t = thread()
    seen = Int32(0)
    while seen == 0:
        seen = _relaxed(flag + t)
    at(out, n)[t] = Float32(seen)


@cute.jit
def _partial(flag: cute.Pointer, t: Int32):
    at(flag, 1024)[t + 128] = t * 3
    cute.arch.fence_acq_rel_gpu()


@cute.kernel
def ticket_without_acquire(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """Each thread leaves a partial result; the last to arrive reads them all."""
    t = thread()
    wait()
    _partial(flag, t)
    arrived = ptx("atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[flag.toint()])
    if arrived == n - 1:
        at(out, n)[t] = Float32(at(flag, n)[t + 256])


@cute.kernel
def ticket_with_acquire(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    _partial(flag, t)
    arrived = ptx("atom.acq_rel.gpu.global.add.u32 {$w0}, [{$r0}], 1;", write_only_types=[Int32], read_only_args=[flag.toint()])
    if arrived == n - 1:
        at(out, n)[t] = Float32(at(flag, n)[t + 256])


@cute.kernel
def local_memory(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    value = at(x, n)[t]
    at(out, n)[t] = ptx(
        "{\n.local .align 4 .b8 buf[256];\n.reg .b64 a;\nmov.u64 a, buf;\ncvta.local.u64 a, a;\ncvta.to.local.u64 a, a;\n"
        "{\n.reg .b64 i;\nmul.wide.u32 i, {$r1}, 4;\nadd.s64 i, i, a;\nst.local.f32 [i], {$r0};\n"
        "ld.local.f32 {$w0}, [a+4];\n}\n}",
        write_only_types=[Float32],
        read_only_args=[value, n],
    )


@cute.kernel
def registers_only(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    values = cute.make_rmem_tensor(cute.make_layout(8), Float32)
    for i in cutlass.range_constexpr(8):
        values[i] = at(x, n)[t + i * 128]
    at(out, n)[t] = values[n % 8]


@cute.jit
def _hinted(x: cute.Pointer, policy: Int64):
    return ptx(
        "ld.global.L2::cache_hint.f32 {$w0}, [{$r0}], {$r1};",
        write_only_types=[Float32],
        read_only_args=[x.toint(), policy],
    )


@cute.kernel
def evict_last(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    policy = ptx("createpolicy.fractional.L2::evict_last.b64 {$w0}, 1.0;", write_only_types=[Int64])
    at(out, n)[t] = _hinted(x + t, policy)


@cute.kernel
def evict_first(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    policy = ptx("createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64])
    at(out, n)[t] = _hinted(x + t, policy)
    ptx("st.global.L1::no_allocate.f32 [{$r0}], {$r1};", read_only_args=[(out + t + 128).toint(), Float32(1.0)])


@cute.kernel
def fractional_policy(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    policy = ptx("createpolicy.fractional.L2::evict_last.L2::evict_first.b64 {$w0}, 0.5;", write_only_types=[Int64])
    at(out, n)[t] = _hinted(x + t, policy)


@cute.kernel
def computed_policy(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    at(out, n)[t] = _hinted(x + t, Int64(n) << 56)


@cute.kernel
def bulk_evict_last(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    tile, bar = _tile(t)
    wait()
    if t == 0:
        cute.arch.mbarrier_arrive_and_expect_tx(bar, 4096)
        ptx(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
            "[{$r0}], [{$r1}], 4096, [{$r2}], {$r3};",
            read_only_args=[tile.toint(), x.toint(), bar.toint(), Int64(0x14F0000000000000)],
        )
    cute.arch.mbarrier_wait(bar, 0)
    at(out, n)[t] = at(tile, 1024)[t]


@cute.kernel
def prefetch_evict_last(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    ptx("prefetch.global.L2::evict_last [{$r0}];", read_only_args=[(w + t).toint()])
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def tensor_core(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    a, b = at(x, n)[t].to(Int32), at(w, n)[t].to(Int32)
    d0, d1, d2, d3 = ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0},{$w1},{$w2},{$w3}}, "
        "{{$r0},{$r0},{$r0},{$r0}}, {{$r1},{$r1}}, {{$r2},{$r2},{$r2},{$r2}};",
        write_only_types=[Float32] * 4,
        read_only_args=[a, b, Float32(0.0)],
    )
    at(out, n)[t] = d0 + d1 + d2 + d3


@cute.kernel
def clock(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    at(out, n)[t] = at(x, n)[t] + Float32(cute.arch.clock())


@cute.kernel
def globaltimer(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    at(out, n)[t] = at(x, n)[t] + Float32(cute.arch.globaltimer().to(Int32))


@cute.kernel
def sleep(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    ptx("nanosleep.u32 1000;")
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def trap(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    ptx("trap;", predicate=n == 17)
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def prints(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    t = thread()
    wait()
    cute.printf("%d\n", n)
    at(out, n)[t] = at(x, n)[t]


@cute.kernel
def switch(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """An indirect branch with declared targets, as the compiler makes it for warp roles: honest."""
    t = thread()
    wait()
    ptx(
        "{\n.reg .u32 r;\nts: .branchtargets L0,L1,L2;\nmov.u32 r, {$r0};\nbrx.idx r, ts;\n"
        "L0:\nst.global.u32 [{$r1}],1;\nbra L3;\nL1:\nst.global.u32 [{$r1}],2;\nbra L3;\n"
        "L2: st.global.u32 [{$r1}],7;\nL3:\n}",
        read_only_args=[n, out.toint()],
    )


@cute.kernel
def division(flag: cute.Pointer, x: cute.Pointer, w: cute.Pointer, out: cute.Pointer, n: Int32):
    """Calls the compiler's division routine on both sides of the wait: honest."""
    t = thread()
    scale = at(w, n)[t] / n.to(Float32)
    wait()
    at(out, n)[t] = at(x, n)[t] / scale


ALONE = ("prints",)

# name -> (claims that differ from the default, code that must be found or None)
CASES: dict[str, tuple[dict[str, object], str | None]] = {
    "load_above_wait": ({}, "audit.load_above_wait"),
    "weights_above_wait": ({}, None),
    "hidden_load_above_wait": ({}, "audit.load_above_wait"),
    "hidden_weight_above_wait": ({}, None),
    "bulk_copy_above_wait": ({}, "audit.load_above_wait"),
    "bulk_weights_above_wait": ({"expects": ("bulk_copy",)}, None),
    "store_above_wait": ({}, "audit.store_above_wait"),
    "store_below_wait": ({}, None),
    "prefetch_l1_above_wait": ({}, "audit.prefetch_above_wait"),
    "prefetch_l2_above_wait": ({}, None),
    "no_wait": ({}, "audit.wait_missing"),
    "wait_on_one_path": ({}, "audit.wait_missing"),
    "wait_in_one_warp": ({}, None),
    "role_without_wait": ({}, "audit.wait_by_other_warp"),
    "role_with_wait": ({}, None),
    "fixed_address": ({}, "audit.address_unknown"),
    "poll_then_load": ({"pdl": False}, "audit.load_after_relaxed_poll"),
    "poll_fence_load": ({"pdl": False}, None),
    "poll_acquire_load": ({"pdl": False}, None),
    "mailbox_above_wait": ({}, None),
    "activation_behind_mailbox": ({}, "audit.load_above_wait"),
    "load_inside_poll": ({"pdl": False}, "audit.load_after_relaxed_poll"),
    "poll_moved_load": ({"pdl": False}, "audit.load_above_poll"),
    "poll_fenced_load": ({"pdl": False}, None),
    "mailbox_before_poll": ({"pdl": False}, "audit.load_above_poll"),
    "mailbox_after_poll": ({"pdl": False}, None),
    "poll_data_in_flag": ({"pdl": False}, "audit.relaxed_poll"),
    "ticket_without_acquire": ({}, "audit.load_after_relaxed_atomic"),
    "ticket_with_acquire": ({}, None),
    "local_memory": ({}, "audit.spill"),
    "registers_only": ({}, None),
    "evict_last": ({}, "audit.cache_hint"),
    "evict_first": ({}, None),
    "fractional_policy": ({}, "audit.cache_hint"),
    "computed_policy": ({}, "audit.cache_hint"),
    "bulk_evict_last": ({}, "audit.cache_hint"),
    "prefetch_evict_last": ({}, "audit.cache_hint"),
    "tensor_core": ({"expects": ("tensor_core",)}, None),
    "clock": ({}, "audit.clock"),
    "globaltimer": ({}, "audit.clock"),
    "sleep": ({}, "audit.sleep"),
    "trap": ({}, "audit.debug"),
    "prints": ({}, "audit.external_call"),
    "switch": ({}, None),
    "division": ({}, None),
}
