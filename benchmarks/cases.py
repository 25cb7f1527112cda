"""The benchmark's cases: bf16 inputs, K = V = 128, lower_bound = -5, fp32 initial and final state, both gates."""

from dataclasses import dataclass

HEAD_DIM = 128
MIXED = (1300, 547, 2048, 963, 271, 3063)


@dataclass(frozen=True)
class Case:
    """Sequences of `lengths` tokens with `heads` heads; must_us, goal_us: microseconds to reach on an H200."""

    name: str
    table: str
    heads: int
    lengths: tuple[int, ...]
    must_us: float
    goal_us: float

    @property
    def tokens(self):
        return sum(self.lengths)

    @property
    def bytes(self):
        """Bytes that must move: q, k, v, g, out in bf16 and beta once; the fp32 states once in, once out."""
        rows = self.tokens * self.heads * (5 * HEAD_DIM + 1) * 2
        return rows + 2 * len(self.lengths) * self.heads * HEAD_DIM**2 * 4


def many(name, heads, lengths, must_us, goal_us):
    return Case(f"{name}/{heads}", "many heads", heads, tuple(lengths), must_us, goal_us)


def few(tokens, heads, sequences, must_us, goal_us):
    lengths = (tokens // sequences,) * sequences
    return Case(f"{tokens}/{heads}/{sequences}", "few heads", heads, lengths, must_us, goal_us)


CASES = (
    many("8192", 96, [8192], 400, 340),
    many("mixed", 96, MIXED, 400, 340),
    many("8x1024", 96, [1024] * 8, 400, 340),
    many("8192", 64, [8192], 320, 250),
    many("mixed", 64, MIXED, 300, 240),
    many("8x1024", 64, [1024] * 8, 280, 230),
    few(1024, 4, 1, 25, 16),
    few(2048, 12, 1, 40, 30),
    few(2048, 16, 1, 45, 35),
    few(3072, 10, 1, 48, 38),
    few(4096, 8, 1, 48, 38),
    few(4096, 12, 1, 60, 46),
    few(8192, 12, 4, 105, 80),
    few(8192, 16, 1, 130, 100),
    few(8192, 24, 1, 180, 140),
    few(16384, 16, 8, 240, 190),
    few(32768, 8, 1, 250, 190),
    few(65536, 12, 1, 700, 540),
)
QUICK = ("mixed/96", "2048/12/1")
# Of this one the error of `out` is kept by token position, too: every peer runs it, as one long sequence.
ERROR_CASE = "8192/96"
