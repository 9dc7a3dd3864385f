"""Sizes of one compiled mla_decode kernel, and where things lie in its shared memory."""

from dataclasses import dataclass

__all__ = [
    "CHUNK", "CONSUMERS", "CONSUMER_REGISTERS", "K_STEPS", "LOG2_E", "MAX_BATCH", "MERGE_DEPTH",
    "NEG_INF", "PITCH", "PRODUCERS", "PRODUCER_REGISTERS", "PRODUCER_STEP", "P_PITCH", "ROW", "SHARE", "SHARED_LIMIT",
    "SLICES", "STOPS", "S_PITCH", "TABLE_DEPTH", "TILE", "VALUE", "WARPS", "WARP_COLUMNS", "Plan", "cut",
]  # fmt: skip

ROW, VALUE = 576, 512
"""Columns of a cache row, and those of them that are the value."""
PITCH = 2 * ROW + 16
"""Bytes between bf16 rows: eight rows of an ldmatrix then lie in different banks."""
CHUNK = 16
"""Cache rows per ring slot: one m16 tile of K, one k16 step of V."""
TILE = 4
"""Chunks between two exchanges of scores."""
SLICES, K_STEPS = 4, 9
"""S sums 576 columns in 4 slices of 9 k16 steps."""
WARPS, PRODUCERS = 8, 4
"""Consumer and producer warps. A bulk copy takes uniform registers, so a warp issues its lanes' copies one by one."""
CONSUMERS = 32 * WARPS
PRODUCER_STEP = CHUNK * PRODUCERS
TABLE_DEPTH = 4
"""Chunks for which a producer warp holds block table entries, and as many are on their way."""
WARP_COLUMNS = VALUE // WARPS
S_PITCH = CHUNK * TILE + 4
"""Floats between query rows of partial scores: C fragments are then stored without bank conflicts."""
P_PITCH = 2 * CHUNK * TILE + 16
"""Bytes between query rows of P, likewise."""
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40
"""Of 168 that 384 threads get at launch, moved between the roles."""
MAX_BATCH = 128
SHARE = MAX_BATCH + 1
"""Where the chunks per cluster lie, behind the first chunks of all requests and the sequence's length."""
STOPS = MAX_BATCH + 4
"""Where the chunks behind the requests' last ones lie, in the same array."""
MERGE_DEPTH = 9
"""Partials of a fragment that a thread loads at once, unless it has several fragments."""
SHARED_LIMIT = 226 * 1024
"""227 KB less what the compiler reserves."""
LOG2_E = 1.4426950408889634
NEG_INF = float("-inf")


def cut(query_rows: int, most: int) -> tuple[int, int]:
    """Query rows of a request in groups: (how many, rows of each but the last: a multiple of 8, at most `most`)."""
    groups = -(-query_rows // most)
    return groups, -(-query_rows // (8 * groups)) * 8


@dataclass(frozen=True)
class Plan:
    """What a variant fixes at compile time. Offsets are bytes of dynamic shared memory."""

    heads: int
    tokens: int
    rows: int
    """Query rows per group: a multiple of 8."""
    groups: int
    cluster: int
    idle: int
    min_chunks: int
    """A CTA's share of a segment is not cut finer than this."""
    merge_split: int
    """Warps that share a fragment in the second launch; 0: no second launch, the last cluster of a request merges."""
    most_slots: int
    """Ring slots of bf16 rows at most: what is in flight delays what is needed first."""
    e4m3: bool
    """Whether the cache holds E4M3 bytes."""

    def __post_init__(self) -> None:
        if (self.groups - 1) * self.rows >= self.all_rows:
            raise ValueError("a group without query rows")
        if 16 * self.slots + 16 > self.starts or self.slots < TILE:
            raise ValueError("more ring slots than barriers, or fewer than a tile")

    @property
    def merge_warps(self) -> int:
        """Of a CTA of the second launch."""
        return max(WARPS, self.merge_split)

    @property
    def all_rows(self) -> int:
        """Query rows of a request."""
        return self.heads * self.tokens

    @property
    def clusters(self) -> str:
        """Clusters per group, as an expression over the launch's sizes."""
        return f"max(1, (sms - {self.idle}) // {self.groups * self.cluster})"

    @property
    def columns(self) -> int:
        """Value columns that a CTA of the cluster adds up."""
        return VALUE // self.cluster

    @property
    def tiles(self) -> int:
        """n8 tiles of query rows."""
        return self.rows // 8

    @property
    def owned(self) -> int:
        """Query rows whose softmax a warp does."""
        return self.rows // WARPS

    @property
    def row_bytes(self) -> int:
        """Of a cache row."""
        return ROW if self.e4m3 else 2 * ROW

    @property
    def pitch(self) -> int:
        """Bytes between rows of a slot. E4M3 rows are read in one piece, bf16 rows by ldmatrix."""
        return ROW if self.e4m3 else PITCH

    @property
    def slot(self) -> int:
        """Bytes of a ring slot."""
        return CHUNK * self.pitch

    @property
    def warp_fragments(self) -> int:
        """C fragments of O^T that a warp holds: of 16 value columns and 8 query rows each."""
        return WARP_COLUMNS // 16 * self.tiles

    @property
    def slice_fragments(self) -> int:
        """Fragments of the columns that a CTA of the cluster adds up."""
        return self.warp_fragments * WARPS // self.cluster

    @property
    def merge_fragments(self) -> int:
        """Fragments of a warp whose partials the last cluster loads together."""
        return next(n for n in (4, 2, 1) if self.slice_fragments % (n * WARPS) == 0 or n == 1)

    @property
    def merge_depth(self) -> int:
        """Partials of each of them that it loads at once; more than there are cost their instructions all the same."""
        return MERGE_DEPTH if self.merge_fragments == 1 else 16 // self.merge_fragments

    @property
    def inbox_bytes(self) -> int:
        """What the cluster sends to each CTA per segment: fragments, maxima and sums."""
        return self.cluster * (512 * self.slice_fragments + 8 * self.rows)

    @property
    def barriers(self) -> int:
        """First of the mbarriers: full and empty of each slot, inbox, free."""
        return 0

    @property
    def inbox_barrier(self) -> int:
        """Completes when the whole cluster has sent its results of a segment."""
        return self.barriers + 16 * self.slots

    @property
    def free_barrier(self) -> int:
        """Completes when the whole cluster has read its inboxes."""
        return self.inbox_barrier + 8

    @property
    def starts(self) -> int:
        """First chunk of each request in the sequence, the sequence's length, chunks per cluster, requests' ends."""
        return 512

    @property
    def lengths(self) -> int:
        """Sequence length of each request."""
        return self.starts + 4 * (STOPS + MAX_BATCH)

    @property
    def stats(self) -> int:
        """Maximum and sum of each query row, by CTA of the cluster."""
        return self.lengths + 4 * MAX_BATCH

    @property
    def factors(self) -> int:
        """By which each query row's O shrinks in this tile."""
        return self.stats + 8 * self.rows * self.cluster

    @property
    def verdict(self) -> int:
        """A word: how many clusters had finished a request before this one."""
        return self.factors + 4 * self.rows

    @property
    def p(self) -> int:
        """P of a tile."""
        return self.factors + 4 * self.rows + 16

    @property
    def scores(self) -> int:
        """Partial scores of a tile."""
        return self.p + P_PITCH * self.rows

    @property
    def inbox(self) -> int:
        """Fragments from the cluster's CTAs."""
        return self.scores + 4 * SLICES * S_PITCH * self.rows

    @property
    def tile(self) -> int:
        """A tile of rows converted from E4M3 to f16."""
        end = self.inbox + (512 * self.slice_fragments * self.cluster if self.cluster > 1 else 0)
        return -(-end // 128) * 128

    @property
    def ring(self) -> int:
        """The slots."""
        return self.tile + (TILE * CHUNK * PITCH if self.e4m3 else 0)

    @property
    def slots(self) -> int:
        """As many as are wanted and fit."""
        return min(self.most_slots * (2 if self.e4m3 else 1), (SHARED_LIMIT - self.ring) // self.slot)

    @property
    def shared(self) -> int:
        """Bytes in all."""
        return self.ring + self.slots * self.slot
