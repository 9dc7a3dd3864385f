"""The kernel that writes a call's inputs late: trusted, and the predecessor of the kernel under test.

It lets its successor start at once (`griddepcontrol.launch_dependents`), waits, and only then copies the inputs into
place. A kernel under test that loads an activation, a state or a batch description above its own wait reads what was
there before: NaN, or -1. One PTX text serves every architecture; the driver assembles it.
"""

from __future__ import annotations

__all__ = ["ENTRY", "PTX", "WORD_BYTES", "table"]

ENTRY = "fasttrack_late_copy"
WORD_BYTES = 16
"""Copies move whole words; a range's end is rounded up, which stays inside its red zone."""

PTX = """\
.version 7.8
.target sm_90
.address_size 64

// table: delay in ns, number of ranges, then (destination, source, words of 16 bytes) of each range; all 64 bits.
.visible .entry fasttrack_late_copy(.param .u64 table)
{
    .reg .pred %p;
    .reg .b32 %x, %y, %z, %w, %a, %b;
    .reg .b64 %table, %delay, %count, %start, %now, %index, %stride, %range, %to, %from, %words, %i, %off, %s, %d;

    griddepcontrol.launch_dependents;
    ld.param.u64 %table, [table];
    cvta.to.global.u64 %table, %table;
    ld.global.u64 %delay, [%table];
    ld.global.u64 %count, [%table+8];
    mov.u64 %start, %globaltimer;
WAIT:
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %p, %now, %delay;
    @%p bra WAIT;

    mov.u32 %x, %ctaid.x;
    mov.u32 %y, %ntid.x;
    mov.u32 %z, %tid.x;
    mad.lo.u32 %a, %x, %y, %z;
    cvt.u64.u32 %index, %a;
    mov.u32 %x, %nctaid.x;
    mul.lo.u32 %b, %x, %y;
    cvt.u64.u32 %stride, %b;
    add.u64 %range, %table, 16;
RANGE:
    setp.eq.u64 %p, %count, 0;
    @%p bra DONE;
    ld.global.u64 %to, [%range];
    ld.global.u64 %from, [%range+8];
    ld.global.u64 %words, [%range+16];
    mov.u64 %i, %index;
WORD:
    setp.ge.u64 %p, %i, %words;
    @%p bra NEXT;
    shl.b64 %off, %i, 4;
    add.u64 %s, %from, %off;
    add.u64 %d, %to, %off;
    ld.global.v4.u32 {%x, %y, %z, %w}, [%s];
    st.global.v4.u32 [%d], {%x, %y, %z, %w};
    add.u64 %i, %i, %stride;
    bra WORD;
NEXT:
    add.u64 %range, %range, 24;
    sub.u64 %count, %count, 1;
    bra RANGE;
DONE:
    ret;
}
"""


def table(delay_ns: int, ranges: list[tuple[int, int, int]]) -> list[int]:
    """The kernel's parameter table as 64-bit words.

    Args:
        delay_ns: how long it waits before it copies.
        ranges: (destination address, source address, bytes); addresses are multiples of `WORD_BYTES`.

    Raises:
        ValueError: an address that is not.
    """
    words = [delay_ns, len(ranges)]
    for to, source, nbytes in ranges:
        if to % WORD_BYTES or source % WORD_BYTES:
            raise ValueError(f"addresses {to:#x} and {source:#x}; expected multiples of {WORD_BYTES}")
        words += [to, source, -(-nbytes // WORD_BYTES)]
    return words
