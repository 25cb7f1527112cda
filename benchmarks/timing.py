"""Times and memory of calls on the current GPU."""

import statistics
import time
from dataclasses import dataclass

import torch


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


def gpu_times(calls, seconds=0.3):
    """GPU time of one call by replay of one CUDA graph that holds all of `calls`, which work on different tensors."""
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
    once = statistics.median(elapsed(graph.replay, 3)) / 1e6
    samples = min(max(int(seconds / once), 10), 300)
    return Times.of([sample / len(calls) for sample in elapsed(graph.replay, samples)])


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
