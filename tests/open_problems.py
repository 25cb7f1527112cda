"""What the landed GPU record says went wrong and is known about: {start of the problem: why it is open}.

tests/test_gpu_record.py takes a problem of the record that is not listed here for a failure, and so it does an entry
that the record no longer bears out. The next run of tests/gpu.sh that passes empties this list.
"""

_BOUND = (
    "a bound of the fuzzer, not a fault of the kernels: the final state of a single head under the gate `extreme`, "
    "erased to a thousandth and less of the initial state, whose rounding to bf16 as an operand then counts that many "
    "times. Emulating the kernels' roundings on such calls gives up to 1e-2, and up to 2e-2 for the kernels of the "
    "record before. The fuzzer has taken 2^-10 of the initial state for the least norm since; not run on a GPU yet"
)
OPEN_PROBLEMS = {
    "fuzz: exit status 1": "the two calls below, of 2000",
    "fuzz: python tests/fuzz.py --seed 0 --case 667 ": _BOUND,
    "fuzz: python tests/fuzz.py --seed 0 --case 1012 ": _BOUND,
}
