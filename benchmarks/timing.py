"""Times and memory of calls on the current GPU, and its SM clock."""

import functools
import statistics
import subprocess
import time
from dataclasses import dataclass

import torch

# The power limit lowers the clock of a GPU that is full for tens of milliseconds. So long without work brings the full
# one back, and so short a burst after it still has that (docs/sm90-forward.md, section 4).
REST_SECONDS = 0.5
BURST_SECONDS = 0.02


@dataclass(frozen=True)
class Times:
    """Microseconds a call: median, least, and the distance from the 10th to the 90th percentile."""

    median: float
    least: float
    spread: float

    @classmethod
    def of(cls, samples):
        tenths = statistics.quantiles(samples, n=10, method="inclusive")
        return cls(statistics.median(samples), min(samples), tenths[-1] - tenths[0])


def elapsed(enqueue, samples):
    """GPU microseconds of each of `samples` runs, queued behind a pause so that the GPU never waits for the host."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(samples)]
    torch.cuda._sleep(4_000_000)
    for start, end in events:
        start.record()
        enqueue()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e3 for start, end in events]


@dataclass(frozen=True)
class GpuTimes:
    """GPU time of one call, twice; and the SM clock in MHz that `sustained` ends with, None where it is not known.

    rested: at the full clock, of 10 to 40 replays, at most 20 ms where 10 are not longer, after 0.5 s without work.
    sustained: of replays without a rest, at whatever clock the power limit leaves: 0.3 s of them, but 10 to 300.
    """

    rested: Times
    sustained: Times
    sm_clock: int | None

    def fields(self):
        """What rows of a results file hold of it."""
        return {
            "gpu_us": self.rested.median,
            "gpu_us_least": self.rested.least,
            "gpu_us_spread": self.rested.spread,
            "gpu_us_sustained": self.sustained.median,
            "gpu_us_sustained_spread": self.sustained.spread,
            "sm_clock_mhz": self.sm_clock,
        }


class SmClock:
    """Readings of a GPU's SM clock under load, by nvidia-smi; `budget`: the most seconds that all of them may take.

    gpu: its UUID as nvidia-smi takes it; None where that is not known, and then no clock is.
    """

    def __init__(self, gpu, budget=20.0):
        self.command = ["nvidia-smi", "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={gpu}"]
        self.left = budget if gpu is not None else 0.0

    def read(self, load):
        """MHz while load() is called again and again; None where nvidia-smi is missing, fails, or does not know."""
        started = time.monotonic()
        try:
            return self._read(load, started + min(self.left, 2.0)) if self.left > 0 else None
        finally:
            self.left -= time.monotonic() - started

    def _read(self, load, deadline):
        try:
            process = subprocess.Popen(self.command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        except OSError:
            return None
        with process:
            try:
                while process.poll() is None:
                    if time.monotonic() > deadline:
                        return None
                    load()
                output = process.stdout.read()
            finally:
                process.kill()  # nothing, where it has ended
        clock = output.strip()
        return int(clock) if process.returncode == 0 and clock.isdigit() and int(clock) > 0 else None


@functools.cache
def current_sm_clock():
    """The SmClock of the GPU that is current at the first call."""
    # The oldest PyTorch that is allowed does not know it.
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    return SmClock(None if uuid is None else f"GPU-{uuid}")


def gpu_times(calls):
    """GpuTimes of one call, by replay of one CUDA graph that holds all of `calls`, which work on different tensors."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return replay_times(graph.replay, len(calls), current_sm_clock())


def replay_times(replay, count, sm_clock, seconds=0.3):
    """GpuTimes of one of the `count` calls that replay() enqueues; `seconds` of replays for the sustained ones."""
    once = statistics.median(elapsed(replay, 3)) / 1e6

    def times(seconds, most):
        samples = min(max(int(seconds / once), 10), most)
        return Times.of([sample / count for sample in elapsed(replay, samples)])

    def load():
        for _ in range(max(int(0.005 / once), 1)):
            replay()
        torch.cuda.synchronize()

    # elapsed has waited for the GPU's last work.
    time.sleep(REST_SECONDS)
    replay()  # for what the rest has cooled in the caches
    rested = times(BURST_SECONDS, most=40)
    sustained = times(seconds, most=300)
    # Not before, so that no process that starts is beside a timed replay; the load goes on where it was.
    return GpuTimes(rested, sustained, sm_clock.read(load))


def host_time(call, samples=50):
    """Median host microseconds of one eager call, with the GPU's queue never full."""
    times = []
    for i in range(samples + 10):
        if i % 10 == 0:
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start) / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times[10:])


def wall_time(call, samples=50):
    """Median microseconds from the start of one eager call to the end of its work, with nothing else on the GPU."""
    times = []
    for _ in range(samples + 5):
        torch.cuda.synchronize()
        start = time.perf_counter_ns()
        call()
        torch.cuda.synchronize()
        times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times[5:])


def extra_memory(call):
    """Peak bytes of device memory beyond a call's arguments and results, from PyTorch's allocator or elsewhere."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    reserved, free = torch.cuda.memory_reserved(), torch.cuda.mem_get_info()[0]
    results = call()
    taken = free - torch.cuda.mem_get_info()[0]
    torch.cuda.synchronize()
    elsewhere = taken - (torch.cuda.memory_reserved() - reserved)
    extra = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del results
    return extra + max(elsewhere, 0)


def copy_bandwidth(size=2**31):
    """Bytes a second, read and written, of a device-to-device copy of `size` bytes."""
    source = torch.zeros(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * size / (statistics.median(elapsed(lambda: target.copy_(source), 20)) / 1e6)
