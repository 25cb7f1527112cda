"""What the landed GPU record says went wrong and is known about: {start of the problem: why it is open}.

tests/test_gpu_record.py takes a problem of the record that is not listed here for a failure, and so it does an entry
that the record no longer bears out. The next run of tests/gpu.sh that passes empties this list.
"""

OPEN_PROBLEMS = {}

# Sources that were landed without a record of their own: {digest of csrc: why}. The record is then of older ones. Any
# other change of csrc fails the tests, and so does an entry that is no longer needed.
UNRECORDED = {}
