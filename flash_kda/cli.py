"""`python -m flash_kda`: prefill a real text through Kimi Delta Attention heads, check the result, show the speed.

The text's paragraphs become packed sequences of byte embeddings; fixed-seed weights shaped like Kimi Linear's KDA
layer turn them into q, k, v, g and beta; `flash_kda.fwd` runs them in one call, and again in pieces with the state
carried over.
"""

import argparse
import json
import math
import os
import re
import sys
import time
from importlib import resources
from itertools import accumulate
from pathlib import Path
from statistics import median

import torch

from flash_kda import __version__, fwd
from flash_kda.interface import extension, schedule
from flash_kda.recurrence import recurrence
from flash_kda.validation import HEAD_DIM, HEADS_MAX

LOWER_BOUND = -5.0
MODEL_DIM = 512
CONV_TAPS = 4
PIECE_TOKENS = 1000  # deliberately not a multiple of any chunk size
SAMPLE_TOKENS = 1024
SAMPLE_LIMIT = 4096
SAMPLE_HEADS = 4
# Relative errors against the fp64 recurrence that no run may exceed. A streamed run cuts sequences off the chunk grid
# and so rounds differently; two runs with independent errors of that size differ by sqrt(2) times as much.
OUT_BOUND = 4.6e-3
STATE_BOUND = 3.5e-3
STREAMED_OUT_BOUND = math.sqrt(2) * OUT_BOUND
STREAMED_STATE_BOUND = math.sqrt(2) * STATE_BOUND
BYTES_PER_TOKEN_HEAD = 5 * 2 * HEAD_DIM + 2  # q, k, v, g read, out written, one logit


class UsageError(Exception):
    """What the user gave cannot be used: one line on standard error, exit status 2."""


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UsageError(message)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    0: fine. 1: an error bound was exceeded, the computation failed (out of memory, a failed kernel launch) or its
    results could not be written. 2: unusable arguments.
    """
    try:
        options = _parse(argv)
        if options.version:
            return _show(lambda: print(version()))
        device = _device(options.device)
    except UsageError as error:
        return _fail(error, 2)
    try:
        report = prefill(options.text, options.heads, device, options.seed)
    except (RuntimeError, MemoryError) as error:
        # PyTorch's messages run over many lines, the first of which names the failure.
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return _fail(f"the computation failed: {reason}", 1)
    if options.json:
        try:
            _write(options.json, json.dumps(report, indent=2) + "\n")
        except OSError as error:
            return _fail(f"--json {options.json}: cannot be written: {error.strerror}", 1)
    unseen = _show(lambda: _print(report))
    return unseen or (0 if all(check["ok"] for check in report["checks"]) else 1)


def _fail(message, status):
    print(f"flash_kda: error: {message}", file=sys.stderr)
    return status


def _show(write):
    """0, or 1 with a line where standard output takes no more."""
    try:
        write()
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered is written again at exit, and would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail(f"standard output: cannot be written: {error.strerror}", 1)
    return 0


def _write(path, text):
    """All of the text or nothing: a file of that name is replaced once the text is on the disk beside it."""
    if path.exists() and not path.is_file():  # a pipe or a terminal; a directory, which raises
        path.write_text(text, encoding="utf-8")
        return
    path = path.resolve()  # a link's target is replaced, not the link
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _check_writable(path):
    """OSError where `_write` would raise one, with nothing left behind."""
    if path.exists():
        path.open("a", encoding="utf-8").close()
    if not path.exists() or path.is_file():
        path = path.resolve()
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.touch()
        temporary.unlink()


def _parse(argv):
    def heads(value):
        if not value.isdecimal() or not 1 <= int(value) <= HEADS_MAX:
            raise argparse.ArgumentTypeError(f"expected an integer in [1, {HEADS_MAX}], got {value!r}")
        return int(value)

    def seed(value):
        if not value.isdecimal() or int(value) >= 2**63:
            raise argparse.ArgumentTypeError(f"expected an integer in [0, 2^63), got {value!r}")
        return int(value)

    parser = _Parser(
        prog="python -m flash_kda",
        description="Prefill a text through Kimi Delta Attention heads: speed, accuracy, streaming against one call.",
        epilog="Exit status: 0 fine, 1 an error bound was exceeded or the computation failed, 2 unusable arguments.",
    )
    parser.add_argument(
        "--text", metavar="FILE", help="UTF-8 text, - for standard input (default: one that ships along)"
    )
    parser.add_argument("--heads", type=heads, default=8, metavar="H", help="number of heads (default: 8)")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N (default: auto)")
    parser.add_argument("--seed", type=seed, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there, too")
    parser.add_argument("--version", action="store_true", help="print version, archs and CUDA built for, and exit")
    options = parser.parse_args(argv)
    if not options.version:
        try:
            schedule()
        except ValueError as error:
            raise UsageError(error) from None
        text, options.text = options.text, _paragraphs(options.text)
        if options.json:
            try:
                if text not in (None, "-") and options.json.exists() and options.json.samefile(text):
                    raise UsageError(f"--json {options.json}: is the text, which the report would replace")
                _check_writable(options.json)
            except OSError as error:
                raise UsageError(f"--json {options.json}: cannot be written: {error.strerror}") from None
    return options


def version() -> str:
    """Version with the archs and the CUDA release that the kernels were built for, or "CPU only"."""
    try:
        info = extension().build_info()
    except RuntimeError:
        return f"flash_kda {__version__} (CPU only)"
    return f"flash_kda {__version__} (CUDA {info['cuda']}, archs {', '.join(info['archs'])})"


def _paragraphs(path):
    """The text's paragraphs, separated by blank lines, as byte strings."""
    name = "standard input" if path == "-" else path
    try:
        if path is None:
            data = (resources.files("flash_kda") / "data" / "sample.txt").read_bytes()
        elif path == "-":
            if sys.stdin is None:
                raise UsageError(f"--text {name}: cannot be read: it is closed")
            data = sys.stdin.buffer.read()
        else:
            data = Path(path).read_bytes()
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"--text {name}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {name}: not UTF-8: {error.reason} at byte {error.start}") from None
    paragraphs = [paragraph.strip().encode("utf-8") for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    if not paragraphs:
        raise UsageError(f"--text {name}: holds no text")
    return paragraphs


def _device(name):
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise UsageError(f"--device: expected auto, cpu, cuda or cuda:N, got {name!r}")
    if name == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    try:
        extension()
    except RuntimeError as error:
        if name != "auto":
            raise UsageError(f"--device {name}: {error}") from None
        return torch.device("cpu")
    if name == "auto":
        usable = count and torch.cuda.get_device_capability() >= (9, 0)
        return torch.device("cuda", torch.cuda.current_device()) if usable else torch.device("cpu")
    index = int(name.partition(":")[2] or 0)
    if index >= count:
        raise UsageError(f"--device {name}: PyTorch sees {count} CUDA device{'' if count == 1 else 's'}")
    return torch.device("cuda", index)


@torch.inference_mode()
def layer_inputs(paragraphs: list[bytes], heads: int, device: torch.device, seed: int) -> dict:
    """q, k, v, g, beta, A_log, dt_bias, scale, lower_bound and cu_seqlens of a KDA layer with random weights.

    As in Kimi Linear (arXiv 2510.26692, section 4): linear projections, a causal depthwise convolution of 4 taps and
    SiLU for q, k and v; a low-rank projection for the gate; one logit a head for beta; A uniform in [1, 16] and
    dt_bias the inverse softplus of a log-uniform step in [0.001, 0.1]. The weights are drawn on the CPU, so that
    every device gets the same ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def weight(rows, columns):
        return torch.randn(rows, columns, generator=generator).mul_(rows**-0.5).to(device)

    cu_seqlens = torch.tensor([0, *accumulate(map(len, paragraphs))], device=device)
    starts, lengths = cu_seqlens[:-1], cu_seqlens.diff()
    tokens = torch.frombuffer(bytearray(b"".join(paragraphs)), dtype=torch.uint8).to(device).long()
    position = torch.arange(len(tokens), device=device) - starts.repeat_interleave(lengths)
    x = torch.randn(256, MODEL_DIM, generator=generator).to(device)[tokens]

    def convolved(y):
        taps = torch.randn(CONV_TAPS, y.shape[1], generator=generator).mul_(CONV_TAPS**-0.5).to(device)
        mixed = y * taps[0]
        for tap in range(1, CONV_TAPS):
            mixed[tap:] += torch.where(position[tap:, None] >= tap, y[:-tap] * taps[tap], 0)
        return torch.nn.functional.silu(mixed)

    def by_head(y):
        return y.to(torch.bfloat16).view(1, len(tokens), heads, HEAD_DIM)

    width = heads * HEAD_DIM
    q, k, v = (by_head(convolved(x @ weight(MODEL_DIM, width))) for _ in range(3))
    g = by_head(x @ weight(MODEL_DIM, HEAD_DIM) @ weight(HEAD_DIM, width))
    beta = (x @ weight(MODEL_DIM, heads)).to(torch.bfloat16)[None]
    A_log = torch.empty(heads).uniform_(1, 16, generator=generator).log_()
    step = torch.empty(heads, HEAD_DIM).uniform_(math.log(1e-3), math.log(0.1), generator=generator).exp_()
    dt_bias = step + torch.log(-torch.expm1(-step))
    return {
        "q": q,
        "k": k,
        "v": v,
        "g": g,
        "beta": beta,
        "scale": HEAD_DIM**-0.5,
        "A_log": A_log.to(device),
        "dt_bias": dt_bias.to(device),
        "lower_bound": LOWER_BOUND,
        "cu_seqlens": cu_seqlens,
    }


@torch.inference_mode()
def prefill(paragraphs: list[bytes], heads: int, device: torch.device, seed: int) -> dict:
    """The main job on `paragraphs`; returns what the table and the JSON file show."""
    inputs = layer_inputs(paragraphs, heads, device, seed)
    cu_seqlens = inputs["cu_seqlens"]
    tokens, sequences = cu_seqlens[-1].item(), len(paragraphs)
    state_shape = (sequences, heads, HEAD_DIM, HEAD_DIM)

    out = torch.empty_like(inputs["v"])
    final_state = torch.empty(state_shape, device=device)
    seconds = _seconds(lambda: fwd(**inputs, out=out, final_state=final_state), device)
    streamed_out = torch.empty_like(out)
    streamed_state = torch.zeros(state_shape, device=device)
    pieces = stream(inputs, streamed_out, streamed_state)

    sample_out, sample_state, reference_out, reference_state = _sample(inputs, out, final_state)
    checks = [
        _check("out against the fp64 recurrence", sample_out, reference_out, OUT_BOUND),
        _check("final state against the fp64 recurrence", sample_state, reference_state, STATE_BOUND),
        _check("out, streamed against one call", streamed_out, out, STREAMED_OUT_BOUND),
        _check("final state, streamed against one call", streamed_state, final_state, STREAMED_STATE_BOUND),
    ]
    report = {
        "version": __version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "path": f"CUDA kernels, schedule {schedule()}" if device.type == "cuda" else "chunked PyTorch, fp32",
        "torch": torch.__version__,
        "seed": seed,
        "heads": heads,
        "sequences": sequences,
        "longest_sequence": max(map(len, paragraphs)),
        "tokens": tokens,
        "pieces": pieces,
        "sample_tokens": sample_out.shape[1],
        "sample_heads": sample_out.shape[2],
        "seconds": seconds,
        "tokens_per_second": tokens / seconds,
        "checks": checks,
    }
    if device.type == "cuda":
        moved = BYTES_PER_TOKEN_HEAD * tokens * heads + final_state.nbytes
        bandwidth = _copy_bandwidth(device)
        report |= {"bytes": moved, "copy_bandwidth": bandwidth, "share_of_floor": moved / bandwidth / seconds}
    return report


def stream(inputs: dict, out: torch.Tensor, state: torch.Tensor) -> int:
    """Run the packed sequences in pieces of PIECE_TOKENS, `state` [N, H, V, K] updated in place; returns how many.

    A sequence that a boundary cuts goes on in the next piece from the state that the piece before left.
    """
    bounds = inputs["cu_seqlens"].tolist()
    starts = range(0, bounds[-1], PIECE_TOKENS)
    for start in starts:
        end = min(start + PIECE_TOKENS, bounds[-1])
        inside = [n for n in range(len(bounds) - 1) if bounds[n] < end and bounds[n + 1] > start]
        first, last = inside[0], inside[-1] + 1
        piece = {name: inputs[name][:, start:end] for name in ("q", "k", "v", "g", "beta")}
        cu_seqlens = (inputs["cu_seqlens"][first : last + 1] - start).clamp_(0, end - start)
        states = state[first:last]
        fwd(
            **inputs | piece | {"cu_seqlens": cu_seqlens},
            out=out[:, start:end],
            initial_state=states,
            final_state=states,
        )
    return len(starts)


def _sample(inputs, out, final_state):
    """Out and final state of some sequences and heads, and the same from the fp64 recurrence.

    The longest sequences that the token-by-token recurrence can afford are taken until SAMPLE_TOKENS tokens are
    together; where all are longer, `fwd` runs the first SAMPLE_TOKENS tokens of the first one once more.
    """
    bounds = inputs["cu_seqlens"].tolist()
    lengths = [end - start for start, end in zip(bounds, bounds[1:], strict=False)]
    affordable = sorted((n for n, length in enumerate(lengths) if length <= SAMPLE_LIMIT), key=lambda n: -lengths[n])
    if not affordable:
        prefix = {name: inputs[name][:, :SAMPLE_TOKENS] for name in ("q", "k", "v", "g", "beta")}
        inputs = inputs | prefix | {"cu_seqlens": inputs["cu_seqlens"][:2].clamp(max=SAMPLE_TOKENS)}
        out, final_state = torch.empty_like(prefix["v"]), final_state[:1].clone()
        affordable, lengths = [0], [SAMPLE_TOKENS]
        fwd(**inputs, out=out, final_state=final_state)

    chosen, rows = [], []
    for n in affordable:
        if len(rows) >= SAMPLE_TOKENS:
            break
        chosen.append(n)
        rows.extend(range(bounds[n], bounds[n] + lengths[n]))
    heads = slice(0, SAMPLE_HEADS)
    sample = {name: inputs[name][:, rows, heads] for name in ("q", "k", "v", "g", "beta")}
    sample |= {name: inputs[name][heads] for name in ("A_log", "dt_bias")}
    sample["cu_seqlens"] = torch.tensor([0, *accumulate(lengths[n] for n in chosen)], device=out.device)
    reference_out, reference_state = recurrence(**inputs | sample)
    return out[:, rows, heads], final_state[chosen][:, heads], reference_out, reference_state


def _check(name, x, reference, bound):
    reference = reference.double()
    error = ((x.double() - reference).norm() / reference.norm()).item()
    return {"name": name, "error": error, "bound": bound, "ok": error <= bound}


def _seconds(run, device):
    """Seconds of one run: on a GPU the median of ten by its own clock, after a warm-up; on a CPU the second of two."""
    run()
    if device.type == "cpu":
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    return _gpu_seconds(run, device)


def _gpu_seconds(run, device, repeats=10):
    with torch.cuda.device(device):
        times = []
        for _ in range(repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) / 1000)
    return median(times)


def _copy_bandwidth(device):
    """Bytes a second, read plus written, of a device-to-device copy far larger than the caches."""
    source = torch.empty(2**29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / _gpu_seconds(lambda: target.copy_(source), device)


def _print(report):
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"FlashKDA {report['version']}", show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("device", report["device"])
    table.add_row("path", report["path"])
    table.add_row(
        "text", f"{report['sequences']} paragraphs, {report['tokens']} tokens, the longest {report['longest_sequence']}"
    )
    table.add_row("heads", str(report["heads"]))
    table.add_row("time", f"{report['seconds'] * 1000:.3f} ms")
    table.add_row("speed", f"{report['tokens_per_second']:,.0f} tokens/s")
    if "share_of_floor" in report:
        table.add_row(
            "bandwidth floor",
            f"{report['share_of_floor']:.1%} of {report['copy_bandwidth'] / 1e12:.2f} TB/s copy bandwidth",
        )
    table.add_row("sample", f"{report['sample_tokens']} tokens, {report['sample_heads']} heads in fp64")
    table.add_row("streamed", f"{report['pieces']} pieces of up to {PIECE_TOKENS} tokens, state carried over")
    for check in report["checks"]:
        verdict = "ok" if check["ok"] else "EXCEEDED"
        table.add_row(check["name"], f"{check['error']:.2e}, bound {check['bound']:.2e}: {verdict}")
    Console().print(table)
