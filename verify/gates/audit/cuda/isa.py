"""What SASS opcodes do, as far as the audit needs it. Tables and no logic.

NVIDIA documents opcode names (CUDA Binary Utilities, "Instruction Set Reference") but not their operands. The tables
were read off the output of ptxas 13.4 for sm_90a, sm_100a and sm_103a, from PTX whose meaning is documented; what no
kernel of tests/hostile/cuda or of the study in docs/audit.md holds (older tensor-core and tensor-memory forms) is
entered by its documented name. An opcode that is in no table and has no address operand is arithmetic: its result
derives from all its inputs. One with an address operand is reported, never guessed.
"""

from __future__ import annotations

from verify.gates.audit.cuda.ops import Touch

__all__ = [
    "CLASSES", "CLOCKS", "GLOBAL", "LOCAL_READS", "LOCAL_WRITES", "NO_RESULT", "RESULT_REGISTERS", "SHARED_READS",
    "SHARED_WRITES", "SILENT_BRACKETS", "THREAD_IDS", "WINDOWS",
]  # fmt: skip

GLOBAL: dict[str, tuple[Touch, int]] = {
    "LDG": (Touch.LOAD, 0), "LD": (Touch.LOAD, 0), "LDGMC": (Touch.LOAD, 0),
    "STG": (Touch.STORE, 0), "ST": (Touch.STORE, 0),
    "ATOM": (Touch.ATOMIC, 0), "ATOMG": (Touch.ATOMIC, 0), "RED": (Touch.ATOMIC, 0), "REDG": (Touch.ATOMIC, 0),
    "LDGSTS": (Touch.COPY_IN, 1),
    "UBLKPF": (Touch.PREFETCH_L2, 0), "UTMAPF": (Touch.PREFETCH_L2, 1),
    "UTMALDG": (Touch.COPY_IN, 1), "UTMASTG": (Touch.COPY_OUT, 1), "UTMAREDG": (Touch.COPY_OUT, 1),
    "UBLKRED": (Touch.COPY_OUT, 0),
}  # fmt: skip
"""Opcode -> (how global memory is touched, which address operand is the global one). UBLKCP and CCTL depend on
modifiers and are decided in `lower`; multimem.st and multimem.red become STG and REDG."""

SILENT_BRACKETS = frozenset({
    "LDS", "STS", "LDSM", "STSM", "ATOMS", "SYNCS", "LDL", "STL", "LDC", "ULDC", "LDCU", "UTCBAR", "UTMACCTL", "STAS",
    "REDAS", "ARRIVES", "UTCCP", "UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCATOMSWS", "HGMMA", "QGMMA", "IGMMA",
    "BGMMA", "LDTM", "STTM", "UTCSHIFT", "UGETNEXTWORKID", "QSPC", "LDSLK", "STSCUL", "LDTRAM", "LDSU", "USTS",
    "UTCSTSWS", "UTCLDSWS", "CCTLL", "USYNCS", "ULDS", "LDT", "STT", "ULDT", "USTT",
})  # fmt: skip
"""Opcodes whose address operands never name global memory: shared, distributed shared, local, constant and tensor
memory, and instruction descriptors. UTMACCTL acts on the descriptor cache."""

SHARED_READS = frozenset({"LDS", "LDSM", "ATOMS", "ULDS"})
SHARED_WRITES = frozenset({"STS", "STSM", "ATOMS", "STAS", "USTS"})
LOCAL_READS = frozenset({"LDL"})
LOCAL_WRITES = frozenset({"STL"})

NO_RESULT = frozenset({
    "STG", "ST", "STS", "STL", "STSM", "STTM", "STAS", "RED", "REDG", "REDAS", "BAR", "MEMBAR", "CCTL", "BRA", "EXIT",
    "NOP", "BSSY", "BSYNC", "BREAK", "WARPSYNC", "YIELD", "DEPBAR", "LDGDEPBAR", "LDGSTS", "UBLKCP", "UBLKPF",
    "UBLKRED", "UTMALDG", "UTMASTG", "UTMAREDG", "UTMAPF", "UTMACCTL", "UTMACMDFLUSH", "FENCE", "NANOSLEEP", "PMTRIG",
    "BPT", "RET", "CALL", "BRX", "BRXU", "JMX", "JMXU", "JMP", "ERRBAR", "CGAERRBAR", "ACQBULK", "PREEXIT", "ISETP",
    "FSETP", "HSETP2", "DSETP", "UISETP", "UFSETP", "PLOP3", "UPLOP3", "PSETP", "UPSETP", "FCHK", "WARPGROUP",
    "UCGABAR_ARV", "UCGABAR_WAIT", "UTCBAR", "UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA", "UTCCP", "USETMAXREG", "KILL",
    "R2P", "WARPARRIVE", "ENDCOLLECTIVE",
})  # fmt: skip
"""Opcodes that write no general register: their first plain operand is an input."""

RESULT_REGISTERS: tuple[tuple[str, int], ...] = (
    ("DFMA", 2), ("DADD", 2), ("DMUL", 2), ("DMNMX", 2), ("FFMA2", 2), ("FADD2", 2), ("FMUL2", 2), ("LEPC", 2),
    ("ULEPC", 2), ("HMMA", 4), ("IMMA", 4), ("QMMA", 4), ("OMMA", 4), ("DMMA", 4), ("BMMA", 4),
)  # fmt: skip
"""Registers that an opcode writes when no modifier says so; 1 for all others."""

THREAD_IDS = ("SR_TID", "SR_LANEID", "SR_LTMASK", "SR_LEMASK", "SR_EQMASK", "SR_GTMASK", "SR_GEMASK", "SR_VIRTID")
CLOCKS = ("SR_CLOCK", "SR_GLOBALTIMER", "SR_PM")
WINDOWS = ("SR_SWINHI", "SR_SWINLO", "SR_LWIN", "SR_SWIN")

CLASSES: dict[str, tuple[str, ...]] = {
    "tensor_core": ("HMMA", "IMMA", "QMMA", "OMMA", "DMMA", "BMMA", "HGMMA", "IGMMA", "QGMMA", "BGMMA", "UTCHMMA",
                    "UTCQMMA", "UTCOMMA", "UTCIMMA"),
    "warpgroup_mma": ("HGMMA", "IGMMA", "QGMMA", "BGMMA"),
    "tcgen05": ("UTCHMMA", "UTCQMMA", "UTCOMMA", "UTCIMMA"),
    "bulk_copy": ("UBLKCP", "UTMALDG", "UTMASTG", "UBLKRED", "UTMAREDG"),
    "tma": ("UTMALDG", "UTMASTG", "UTMAREDG"),
    "async_copy": ("LDGSTS", "UBLKCP", "UTMALDG"),
    "cluster": ("UCGABAR_ARV", "UCGABAR_WAIT", "STAS", "REDAS"),
    "mbarrier": ("SYNCS",),
    "prefetch": ("UBLKPF", "UTMAPF", "CCTL.PF1", "CCTL.PF2", "CCTL.PML2"),
    "pdl_wait": ("ACQBULK",),
    "pdl_launch": ("PREEXIT",),
    "multimem": ("LDGMC",),
    "strong_load": ("LDG.STRONG", "LD.STRONG"),
}  # fmt: skip
"""Names that a kernel's claims may expect -> opcodes any of which proves the class."""
